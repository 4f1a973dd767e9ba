"""Looks for training data that is possible but probably not what was meant. Pure and cheap; it never refuses.

Each rule returns one sentence with its evidence, opened by a stable code (`prompt_trained: …`), or None. What compares
the sampler's logprobs with the policy's is in `logprob_lint`. Knows one request, so nothing of groups or steps before.

Letters: N tokens of one datum · B the positions of all datums, one after the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import gcd

import numpy as np

from mint.engine.protocol import LossSpec, PassResult, TrainDatum
from mint.server.worker.logprob_lint import Tokens, logprob_warning

MIN_DATUMS = 8
"""Rules about a whole batch need at least this many datums."""

MIN_DISTINCT_IN_ORDER, MIN_DISTINCT = 8, 32
"""Short samples of one prompt are often alike. Copies are no accident if this many different datums come again in the
same order, or if each of that many comes equally often."""

SUSPICIOUS_SHARE = 0.5


def lint(
    data: Sequence[TrainDatum],
    loss: LossSpec,
    result: PassResult,
    *,
    stop_tokens: Sequence[int] = (),
    fresh: bool = False,
) -> list[str]:
    """The warnings about a batch, given what its pass computed.

    `stop_tokens` are the base's end tokens. `fresh` says that the weights have not changed since they were last
    published, so that samples of them must agree with the policy.
    """
    policy = "logprobs" in data[0].inputs
    tokens = _flatten(data, result, policy=policy)
    # Where a position has several targets (a teacher's best, say), none of them need be the next token.
    shifted = None if any(datum.targets.ndim == 2 for datum in data) else _not_shifted(tokens)
    found = [shifted, _duplicates(data, policy=policy), _nothing_trained(tokens)]
    if policy and tokens.trained.any():
        found.append(_advantages(data, tokens))
        if found[0] is None:
            temperature = loss.config["temperature"]
            found.append(logprob_warning(tokens, temperature=temperature, stop_tokens=stop_tokens, fresh=fresh))
    return [warning for warning in found if warning is not None]


def _flatten(data: Sequence[TrainDatum], result: PassResult, *, policy: bool) -> Tokens:
    sizes = np.array([datum.tokens.size for datum in data])
    own = np.concatenate([_first(row) for row in result.logprobs])
    return Tokens(
        starts=np.cumsum(sizes) - sizes,
        inputs=np.concatenate([datum.tokens for datum in data]),
        targets=np.concatenate([_first(datum.targets) for datum in data]),
        trained=np.concatenate([datum.trained for datum in data]),
        own=own,
        sampler=np.concatenate([datum.inputs["logprobs"] for datum in data]) if policy else own,
        entropies=np.concatenate(result.entropies) if result.entropies else None,
    )


def _first(values: np.ndarray) -> np.ndarray:
    """[N] of [N] or [N, K]: the rules that read targets or their logprobs are for one target per position."""
    return values[:, 0] if values.ndim == 2 else values


def _not_shifted(tokens: Tokens) -> str | None:
    """Targets must be the input moved by one place."""
    inside = tokens.followed
    total, shifted = int(inside.sum()), int((tokens.targets[:-1] == tokens.inputs[1:])[inside].sum())
    if total < MIN_DATUMS or shifted >= SUSPICIOUS_SHARE * total:
        return None
    same = int((tokens.targets[:-1] == tokens.inputs[:-1])[inside].sum())
    what = "equal the input" if same > SUSPICIOUS_SHARE * total else "are not the input shifted by one"
    return (
        f"not_shifted: targets {what} ({shifted} of {total} follow it): "
        "use input = full[:-1] and target_tokens = full[1:]"
    )


def _duplicates(data: Sequence[TrainDatum], *, policy: bool) -> str | None:
    """Under a policy loss short samples of one prompt may well be the same, but hardly every one of them."""
    if len(data) < MIN_DATUMS:
        return None
    keys = [
        tuple(part.tobytes() for part in (datum.tokens, datum.targets, datum.weights, *datum.inputs.values()))
        for datum in data
    ]
    counts = Counter(keys)
    copies, half = len(data) - len(counts), len(data) // 2
    if policy and len(counts) > 1:
        in_order = 2 * len(counts) >= MIN_DISTINCT_IN_ORDER and keys[:half] == keys[half:]
        in_order |= len(counts) >= MIN_DISTINCT_IN_ORDER and keys[::2] == keys[1::2]
        if not in_order and (len(counts) < MIN_DISTINCT or gcd(*counts.values()) < 2):
            return None
    if copies < SUSPICIOUS_SHARE * len(data):
        return None
    return f"duplicates: {copies} of {len(data)} datums are exact copies of others"


def _nothing_trained(tokens: Tokens) -> str | None:
    return None if tokens.trained.any() else "nothing_trained: all weights are 0: nothing is trained"


def _advantages(data: Sequence[TrainDatum], tokens: Tokens) -> str | None:
    trained = np.concatenate([datum.inputs["advantages"] for datum in data])[tokens.trained]
    lowest, highest = float(trained.min()), float(trained.max())
    if lowest == highest == 0.0:
        return "zero_advantages: all advantages are 0: nothing will be learned from this batch"
    if len(data) >= MIN_DATUMS and (lowest >= 0.0 or highest <= 0.0):
        return (
            f"raw_rewards: no advantage is {'negative' if lowest >= 0 else 'positive'} "
            f"(from {lowest:g} to {highest:g} over {len(data)} datums): are these raw rewards? "
            "Subtract each group's mean"
        )
    return None
