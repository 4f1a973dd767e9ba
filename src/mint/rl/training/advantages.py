"""Advantages and loss weights of graded groups. Pure.

The mean-centred advantage, summed over tokens and not divided by the length or the deviation, is the unbiased
estimator (Dr. GRPO, arXiv 2503.20783). `rloo` is leave-one-out (arXiv 2402.14740), `std` the original GRPO
(arXiv 2402.03300), `std_batch` divides by the deviation over the whole batch (Lite PPO, arXiv 2508.08221).
`reinforce++` normalizes what the baseline leaves over the whole batch (arXiv 2501.03262): with the baseline `group` it
is REINFORCE++-baseline, with `batch` REINFORCE++. Where the settings hold a function of the user, it is called here,
and what it returns is checked.

Letters: B groups of a batch · G rollouts of one prompt · T tokens of one completion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np

from mint.errors import InvalidRequestError
from mint.rl.config import AdvantageName, RLConfig
from mint.rl.objective import AdvantageFunction, called, finite_numbers, function_name, real_numbers
from mint.rl.rollout import Group, Rollout

STD_EPS = 1e-4
"""As in TRL."""


@dataclass(frozen=True)
class RolloutAdvantage:
    """A rollout that enters the group's mean, with its advantage, and with that of each of its turns where turns are
    credited one by one (`RLConfig.credit`)."""

    group: Group
    rollout: Rollout
    advantage: float
    by_turn: Sequence[float] = ()

    @property
    def advantages_T(self) -> np.ndarray:
        """The advantage of each token, float64 [T]."""
        if not self.by_turn:
            return np.full(len(self.rollout.tokens), self.advantage)
        return np.repeat(np.asarray(self.by_turn), [len(turn.tokens) for turn in self.rollout.turns])


def group_advantages(
    rewards_G: Sequence[float],
    estimator: AdvantageName | AdvantageFunction = "center",
    *,
    batch_std: float = 1.0,
    baseline: float | np.ndarray | None = None,
) -> np.ndarray:
    """Advantages float64 [G].

    `batch_std` is the sample deviation over the batch: of all rewards for `std_batch`, of what the baseline leaves of
    them for `reinforce++`. `baseline` None is the mean of the
    group; then all are zero exactly where all rewards are equal, and where G is 1. A function as `estimator` gets the
    rewards less the baseline, or unchanged where that is None.

    Raises:
        InvalidRequestError: there is no such estimator, or the function did not return G finite numbers.
    """
    rewards = np.asarray(rewards_G, dtype=np.float64)
    if callable(estimator):
        if not len(rewards):
            return rewards
        given = called("RLConfig.advantage", estimator, rewards if baseline is None else rewards - baseline)
        return finite_numbers("RLConfig.advantage", estimator, given, len(rewards))
    if estimator not in get_args(AdvantageName):
        names = ", ".join(get_args(AdvantageName))
        raise InvalidRequestError("is unknown", field="advantage", value=estimator, remedy=f"Choose one of {names}")
    if baseline is None and (len(rewards) < 2 or bool((rewards == rewards[0]).all())):
        return np.zeros_like(rewards)
    centred = rewards - (rewards.mean() if baseline is None else baseline)
    if estimator == "rloo":
        return centred * (len(rewards) / (len(rewards) - 1))
    if estimator == "std":
        return centred / ((rewards.std(ddof=1) if len(rewards) > 1 else 0.0) + STD_EPS)
    if estimator in ("std_batch", "reinforce++"):
        return centred / (batch_std + STD_EPS)
    return centred


def turn_advantages(
    rewards_GN: Sequence[Sequence[float]],
    estimator: AdvantageName | AdvantageFunction = "center",
    *,
    batch_std: float = 1.0,
) -> list[np.ndarray]:
    """Advantages of the turns of G episodes, float64 [N] for an episode of N turns.

    Turn n is credited with the sum of the rewards from it to the end, and compared with the same turn of those
    episodes of the group that have one (turn-level credit, arXiv 2505.11821). `estimator` as in `group_advantages`.
    """
    returns_GN = [np.cumsum(np.asarray(rewards, dtype=np.float64)[::-1])[::-1] for rewards in rewards_GN]
    advantages_GN = [np.zeros_like(returns) for returns in returns_GN]
    for turn in range(max(map(len, returns_GN), default=0)):
        places = [place for place, returns in enumerate(returns_GN) if len(returns) > turn]
        advantages = group_advantages([returns_GN[place][turn] for place in places], estimator, batch_std=batch_std)
        for place, advantage in zip(places, advantages, strict=True):
            advantages_GN[place][turn] = advantage
    return advantages_GN


def apply_truncation_penalty(groups: Sequence[Group], config: RLConfig) -> list[Group]:
    """The groups with the penalty of `truncation="penalize"` or `"soft"`; otherwise the rewards stay unchanged."""
    if config.truncation not in ("penalize", "soft"):
        return list(groups)
    return [
        replace(
            group, rollouts=[_with_penalty(rollout, _length_penalty(rollout, config)) for rollout in group.rollouts]
        )
        for group in groups
    ]


def _length_penalty(rollout: Rollout, config: RLConfig) -> float:
    if config.truncation == "penalize":
        return config.truncation_penalty if rollout.truncated else 0.0
    whole_episode = config.max_episode_tokens is not None and len(rollout.turns) > 1
    length = len(rollout.tokens) if whole_episode else max((len(turn.tokens) for turn in rollout.turns), default=0)
    limit = config.max_episode_tokens if whole_episode and config.max_episode_tokens else config.max_tokens
    share = 1.0 if rollout.truncated else soft_overlong_share(length, limit, config.overlong_buffer)
    return config.truncation_penalty * share


def soft_overlong_share(length: int, limit: int, buffer: int) -> float:
    """The share of the penalty of a completion of `length` tokens, from 0 to 1.

    It grows linearly from `limit` - `buffer` to `limit` (soft overlong punishment, DAPO, arXiv 2503.14476).
    """
    return min(1.0, max(0.0, (length - (limit - buffer)) / buffer))


def _with_penalty(rollout: Rollout, penalty: float) -> Rollout:
    if not penalty or rollout.reward is None:
        return rollout
    parts = rollout.parts or {"reward": rollout.reward}
    turn_rewards = [*rollout.turn_rewards[:-1], *(last - penalty for last in rollout.turn_rewards[-1:])]
    parts = {**parts, "truncation": -penalty}
    return replace(rollout, reward=rollout.reward - penalty, parts=parts, turn_rewards=turn_rewards)


def counted_rollouts(group: Group, config: RLConfig) -> list[Rollout]:
    """The graded rollouts that enter the group's mean; with `truncation="mask"` without the truncated ones."""
    return [rollout for rollout in group.graded if not (config.truncation == "mask" and rollout.truncated)]


