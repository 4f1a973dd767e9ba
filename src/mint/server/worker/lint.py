"""Looks for training data that is possible but probably a mistake. Pure and cheap; it never refuses.

Each rule returns one sentence with its evidence, opened by a stable code (`prompt_trained: …`), or None. Rules about
the data alone come first. Then come the rules about logprobs: a pass has just computed the policy's own logprobs and
entropies, so the sampler's can be compared with them token by token, and each usual mistake has its own pattern. Knows
one request, and nothing of groups or earlier steps.

Letters: N tokens of one datum · B the positions of all datums, one after the other · p the policy's logprobs · q the
sampler's · H entropies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd

import numpy as np

from mint.engine.protocol import LossSpec, PassResult, TrainDatum

MIN_DATUMS = 8
"""Rules about a whole batch need at least this many datums."""

MIN_DISTINCT_IN_ORDER, MIN_DISTINCT = 8, 32
"""Short samples of one prompt are often equal. Copies are suspicious if this many different datums are repeated in the
same order, or if that many different datums are all repeated equally often."""

SUSPICIOUS_SHARE = 0.5

LARGE_ADVANTAGE = 10.0
"""Root mean square of the advantages above which they are large. Centred rewards of 0 and 1 stay below 0.5, advantages
divided by their standard deviation have 1."""

MIN_TOKENS = 16
"""Rules about logprobs need at least this many trained tokens."""

AFTER_STOP_SHARE = 0.1
"""Share of datums that may go on after an end token: `stop=[]` asks for such samples."""

CERTAIN_LOGPROB = -0.01
"""Above this, a sampler's logprob of exactly 0 is plausible."""

UNLIKELY_LOGPROB = -0.7
"""Below this, no usual temperature or nucleus gives a sampler's logprob of exactly 0."""

SHIFT_GAIN = 0.25
"""Moving the logprobs by one position must remove three quarters of the difference, and leave less than a quarter of
the logprobs' own size: once the policy has moved far, any small number is nearer to it."""

SHIFT_FLOOR = 0.1
"""Mean |p - q| below which no shift is looked for."""

TEMPERATURE_FLOOR = 0.02
"""Root mean square of p - q below which no temperature is looked for."""

TEMPERATURE_FIT = 0.95
"""Share of the variance of q - p that a temperature must explain."""

TEMPERATURE_RANGE = (0.3, 2.0)
"""Plausible sampling temperatures, relative to that of the pass. A policy that has moved to other tokens looks like a
still higher one."""

TEMPERATURE_SLOPE = 0.04
"""|1/T - 1| below which no temperature is reported."""

STALE_DIFFERENCE = 0.25
"""Mean |p - q| above which samples are stale: the ratio of a typical token then differs from 1 by more than a quarter.
A second optimizer step on one batch stays far below."""

STALE_ESS = 0.3
"""Effective sample size, as a share of the tokens, below which training may collapse (arXiv 2602.17616)."""

FOREIGN_DIFFERENCE = 1.0
FOREIGN_CORRELATION = 0.3
"""Mean |p - q| above which, and correlation of p and q below which, fresh logprobs belong to other tokens."""

FRESH_DIFFERENCE = 0.02
"""Mean |p - q| on unchanged weights that rounding in bfloat16 does not explain."""

MISMATCH_NOISE = 0.005
"""|p - q| below which the sign of the difference may be rounding."""

ONE_SIDED = 0.95
"""Share of the tokens whose logprobs the sampler must have raised, to say that it left out the others' probability."""


