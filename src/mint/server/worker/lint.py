"""Looks for training data that is possible but probably a mistake. Pure and cheap; it never refuses.

Each rule returns one sentence with its evidence, opened by a stable code (`prompt_trained: …`), or None. Rules about
the data alone come first. Then come the rules about logprobs: a pass has just computed the policy's own logprobs and
entropies, so the sampler's can be compared with them token by token, and each usual mistake has its own pattern. Knows
one request, and nothing of groups or earlier steps.

Letters: N tokens of one datum · B the positions of all datums, one after the other · p the policy's logprobs · q the
sampler's · H entropies.
"""

from __future__ import annotations

from collections import Counter, defaultdict
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

COPIED_GROUPS = 0.9
COPIED_SURPRISE, COPIED_SURPRISE_EQUAL = 5.0, 25.0
"""If in this share of the groups all samples are equal, then by the sampler's own logprobs the probability that this
happens must be below e to the minus so many: where equal samples have different advantages, as only a noisy grader
gives them, and where they do not. A policy that is nearly certain repeats itself at no surprise; a low temperature
explains more than the logprobs do. Where only right answers are trained, and each prompt has one, equal samples are no
surprise at all: no advantage is negative then, or the groups have different sizes."""

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
SHARPENED_FIT = 0.985
"""Shares of the variance of q - p that a temperature must explain: below that of the pass, and above. Training sharpens
a policy, so that samples of older weights look like those of a higher temperature, to 0.98 at most. The first share
must hold without the token that differs most, too: where a policy is certain of nearly all tokens, the rounding of one
of them makes up most of q - p, and the two slopes can always be chosen to fit one token."""

TEMPERATURE_RANGE = (0.3, 2.0)
"""Plausible sampling temperatures, relative to that of the pass."""

TEMPERATURE_SLOPE = 0.04
"""|1/T - 1| below which no temperature is reported."""

STALE_DIFFERENCE = 0.35
"""Mean |p - q| above which samples are stale: the ratio of a typical token then differs from 1 by more than 40 %.
Eight optimizer steps at a usual learning rate stay below, also for answers of one to three tokens."""

STALE_ESS = 0.3
STALE_TOKENS = 0.1
"""Effective sample size, as a share of the tokens, below which training may collapse (arXiv 2602.17616), if at least so
many tokens have a ratio above e or below 1/e: one rare token alone may have a large ratio."""

EARLY_SHARE = 0.9
EARLY_LOGPROB = -1e-6
"""The first trained tokens are the prompt's last ones if their logprobs are exactly 0 in this share of the samples,
though the policy's own are below this: the sampler rounds a logprob to 0 only where the policy does."""

COMPARABLE_LOGPROB = -0.05
MIN_COMPARABLE = 8
COMPARABLE_QUANTILE = 0.95
EARLY_GAIN, EARLY_GAIN_STALE = 2.0, 5.0
EARLY_LOGPROB_STALE = -1e-4
"""The policy's own logprobs of the first tokens must be so many times larger than what sampler and policy differ by on
other nearly certain tokens: on fresh weights, and on weights that have moved since. Noise and a nucleus raise both."""

IMPOSSIBLE_LOGPROB = 1e-3
"""A logprob above this is no rounding."""

FOREIGN_GAP = 5.0
FOREIGN_SHARE = 0.4
"""If the policy finds this share of the tokens less likely than the sampler's logprobs say, by so many nats, then the
logprobs are those of other tokens. After 20 steps on one batch at a high learning rate it is 0.3."""

FOREIGN_DIFFERENCE = 0.1
FOREIGN_CORRELATION = 0.3
FOREIGN_SURPRISE = 3.0
"""Mean |p - q| above which, and correlation of p and q below which, the logprobs are those of other tokens, if the
tokens are the policy's own: their mean -p is at most so many times H. Old weights sampled what is rare now."""