def has_unequal_rewards(group: Group, config: RLConfig) -> bool:
    """Whether the rollouts that count have unequal rewards."""
    rewards = [rollout.reward for rollout in counted_rollouts(group, config)]
    return len(rewards) > 1 and any(reward != rewards[0] for reward in rewards)


def passes_filter(group: Group, config: RLConfig) -> bool:
    """Whether `RLConfig.group_filter` keeps a group; it sees the rollouts that count.

    Raises:
        InvalidRequestError: the filter returned something else than True, False, 1 or 0.
    """
    if config.group_filter is None:
        return True
    shown = replace(group, rollouts=counted_rollouts(group, config))
    kept = called("RLConfig.group_filter", config.group_filter, shown)
    decided = real_numbers(kept)
    if decided is None or decided.shape or decided not in (0, 1):
        raise InvalidRequestError(
            f"returned {str(kept)[:80]}",
            field="RLConfig.group_filter",
            value=function_name(config.group_filter),
            remedy="Return True to train on the group, or False",
        )
    return bool(decided)


def rollout_advantages(groups: Sequence[Group], config: RLConfig) -> list[RolloutAdvantage]:
    """The counted rollouts of all groups with their advantages.

    With the baseline `group`, they are 0 in a group with equal rewards.
    """
    rewards_B = [[float(rollout.reward or 0.0) for rollout in counted_rollouts(group, config)] for group in groups]
    rollouts_B = [counted_rollouts(group, config) for group in groups]
    joined = np.concatenate([np.zeros(0), *map(np.asarray, rewards_B)])
    mean = float(joined.mean()) if len(joined) else 0.0
    baselines_B = [_baseline(*pair, mean, config) for pair in zip(groups, rollouts_B, strict=True)]
    if config.advantage == "reinforce++":
        left_B = [
            group_advantages(rewards, baseline=baseline)
            for rewards, baseline in zip(rewards_B, baselines_B, strict=True)
        ]
        joined = np.concatenate([np.zeros(0), *left_B])
        # Less the mean of the group, the mean over the batch is 0, and equal rewards must give exactly 0.
        shift = float(joined.mean()) if config.baseline != "group" and len(joined) else 0.0
        baselines_B = [None if baseline is None else baseline + shift for baseline in baselines_B]
    batch_std = float(joined.std(ddof=1)) if len(joined) > 1 else 0.0
    found: list[RolloutAdvantage] = []
    for group, rollouts, rewards_G, baseline in zip(groups, rollouts_B, rewards_B, baselines_B, strict=True):
        advantages_G = group_advantages(rewards_G, config.advantage, batch_std=batch_std, baseline=baseline).tolist()
        by_turn_G: Sequence[Sequence[float]] = [()] * len(rollouts)
        if config.credit == "turn" and all(rollout.turn_rewards for rollout in rollouts):
            rewards_GN = [rollout.turn_rewards for rollout in rollouts]
            by_turn_G = [one.tolist() for one in turn_advantages(rewards_GN, config.advantage, batch_std=batch_std)]
        found += map(RolloutAdvantage, [group] * len(rollouts), rollouts, advantages_G, by_turn_G)
    return found


