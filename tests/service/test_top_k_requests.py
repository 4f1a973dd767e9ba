"""Passes with several targets per position, dense or sparse, as the service takes them."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from service_harness import GOOD_PASS, Harness, failure, pass_body

from mint import wire
from mint.errors import InvalidRequestError, from_wire
from mint.types import ForwardBackwardOutput
from mint.types.tensors import TensorData

TOKENS = list(range(20, 50))


def _datum(targets: Any, weights: Any = None, tokens: list[int] = TOKENS) -> dict[str, Any]:
    tensors = {"target_tokens": targets, "weights": weights}
    written = {
        key: json.loads(tensor.model_dump_json(exclude_none=True)) if isinstance(tensor, TensorData) else tensor
        for key, tensor in tensors.items()
        if tensor is not None
    }
    return {"model_input": {"chunks": [{"tokens": tokens}]}, "loss_fn_inputs": written}


def _matrices(seed: int, share: float = 0.1, k: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    listed = rng.random((len(TOKENS), k)) < share
    targets = np.where(listed, rng.integers(1, 1000, listed.shape), 0)
    weights = np.where(listed, rng.normal(0, 1, listed.shape), 0).astype(np.float32)
    return torch.from_numpy(targets), torch.from_numpy(weights)


def _run(
    harness: Harness, body: dict[str, Any], seq_id: int = 1, kind: str = "forward_backward"
) -> ForwardBackwardOutput:
    model_id = harness.create_model(seq_id)
    body = harness.answer(harness.send(kind, model_id, 1, body))
    error = wire.decode_error(body)
    if error is not None:
        raise from_wire(error)
    encoding = wire.Encoding.JSON if body.startswith(b"{") else wire.Encoding.PROTO
    return wire.decode(ForwardBackwardOutput, body, encoding)


def test_logprobs_have_the_shape_of_the_targets_and_k_may_differ(harness: Harness) -> None:
    data = [
        _datum(TensorData.from_torch(_matrices(1)[0]), TensorData.from_torch(_matrices(1)[1])),
        _datum(TensorData.from_torch(_matrices(2, k=3)[0])),
        _datum({"data": TOKENS, "dtype": "int64"}),
    ]
    output = _run(harness, pass_body(*data))
    assert [row["logprobs"].shape for row in output.loss_fn_outputs] == [[30, 8], [30, 3], [30]]


def test_sparse_and_dense_say_the_same(harness: Harness) -> None:
    outputs = []
    for seq, write in enumerate((TensorData.from_torch, TensorData.from_torch_sparse), start=1):
        targets, weights = _matrices(3)
        assert TensorData.from_torch_sparse(targets).is_sparse
        outputs.append(_run(harness, pass_body(_datum(write(targets), write(weights))), seq))
    dense, sparse = outputs
    assert dense.metrics == sparse.metrics and dense.metrics["tokens:sum"] > 0
    np.testing.assert_array_equal(
        dense.loss_fn_outputs[0]["logprobs"].to_numpy(), sparse.loss_fn_outputs[0]["logprobs"].to_numpy()
    )


def test_without_weights_every_listed_target_counts_once(harness: Harness) -> None:
    targets, _ = _matrices(4)
    ones = (targets != 0).float()
    packed = TensorData.from_torch_sparse(targets)
    without = _run(harness, pass_body(_datum(packed)), 1)
    given = _run(harness, pass_body(_datum(packed, TensorData.from_torch(ones))), 2)
    assert without.metrics["loss:sum"] == given.metrics["loss:sum"] > 0
    dense = _run(harness, pass_body(_datum(TensorData.from_torch(targets))), 3)
    assert dense.metrics["tokens:sum"] == 30


def test_a_plain_pass_is_linted_beside_one_of_several_targets(harness: Harness) -> None:
    body = pass_body(*[_datum(TensorData.from_torch(_matrices(n)[0])) for n in range(10)])
    assert not any("not_shifted" in warning for warning in _run(harness, body).warnings)
    zero = TensorData.from_torch(torch.zeros(30, 8))
    nothing = pass_body(*[_datum(TensorData.from_torch(_matrices(n)[0]), zero) for n in range(10)])
    assert any("nothing_trained" in warning for warning in _run(harness, nothing, 2).warnings)


FLAT = {"data": [1] * 60, "dtype": "int64"}
WIDE = {**FLAT, "shape": [30, 2]}
SPARSE = {
    "data": [5],
    "dtype": "int64",
    "shape": [30, 2],
    "sparse_crow_indices": [0] * 30 + [1],
    "sparse_col_indices": [1],
}
ONES = {"data": [1.0] * 60, "dtype": "float32", "shape": [30, 2]}
TARGETS, WEIGHTS = "data[0].loss_fn_inputs.target_tokens", "data[0].loss_fn_inputs.weights"
BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    # name: (inputs that differ from the good ones, part of the field, part of the message)
    "flat targets": ({"target_tokens": FLAT}, TARGETS, "length 60"),
    "rows that are not tokens": ({"target_tokens": {**WIDE, "shape": [20, 3]}}, TARGETS, "[20, 3]"),
    "no targets": ({"target_tokens": {**WIDE, "data": [], "shape": [30, 0]}}, TARGETS, "at least one target"),
    "a negative width": ({"target_tokens": {**WIDE, "shape": [30, -2]}}, TARGETS, "at least one target"),
    "shape and numbers differ": ({"target_tokens": {**WIDE, "shape": [30, 3]}}, TARGETS, "[30, 3]"),
    "three dimensions": ({"target_tokens": {**WIDE, "shape": [30, 2, 1]}}, TARGETS, "[30, 2, 1]"),
    "weights of one row": ({"weights": {"data": [1.0] * 30, "dtype": "float32"}}, WEIGHTS, "[30, 2]"),
    "weights too wide": ({"weights": {"data": [1.0] * 90, "dtype": "float32", "shape": [30, 3]}}, WEIGHTS, "[30, 3]"),
    "a weight that is not finite": ({"weights": {**ONES, "data": [1.0] * 59 + [1e999]}}, f"{WEIGHTS}[29][1]", "finite"),
    "beyond the vocabulary": ({"target_tokens": {**WIDE, "data": [1] * 33 + [1024] * 27}}, f"{TARGETS}[16][1]", "1024"),
    "a negative target": ({"target_tokens": {**WIDE, "data": [-1] * 60}}, f"{TARGETS}[0][0]", "-1"),
    "sparse beyond the columns": ({"target_tokens": {**SPARSE, "sparse_col_indices": [2]}}, TARGETS, "not a column"),
    "sparse with one list": ({"target_tokens": {**SPARSE, "sparse_col_indices": None}}, TARGETS, "belong together"),
    "sparse in one dimension": ({"target_tokens": {**SPARSE, "shape": [30]}}, TARGETS, "rows, columns"),
    "sparse beyond 64 bits": ({"target_tokens": {**SPARSE, "data": [2**70]}}, TARGETS, "64 bits"),
    "more cells than fit": ({"target_tokens": {**SPARSE, "shape": [30, 10**9]}}, "target_tokens", "at most"),
    "sparse weights without end": (
        {"weights": {**SPARSE, "dtype": "float32", "shape": [30, 10**9]}},
        WEIGHTS,
        "[30, 2]",
    ),
}


def test_many_small_bodies_cannot_ask_for_much_together(harness: Harness) -> None:
    body = pass_body(*[_datum({**SPARSE, "shape": [30, 50_000]})] * 6)
    assert "9000000 cells" in str(failure(lambda: _run(harness, body)))


@pytest.mark.parametrize("name", BAD)
def test_a_wrong_matrix_is_refused_by_name_and_at_no_cost(harness: Harness, name: str) -> None:
    changes, field, text = BAD[name]
    inputs = {"target_tokens": WIDE, "weights": ONES, **changes}
    body = pass_body(_datum(inputs["target_tokens"], inputs["weights"]))
    model_id = harness.create_model()
    tracemalloc.start()
    try:
        request = harness.send("forward_backward", model_id, 1, body)
        error = failure(lambda: harness.wait(request))
        assert tracemalloc.get_traced_memory()[1] < 30e6
    finally:
        tracemalloc.stop()
    assert isinstance(error, InvalidRequestError) and field in (error.field or "") and text in str(error)
    harness.answer(harness.send("forward_backward", model_id, 2, GOOD_PASS))


def test_a_policy_loss_says_which_loss_takes_several_targets(harness: Harness) -> None:
    datum = _datum(WIDE)
    for key in ("logprobs", "advantages"):
        datum["loss_fn_inputs"][key] = {"data": [0.5] * 30, "dtype": "float32"}
    error = failure(lambda: _run(harness, pass_body(datum, loss="importance_sampling")))
    assert isinstance(error, InvalidRequestError) and "one target per token" in str(error)
    assert "cross_entropy" in str(error)
