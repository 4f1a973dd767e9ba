"""A loss of the user's own for `TrainingClient.forward_backward_custom`: called for each datum, on its trained tokens.

The function is differentiated on this machine, and the server gets its gradient. So it costs one more forward, and
needs torch here. Knows no loss of the server.

Letters: T trained tokens of one datum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mint.client.custom_loss import CustomLoss
from mint.errors import InvalidRequestError
from mint.rl.objective import LossFunction, called, function_name
from mint.types import Datum


def custom_loss(function: LossFunction) -> CustomLoss:
    """The sum of `function` over datums, with the ratio and KL of sampler and policy as metrics."""

    def loss(data: list[Datum], rows: list[Any]) -> tuple[Any, dict[str, float]]:
        parts = []
        log_ratios = []
        for datum, row in zip(data, rows, strict=True):
            columns = {name: datum.loss_fn_inputs[name].to_torch() for name in ("logprobs", "advantages", "weights")}
            trained = columns["weights"] != 0
            own = row[trained]
            if not len(own):
                continue
            sampled, advantages, weights = (column[trained] for column in columns.values())
            # Before the call: the function may change its tensors in place.
            log_ratios.append((own.detach() - sampled).numpy().astype(np.float64))
            value = called("RLConfig.loss_fn", function, own, sampled, advantages, weights)
            parts.append(_summed(function, value, len(own)))
        # Without a trained token, a zero that depends on the logprobs: its gradient is 0.
        return sum(parts, 0 * rows[0].sum()), ratio_metrics(log_ratios)

    return loss


def _summed(function: LossFunction, value: Any, tokens: int) -> Any:
    """The loss of one datum as a scalar with a gradient."""
    shape = getattr(value, "shape", None)
    wrong = None
    if shape is None or not getattr(value, "requires_grad", False):
        wrong = "returned a value that does not depend on logprobs"
    elif tuple(shape) not in {(), (tokens,)}:
        wrong = f"returned a loss of shape {tuple(shape)} for {tokens} tokens"
    elif not bool(value.detach().isfinite().all()):
        wrong = "returned a loss that is not finite"
    if wrong is not None:
        raise InvalidRequestError(
            wrong,
            field="RLConfig.loss_fn",
            value=function_name(function),
            remedy="Return a finite torch tensor: the loss of each token, or their sum",
        )
    return value.sum()


def ratio_metrics(log_ratios: Sequence[np.ndarray]) -> dict[str, float]:
    """Ratio and KL of the trained tokens, named as the server names those of its own losses."""
    if not log_ratios:
        return {}
    joined = np.concatenate(log_ratios)
    ratio = np.exp(joined)
    return {
        "ratio:mean": float(ratio.mean()),
        "ratio_max:max": float(ratio.max()),
        "ratio_min:min": float(ratio.min()),
        "ess:mean": float(ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum())),
        "kl_k1:mean": float(-joined.mean()),
        "kl_k2:mean": float(0.5 * (joined**2).mean()),
        "kl_k3:mean": float((ratio - 1 - joined).mean()),
        "abs_logprob_diff:mean": float(np.abs(joined).mean()),
    }