@dataclass(frozen=True)
class Tokens:
    """All positions of a batch, [B] each; `starts` are the datums' first positions.

    With several targets per position (`many_targets`), `targets` and `own` are about the first one.
    """

    starts: np.ndarray
    inputs: np.ndarray
    targets: np.ndarray
    trained: np.ndarray
    own: np.ndarray
    sampler: np.ndarray
    entropies: np.ndarray | None
    many_targets: bool

    @cached_property
    def datum_of(self) -> np.ndarray:
        """The datum of each position."""
        return np.repeat(np.arange(len(self.starts)), np.diff(np.append(self.starts, len(self.inputs))))

    @cached_property
    def followed(self) -> np.ndarray:
        """[B - 1]: whether the next position belongs to the same datum."""
        inside = np.ones(len(self.inputs) - 1, bool)
        inside[self.starts[1:] - 1] = False
        return inside


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
    # With several targets per position (the best tokens of a teacher), none of them need be the next token.
    shifted = None if tokens.many_targets else _not_shifted(tokens)
    found = [shifted]
    if len(data) >= MIN_DATUMS:
        found.append(_duplicates(data, policy=policy))
    if not tokens.trained.any():
        found.append("nothing_trained: all weights are 0: nothing is trained")
    elif policy:
        found.append(_advantages(data, tokens))
        if shifted is None:
            temperature = loss.config["temperature"]
            found.append(_logprobs(tokens, temperature=temperature, stop_tokens=stop_tokens, fresh=fresh))
    return list(filter(None, found))


def _flatten(data: Sequence[TrainDatum], result: PassResult, *, policy: bool) -> Tokens:
    sizes: list[int] = []
    inputs: list[np.ndarray] = []
    targets: list[np.ndarray] = []
    trained: list[np.ndarray] = []
    own: list[np.ndarray] = []
    sampler: list[np.ndarray] = []
    many_targets = False
    for datum, logprobs in zip(data, result.logprobs, strict=True):
        sizes.append(len(datum.tokens))
        inputs.append(datum.tokens)
        trained.append(datum.trained)
        if datum.targets.ndim == 2:
            many_targets = True
            targets.append(datum.targets[:, 0])
            own.append(logprobs[:, 0])
        else:
            targets.append(datum.targets)
            own.append(logprobs)
        sampler.append(datum.inputs["logprobs"] if policy else own[-1])
    return Tokens(
        starts=np.cumsum(sizes) - sizes,
        inputs=np.concatenate(inputs),
        targets=np.concatenate(targets),
        trained=np.concatenate(trained),
        own=np.concatenate(own),
        sampler=np.concatenate(sampler),
        entropies=np.concatenate(result.entropies) if result.entropies else None,
        many_targets=many_targets,
    )


def _not_shifted(tokens: Tokens) -> str | None:
    """Targets must be the input shifted by one position."""
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
    """Under a policy loss, some short samples of one prompt may be equal, but rarely all of them."""
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
    negative = int(sum((datum.weights < 0).sum() for datum in data))
    if negative > SUSPICIOUS_SHARE * len(trained):
        return (
            f"negative_weights: {negative} of {len(trained)} trained tokens have a negative weight, which changes the "
            "sign of their loss: the service minimizes the loss, so give positive weights"
        )
    size = float(np.sqrt(np.mean(np.square(trained.astype(np.float64)))))
    if size > LARGE_ADVANTAGE:
        return (
            f"large_advantages: the root mean square of the advantages is {size:.3g}: scale the rewards to about 1. "
            "Adam's step hardly changes, but gradient clipping, KL and entropy terms lose their meaning"
        )
    return None


# --- logprobs ---------------------------------------------------------------------------------------------------------


def _logprobs(
    tokens: Tokens, *, temperature: float, stop_tokens: Sequence[int] = (), fresh: bool = False
) -> str | None:
    """The first problem of the mask or the logprobs: only the cause, not its effects on the other rules.

    `temperature` is that of the pass; the rest as for `lint`.
    """
    found = _first_token_trained(tokens) or _after_stop(tokens, stop_tokens) or _shifted(tokens)
    found = found or _zero(tokens) or _unsampled(tokens)
    if found is not None or tokens.trained.sum() < MIN_TOKENS:
        return found
    with np.errstate(over="ignore", invalid="ignore"):  # weights that have diverged
        found = _tempered(tokens, temperature) or (_foreign(tokens) if fresh else None)
        return found or _stale(tokens) or (_mismatch(tokens) if fresh else None)


def _first_token_trained(tokens: Tokens) -> str | None:
    """The first target is a prompt token, unless the prompt was one token and the policy sampled the next one."""
    starts = tokens.starts
    weighted = tokens.trained[starts]
    weighted &= tokens.followed[np.minimum(starts, len(tokens.followed) - 1)] if len(tokens.followed) else False
    count = int(weighted.sum())
    if count <= SUSPICIOUS_SHARE * len(starts):
        return None
    one_token = len(np.unique(tokens.inputs[starts])) == 1 and len(np.unique(tokens.targets[starts])) > 1
    if one_token and np.abs(tokens.own[starts] - tokens.sampler[starts]).mean() < STALE_DIFFERENCE:
        return None
    return (
        f"prompt_trained: the first token has a weight in {count} of {len(starts)} datums: "
        "give prompt tokens weight 0 (without weights, every token whose advantage is not 0 is trained)"
    )


