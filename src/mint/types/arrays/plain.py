"""The part of numpy that the SDK's values and messages use, in plain Python, for an install without numpy.

Names and meaning are numpy's, so that the code that uses them is the same with and without. It holds, copies, reshapes
and lists numbers; it does not compute. Bytes are shared, not copied, as `numpy.frombuffer` shares them.
"""

from __future__ import annotations

import math
import sys
from array import array as _typed_list
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from types import SimpleNamespace
from typing import Any, Literal

if sys.byteorder != "little":  # the messages are little-endian, and memoryview reads the machine's order
    raise ModuleNotFoundError(
        "mint needs the package numpy on a big-endian machine, and it is not installed. pip install numpy", name="numpy"
    )


class dtype:
    """The type of an array's numbers: one of the five that numpy gives to lists, or `object`."""

    def __init__(self, name: str | dtype) -> None:
        self.name = name.name if isinstance(name, dtype) else _NAMES.get(name, name)
        self.kind, self.char, self.itemsize = _TYPES[self.name]

    def __eq__(self, other: object) -> bool:
        return self.name == (other.name if isinstance(other, dtype) else other)

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"dtype('{self.name}')"

    def __str__(self) -> str:
        return self.name


int32, int64, float32 = "int32", "int64", "float32"
_TYPES = {
    "bool": ("b", "?", 1),
    "int32": ("i", "i", 4),
    "int64": ("i", "q", 8),
    "float32": ("f", "f", 4),
    "float64": ("f", "d", 8),
    "object": ("O", "O", 8),
}
"""Name → numpy's kind, the code of `struct` and `memoryview`, bytes."""
_NAMES = {"<i4": "int32", "<i8": "int64", "<f4": "float32"}


class ndarray:
    """Numbers in row-major order and their shape. Items are Python's int, float or bool."""

    def __init__(self, numbers: Any, kind: dtype, shape: tuple[int, ...], *, writeable: bool = True) -> None:
        """`numbers` is flat: a memoryview or a typed list, or a list if `kind` is `object`."""
        self._numbers = numbers
        self.dtype = kind
        self.shape = shape
        self.flags = SimpleNamespace(writeable=writeable)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return len(self._numbers)

    @property
    def flat(self) -> Iterator[Any]:
        return iter(self._numbers)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of unsized object")
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tolist())

    def __getitem__(self, place: int | slice | tuple[int, ...]) -> Any:
        if isinstance(place, tuple) and len(place) == self.ndim:
            return self._numbers[self._flat_place(place)]
        if isinstance(place, tuple) or self.ndim != 1:
            raise _needs_numpy(f"the index {place!r} of an array of shape {self.shape}")
        found = self._numbers[place]
        if not isinstance(place, slice):
            return found
        return ndarray(found, self.dtype, (len(found),), writeable=self.flags.writeable)

    def __setitem__(self, place: tuple[int, ...], number: float) -> None:
        if not self.flags.writeable:
            raise ValueError("assignment destination is read-only")
        self._numbers[self._flat_place(place)] = number

    def _flat_place(self, place: tuple[int, ...]) -> int:
        flat = 0
        for index, size in zip(place, self.shape, strict=True):
            if not 0 <= index < size:
                raise IndexError(f"index {index} is out of bounds for size {size}")
            flat = flat * size + index
        return flat

    def __eq__(self, other: object) -> bool:
        raise _needs_numpy("a comparison of arrays")

    __hash__ = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.tobytes(), self.dtype.name, self.shape, self.flags.writeable)

    def __getattr__(self, name: str) -> Any:
        raise _needs_numpy(f"{name!r} of an array")

    def __repr__(self) -> str:
        return f"array({self.tolist()}, dtype={self.dtype})"

    def reshape(self, *shape: int | tuple[int, ...]) -> ndarray:
        wanted: tuple[int, ...] = ()
        for size in shape:
            wanted += size if isinstance(size, tuple) else (size,)
        if wanted == (-1,):
            wanted = (self.size,)
        if math.prod(wanted) != self.size:
            raise ValueError(f"cannot reshape array of size {self.size} into shape {wanted}")
        return ndarray(self._numbers, self.dtype, wanted, writeable=self.flags.writeable)

    def astype(self, kind: str | dtype, copy: bool = True) -> ndarray:
        """Integers that do not fit raise `OverflowError`; floats beyond float32 become infinite."""
        wanted = dtype(kind)
        if self.dtype == wanted and not copy:
            return self
        numbers: Any = self._numbers
        if wanted.kind == "i" and self.dtype.kind == "f":
            numbers = map(int, numbers)
        elif wanted.kind == "b":
            numbers = map(bool, numbers)
        return ndarray(_typed(numbers, wanted), wanted, self.shape)

    def min(self) -> Any:
        return min(self._numbers)

    def max(self) -> Any:
        return max(self._numbers)

    def tolist(self) -> Any:
        """Nested lists; a number if there is no dimension."""
        if not self.shape:
            return self._numbers[0]
        rows = list(self._numbers)
        for size in reversed(self.shape[1:]):
            count = len(rows) // size if size else math.prod(self.shape[: self.shape.index(0)])
            rows = [rows[row * size : (row + 1) * size] for row in range(count)]
        return rows

    def tobytes(self) -> bytes:
        return self._numbers.tobytes()


