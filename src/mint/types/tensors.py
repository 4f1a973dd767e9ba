"""Numbers on their way to or from the service: a tensor as flat lists, dense or sparse.

Type and layout are checked here; whether values make sense is the service's business. Knows no datums, no encoding, and
torch only where a user's own tensor comes in or goes out.

Letters: R rows · C columns of a sparse matrix · S its listed cells.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from mint.errors import InvalidRequestError

DType = Literal["int64", "float32"]
M = TypeVar("M", bound=BaseModel)
Numbers = Annotated[list[int], Field(fail_fast=True)] | Annotated[list[float], Field(fail_fast=True)]

MAX_DENSE_CELLS = 1 << 26
"""Cells of a sparse matrix that is made dense; a few bytes can ask for any number of them."""


class StrictValue(BaseModel):
    """A strict value: no coercion, no unknown field. Infinities and NaN survive JSON."""

    model_config = ConfigDict(strict=True, extra="forbid", ser_json_inf_nan="constants")


def of_checked(kind: type[M], **fields: Any) -> M:
    """The value with exactly these fields, all of them and already right: nothing is checked or filled in.

    As `model_construct`, at a tenth of its price: a batch is made of thousands of values.
    """
    value = kind.__new__(kind)
    object.__setattr__(value, "__dict__", fields)
    object.__setattr__(value, "__pydantic_fields_set__", set(fields))
    object.__setattr__(value, "__pydantic_extra__", None)
    object.__setattr__(value, "__pydantic_private__", None)
    return value


class TensorData(StrictValue):
    """A tensor: `data` flat in row-major order, `shape` (None means one-dimensional).

    With both index lists it is a sparse matrix [R, C] in CSR form: `data` has its S listed cells row by row,
    `sparse_col_indices` [S] their columns, and `sparse_crow_indices` [R + 1] where each row begins. Every other cell is
    `pad_value`, which sender and reader agree on: 0, or -1 where 0 is a token that is meant.
    """

    data: Annotated[Numbers, Field(union_mode="left_to_right")]
    dtype: DType
    shape: list[int] | None = None
    sparse_crow_indices: Annotated[list[int], Field(fail_fast=True)] | None = None
    sparse_col_indices: Annotated[list[int], Field(fail_fast=True)] | None = None

    @classmethod
    def from_numpy(cls, array: np.ndarray) -> Self:
        """Integers and bools become int64, everything else float32."""
        whole = array.dtype.kind in "iub"
        flat = np.ascontiguousarray(array, dtype=np.int64 if whole else np.float32).reshape(-1)
        return of_checked(
            cls,
            data=flat.tolist(),
            dtype="int64" if whole else "float32",
            shape=list(array.shape),
            sparse_crow_indices=None,
            sparse_col_indices=None,
        )

    @classmethod
    def from_torch(cls, tensor: Any) -> Self:
        """A `torch.Tensor` of any device and dtype."""
        return cls.from_numpy(_torch_to_numpy(tensor))

    @classmethod
    def from_torch_sparse(cls, tensor: Any, pad_value: int = 0) -> Self:
        """A `torch.Tensor` [R, C] without the cells that equal `pad_value`; dense where that would not be smaller, or
        where the tensor has not two dimensions."""
        if isinstance(pad_value, bool) or not isinstance(pad_value, int):
            raise InvalidRequestError(
                "is not a whole number", field="pad_value", value=pad_value, remedy="Pass an integer, as 0 or -1"
            )
        array = _torch_to_numpy(tensor)
        listed = array != pad_value
        if array.ndim != 2 or len(array) + 1 + 2 * int(listed.sum()) >= array.size:
            return cls.from_numpy(array)
        cells = cls.from_numpy(array[listed])
        return cls.model_construct(
            data=cells.data,
            dtype=cells.dtype,
            shape=list(array.shape),
            sparse_crow_indices=[0, *np.cumsum(listed.sum(axis=1)).tolist()],
            sparse_col_indices=np.nonzero(listed)[1].tolist(),
        )

    @classmethod
    def from_any(cls, values: Any, *, dtype: DType | None = None) -> Self:
        """Lists, tuples, numpy arrays, torch tensors and `TensorData` alike; `dtype` overrides what was inferred."""
        if isinstance(values, TensorData) and values.is_sparse:
            cells = cls.from_any(values.data, dtype=dtype or values.dtype)
            return values.model_copy(update={"data": cells.data, "dtype": cells.dtype})
        if isinstance(values, TensorData):
            array = values.to_numpy()
        elif hasattr(values, "detach"):
            array = _torch_to_numpy(values)
        else:
            array = np.asarray(values)
        if array.dtype.kind not in "iubf":
            raise InvalidRequestError(
                f"is not a tensor of numbers (numpy reads it as {array.dtype})",
                field="TensorData",
                value=values,
                remedy="Pass a list, numpy array or torch tensor of equal-length rows of numbers",
            )
        if dtype == "int64" and array.dtype.kind == "f" and array.size:
            raise InvalidRequestError(
                "holds fractions where token ids belong",
                field="TensorData",
                value=values,
                remedy="Pass integers",
            )
        if dtype is not None:
            array = array.astype(np.int64 if dtype == "int64" else np.float32)
        return cls.from_numpy(array)

    @property
    def is_sparse(self) -> bool:
        """Whether `data` has the listed cells of a matrix only."""
        return self.sparse_crow_indices is not None or self.sparse_col_indices is not None

    def cells(self) -> tuple[np.ndarray, np.ndarray]:
        """Row and column of each listed cell of a sparse matrix, int64 [S].

        Raises:
            InvalidRequestError: the indices are no CSR form of `shape`.
        """
        if self.sparse_crow_indices is None or self.sparse_col_indices is None:
            raise _misfit("sparse_crow_indices, sparse_col_indices", None, "belong together: one is missing")
        if self.shape is None or len(self.shape) != 2 or min(self.shape) < 0:
            raise _misfit("shape", self.shape, "is not [rows, columns], which a sparse tensor needs")
        crow, columns = _indices(self, "sparse_crow_indices"), _indices(self, "sparse_col_indices")
        counts = np.diff(crow)
        if len(crow) != self.shape[0] + 1 or crow[0] != 0 or (counts < 0).any() or crow[-1] != len(columns):
            wanted = f"{self.shape[0]} + 1 numbers that begin with 0, do not fall, and end with {len(columns)}"
            raise _misfit("sparse_crow_indices", self.sparse_crow_indices, f"does not fit: wanted are {wanted}")
        if len(columns) != len(self.data):
            raise _misfit("sparse_col_indices", f"{len(columns)} numbers", f"data has {len(self.data)}")
        if ((columns < 0) | (columns >= self.shape[1])).any():
            wrong = columns[(columns < 0) | (columns >= self.shape[1])][0]
            raise _misfit("sparse_col_indices", int(wrong), f"is no column of shape {self.shape}")
        rows = np.repeat(np.arange(self.shape[0]), counts)
        if ((np.diff(rows) == 0) & (np.diff(columns) <= 0)).any():
            raise _misfit("sparse_col_indices", self.sparse_col_indices, "does not ascend within each row")
        return rows, columns

    def to_numpy(self, pad_value: int = 0) -> np.ndarray:
        """An array of `shape` (or one-dimensional), int64 or float32; cells that are not listed become `pad_value`.

        Raises:
            InvalidRequestError: a sparse matrix whose indices do not fit, or of more than `MAX_DENSE_CELLS` cells.
        """
        array = np.asarray(self.data, dtype=np.int64 if self.dtype == "int64" else np.float32)
        if not self.is_sparse:
            return array if self.shape is None else array.reshape(self.shape)
        places = self.cells()
        rows, columns = self.shape or (0, 0)
        if rows * columns > MAX_DENSE_CELLS:
            raise _misfit("shape", self.shape, f"has more than {MAX_DENSE_CELLS} cells")
        dense = np.full((rows, columns), pad_value, array.dtype)
        dense[places] = array
        return dense

    def to_torch(self, pad_value: int = 0) -> Any:
        """A `torch.Tensor` on the CPU; needs torch on this machine."""
        import torch  # deferred: the SDK works without torch

        return torch.from_numpy(self.to_numpy(pad_value))

    def tolist(self, pad_value: int = 0) -> list[Any]:
        """Nested Python lists, in `shape`."""
        return self.to_numpy(pad_value).tolist()

    def __len__(self) -> int:
        return len(self.data) if self.shape is None else self.shape[0]


def _indices(tensor: TensorData, name: str) -> np.ndarray:
    try:
        return np.asarray(getattr(tensor, name), dtype=np.int64)
    except (OverflowError, TypeError, ValueError) as error:
        raise _misfit(name, getattr(tensor, name), "holds what is no index") from error


def _misfit(field: str, value: object, message: str) -> InvalidRequestError:
    remedy = "TensorData.from_torch_sparse makes the CSR form of a matrix"
    return InvalidRequestError(message, field=f"TensorData.{field}", value=value, remedy=remedy)


def _torch_to_numpy(tensor: Any) -> np.ndarray:
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.is_floating_point() else tensor).numpy()
