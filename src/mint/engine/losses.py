"""The losses, token by token in float64: value and derivative with respect to the token's logprob, in closed form.

Per token: p = logprob under the trained policy, q = logprob under the sampler, r = exp(p - q), A = advantage, w =
weight. `gspo` has one ratio per datum instead, s = exp(mean of p - q over its trained tokens). With a
`sequence_ratio_mask`, the mean is over the trained tokens that it selects (s = 1 if none), and each token has the
gradient of s·exp(p - stop_gradient(p)): that of its own p alone (gspo-token). `stable_reinforce` weighs a datum by
exp(sum of p - q over its trained tokens). Every loss is multiplied by w. Where w
is 0 nothing else is read: masked positions may hold anything. Losses are summed over tokens. `entropy_coef` subtracts
w·coef·H, with H the entropy of the distribution that the token was predicted from.
Knows nothing of models or torch; names and defaults are in `protocol.LOSSES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mint.engine.protocol import LOSSES, LossSpec, TrainDatum


@dataclass(frozen=True)
class TokenInputs:
    """Float64 arrays over the trained tokens of one datum; `low`, `high` are the bounds of the ratio."""

    logprobs: np.ndarray
    sampler_logprobs: np.ndarray
    advantages: np.ndarray
    low: np.ndarray | float
    high: np.ndarray | float
    beta: float
    kl_coeff: float
    dual_clip: float
    tau_positive: float
    tau_negative: float
    of_sequence: bool
    in_ratio: np.ndarray
    """The tokens whose mean is the ratio of a sequence."""

    @property
    def log_ratio(self) -> np.ndarray:
        """p - q."""
        return self.logprobs - self.sampler_logprobs

    @property
    def ratio(self) -> np.ndarray:
        """The loss's own ratio: r, or s at every token."""
        log_ratio = self.log_ratio
        if self.of_sequence and len(log_ratio):
            counted = log_ratio[self.in_ratio]
            log_ratio = np.full_like(log_ratio, counted.mean() if len(counted) else 0.0)
        return np.exp(log_ratio)


LossFunction = Callable[[TokenInputs], tuple[np.ndarray, np.ndarray]]
"""Trained tokens → (loss, d loss / d logprob), before the weights; for a ratio of sequences, d loss / d log s."""


def _cross_entropy(t: TokenInputs) -> tuple[np.ndarray, np.ndarray]:
    """-p."""
    return -t.logprobs, np.full_like(t.logprobs, -1.0)


def _importance_sampling(t: TokenInputs) -> tuple[np.ndarray, np.ndarray]:
    """-r·A; with a cap C, -min(r, C)·A whose gradient stays -min(r, C)·A: truncated importance sampling
    (https://fengyao.notion.site/off-policy-rl)."""
    loss = -np.minimum(t.ratio, t.high) * t.advantages
    return loss, loss


def _ppo(t: TokenInputs) -> tuple[np.ndarray, np.ndarray]:
    """-min(r·A, clip(r)·A) (arXiv 1707.06347); on a bound the gradient still flows, as through torch.clamp.

    With s for r this is gspo (arXiv 2507.18071). With a `dual_clip` c, the loss of a token with A < 0 is at most -c·A,
    beyond which it has no gradient (arXiv 1912.09729).
    """
    free = t.ratio * t.advantages
    clipped = np.clip(t.ratio, t.low, t.high) * t.advantages
    loss, slope = -np.minimum(free, clipped), np.where(free <= clipped, -free, 0.0)
    if np.isfinite(t.dual_clip):
        beyond = (t.advantages < 0) & (t.ratio > t.dual_clip)
        loss = np.where(beyond, -t.dual_clip * t.advantages, loss)
        slope = np.where(beyond, 0.0, slope)
    return loss, slope


def _sapo(t: TokenInputs) -> tuple[np.ndarray, np.ndarray]:
    """-f(r)·A with f(r) = 4/τ · sigmoid(τ·(r - 1)), τ = `tau_positive` where A > 0, else `tau_negative`.

    A soft gate in place of a clip (SAPO, arXiv 2511.20347): the gradient of a token is that of -r·A times
    4·f'·(1 - f'), f' = sigmoid(τ·(r - 1)), which is 1 at r = 1 and falls smoothly on both sides.
    """
    tau = np.where(t.advantages > 0, t.tau_positive, t.tau_negative)
    exponent = np.clip(tau * (t.ratio - 1), -700.0, 700.0)  # where sigmoid is 0 or 1 in float64
    gate = 1 / (1 + np.exp(-exponent))
    gain = 4 * gate * (1 - gate)
    # An infinite ratio has the gate 1 and the gain 0: its gradient is 0, not NaN.
    moved = np.where(gain > 0, t.ratio * gain, 0.0)
    return -4 / tau * gate * t.advantages, -moved * t.advantages


