"""Tensors as flat lists: the sparse form says what the dense one says, and a wrong one is refused before it costs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mint.errors import InvalidRequestError
from mint.types import Datum, ModelInput
from mint.types.tensors import MAX_DENSE_CELLS, TensorData

CSR: dict[str, Any] = {
    "data": [5, 7, 9],
    "dtype": "int64",
    "shape": [3, 4],
    "sparse_crow_indices": [0, 2, 2, 3],
    "sparse_col_indices": [0, 3, 1],
}


def test_unlisted_cells_are_the_pad_value() -> None:
    tensor = TensorData(**CSR)
    assert tensor.tolist() == [[5, 0, 0, 7], [0, 0, 0, 0], [0, 9, 0, 0]]
    assert tensor.tolist(-1)[1] == [-1] * 4 and tensor.to_torch(-1)[0].tolist() == [5, -1, -1, 7]
    assert len(tensor) == 3 and [part.tolist() for part in tensor.cells()] == [[0, 0, 2], [0, 3, 1]]


@given(
    st.integers(0, 6), st.integers(0, 40), st.floats(0, 1), st.booleans(), st.sampled_from([0, -1, 3]), st.integers(0)
)
def test_a_matrix_survives_the_sparse_form(
    rows: int, columns: int, share: float, whole: bool, pad: int, seed: int
) -> None:
    rng = np.random.default_rng(seed % 2**32)
    dense = np.where(rng.random((rows, columns)) < share, rng.integers(-9, 9, (rows, columns)), pad)
    tensor = torch.from_numpy(dense) if whole else torch.from_numpy(dense.astype(np.float32) / 2)
    packed = TensorData.from_torch_sparse(tensor, pad_value=pad)
    assert packed.dtype == ("int64" if whole else "float32") and packed.shape == [rows, columns]
    np.testing.assert_array_equal(packed.to_numpy(pad), tensor.numpy())
    again = TensorData.model_validate_json(packed.model_dump_json())
    np.testing.assert_array_equal(again.to_numpy(pad), tensor.numpy())


def test_only_what_is_smaller_that_way_becomes_sparse() -> None:
    full, thin = torch.ones(4, 5), torch.zeros(40, 50)
    assert not TensorData.from_torch_sparse(full).is_sparse and TensorData.from_torch_sparse(thin).is_sparse
    assert not TensorData.from_torch_sparse(torch.zeros(50)).is_sparse
    assert not TensorData.from_torch_sparse(torch.zeros(4, 5, 6)).is_sparse
    gappy = torch.full((10, 10), float("nan"))
    gappy[1:] = 0
    assert np.isnan(TensorData.from_torch_sparse(gappy).to_numpy()).sum() == 10
    with pytest.raises(InvalidRequestError, match="pad_value"):
        TensorData.from_torch_sparse(thin, pad_value=0.5)  # ty: ignore[invalid-argument-type]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "one index list alone": ({"sparse_col_indices": None}, "belong together"),
    "no shape": ({"shape": None}, "rows, columns"),
    "three dimensions": ({"shape": [3, 2, 2]}, "rows, columns"),
    "a negative size": ({"shape": [3, -4]}, "rows, columns"),
    "too few rows": ({"sparse_crow_indices": [0, 2, 3]}, "3 \\+ 1 numbers"),
    "no rows": ({"sparse_crow_indices": []}, "3 \\+ 1 numbers"),
    "rows that fall": ({"sparse_crow_indices": [0, 3, 2, 3]}, "do not fall"),
    "rows that begin late": ({"sparse_crow_indices": [1, 2, 2, 3]}, "begin with 0"),
    "rows that end early": ({"sparse_crow_indices": [0, 2, 2, 2]}, "end with 3"),
    "fewer columns than numbers": ({"sparse_col_indices": [0, 3], "sparse_crow_indices": [0, 2, 2, 2]}, "data has 3"),
    "a column too far": ({"sparse_col_indices": [0, 4, 1]}, "= 4: is not a column"),
    "a negative column": ({"sparse_col_indices": [0, -1, 1]}, "= -1: is not a column"),
    "the same column twice": ({"sparse_col_indices": [3, 3, 1]}, "ascend"),
    "columns that fall": ({"sparse_col_indices": [3, 0, 1]}, "ascend"),
    "an index beyond 64 bits": ({"sparse_col_indices": [0, 2**70, 1]}, "does not fit 64 bits"),
    "rows without end": ({"shape": [10**18, 4]}, "1000000000000000000 \\+ 1 numbers"),
    "columns without end": ({"shape": [3, 10**30]}, "more than"),
    "one cell too many": ({"shape": [3, MAX_DENSE_CELLS // 3 + 1]}, "more than"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_wrong_sparse_form_is_refused_with_its_reason(name: str) -> None:
    changes, reason = BAD[name]
    with pytest.raises(InvalidRequestError, match=reason):
        TensorData(**{**CSR, **changes}).to_numpy()


def test_a_datum_takes_matrices_dense_and_sparse_and_keeps_their_form() -> None:
    targets = torch.zeros(20, 10, dtype=torch.int64)
    targets[3, 2] = 8
    sparse = TensorData.from_torch_sparse(targets)
    inputs: dict[str, Any] = {"target_tokens": sparse, "weights": TensorData.from_torch_sparse(targets)}
    datum = Datum(model_input=ModelInput.from_ints(range(20)), loss_fn_inputs=inputs)
    assert datum.loss_fn_inputs["target_tokens"] is sparse
    weights = datum.loss_fn_inputs["weights"]  # whole numbers where fractions belong
    assert weights.is_sparse and weights.dtype == "float32" and weights.to_numpy().sum() == 8.0
    nested = Datum(model_input=ModelInput.from_ints([1, 2]), loss_fn_inputs={"target_tokens": [[1, 2], [3, 4]]})  # ty: ignore[invalid-argument-type]
    assert nested.loss_fn_inputs["target_tokens"].shape == [2, 2]