def _after_stop(tokens: Tokens, stop_tokens: Sequence[int]) -> str | None:
    """A sample ends with its end token. What follows is padding, unless more sampled tokens come later."""
    ends = np.isin(tokens.targets[:-1], np.asarray(stop_tokens, np.int64))
    beyond = np.flatnonzero(ends & tokens.trained[:-1] & tokens.trained[1:] & tokens.followed)
    datums = np.flatnonzero(np.bincount(tokens.datum_of[beyond]))
    total = len(tokens.starts)
    if len(datums) <= AFTER_STOP_SHARE * total:
        return None
    last = _last_sampled(tokens)
    resumed = (tokens.sampler[beyond + 1] == 0) & (beyond < last[tokens.datum_of[beyond]])
    if resumed.mean() > SUSPICIOUS_SHARE:
        return (
            f"prompt_trained: {len(datums)} of {total} datums train tokens of logprob 0 between an end token and the "
            "next sample: give prompt tokens and tool results weight 0"
        )
    return (
        f"tokens_after_stop: {len(datums)} of {total} datums train tokens after the model's end token: "
        "give weight 0 to whatever was not sampled"
    )


def _last_sampled(tokens: Tokens) -> np.ndarray:
    """The last trained position of each datum whose logprob is not exactly 0; -1 if there is none."""
    sampled = np.flatnonzero(tokens.trained & (tokens.sampler != 0))
    last = np.full(len(tokens.starts), -1)
    np.maximum.at(last, tokens.datum_of[sampled], sampled)
    return last


def _shifted(tokens: Tokens) -> str | None:
    """Each q is nearer to the p of a neighbouring token than to that of its own."""
    both = tokens.trained[:-1] & tokens.trained[1:] & tokens.followed
    if both.sum() < MIN_TOKENS:
        return None
    own, sampler = tokens.own, tokens.sampler
    for name, q, here, there in (
        ("late", sampler[1:], own[1:], own[:-1]),
        ("early", sampler[:-1], own[:-1], own[1:]),
    ):
        difference, shifted = (float(np.abs(q - p)[both].mean()) for p in (here, there))
        size = float(np.abs(q[both]).mean())
        if difference > SHIFT_FLOOR and shifted < SHIFT_GAIN * min(difference, size):
            return (
                f"shifted_logprobs: the logprobs stand one place too {name} (mean |difference| to the policy's "
                f"{difference:.3f}, and {shifted:.3f} when moved): position t speaks of target_tokens[t], so a "
                "sample's logprobs start at position len(prompt) - 1"
            )
    return None


def _zero(tokens: Tokens) -> str | None:
    """A logprob of 0 means that the sampler was certain; then the policy must be nearly certain, too."""
    doubtful = tokens.trained & (tokens.own < CERTAIN_LOGPROB)
    count, zero = int(doubtful.sum()), int((doubtful & (tokens.sampler == 0)).sum())
    if zero == 0 or zero < 0.95 * count:
        return None
    return (
        f"zero_logprobs: logprobs are exactly 0 on {zero} of {count} trained tokens of which the policy is not "
        "certain: pass those that sample() returned"
    )


def _unsampled(tokens: Tokens) -> str | None:
    """Logprobs of 0 on unlikely tokens are padding, where nothing was sampled: a prompt's end, a tool's answer."""
    padded = tokens.trained & (tokens.sampler == 0) & (tokens.own < UNLIKELY_LOGPROB)
    count = np.count_nonzero(np.bincount(tokens.datum_of[padded]))
    if count <= SUSPICIOUS_SHARE * len(tokens.starts):
        return None
    last = _last_sampled(tokens)
    at_the_end = np.flatnonzero(padded) > last[tokens.datum_of[padded]]
    if (at_the_end & (last[tokens.datum_of[padded]] >= 0)).mean() > SUSPICIOUS_SHARE:
        return (
            f"foreign_tokens: {count} of {len(tokens.starts)} datums train unlikely tokens behind the last one with a "
            "logprob: train the tokens that were sampled, never their text encoded again, and nothing after them"
        )
    return (
        f"prompt_trained: {count} of {len(tokens.starts)} datums train unlikely tokens whose logprob is exactly 0, as "
        "if nothing had been sampled there: give prompt tokens and tool results weight 0"
    )


