"""Collects the batch of a step: which items, sampled with which weights, and refills for groups without a signal."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from mint.errors import RequestFailedError
from mint.rl.config import RLConfig
from mint.rl.rollout import Group, GroupRequest, RolloutBatch
from mint.rl.rollouts.item_order import ItemOrder
from mint.rl.rollouts.rollout_worker import RolloutWorker
from mint.rl.rollouts.swapping_sampler import PolicySampler
from mint.rl.seeds import mix_seed
from mint.rl.training.advantages import apply_truncation_penalty, has_unequal_rewards, passes_filter


class BatchCollector:
    """Collects one batch of graded groups per step. Several threads may collect at once."""

    def __init__(self, worker: RolloutWorker, dataset: Sequence[Any], order: ItemOrder, config: RLConfig) -> None:
        self.worker = worker
        self.dataset = dataset
        self.order = order
        self.config = config
        self._order_lock = threading.Lock()

    def collect(self, step: int, sampling_client: PolicySampler, policy_step: int) -> RolloutBatch:
        """The rollouts of `step`. With `dynamic_sampling`, groups with equal rewards, and those that `group_filter`
        refuses, are replaced by groups of other items, up to `max_refill`.

        Raises:
            RequestFailedError: not one prompt could be sampled.
        """
        config = self.config
        wanted = config.batch_size
        groups = self._roll_out(step, sampling_client, policy_step, first=0, count=wanted)
        if all(group.error for group in groups):
            raise RequestFailedError(f"step {step}: no prompt could be sampled; the first said: {groups[0].error}")
        replaced: list[Group] = []
        if config.dynamic_sampling:
            groups, replaced = self._refilled(groups, step, sampling_client, policy_step)
        return RolloutBatch(step, groups, replaced, policy_step=policy_step, temperature=config.temperature_at(step))

    def _refilled(
        self, groups: list[Group], step: int, sampling_client: PolicySampler, policy_step: int
    ) -> tuple[list[Group], list[Group]]:
        """The groups to train on, and those that others replaced."""
        wanted = len(groups)
        most = wanted + int(self.config.max_refill * wanted)
        # One verdict per group: `group_filter` is the user's function, which may be slow or count its calls.
        informative = [self._is_informative(group) for group in groups]
        while (missing := min(wanted - sum(informative), most - len(groups))) > 0:
            more = self._roll_out(step, sampling_client, policy_step, first=len(groups), count=missing)
            groups = groups + more
            informative += [self._is_informative(group) for group in more]
        # A stable sort: groups with a signal first, otherwise in the order of the dataset.
        informative_first = sorted(range(len(groups)), key=lambda place: not informative[place])
        chosen = set(informative_first[:wanted])
        return (
            [group for place, group in enumerate(groups) if place in chosen],
            [group for place, group in enumerate(groups) if place not in chosen],
        )

    def _is_informative(self, group: Group) -> bool:
        return has_unequal_rewards(group, self.config) and passes_filter(group, self.config)

    def _roll_out(
        self, step: int, sampling_client: PolicySampler, policy_step: int, *, first: int, count: int
    ) -> list[Group]:
        config = self.config
        with self._order_lock:
            indices = self.order.take(step, count)
        requests = [
            GroupRequest(
                self.dataset[index],
                index,
                config.sampling_params(mix_seed(config.seed, step, first + place), config.temperature_at(step)),
            )
            for place, index in enumerate(indices)
        ]
        groups = self.worker.roll_out(sampling_client, requests, group_size=config.group_size, policy_step=policy_step)
        return apply_truncation_penalty(groups, config)
