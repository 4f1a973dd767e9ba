"""A loss that the user computes, in two passes: one for its logprobs, one with weights that give it its gradient.

The weights are minus the loss's gradient with respect to each logprob: their cross-entropy has the same gradient. Pure
except for the user's function, which needs torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mint.errors import InvalidRequestError, MissingExtraError
from mint.types import Datum, TensorData
from mint.types.arrays import np, require_numpy

CustomLoss = Callable[[list[Datum], list[Any]], tuple[Any, Mapping[str, float]]]
"""`fn(data, logprobs)` → (loss, metrics): torch tensors, one row of logprobs per datum, of the shape of its targets."""

MIN_TOKENS = 32
"""The fewest trained tokens with an advantage from which the sign of a loss is judged."""

REVERSED = -0.5
"""Cosine of advantages and weights up to which a loss has the wrong sign: it is -1 for minus a policy-gradient loss on
fresh samples. Terms of KL and entropy alone leave it near 0."""


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


def reversed_loss(data: Sequence[Datum], weights: Sequence[np.ndarray]) -> str | None:
    """The warning about a loss that raises the logprobs of tokens with negative advantages, and lowers the others.

    `weights` are those of `gradient`, of the shapes of the targets. A datum without `advantages` of that shape is not
    looked at. None without advantages of both signs: minus the loss on those of one sign may be intended.
    """
    pairs = [
        (datum.loss_fn_inputs["advantages"].to_numpy().astype(np.float64), row.astype(np.float64))
        for datum, row in zip(data, weights, strict=True)
        if "advantages" in datum.loss_fn_inputs and datum.loss_fn_inputs["advantages"].to_numpy().shape == row.shape
    ]
    if not pairs:
        return None
    advantages = np.concatenate([given.reshape(-1) for given, _ in pairs])
    pushes = np.concatenate([row.reshape(-1) for _, row in pairs])
    both = (advantages != 0) & (pushes != 0)
    advantages, pushes = advantages[both], pushes[both]
    if len(advantages) < MIN_TOKENS or (advantages > 0).all() or (advantages < 0).all():
        return None
    with np.errstate(over="ignore", invalid="ignore"):  # a gradient that is not finite is refused by the server
        cosine = float(advantages @ pushes / np.sqrt((advantages @ advantages) * (pushes @ pushes)))
    if not cosine <= REVERSED:
        return None
    return (
        f"reversed_loss: the loss lowers the logprobs of tokens with positive advantages and raises those with "
        f"negative ones (cosine of advantages and -gradient {cosine:.2f} over {len(advantages)} tokens): return the "
        "loss to minimize, such as -(ratio * advantages).sum()"
    )


def _with_weights(datum: Datum, weights: TensorData) -> Datum:
    inputs = {"target_tokens": _targets(datum), "weights": weights}
    return Datum(datum.model_input, inputs)


def _zeros(tensor: TensorData) -> TensorData:
    """Zeros in the layout of `tensor`."""
    require_numpy("a custom loss")
    return tensor.with_values(np.zeros(len(tensor.values), np.float32), "float32")


def _targets(datum: Datum) -> TensorData:
    if "target_tokens" not in datum.loss_fn_inputs:
        raise InvalidRequestError(
            "is missing",
            field="loss_fn_inputs.target_tokens",
            value="(missing)",
            remedy="Pass the tokens that are predicted: target_tokens = full[1:] for the input full[:-1]",
        )
    return datum.loss_fn_inputs["target_tokens"]
