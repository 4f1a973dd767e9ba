"""A loss that the user computes, in two passes: one for its logprobs, one with weights that give it its gradient.

The weights are minus the loss's gradient with respect to each logprob: their cross-entropy has the same gradient. Pure
except for the user's function, which needs torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mint.errors import MissingExtraError, NotFoundError
from mint.types import Datum, TensorData

CustomLoss = Callable[[list[Datum], list[Any]], tuple[Any, Mapping[str, float]]]
"""`fn(data, logprobs)` → (loss, metrics): torch tensors, one row of logprobs per datum, of the shape of its targets."""


def without_loss(data: Sequence[Datum]) -> list[Datum]:
    """The same inputs and targets, with weight 0 where none was given."""
    return [
        _with_weights(datum, datum.loss_fn_inputs["weights"])
        if "weights" in datum.loss_fn_inputs
        else _with_weights(datum, _zeros(_targets(datum)))
        for datum in data
    ]


def reweighted(datum: Datum, weights: np.ndarray) -> Datum:
    """The inputs and targets of a datum with other weights, which have the shape of the targets."""
    return _with_weights(datum, TensorData.from_numpy(weights))


def gradient(
    fn: CustomLoss, data: list[Datum], rows: Sequence[TensorData]
) -> tuple[float, dict[str, float], list[np.ndarray]]:
    """The user's loss and metrics, and for each datum the weights of the second pass."""
    try:
        import torch  # deferred: only this function of the SDK needs it
    except ImportError as error:
        raise MissingExtraError("a custom loss needs torch on this machine", remedy="pip install torch") from error
    logprobs = [torch.from_numpy(row.to_numpy()).requires_grad_() for row in rows]
    loss, metrics = fn(data, logprobs)
    loss.backward()
    weights = [np.zeros(tuple(row.shape), np.float32) if row.grad is None else (-row.grad).numpy() for row in logprobs]
    return float(loss.detach()), dict(metrics), weights


def _with_weights(datum: Datum, weights: TensorData) -> Datum:
    inputs = {"target_tokens": _targets(datum), "weights": weights}
    return Datum(datum.model_input, inputs)


def _zeros(tensor: TensorData) -> TensorData:
    """Zeros in the layout of `tensor`."""
    return tensor.with_values(np.zeros(len(tensor.values), np.float32), "float32")


def _targets(datum: Datum) -> TensorData:
    if "target_tokens" not in datum.loss_fn_inputs:
        raise NotFoundError("is missing", field="loss_fn_inputs.target_tokens", value="(missing)")
    return datum.loss_fn_inputs["target_tokens"]
