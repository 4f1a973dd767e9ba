"""`arrays.plain` does what numpy does, for every operation that the SDK uses of it."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mint.types.arrays import plain

INT64 = st.integers(-(2**63), 2**63 - 1)
FLOATS = st.floats(allow_nan=False, width=32)
CODES = {"int32": "<i4", "int64": "<i8", "float32": "<f4"}
NUMBERS = st.one_of(
    st.tuples(st.just("int32"), st.lists(st.integers(-(2**31), 2**31 - 1))),
    st.tuples(st.just("int64"), st.lists(INT64)),
    st.tuples(st.just("float32"), st.lists(FLOATS)),
)
SHAPES = st.lists(st.integers(0, 4), min_size=1, max_size=4).map(tuple)


@given(NUMBERS, st.integers(-5, 5), st.integers(-5, 5))
def test_bytes_are_read_sliced_and_written_as_numpy_does(content: tuple[str, list[Any]], start: int, end: int) -> None:
    name, numbers = content
    raw = np.array(numbers, CODES[name]).tobytes()
    theirs, ours = np.frombuffer(raw, CODES[name]), plain.frombuffer(raw, plain.dtype(CODES[name]))
    assert ours.tolist() == theirs.tolist() and len(ours) == len(theirs) and ours.shape == theirs.shape
    assert ours[start:end].tolist() == theirs[start:end].tolist()
    assert ours[start:end].tobytes() == theirs[start:end].tobytes() and not ours.flags.writeable
    assert (ours.dtype.kind, ours.dtype.itemsize) == (theirs.dtype.kind, theirs.dtype.itemsize)
    if numbers:
        assert (ours.min(), ours.max(), ours[-1]) == (theirs.min(), theirs.max(), theirs[-1])


@given(SHAPES, st.randoms(use_true_random=False))
def test_nested_lists_have_the_shape_and_the_dtype_that_numpy_gives_them(shape: tuple[int, ...], random: Any) -> None:
    pool = random.choice([[0, 1, 2**40], [0.5, 1, -3], [True, False], [True, 2]])
    theirs = np.array([random.choice(pool) for _ in range(math.prod(shape))], dtype=object).reshape(shape)
    nested = theirs.tolist()
    theirs, ours = np.asarray(nested), plain.asarray(nested)
    assert ours.tolist() == theirs.tolist() and ours.ndim == theirs.ndim and ours.size == theirs.size
    if theirs.size:
        assert (ours.shape, ours.dtype.name) == (theirs.shape, theirs.dtype.name)
        assert ours.reshape(-1).tolist() == theirs.reshape(-1).tolist()
        assert ours[tuple(size - 1 for size in shape)] == theirs[tuple(size - 1 for size in shape)]


@given(st.lists(st.one_of(FLOATS, st.just(1e300), st.just(-1e300), st.just(math.nan))))
def test_floats_become_float32_as_in_numpy(numbers: list[float]) -> None:
    with np.errstate(over="ignore"):
        theirs = np.asarray(numbers, np.float64).astype(np.float32)
    assert plain.asarray([*map(float, numbers)]).astype(plain.dtype("float32")).tobytes() == theirs.tobytes()


@given(NUMBERS, NUMBERS)
def test_equality_of_whole_arrays_is_that_of_numpy(one: tuple[str, list[Any]], other: tuple[str, list[Any]]) -> None:
    for left, right in [(one[1], other[1]), (one[1], one[1]), ([math.nan], [math.nan])]:
        expected = np.array_equal(np.asarray(left), np.asarray(right))
        assert plain.array_equal(plain.asarray(left), plain.asarray(right)) == expected


def test_what_is_no_number_is_an_object() -> None:
    for value in (["a", "b"], [None], [2**70], None, object()):
        assert plain.asarray(value).dtype.kind == "O", value
        assert np.asarray(value).dtype.kind in "OU", value
    with pytest.raises(ValueError):
        plain.asarray([[1], [1, 2]])


def test_a_filled_matrix_takes_numbers_cell_by_cell_and_may_be_closed() -> None:
    ours, theirs = plain.full((2, 3), -1, plain.int32), np.full((2, 3), -1, np.int32)
    ours[1, 2] = theirs[1, 2] = 7
    assert ours.tolist() == theirs.tolist() and ours.tobytes() == theirs.tobytes()
    ours.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        ours[0, 0] = 1
    with pytest.raises(IndexError):
        ours[2, 0]


@pytest.mark.parametrize("again", [copy.deepcopy, lambda array: pickle.loads(pickle.dumps(array))])  # noqa: S301
def test_an_array_can_be_copied_and_pickled(again: Any) -> None:
    array = plain.frombuffer(np.arange(6, dtype=np.int64).tobytes(), plain.dtype("int64")).reshape(2, 3)
    copied = again(array)
    assert copied.tolist() == array.tolist() and copied.dtype == array.dtype and not copied.flags.writeable


def test_what_is_left_to_numpy_says_so() -> None:
    array = plain.asarray([1, 2])
    for use in (lambda: array.sum(), lambda: array == 1, lambda: array.reshape(2, 1)[0]):
        with pytest.raises(AttributeError, match=r"needs the package numpy.*pip install numpy"):
            use()
