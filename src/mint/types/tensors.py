"""`TensorData`: numbers on their way to or from the service, dense or sparse, in numpy arrays.

Type and layout are checked here; the service checks whether the values make sense. Torch is imported only
where a user's own tensor comes in or goes out.

Letters: R rows · C columns of a sparse matrix · S its listed cells.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Annotated, Any, Literal, Self

from pydantic import Field

from mint.errors import InvalidRequestError
from mint.types.arrays import np, require_numpy
from mint.types.value_classes import ArrayValue, StrictValue

DType = Literal["int64", "float32"]

MAX_DENSE_CELLS = 1 << 26
"""Cells of a sparse matrix that is made dense; a few bytes can ask for any number of them."""

_INT64 = np.dtype(np.int64)
_FLOAT32 = np.dtype(np.float32)
_SEQUENCES = (list, tuple, range)
_NUMPY: dict[str, np.dtype] = {"int64": _INT64, "float32": _FLOAT32}
_Numbers = Annotated[list[int] | list[float], Field(union_mode="left_to_right")]


class TensorDataJson(StrictValue):
    """A tensor as JSON has it: flat lists."""

    data: _Numbers
    dtype: DType
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class TensorData(ArrayValue):
    """A tensor: `data` flat in row-major order, `shape` (None means one-dimensional).

    With both index lists it is a sparse matrix [R, C] in CSR form: `data` has its S listed cells row by row,
    `sparse_col_indices` [S] their columns, and `sparse_crow_indices` [R + 1] where each row begins. Every other cell is
    `pad_value`, which sender and reader agree on: 0, or -1 where 0 is a valid token.
    """

    __slots__ = ("_columns", "_crow", "_list", "_shape", "dtype", "values")
    json_form = TensorDataJson

    dtype: DType
    values: np.ndarray
    """`data` as a read-only array, int64 or float32."""

    def __init__(
        self,
        data: Sequence[float] | np.ndarray,
        dtype: DType,
        shape: Sequence[int] | None = None,
        sparse_crow_indices: Sequence[int] | np.ndarray | None = None,
        sparse_col_indices: Sequence[int] | np.ndarray | None = None,
    ) -> None:
        """Lists become arrays. A read-only array of the right dtype is shared, any other is copied.

        Raises:
            InvalidRequestError: a field is not of its type, or a number does not fit its dtype.
        """
        if dtype not in _NUMPY:
            raise InvalidRequestError(
                "is not a dtype", field="TensorData.dtype", value=dtype, remedy="Pass 'int64' or 'float32'"
            )
        self.dtype = dtype
        self.values = flat_array(data, _NUMPY[dtype], "TensorData.data")
        self._shape = None if shape is None else tuple(shape)
        crow = sparse_crow_indices
        columns = sparse_col_indices
        self._crow = None if crow is None else flat_array(crow, _INT64, "TensorData.sparse_crow_indices")
        self._columns = None if columns is None else flat_array(columns, _INT64, "TensorData.sparse_col_indices")
        self._list: list[Any] | None = None

    # --- from other forms ----------------------------------------------------------------------------------------

    @classmethod
    def from_numpy(cls, array: np.ndarray) -> Self:
        """A copy. Integers and bools become int64, everything else float32."""
        dtype: DType = "int64" if array.dtype.kind in "iub" else "float32"
        return cls(array.reshape(-1), dtype, array.shape)

    @classmethod
    def from_torch(cls, tensor: Any) -> Self:
        """A copy of a `torch.Tensor` of any device and dtype."""
        return cls.from_numpy(_torch_to_numpy(tensor))

    @classmethod
    def from_torch_sparse(cls, tensor: Any, pad_value: int = 0) -> Self:
        """A `torch.Tensor` [R, C] without the cells that equal `pad_value`; dense where that would not be smaller, or
        where the tensor does not have two dimensions."""
        if isinstance(pad_value, bool) or not isinstance(pad_value, int):
            raise InvalidRequestError(
                "is not a whole number", field="pad_value", value=pad_value, remedy="Pass an integer, such as 0 or -1"
            )
        array = _torch_to_numpy(tensor)
        listed = array != pad_value
        if array.ndim != 2 or len(array) + 1 + 2 * int(listed.sum()) >= array.size:
            return cls.from_numpy(array)
        cells = cls.from_numpy(array[listed])
        crow = np.concatenate([[0], np.cumsum(listed.sum(axis=1))])
        return cls(cells.values, cells.dtype, array.shape, crow, np.nonzero(listed)[1])

    @classmethod
    def from_any(cls, values: Any, *, dtype: DType | None = None) -> Self:
        """Lists, tuples, numpy arrays, torch tensors and `TensorData` alike; `dtype` overrides what was inferred.

        Raises:
            InvalidRequestError: it is no tensor of numbers, or holds fractions where `dtype` is int64.
        """
        if isinstance(values, TensorData):
            return cls(*values._parts(values.values, dtype or values.dtype))
        if dtype is not None and isinstance(values, _SEQUENCES):
            flat = _packed(values, _NUMPY[dtype])
            if flat is not None:
                return cls(flat, dtype, (len(flat),))
        array = _torch_to_numpy(values) if hasattr(values, "detach") else np.asarray(values)
        _require_numbers(array, values, "TensorData")
        if dtype is None:
            return cls.from_numpy(array)
        return cls(flat_array(array.reshape(-1), _NUMPY[dtype], "TensorData"), dtype, array.shape)

    # --- fields --------------------------------------------------------------------------------------------------

    @property
    def data(self) -> list[Any]:
        """`values` as a list; changing it does not change the tensor."""
        if self._list is None:
            self._list = self.values.tolist()
        return self._list

    @property
    def shape(self) -> list[int] | None:
        """The size of each dimension."""
        return None if self._shape is None else list(self._shape)

    @property
    def sparse_crow_indices(self) -> list[int] | None:
        """Where each row begins in `data`."""
        return None if self._crow is None else self._crow.tolist()

    @property
    def sparse_col_indices(self) -> list[int] | None:
        """The column of each number in `data`."""
        return None if self._columns is None else self._columns.tolist()

    @property
    def crow_and_columns(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Both index arrays of a sparse tensor, int64; None for a dense one, or if one is missing."""
        return None if self._crow is None or self._columns is None else (self._crow, self._columns)

    @property
    def is_sparse(self) -> bool:
        """Whether `data` has only the listed cells of a matrix."""
        return self._crow is not None or self._columns is not None

    def cells(self) -> tuple[np.ndarray, np.ndarray]:
        """Row and column of each listed cell of a sparse matrix, int64 [S].

        Raises:
            InvalidRequestError: the indices are not the CSR form of `shape`.
        """
        crow, columns, shape = self._crow, self._columns, self._shape
        if crow is None or columns is None:
            raise _misfit("sparse_crow_indices, sparse_col_indices", None, "belong together: one is missing")
        if shape is None or len(shape) != 2 or min(shape) < 0:
            raise _misfit("shape", self.shape, "is not [rows, columns], which a sparse tensor needs")
        require_numpy("The cells of a sparse tensor")
        counts = np.diff(crow)
        if len(crow) != shape[0] + 1 or crow[0] != 0 or (counts < 0).any() or crow[-1] != len(columns):
            wanted = f"{shape[0]} + 1 numbers that begin with 0, do not fall, and end with {len(columns)}"
            raise _misfit("sparse_crow_indices", self.sparse_crow_indices, f"does not fit: wanted are {wanted}")
        if len(columns) != len(self.values):
            raise _misfit("sparse_col_indices", f"{len(columns)} numbers", f"data has {len(self.values)}")
        if ((columns < 0) | (columns >= shape[1])).any():
            wrong = columns[(columns < 0) | (columns >= shape[1])][0]
            raise _misfit("sparse_col_indices", int(wrong), f"is not a column of shape {self.shape}")
        rows = np.repeat(np.arange(shape[0]), counts)
        if ((np.diff(rows) == 0) & (np.diff(columns) <= 0)).any():
            raise _misfit("sparse_col_indices", self.sparse_col_indices, "does not ascend within each row")
        return rows, columns

    # --- to other forms ------------------------------------------------------------------------------------------

    def to_numpy(self, pad_value: int = 0) -> np.ndarray:
        """A new array of `shape` (or one-dimensional), int64 or float32; cells that are not listed become `pad_value`.

        Raises:
            InvalidRequestError: a sparse matrix whose indices do not fit, or of more than `MAX_DENSE_CELLS` cells.
        """
        require_numpy("TensorData.to_numpy()")
        if not self.is_sparse:
            return (self.values if self._shape is None else self.values.reshape(self._shape)).copy()
        places = self.cells()
        rows, columns = self._shape or (0, 0)
        if rows * columns > MAX_DENSE_CELLS:
            raise _misfit("shape", self.shape, f"has more than {MAX_DENSE_CELLS} cells")
        dense = np.full((rows, columns), pad_value, self.values.dtype)
        dense[places] = self.values
        return dense

    def to_torch(self, pad_value: int = 0) -> Any:
        """A new `torch.Tensor` on the CPU; needs torch on this machine."""
        import torch  # deferred: the SDK works without torch

        return torch.from_numpy(self.to_numpy(pad_value))

    def tolist(self, pad_value: int = 0) -> list[Any]:
        """Nested Python lists, in `shape`."""
        if self.is_sparse:
            return self.to_numpy(pad_value).tolist()
        return (self.values if self._shape is None else self.values.reshape(self._shape)).tolist()

    def with_values(self, values: np.ndarray, dtype: DType) -> Self:
        """A tensor of the same layout with other numbers."""
        return type(self)(*self._parts(values, dtype))

    def __len__(self) -> int:
        return len(self.values) if self._shape is None else self._shape[0]

    def _parts(self, values: np.ndarray, dtype: DType) -> tuple[Any, ...]:
        return values, dtype, self._shape, self._crow, self._columns

    def _content(self) -> tuple[Any, ...]:
        return self._parts(self.values, self.dtype)