def _baseline(
    group: Group, rollouts: Sequence[Rollout], batch_mean: float, config: RLConfig
) -> float | np.ndarray | None:
    """The number subtracted from each reward of a group, or one for each [G]; None: the mean of the group."""
    if config.baseline == "group" or not rollouts:
        return None
    if not callable(config.baseline):
        return batch_mean
    given = called("RLConfig.baseline", config.baseline, replace(group, rollouts=list(rollouts)))
    return finite_numbers("RLConfig.baseline", config.baseline, given, None if np.ndim(given) == 0 else len(rollouts))


def loss_weights(chosen: Sequence[RolloutAdvantage], config: RLConfig) -> list[float]:
    """Per rollout, the weight of each of its tokens in the summed loss: `loss_normalization` times `loss_weighting`."""
    weights = _normalization(chosen, config)
    if config.loss_weighting is None:
        return weights
    factors = [
        finite_numbers(
            "RLConfig.loss_weighting",
            config.loss_weighting,
            called("RLConfig.loss_weighting", config.loss_weighting, one.rollout, one.advantage),
            None,
        )
        for one in chosen
    ]
    return [weight * float(factor) for weight, factor in zip(weights, factors, strict=True)]


def _normalization(chosen: Sequence[RolloutAdvantage], config: RLConfig) -> list[float]:
    lengths = [len(one.rollout.tokens) for one in chosen]
    if config.loss_normalization == "constant":
        return [1.0 / (config.batch_size * config.group_size * config.max_tokens)] * len(chosen)
    if config.loss_normalization == "token":
        return [1.0 / sum(lengths)] * len(chosen)
    if config.loss_normalization == "sequence":
        return [1.0 / (length * len(chosen)) for length in lengths]
    return [1.0] * len(chosen)