FRESH_FOREIGN_DIFFERENCE = 1.0
"""Mean |p - q| above which they are, whatever H is, if the weights are those that were last published."""

PAIRED_TOKENS = 8
PAIRED_DATUMS = 512
"""The first trained tokens of a datum that are compared with those of the others, and the most datums compared."""

PAIRED_DIFFERENCE = 0.1
PAIRED_TOLERANCE = 0.01
PAIRED_SHARE = 0.9
MIN_PAIRED = 3
"""A datum's logprobs are another's if they differ from its own p by more than the difference, and from the other's p by
less than the tolerance. Of those that differ so much, this share must belong to others, and to so many others."""

FRESH_DIFFERENCE = 0.02
"""Mean |p - q| on unchanged weights that rounding in bfloat16 does not explain."""

MISMATCH_NOISE = 0.005
"""|p - q| below which the sign of the difference may be rounding."""

ONE_SIDED = 0.95
"""Share of the tokens whose logprobs the sampler must have raised, to say that it left out the others' probability."""


@dataclass(frozen=True)
class Tokens:
    """All positions of a batch, [B] each; `starts` are the datums' first positions.

    With several targets per position (`many_targets`), `targets` and `own` are about the first one. `given` are the
    sampler's logprobs as they came, also where nothing is trained; None if they are not known.
    """

    starts: np.ndarray
    inputs: np.ndarray
    targets: np.ndarray
    trained: np.ndarray
    own: np.ndarray
    sampler: np.ndarray
    entropies: np.ndarray | None
    many_targets: bool
    given: np.ndarray | None = None

    @cached_property
    def datum_of(self) -> np.ndarray:
        """The datum of each position."""
        return np.repeat(np.arange(len(self.starts)), np.diff(np.append(self.starts, len(self.inputs))))

    @cached_property
    def begins(self) -> np.ndarray:
        """The trained positions before which, in the same datum, nothing is trained: one for each sample or turn."""
        inner = np.append(False, self.trained[:-1] & self.followed)
        return np.flatnonzero(self.trained & ~inner)

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
    given_logprobs: np.ndarray | None = None,
) -> list[str]:
    """The warnings about a batch, given what its pass computed.

    `stop_tokens` are the base's end tokens. `fresh` says that the weights have not changed since they were last
    published, so that samples of them must agree with the policy. `given_logprobs` [B] are the sampler's logprobs as
    they came, also at positions of weight 0.
    """
    policy = "logprobs" in data[0].inputs
    tokens = _flatten(data, result, policy=policy, given=given_logprobs)
    # With several targets per position (the best tokens of a teacher), none of them need be the next token.
    shifted = None if tokens.many_targets else _not_shifted(tokens)
    found = [shifted]
    if len(data) >= MIN_DATUMS:
        found.append(_duplicates(data, policy=policy) or (_copied_samples(data) if policy else None))
    if not tokens.trained.any():
        found.append("nothing_trained: all weights are 0: nothing is trained")
    elif policy:
        found.append(_advantages(data, tokens))
        if shifted is None:
            temperature = loss.config["temperature"]
            found.append(_logprobs(tokens, temperature=temperature, stop_tokens=stop_tokens, fresh=fresh))
    return list(filter(None, found))


def _flatten(
    data: Sequence[TrainDatum], result: PassResult, *, policy: bool, given: np.ndarray | None = None
) -> Tokens:
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
        given=given,
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