def flat_array(values: Iterable[float] | np.ndarray, dtype: np.dtype, field: str) -> np.ndarray:
    """One-dimensional numbers as a read-only array of `dtype` (int32, int64 or float32).

    Numbers beyond float32 become infinite. A read-only array of this dtype is returned as it is.

    Raises:
        InvalidRequestError: names `field`; `values` are not one-dimensional numbers, hold fractions where integers
            belong, or integers that do not fit.
    """
    if isinstance(values, np.ndarray):
        if values.dtype == dtype and values.ndim == 1 and not values.flags.writeable:
            return values
    elif isinstance(values, _SEQUENCES):
        packed = _packed(values, dtype)
        if packed is not None:
            return packed
    array = np.asarray(values)
    if array.dtype != dtype or array.ndim != 1:
        _require_fit(array, values, dtype, field)
    with np.errstate(over="ignore"):
        made = array.astype(dtype)
    made.flags.writeable = False
    return made


def _require_fit(array: np.ndarray, values: Any, dtype: np.dtype, field: str) -> None:
    _require_numbers(array, values, field)
    if array.ndim != 1:
        raise _refusal("is not one-dimensional", field, values, "Pass flat numbers, and their shape beside them")
    if dtype.kind == "i" and array.size:
        if array.dtype.kind == "f":
            raise _refusal("holds fractions where token ids belong", field, values, "Pass integers")
        limits = np.iinfo(dtype)
        if array.min() < limits.min or array.max() > limits.max:
            raise _too_large(field, values, dtype)