def _cispo(t: TokenInputs) -> tuple[np.ndarray, np.ndarray]:
    """-stop_gradient(clip(r))·A·p (arXiv 2506.13585): every token keeps a gradient."""
    slope = -np.clip(t.ratio, t.low, t.high) * t.advantages
    return slope * t.logprobs, slope


def _dro(t: TokenInputs) -> tuple[np.ndarray, np.ndarray]:
    """-(A·p - β/2·(p - q)²) (arXiv 2405.19107)."""
    loss = -(t.advantages * t.logprobs - 0.5 * t.beta * t.log_ratio**2)
    return loss, -(t.advantages - t.beta * t.log_ratio)


def _stable_reinforce(t: TokenInputs) -> tuple[np.ndarray, np.ndarray]:
    """-c·A·p + κ/2·(p - q)²: REINFORCE, with c = 1 where A >= 0 and c = stop_gradient(min(R, 1)) where A < 0.

    R = exp(sum of p - q over the datum's trained tokens) is the ratio of the whole trajectory: tapered off-policy
    REINFORCE (arXiv 2503.14286). Pushing a trajectory down loses its force as the policy leaves it, so data of older
    weights cannot drive p to minus infinity. κ = `kl_coeff` weighs an estimate of KL(policy || sampler), as in `dro`.
    """
    trajectory_ratio = np.exp(min(float(t.log_ratio.sum()), 0.0))
    taper = np.where(t.advantages < 0, trajectory_ratio, 1.0)
    slope = -taper * t.advantages
    return slope * t.logprobs + 0.5 * t.kl_coeff * t.log_ratio**2, slope + t.kl_coeff * t.log_ratio


@dataclass(frozen=True)
class Formula:
    """The mathematics of a loss.

    `of_sequence`: its ratio is one number per datum. `one_sided`: a bound matters only on the side to which the
    advantage pushes.
    """

    function: LossFunction
    of_sequence: bool = False
    one_sided: bool = False


FORMULAS: Mapping[str, Formula] = {
    "cross_entropy": Formula(_cross_entropy),
    "importance_sampling": Formula(_importance_sampling),
    "ppo": Formula(_ppo, one_sided=True),
    "cispo": Formula(_cispo),
    "dro": Formula(_dro),
    "gspo": Formula(_ppo, of_sequence=True, one_sided=True),
    "stable_reinforce": Formula(_stable_reinforce),
    "sapo": Formula(_sapo),
}
"""Every loss of `protocol.LOSSES`."""