def _copied_samples(data: Sequence[TrainDatum]) -> str | None:
    """All samples of a prompt are one, which the policy is not certain enough to repeat."""
    groups: defaultdict[bytes, list[int]] = defaultdict(list)
    for place, datum in enumerate(data):
        trained = datum.trained
        if trained.any():
            groups[datum.tokens[: int(trained.argmax()) + 1].tobytes()].append(place)
    several = [places for places in groups.values() if len(places) > 1]
    copied = [places for places in several if len({_sample_key(data[place]) for place in places}) == 1]
    if not copied or len(copied) < COPIED_GROUPS * len(several) or sum(map(len, copied)) < SUSPICIOUS_SHARE * len(data):
        return None
    with np.errstate(over="ignore", invalid="ignore"):
        surprise = -sum(_trained(data[places[0]], "logprobs").sum() * (len(places) - 1) for places in copied)
    differing = sum(len({_trained(data[place], "advantages").tobytes() for place in places}) > 1 for places in copied)
    different = differing >= SUSPICIOUS_SHARE * len(copied)
    equally_large = len({len(places) for places in groups.values()}) == 1
    if not _has_both_signs(data) or not (different or equally_large):
        return None
    if not surprise > (COPIED_SURPRISE if different else COPIED_SURPRISE_EQUAL):
        return None
    return (
        f"duplicates: {len(copied)} of {len(several)} prompts have one sample several times"
        f"{', with different advantages' if different else ''}, and by its logprobs the policy would hardly repeat it: "
        "make a datum of each sample of a group, or raise a sampling temperature near 0"
    )


def _sample_key(datum: TrainDatum) -> tuple[bytes, ...]:
    return datum.tokens.tobytes(), datum.targets.tobytes(), _trained(datum, "logprobs").tobytes()


def _has_both_signs(data: Sequence[TrainDatum]) -> bool:
    advantages = np.concatenate([_trained(datum, "advantages") for datum in data])
    return bool((advantages > 0).any() and (advantages < 0).any())


def _trained(datum: TrainDatum, key: str) -> np.ndarray:
    """The values at the trained positions, float64."""
    return datum.inputs[key][datum.trained].astype(np.float64)


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
    found = _impossible(tokens) or _first_token_trained(tokens) or _after_stop(tokens, stop_tokens) or _shifted(tokens)
    found = found or _zero(tokens)
    if found is not None or tokens.trained.sum() < MIN_TOKENS:
        return found or _unsampled(tokens)
    with np.errstate(over="ignore", invalid="ignore"):  # weights that have diverged
        found = _foreign(tokens) or _unsampled(tokens) or _begins_early(tokens, fresh=fresh) or _mispaired(tokens)
        # Steps sharpen a policy, which looks like a temperature.
        found = found or (_tempered(tokens, temperature) if fresh else None) or _unrelated(tokens, fresh=fresh)
        return found or _stale(tokens) or (_nucleus(tokens) if fresh else None)


def _impossible(tokens: Tokens) -> str | None:
    """A logprob is at most 0."""
    sampler = tokens.sampler[tokens.trained]
    count = int((sampler > IMPOSSIBLE_LOGPROB).sum())
    if count == 0:
        return None
    with np.errstate(over="ignore", invalid="ignore"):
        flipped = np.abs(sampler + tokens.own[tokens.trained]).mean()
        probabilities = np.abs(sampler - np.exp(tokens.own[tokens.trained])).mean()
    if sampler.min() < -IMPOSSIBLE_LOGPROB:
        cause = "send logprobs as sample() returned them"
    elif sampler.max() <= 1 and probabilities <= flipped:
        cause = "they look like probabilities: send their natural logarithms"
    else:
        cause = "their sign looks flipped: send them as sample() returned them, never as losses"
    return (
        f"impossible_logprobs: {count} of {len(sampler)} trained tokens have a logprob above 0 (the highest is "
        f"{sampler.max():.3g}), and a logprob is at most 0; {cause}"
    )


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
    if count <= SUSPICIOUS_SHARE * len(tokens.starts) or _is_stale_where_sampled(tokens):
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


