"""From graded groups to what is trained on: which rollouts count, with which advantage and which weight. Pure.

Letters: G rollouts of one prompt · B groups of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mint.rl.advantages import group_advantages
from mint.rl.config import RLConfig
from mint.rl.rollouts.rollout import Group, Rollout


@dataclass(frozen=True)
class Judged:
    """A rollout that counts, with its advantage within its group."""

    group: Group
    rollout: Rollout
    advantage: float


def apply_truncation(groups: Sequence[Group], config: RLConfig) -> list[Group]:
    """The groups after the truncation policy's penalty; `keep` and `mask` leave the rewards as they are."""
    if config.truncation != "penalize":
        return list(groups)
    return [
        replace(group, rollouts=[_penalized(rollout, config.truncation_penalty) for rollout in group.rollouts])
        for group in groups
    ]


def _penalized(rollout: Rollout, penalty: float) -> Rollout:
    if not rollout.truncated or rollout.reward is None:
        return rollout
    parts = rollout.parts or {"reward": rollout.reward}
    return replace(rollout, reward=rollout.reward - penalty, parts={**parts, "truncation": -penalty})


def counted(group: Group, config: RLConfig) -> list[Rollout]:
    """The graded rollouts that enter the group's mean; cut-off ones do not under `truncation="mask"`."""
    return [rollout for rollout in group.graded if not (config.truncation == "mask" and rollout.truncated)]


def is_informative(group: Group, config: RLConfig) -> bool:
    """Whether the rollouts that count have unequal rewards."""
    rewards = [rollout.reward for rollout in counted(group, config)]
    return len(rewards) > 1 and any(reward != rewards[0] for reward in rewards)


def judge(groups: Sequence[Group], config: RLConfig) -> list[Judged]:
    """Every rollout that counts, group by group, with its advantage (0 in a group without a signal)."""
    rewards_B = [[float(rollout.reward or 0.0) for rollout in counted(group, config)] for group in groups]
    joined = np.concatenate([np.asarray(rewards) for rewards in rewards_B]) if rewards_B else np.zeros(0)
    batch_std = float(joined.std(ddof=1)) if len(joined) > 1 else 0.0
    return [
        Judged(group, rollout, advantage)
        for group, rewards_G in zip(groups, rewards_B, strict=True)
        for rollout, advantage in zip(
            counted(group, config),
            group_advantages(rewards_G, config.advantage, batch_std=batch_std).tolist(),
            strict=True,
        )
    ]


def loss_weights(chosen: Sequence[Judged], config: RLConfig) -> list[float]:
    """Per rollout, the weight of each of its tokens in the summed loss (see `RLConfig.loss_normalization`)."""
    lengths = [len(one.rollout.tokens) for one in chosen]
    if config.loss_normalization == "constant":
        return [1.0 / (config.batch_size * config.group_size * config.max_tokens)] * len(chosen)
    if config.loss_normalization == "token":
        return [1.0 / sum(lengths)] * len(chosen)
    if config.loss_normalization == "sequence":
        return [1.0 / (length * len(chosen)) for length in lengths]
    return [1.0] * len(chosen)