def loss_and_slope(spec: LossSpec, datum: TrainDatum, logprobs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Weighted loss and its derivative with respect to each logprob, float64, shaped as the targets; both 0 where the
    weight is 0."""
    trained = datum.weights != 0
    loss = np.zeros(trained.shape)
    slope = np.zeros(trained.shape)
    weights = datum.weights[trained].astype(np.float64)
    # A ratio beyond float64 is infinite; the optimizer refuses the step then, and says so.
    with np.errstate(over="ignore", invalid="ignore"):
        values = FORMULAS[spec.name].function(_select(spec, datum, logprobs, trained))
        loss[trained] = weights * values[0]
        slope[trained] = weights * values[1]
        if FORMULAS[spec.name].of_sequence and trained.any() and "sequence_ratio_mask" not in datum.inputs:
            slope[trained] = slope[trained].mean()  # every token moves log s, and with it every term, by 1/n
    return loss, slope


def entropy_bonus(spec: LossSpec, datum: TrainDatum, entropies: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The entropy bonus w·coef·H of each position, which is subtracted from its loss, and the derivative w·coef with
    respect to the entropy H. Both float64 [N], and 0 where the weight w is 0."""
    trained = datum.weights != 0
    slope = np.where(trained, spec.config["entropy_coef"] * datum.weights.astype(np.float64), 0.0)
    return np.where(trained, slope * np.where(trained, entropies, 0.0), 0.0), slope


def measure(
    spec: LossSpec,
    data: Sequence[TrainDatum],
    logprobs: Sequence[np.ndarray],
    entropies: Sequence[np.ndarray],
    losses: Sequence[np.ndarray] | None = None,
) -> dict[str, float]:
    """The metrics of a pass, named `name:reduction`; those of the ratio only where the loss reads sampler logprobs.

    `entropies` [N] are those of each datum's positions; `losses` those of `loss_and_slope`, where they are known.

    Ratio, KL and entropy are over trained tokens (weight not 0) and unweighted; KL is of sampler from trained policy.
    A position counts as one token, however many targets it has.
    """
    if losses is None:
        losses = [loss_and_slope(spec, datum, own)[0] for datum, own in zip(data, logprobs, strict=True)]
    loss_sum = 0.0
    masks = []
    trained = []
    for datum, entropy, loss in zip(data, entropies, losses, strict=True):
        masks.append(datum.trained)
        trained.append(entropy[masks[-1]])
        loss_sum += float(loss.sum())
    of_tokens = np.concatenate(trained)
    metrics = {"loss:sum": loss_sum, "tokens:sum": float(len(of_tokens))}
    if not len(of_tokens):
        return metrics
    metrics["entropy:mean"] = float(of_tokens.mean())
    if "logprobs" not in LOSSES[spec.name].required:
        return metrics
    selected = [_select(spec, *parts) for parts in zip(data, logprobs, masks, strict=True)]
    with np.errstate(over="ignore", invalid="ignore"):
        metrics |= _measure_ratio(np.concatenate([tokens.log_ratio for tokens in selected]))
        metrics |= _measure_clipping(spec, selected)
    return metrics


def _measure_clipping(spec: LossSpec, selected: list[TokenInputs]) -> dict[str, float]:
    """How many tokens lie outside the bounds, and on how many (`tokens_clipped`) that changed the gradient."""
    bounded = "clip_low_threshold" in spec.config
    if not bounded and not np.isfinite(spec.config.get("tis_cap", np.inf)):
        return {}
    below = np.concatenate([tokens.ratio < tokens.low for tokens in selected])
    above = np.concatenate([tokens.ratio > tokens.high for tokens in selected])
    clipped = below | above
    if FORMULAS[spec.name].one_sided:
        advantages = np.concatenate([tokens.advantages for tokens in selected])
        clipped = (below & (advantages < 0)) | (above & (advantages > 0))
    share = {"tokens_clipped:mean": float(clipped.mean())}
    if bounded:
        share |= {"clip_low_fraction:mean": float(below.mean()), "clip_high_fraction:mean": float(above.mean())}
    return share


def _measure_ratio(log_ratio: np.ndarray) -> dict[str, float]:
    ratio = np.exp(log_ratio)
    # The effective sample size does not depend on the scale, and these cannot overflow.
    scaled = np.exp(log_ratio - log_ratio.max())
    return {
        "ratio:mean": float(ratio.mean()),
        "ratio_max:max": float(ratio.max()),
        "ratio_min:min": float(ratio.min()),
        "ratio_p99:max": _quantile(ratio, 0.99),
        # Effective sample size as a share of the tokens, (Σr)² / (n·Σr²): 1 where all ratios are equal.
        "ess:mean": float(scaled.sum() ** 2 / (len(scaled) * (scaled**2).sum())),
        # Estimators of KL(sampler || policy), http://joschu.net/blog/kl-approx.html
        "kl_k1:mean": float(-log_ratio.mean()),
        "kl_k2:mean": float(0.5 * (log_ratio**2).mean()),
        "kl_k3:mean": float((ratio - 1 - log_ratio).mean()),
        "abs_logprob_diff:mean": float(np.abs(log_ratio).mean()),
        "abs_logprob_diff_max:max": float(np.abs(log_ratio).max()),
    }


def _quantile(values: np.ndarray, share: float) -> float:
    """Same as `np.quantile`, whose first use imports masked arrays: 15 ms of a process's first step."""
    place = share * (len(values) - 1)
    low = math.floor(place)
    high = math.ceil(place)
    ordered = np.partition(values, [low, high])
    return float(ordered[low] + (ordered[high] - ordered[low]) * (place - low))


def _select(spec: LossSpec, datum: TrainDatum, logprobs: np.ndarray, trained: np.ndarray) -> TokenInputs:
    """The trained tokens alone, so that no masked value reaches the arithmetic."""
    policy = "logprobs" in LOSSES[spec.name].required
    own = _cut(logprobs, trained)
    low = datum.inputs.get("clip_low_threshold")
    high = datum.inputs.get("clip_high_threshold")
    cap = spec.config.get("tis_cap", np.inf)
    mask = datum.inputs.get("sequence_ratio_mask")
    return TokenInputs(
        logprobs=own,
        sampler_logprobs=_cut(datum.inputs["logprobs"], trained) if policy else own,
        advantages=_cut(datum.inputs["advantages"], trained) if policy else np.ones_like(own),
        low=spec.config.get("clip_low_threshold", 0.0) if low is None else _cut(low, trained),
        high=spec.config.get("clip_high_threshold", cap) if high is None else _cut(high, trained),
        beta=spec.config.get("beta", 0.0),
        kl_coeff=spec.config.get("kl_coeff", 0.0),
        dual_clip=spec.config.get("dual_clip", np.inf),
        tau_positive=spec.config.get("tau_positive", 1.0),
        tau_negative=spec.config.get("tau_negative", 1.0),
        of_sequence=FORMULAS[spec.name].of_sequence,
        in_ratio=np.ones(own.shape, bool) if mask is None else mask[trained] != 0,
    )


def _cut(array: np.ndarray, trained: np.ndarray) -> np.ndarray:
    return array[trained].astype(np.float64)