def _begins_early(tokens: Tokens, *, fresh: bool) -> str | None:
    """The mask begins at the prompt's last token: its logprob is exactly 0, and the policy is not that certain of it.

    A chat template's last token is nearly certain, but hardly ever as certain as a logprob of 0 says.
    """
    begins = tokens.begins
    total = len(begins)
    early = (tokens.sampler[begins] == 0) & (tokens.own[begins] < EARLY_LOGPROB)
    count = int(early.sum())
    if total < MIN_DATUMS or count < EARLY_SHARE * total:
        return None
    words = (
        f"prompt_trained: the first trained token of {count} of {total} samples has the logprob 0, as if nothing had "
        "been sampled there, and the policy is less certain of it"
    )
    cure = "a mask that begins one token early trains the prompt's last token. In targets = full[1:], a sample starts"
    cure = f"{cure} at position len(prompt) - 1"
    if _ends_early(tokens) >= EARLY_SHARE * total:
        return f"{words}; behind the last trained token a sampled one has weight 0: {cure}"
    others = tokens.trained & (tokens.own > COMPARABLE_LOGPROB)
    others[begins] = False
    if others.sum() < MIN_COMPARABLE:
        return None
    noise = float(np.quantile(np.abs(tokens.own - tokens.sampler)[others], COMPARABLE_QUANTILE))
    size = float(np.median(-tokens.own[begins][early]))
    if size <= noise * (EARLY_GAIN if fresh else EARLY_GAIN_STALE) or not (fresh or size > -EARLY_LOGPROB_STALE):
        return None
    return f"{words} (by {size:.1g}, while on other tokens both agree to {noise:.1g}): {cure}"


def _ends_early(tokens: Tokens) -> int:
    """How often the position behind the last trained one of a sample has a logprob, and no weight."""
    if tokens.given is None:
        return 0
    behind = np.flatnonzero(tokens.trained[:-1] & ~tokens.trained[1:] & tokens.followed) + 1
    given = tokens.given[behind]
    return int((np.isfinite(given) & (given != 0)).sum())


def _is_stale_where_sampled(tokens: Tokens) -> bool:
    """An old policy may have been certain of what is unlikely now. Then its logprobs that are not 0 differ, too."""
    sampled = tokens.trained & (tokens.sampler != 0)
    if sampled.sum() < MIN_TOKENS:
        return False
    return bool(np.abs(tokens.own - tokens.sampler)[sampled].mean() > STALE_DIFFERENCE)


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
    needed = TEMPERATURE_FIT if slope > 0 else SHARPENED_FIT
    if fit < needed or abs(slope) < TEMPERATURE_SLOPE or slope * slopes[1] <= 0:
        return None
    others = np.arange(len(own)) != np.abs(difference).argmax()
    if float(rest[others] @ rest[others]) > (1 - TEMPERATURE_FIT) * float(difference[others] @ difference[others]):
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
    """The policy finds most tokens nearly impossible that the logprobs call likely.

    Where the logprob is exactly 0, nothing may have been sampled; `_unsampled` is about those.
    """
    sampled = tokens.trained & (tokens.sampler != 0)
    count = int(sampled.sum())
    far = int((tokens.own - tokens.sampler < -FOREIGN_GAP)[sampled].sum())
    if count < MIN_TOKENS or far < FOREIGN_SHARE * count:
        return None
    return (
        f"foreign_tokens: the policy finds {far} of {count} trained tokens at least {np.exp(FOREIGN_GAP):.0f} times "
        "less likely than their logprobs say: the logprobs are those of other tokens, or the weights have diverged. "
        "Train the tokens that were sampled, never their text encoded again"
    )


