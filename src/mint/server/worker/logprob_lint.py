"""Do the sampler's logprobs belong to these tokens and to this policy? The lint's rules that read logprobs.

A pass has just computed the policy's own logprobs and entropies, so the two can be compared token by token, and each
usual mistake leaves a mark of its own. Knows no requests and nothing of where a batch came from.

Letters: B the positions of all datums, one after the other · p the policy's logprobs · q the sampler's · H entropies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

MIN_TOKENS = 16
"""Fewer trained tokens prove nothing about logprobs."""

SUSPICIOUS_SHARE = 0.5

AFTER_STOP_SHARE = 0.1
"""Share of datums that go on after an end token; a stray one may have been asked for by `stop=[]`."""

CERTAIN_LOGPROB = -0.01
"""A policy this sure of a token may well report a logprob of exactly 0."""

UNLIKELY_LOGPROB = -0.7
"""A token less likely than not; no temperature or nucleus in use makes its sampler logprob exactly 0."""

SHIFT_GAIN = 0.25
"""Moving the logprobs by one place must take away three quarters of the difference, and leave less than a quarter of
the logprobs' own size: to a policy that has moved far, any small number is nearer."""

SHIFT_FLOOR = 0.1
"""Mean |p - q| that is worth asking about a shift."""

HEAT_FLOOR = 0.02
"""Root mean square of p - q that is worth asking about a temperature."""

HEAT_FIT = 0.95
"""Share of the variance of q - p that a temperature must explain."""

HEAT_RANGE = (0.3, 2.0)
"""Temperatures, relative to that of the pass, that somebody may have sampled at; a policy that has become sure of other
tokens looks like a higher one still."""

HEAT_SLOPE = 0.04
"""|1/T - 1| below which a temperature is not named."""

STALE_DIFFERENCE = 0.25
"""Mean |p - q| above which the samples are called stale: a ratio is then typically off by more than a quarter. A second
optimizer step on one batch stays far below."""

STALE_ESS = 0.3
"""Effective sample size (a share) below which a collapse is near (arXiv 2602.17616)."""

FRESH_DIFFERENCE = 0.02
"""Mean |p - q| on unchanged weights; what bfloat16 kernels leave stays below."""


@dataclass(frozen=True)
class Tokens:
    """All positions of a batch, [B] each; `starts` are the datums' first positions."""

    starts: np.ndarray
    inputs: np.ndarray
    targets: np.ndarray
    trained: np.ndarray
    own: np.ndarray
    sampler: np.ndarray
    entropies: np.ndarray | None

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


def logprob_warning(
    tokens: Tokens, *, temperature: float, stop_tokens: Sequence[int] = (), fresh: bool = False
) -> str | None:
    """What is wrong with the mask or the logprobs, if anything: the cause alone, not its effects on the other rules.

    `temperature` is that of the pass; the rest as for `lint.lint`.
    """
    found = _first_token_trained(tokens) or _after_stop(tokens, stop_tokens) or _shifted(tokens)
    found = found or _zero(tokens) or _unsampled(tokens)
    if found is not None or tokens.trained.sum() < MIN_TOKENS:
        return found
    with np.errstate(over="ignore", invalid="ignore"):  # weights that have diverged
        return _tempered(tokens, temperature) or _stale(tokens) or (_mismatch(tokens) if fresh else None)


def _first_token_trained(tokens: Tokens) -> str | None:
    """The first target is a prompt token, unless the prompt was one token and the policy really sampled from there."""
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
    """A sample ends with its end token: what follows is padding, unless sampled tokens come later still."""
    ends = np.isin(tokens.targets[:-1], np.asarray(stop_tokens, np.int64))
    beyond = np.flatnonzero(ends & tokens.trained[:-1] & tokens.trained[1:] & tokens.followed)
    datums, total = np.flatnonzero(np.bincount(tokens.datum_of[beyond])), len(tokens.starts)
    if len(datums) <= AFTER_STOP_SHARE * total:
        return None
    sampled = np.flatnonzero(tokens.trained & (tokens.sampler != 0))
    last = np.full(total, -1)
    np.maximum.at(last, tokens.datum_of[sampled], sampled)
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


def _shifted(tokens: Tokens) -> str | None:
    """q is nearer to p of the neighbouring token than to that of its own."""
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
    """A logprob of 0 says that the sampler was certain; the policy must nearly be so, too."""
    doubtful = tokens.trained & (tokens.own < CERTAIN_LOGPROB)
    count, zero = int(doubtful.sum()), int((doubtful & (tokens.sampler == 0)).sum())
    if zero == 0 or zero < 0.95 * count:
        return None
    return (
        f"zero_logprobs: logprobs are exactly 0 on {zero} of {count} trained tokens of which the policy is not "
        "certain: pass those that sample() returned"
    )


def _unsampled(tokens: Tokens) -> str | None:
    """Padding stands where nothing was sampled: a prompt's end, a tool's answer."""
    padded = tokens.trained & (tokens.sampler == 0) & (tokens.own < UNLIKELY_LOGPROB)
    count = np.count_nonzero(np.bincount(tokens.datum_of[padded]))
    if count <= SUSPICIOUS_SHARE * len(tokens.starts):
        return None
    return (
        f"prompt_trained: {count} of {len(tokens.starts)} datums train unlikely tokens whose logprob is exactly 0, as "
        "if nothing had been sampled there: give prompt tokens and tool results weight 0"
    )


def _tempered(tokens: Tokens, temperature: float) -> str | None:
    """With β = 1/T, d log p_β / dβ = log p + H: so q - p follows (β - 1)·(p + H) if q was taken at temperature T."""
    if tokens.entropies is None:
        return None
    own, entropies = (array[tokens.trained].astype(np.float64) for array in (tokens.own, tokens.entropies))
    difference = tokens.sampler[tokens.trained] - own
    total = float(difference @ difference)
    if not HEAT_FLOOR**2 * len(own) < total < np.inf or not np.isfinite(entropies).all():
        return None
    # Two slopes: the exact change is (β - 1)·p - log Σ p^β, of which H is the first order only.
    terms = np.stack([own, entropies])
    slopes, *_ = np.linalg.lstsq(terms.T, difference, rcond=None)
    rest = difference - slopes @ terms
    fit = 1 - float(rest @ rest) / total
    slope = float(slopes[0])
    if fit < HEAT_FIT or abs(slope) < HEAT_SLOPE or slope * slopes[1] <= 0:
        return None
    low, high = HEAT_RANGE
    if not 1 / high <= 1 + slope <= 1 / low:
        return None
    estimate = temperature / (1 + slope)
    return (
        f"temperature_logprobs: the logprobs look like those of sampling temperature {estimate:.2f} (it explains "
        f"{fit:.0%} of their difference), while this pass trains at {temperature:g}: sample with logprobs_mode='raw', "
        f"or pass loss_fn_config={{'temperature': {estimate:.2f}}}"
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
    difference = float(np.abs(tokens.own - tokens.sampler)[tokens.trained].mean())
    if difference <= FRESH_DIFFERENCE:
        return None
    return (
        f"mismatch: the logprobs differ by {difference:.3f} on average from those of the weights that were last "
        "published: check the sampling temperature and top_p first, then whether the samples are of older weights"
    )