def frombuffer(buffer: bytes, kind: dtype) -> ndarray:
    numbers: Any = memoryview(buffer)
    numbers = numbers.cast(kind.char)
    return ndarray(numbers, kind, (len(numbers),), writeable=False)


def asarray(values: Any) -> ndarray:
    """Numbers, or nested sequences of them, in the dtype that numpy gives them.

    Raises:
        ValueError: rows are not equally long.
    """
    if isinstance(values, ndarray):
        return values
    if isinstance(values, memoryview | _typed_list):
        values = values.tolist()
    shape = _shape(values)
    flat = values if shape else [values]
    for _ in shape[1:]:
        flat = list(chain.from_iterable(flat))
    kind = _kind(flat)
    return ndarray(list(flat) if kind.kind == "O" else _typed(flat, kind), kind, shape)


def full(shape: tuple[int, ...], number: float, kind: Literal["int32", "float32"]) -> ndarray:
    wanted = dtype(kind)
    return ndarray(_typed([number], wanted) * math.prod(shape), wanted, shape)


def iinfo(kind: dtype) -> SimpleNamespace:
    """The smallest and the largest number of a dtype of integers."""
    limit = 1 << (8 * kind.itemsize - 1)
    return SimpleNamespace(min=-limit, max=limit - 1)


def array_equal(one: Any, other: Any) -> bool:
    if not (isinstance(one, ndarray) and isinstance(other, ndarray)):
        return False
    return one.shape == other.shape and all(map(_equal, one.flat, other.flat))


def errstate(**_settings: str) -> AbstractContextManager[None]:
    """Does nothing: floats beyond float32 become infinite without a warning."""
    return nullcontext()


def _restored(content: bytes, kind: str, shape: tuple[int, ...], writeable: bool) -> ndarray:
    wanted = dtype(kind)
    numbers = frombuffer(content, wanted)
    return ndarray(_typed(numbers.flat, wanted), wanted, shape, writeable=writeable)


def _equal(one: float, other: float) -> bool:
    return one == other  # a NaN equals nothing, itself included, as in numpy


def _typed(numbers: Any, kind: dtype) -> _typed_list[Any]:
    return _typed_list("b" if kind.kind == "b" else kind.char, numbers)


def _shape(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list | tuple | range):
        return ()
    inner = {_shape(value) for value in values} if not isinstance(values, range) else {()}
    if len(inner) > 1:
        raise ValueError("setting an array element with a sequence: the rows are not equally long")
    return (len(values), *(inner.pop() if inner else ()))


def _kind(flat: Sequence[Any]) -> dtype:
    kinds = set(map(type, flat))
    if kinds == {bool}:
        return dtype("bool")
    if kinds and kinds <= {bool, int}:
        fits = all(-(1 << 63) <= number < 1 << 63 for number in flat)
        return dtype("int64" if fits else "object")
    return dtype("float64" if kinds <= {bool, int, float} else "object")


def _needs_numpy(what: str) -> AttributeError:
    return AttributeError(f"{what} needs the package numpy, which is not installed. pip install numpy")