def _unrelated(tokens: Tokens, *, fresh: bool) -> str | None:
    """The policy would sample these tokens, but their logprobs say nothing about them."""
    own, sampler = (array[tokens.trained].astype(np.float64) for array in (tokens.own, tokens.sampler))
    difference = float(np.abs(own - sampler).mean())
    if difference <= FOREIGN_DIFFERENCE or not own.std() or not sampler.std():
        return None
    correlation = float(np.corrcoef(own, sampler)[0, 1])
    entropy = 0.0 if tokens.entropies is None else float(tokens.entropies[tokens.trained].mean())
    is_own = -own.mean() <= FOREIGN_SURPRISE * entropy or (fresh and difference > FRESH_FOREIGN_DIFFERENCE)
    if not correlation < FOREIGN_CORRELATION or not is_own:
        return None
    return (
        f"foreign_tokens: the logprobs do not belong to these tokens (mean |difference| to the policy's "
        f"{difference:.3f}, correlation {correlation:.2f}): train the tokens that were sampled, never their text "
        "encoded again, with the logprobs of the same sample"
    )


def _mispaired(tokens: Tokens) -> str | None:
    """The logprobs of most datums that differ from the policy's are equal to those of another datum of the batch."""
    p, q = (_first_trained(tokens, column) for column in (tokens.own, tokens.sampler))
    known = ~np.isnan(p)
    size = np.where(known, np.abs(q), 0).max(1, initial=0)
    own = np.where(known, np.abs(q - p), 0).max(1, initial=0)
    off = np.flatnonzero((own > PAIRED_DIFFERENCE) & (own > SHIFT_GAIN * size))
    if len(off) < MIN_PAIRED:
        return None
    matched: list[int] = []
    for row in off:
        both = known & known[row]
        other = np.where(both, np.abs(p - q[row]), 0).max(1)
        other[(both.sum(1) < 2) | (np.arange(len(p)) == row)] = np.inf
        nearest = int(other.argmin())
        if other[nearest] < PAIRED_TOLERANCE * (1 + size[row]):
            matched.append(nearest)
    others = len(set(matched))
    if others < MIN_PAIRED or len(matched) < PAIRED_SHARE * len(off):
        return None
    return (
        f"mispaired_logprobs: the logprobs of {len(matched)} of {len(p)} datums are those of another datum of this "
        "batch: keep each sample's tokens and logprobs together when you sort, filter or shuffle"
    )


def _first_trained(tokens: Tokens, column: np.ndarray) -> np.ndarray:
    """The values at the first trained positions of each datum, float64 [D, PAIRED_TOKENS]; nan where it has fewer."""
    places = np.flatnonzero(tokens.trained)
    datums = tokens.datum_of[places]
    rank = np.arange(len(places)) - np.searchsorted(datums, datums)
    kept = (rank < PAIRED_TOKENS) & (datums < PAIRED_DATUMS)
    found = np.full((min(len(tokens.starts), PAIRED_DATUMS), PAIRED_TOKENS), np.nan)
    found[datums[kept], rank[kept]] = column[places[kept]]
    return found


def _stale(tokens: Tokens) -> str | None:
    log_ratio = (tokens.own - tokens.sampler)[tokens.trained].astype(np.float64)
    difference = float(np.abs(log_ratio).mean())
    ratio = np.exp(log_ratio - log_ratio.max())
    size = float(ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum()))
    many = float((np.abs(log_ratio) > 1).mean()) >= STALE_TOKENS
    if difference <= STALE_DIFFERENCE and not (size < STALE_ESS and many):
        return None
    return (
        f"stale_policy: the policy has moved far from the one that sampled (mean |difference of logprobs| "
        f"{difference:.3f}, effective sample size {size:.2f}): sample from newer weights, or lower the learning rate"
    )


def _nucleus(tokens: Tokens) -> str | None:
    """top_p and top_k give each sampled token a higher logprob. Older weights raise some and lower others."""
    difference = (tokens.sampler - tokens.own)[tokens.trained]
    size = float(np.abs(difference).mean())
    known = difference[np.abs(difference) > MISMATCH_NOISE]
    if size <= FRESH_DIFFERENCE or (known > 0).mean() < ONE_SIDED:
        return None
    return (
        f"mismatch: the sampler's logprobs are higher than the policy's on nearly all tokens, by {size:.3f} on "
        "average, as after top_p or top_k: sample with logprobs_mode='raw'"
    )
