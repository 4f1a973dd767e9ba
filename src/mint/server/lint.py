"""Looks for training data that is possible but probably not what was meant. Pure and cheap; it never refuses.

Each rule returns a sentence with its evidence, or None. Letters: N tokens of one datum.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mint.engine.protocol import TrainDatum

MIN_DATUMS = 8
"""Rules about a whole batch need at least this many datums."""

SUSPICIOUS_SHARE = 0.5


CERTAIN_LOGPROB = -0.01
"""A policy this sure of a token may well report a logprob of exactly 0."""


def lint(data: Sequence[TrainDatum], loss: str, logprobs: Sequence[np.ndarray]) -> list[str]:
    """The warnings about a batch; `logprobs` float32 [N] per datum are those that the pass computed."""
    found = [_not_shifted(data), _duplicates(data, loss), _nothing_trained(data)]
    if loss != "cross_entropy":
        found += [_advantages(data), _zero_logprobs(data, logprobs), _prompts_trained(data)]
    return [warning for warning in found if warning is not None]


def _not_shifted(data: Sequence[TrainDatum]) -> str | None:
    """Targets must be the input moved by one place."""
    total = sum(datum.tokens.size - 1 for datum in data)
    shifted = sum(int((datum.targets[:-1] == datum.tokens[1:]).sum()) for datum in data)
    if total < MIN_DATUMS or shifted >= SUSPICIOUS_SHARE * total:
        return None
    same = sum(int((datum.targets[:-1] == datum.tokens[:-1]).sum()) for datum in data)
    what = "equal the input" if same > SUSPICIOUS_SHARE * total else "are not the input shifted by one"
    return f"targets {what} ({shifted} of {total} follow it): use input = full[:-1] and target_tokens = full[1:]"


def _duplicates(data: Sequence[TrainDatum], loss: str) -> str | None:
    """Short samples of one prompt are often the same; under a policy loss only a batch of one datum is doubtful."""
    if len(data) < MIN_DATUMS:
        return None
    seen = {
        (datum.tokens.tobytes(), datum.weights.tobytes(), *(array.tobytes() for array in datum.inputs.values()))
        for datum in data
    }
    copies = len(data) - len(seen)
    if loss != "cross_entropy" and len(seen) > 1:
        return None
    return (
        f"{copies} of {len(data)} datums are exact copies of others" if copies > SUSPICIOUS_SHARE * len(data) else None
    )


def _nothing_trained(data: Sequence[TrainDatum]) -> str | None:
    return None if any(datum.weights.any() for datum in data) else "all weights are 0: nothing is trained"


def _advantages(data: Sequence[TrainDatum]) -> str | None:
    trained = [datum.inputs["advantages"][datum.weights != 0] for datum in data if datum.weights.any()]
    if not trained:
        return None
    lowest, highest = min(float(row.min()) for row in trained), max(float(row.max()) for row in trained)
    if lowest == highest == 0.0:
        return "all advantages are 0: nothing will be learned from this batch"
    if len(data) >= MIN_DATUMS and lowest >= 0.0:
        return (
            f"no advantage is negative (from {lowest:g} to {highest:g} over {len(data)} datums): "
            "are these raw rewards? Subtract each group's mean"
        )
    return None


def _zero_logprobs(data: Sequence[TrainDatum], logprobs: Sequence[np.ndarray]) -> str | None:
    """A logprob of 0 says that the sampler was certain; the policy must nearly be so, too."""
    trained = sum(int((datum.weights != 0).sum()) for datum in data)
    zero = sum(
        int(((datum.inputs["logprobs"] == 0) & (datum.weights != 0) & (own < CERTAIN_LOGPROB)).sum())
        for datum, own in zip(data, logprobs, strict=True)
    )
    if not trained or zero <= SUSPICIOUS_SHARE * trained:
        return None
    return (
        f"logprobs are exactly 0 on {zero} of {trained} trained tokens of which the policy is not certain: "
        "pass those that sample() returned"
    )


def _prompts_trained(data: Sequence[TrainDatum]) -> str | None:
    first = sum(bool(datum.weights[0]) and datum.tokens.size > 1 for datum in data)
    if first <= SUSPICIOUS_SHARE * len(data):
        return None
    return f"the first token has a weight in {first} of {len(data)} datums: give prompt tokens weight 0"