def _packed(values: Sequence[float], dtype: np.dtype) -> np.ndarray | None:
    """The array of a flat list, three times as fast as numpy makes it; None where numpy must look closer."""
    try:
        return np.frombuffer(_packer(len(values), dtype.char)(*values), dtype)
    except (struct.error, TypeError, OverflowError, ValueError):
        return None


@lru_cache(maxsize=1024)
def _packer(count: int, code: str) -> Callable[..., bytes]:
    """Kept for each length: the datums of a batch, and of the next batch, have few lengths."""
    return struct.Struct(f"{count}{code}").pack


def _require_numbers(array: np.ndarray, values: Any, field: str) -> None:
    if array.dtype.kind in "iubf":
        return
    if array.dtype.kind == "O" and all(isinstance(value, int) for value in array.flat):
        raise _too_large(field, values, _INT64)
    remedy = "Pass a list, numpy array or torch tensor of equal-length rows of numbers"
    raise _refusal(f"is not a tensor of numbers (its dtype would be {array.dtype})", field, values, remedy)


def _too_large(field: str, values: Any, dtype: np.dtype) -> InvalidRequestError:
    bits = 8 * dtype.itemsize
    return _refusal(f"holds a number that does not fit {bits} bits", field, values, "Pass smaller numbers")


def _refusal(message: str, field: str, values: Any, remedy: str) -> InvalidRequestError:
    shown = values.tolist() if isinstance(values, np.ndarray) else values
    return InvalidRequestError(message, field=field, value=shown, remedy=remedy)


def _misfit(field: str, value: object, message: str) -> InvalidRequestError:
    remedy = "TensorData.from_torch_sparse makes the CSR form of a matrix"
    return InvalidRequestError(message, field=f"TensorData.{field}", value=value, remedy=remedy)


def _torch_to_numpy(tensor: Any) -> np.ndarray:
    require_numpy("A torch tensor as a value of the SDK")
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.is_floating_point() else tensor).numpy()
