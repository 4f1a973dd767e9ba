"""Gathers the rollouts of one step: which items, sampled by which weights, refilled where they carry no signal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mint.client.sampling_client import SamplingClient
from mint.errors import RequestFailedError
from mint.rl.adapter import Task
from mint.rl.call_pool import CallPool
from mint.rl.config import RLConfig
from mint.rl.rollout import Group
from mint.rl.rollouts.completions import collect_groups
from mint.rl.rollouts.curriculum import Curriculum
from mint.rl.seeds import mix_seed
from mint.rl.training.advantages import apply_truncation_penalty, has_unequal_rewards


@dataclass(frozen=True)
class StepRollouts:
    """The groups that a step trains on, those that were replaced, and how many optimizer steps their weights had."""

    step: int
    groups: list[Group]
    replaced: list[Group] = field(default_factory=list)
    policy_step: int = 0
    temperature: float = 1.0

    @property
    def all_groups(self) -> list[Group]:
        """Everything that was sampled."""
        return [*self.groups, *self.replaced]


class Items:
    """Which places of the dataset come next: a shuffled walk by (seed, epoch), or the curriculum's choice."""

    def __init__(self, size: int, config: RLConfig) -> None:
        """`size` is that of the dataset."""
        self.size, self.config = size, config
        self.drawn = 0
        self.curriculum = Curriculum(
            size,
            seed=config.seed,
            low=config.curriculum_low,
            high=config.curriculum_high,
            retire_at=config.curriculum_retire_at,
            retest_share=config.curriculum_retest_share,
        )

    def take(self, step: int, count: int) -> list[int]:
        """The next `count` places."""
        first, self.drawn = self.drawn, self.drawn + count
        if self.config.curriculum:
            return self.curriculum.choose(step, count)
        places = range(first, first + count)
        orders = {
            epoch: np.random.default_rng([self.config.seed, epoch]).permutation(self.size)
            for epoch in {place // self.size for place in places}
        }
        return [int(orders[place // self.size][place % self.size]) for place in places]

    def to_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""
        return {"drawn": self.drawn, "curriculum": self.curriculum.to_dict()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from `to_dict`."""
        self.drawn = int(state["drawn"])
        self.curriculum = Curriculum.from_dict(state["curriculum"])


class Collector:
    """Samples and grades the batch of a step."""

    def __init__(
        self, task: Task, dataset: Sequence[Any], items: Items, *, config: RLConfig, tokenizer: Any, calls: CallPool
    ) -> None:
        """`dataset[i]` is the sample at place i."""
        self.task, self.dataset, self.items = task, dataset, items
        self.config, self.tokenizer, self.calls = config, tokenizer, calls

    def collect(self, step: int, sampler: SamplingClient, policy_step: int) -> StepRollouts:
        """The rollouts of `step`.

        Raises:
            RequestFailedError: not one prompt could be sampled.
        """
        config = self.config
        wanted = config.batch_size
        groups = self._sample(step, sampler, policy_step, first=0, count=wanted)
        if all(group.error for group in groups):
            raise RequestFailedError(f"step {step}: no prompt could be sampled; the first said: {groups[0].error}")
        drawn = wanted
        while config.dynamic_sampling:
            missing = wanted - sum(has_unequal_rewards(group, config) for group in groups)
            missing = min(missing, wanted + int(config.max_refill * wanted) - drawn)
            if missing <= 0:
                break
            groups += self._sample(step, sampler, policy_step, first=drawn, count=missing)
            drawn += missing
        kept = sorted(range(len(groups)), key=lambda place: not has_unequal_rewards(groups[place], config))[:wanted]
        chosen = set(kept)
        return StepRollouts(
            step,
            [groups[place] for place in sorted(kept)],
            [group for place, group in enumerate(groups) if place not in chosen],
            policy_step,
            config.temperature_at(step),
        )

    def _sample(self, step: int, sampler: SamplingClient, policy_step: int, *, first: int, count: int) -> list[Group]:
        places = self.items.take(step, count)
        groups = collect_groups(
            sampler,
            self.task,
            [self.dataset[place] for place in places],
            places,
            config=self.config,
            tokenizer=self.tokenizer,
            calls=self.calls,
            num_samples=self.config.group_size,
            seeds=[mix_seed(self.config.seed, step, first + place) for place in range(count)],
            temperature=self.config.temperature_at(step),
            policy_step=policy_step,
        )
        return apply_truncation_penalty(groups, self.config)
