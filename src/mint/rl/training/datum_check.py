"""Checks datums before they are trained on: the loss mask must cover the completion and no prompt token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mint.rl.finding import Finding
from mint.types import Datum


def check_datums(datums: Sequence[Datum], prompt_lengths: Sequence[int], *, step: int = 0) -> list[Finding]:
    """At most one `masked_loss` finding about a batch that is about to be trained on.

    `prompt_lengths[i]` tokens of datum i are the prompt [P]. Position t predicts token t + 1, so the first P − 1
    positions must have weight 0 and advantage 0, and something after them must be trained.
    """
    on_prompt = []
    untrained = []
    for place, (datum, length) in enumerate(zip(datums, prompt_lengths, strict=True)):
        prompt = max(0, length - 1)
        weights = _column(datum, "weights")
        advantages = _column(datum, "advantages")
        if any(column is not None and bool(column[:prompt].any()) for column in (weights, advantages)):
            on_prompt.append(place)
        if weights is not None and not weights[prompt:].any():
            untrained.append(place)
    if not on_prompt and not untrained:
        return []
    first = (on_prompt or untrained)[0]
    evidence = (
        f"{len(on_prompt)} of {len(datums)} datums have weights or advantages on prompt tokens"
        if on_prompt
        else f"{len(untrained)} of {len(datums)} datums have no weight on their completion"
    )
    return [
        Finding(
            "masked_loss",
            "error",
            step,
            f"{evidence}; the first is datum {first}, with a prompt of {prompt_lengths[first]} tokens",
            "Give the first len(prompt) − 1 positions weight 0 and advantage 0, and the completion's weight 1: "
            "input = full[:-1], target_tokens = full[1:]",
            {"on_prompt": float(len(on_prompt)), "untrained": float(len(untrained)), "datums": float(len(datums))},
        )
    ]


def _column(datum: Datum, name: str) -> np.ndarray | None:
    tensor = datum.loss_fn_inputs.get(name)
    return None if tensor is None else tensor.to_numpy()