def _tempered(tokens: Tokens, temperature: float) -> str | None:
    """With β = 1/T, d log p_β / dβ = log p + H. So q - p is about (β - 1)·(p + H) if q was sampled at temperature T."""
    if tokens.entropies is None:
        return None
    own, entropies = (array[tokens.trained].astype(np.float64) for array in (tokens.own, tokens.entropies))
    difference = tokens.sampler[tokens.trained] - own
    total = float(difference @ difference)
    if not TEMPERATURE_FLOOR**2 * len(own) < total < np.inf or not np.isfinite(entropies).all():
        return None
    # Two slopes, because H is only the first-order term: the exact change is (β - 1)·p - log Σ p^β.
    terms = np.stack([own, entropies])
    slopes, *_ = np.linalg.lstsq(terms.T, difference, rcond=None)
    rest = difference - slopes @ terms
    fit = 1 - float(rest @ rest) / total
    slope = float(slopes[0])
    if fit < TEMPERATURE_FIT or abs(slope) < TEMPERATURE_SLOPE or slope * slopes[1] <= 0:
        return None
    low, high = TEMPERATURE_RANGE
    if not 1 / high <= 1 + slope <= 1 / low:
        return None
    estimate = temperature / (1 + slope)
    return (
        f"temperature_logprobs: the logprobs look like those of sampling temperature {estimate:.2f} (it explains "
        f"{fit:.0%} of their difference), while this pass trains at {temperature:g}: sample with logprobs_mode='raw', "
        f"or pass loss_fn_config={{'temperature': {estimate:.2f}}}"
    )


def _foreign(tokens: Tokens) -> str | None:
    """Weights that are a few steps older still find the same tokens likely. The logprobs of other tokens do not."""
    own, sampler = (array[tokens.trained].astype(np.float64) for array in (tokens.own, tokens.sampler))
    difference = float(np.abs(own - sampler).mean())
    if difference <= FOREIGN_DIFFERENCE or not own.std() or not sampler.std():
        return None
    correlation = float(np.corrcoef(own, sampler)[0, 1])
    if not correlation < FOREIGN_CORRELATION:
        return None
    return (
        f"foreign_tokens: the logprobs do not belong to these tokens (mean |difference| to the policy's "
        f"{difference:.3f}, correlation {correlation:.2f}): train the tokens that were sampled, never their text "
        "encoded again, with the logprobs of the same sample"
    )


def _stale(tokens: Tokens) -> str | None:
    log_ratio = (tokens.own - tokens.sampler)[tokens.trained].astype(np.float64)
    difference = float(np.abs(log_ratio).mean())
    ratio = np.exp(log_ratio - log_ratio.max())
    size = float(ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum()))
    if difference <= STALE_DIFFERENCE and size >= STALE_ESS:
        return None
    return (
        f"stale_policy: the policy has moved far from the one that sampled (mean |difference of logprobs| "
        f"{difference:.3f}, effective sample size {size:.2f}): sample from newer weights, or lower the learning rate"
    )


def _mismatch(tokens: Tokens) -> str | None:
    """top_p and top_k give each sampled token a higher logprob. Other weights raise some and lower others."""
    difference = (tokens.sampler - tokens.own)[tokens.trained]
    size = float(np.abs(difference).mean())
    if size <= FRESH_DIFFERENCE:
        return None
    known = difference[np.abs(difference) > MISMATCH_NOISE]
    cause = (
        "the sampler's are higher on nearly all tokens, as after top_p or top_k: sample with logprobs_mode='raw'"
        if (known > 0).mean() >= ONE_SIDED
        else "they differ in both directions: probably the samples are of older weights, or not sampled at all"
    )
    return (
        f"mismatch: the logprobs differ by {size:.3f} on average from those of the weights that were last published; "
        f"{cause}"
    )
