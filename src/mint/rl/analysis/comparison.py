"""Checkpoints compared on held-out items: the same items and the same draws for each, so that differences are paired.

The interval of a paired difference is that of the mean of the differences per item (arXiv 2411.00640, section 4). It is
narrower than what two separate intervals suggest, because hard items are hard for both checkpoints.

Letters: N held-out items.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mint.client.sampling_client import SamplingClient
from mint.client.service_client import ServiceClient
from mint.errors import InvalidRequestError
from mint.rl.adapter import MessageEnvAdapter, RLAdapter, Task, as_task
from mint.rl.checkpoint_sampler import checkpoint_sampler
from mint.rl.config import RLConfig
from mint.rl.estimate import interval, reward_interval
from mint.rl.heldout_evaluation import EVALUATION_TEMPERATURES, GREEDY, heldout_items, sample_heldout
from mint.rl.rollouts.rollout_worker import RolloutWorker, open_calls
from mint.rl.seeds import mix_seed


@dataclass(frozen=True)
class Difference:
    """The mean difference of paired rewards with its 95 % interval."""

    mean: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """`better` or `worse` if the interval lies on one side of 0, else `not shown`."""
        if self.low > 0:
            return "better"
        return "worse" if self.high < 0 else "not shown"


@dataclass(frozen=True)
class Reading:
    """One checkpoint on one task at one temperature: mean reward over `n` items with its 95 % interval.

    `difference` is the first checkpoint minus this one; None for the first itself.
    """

    task: str
    checkpoint: str
    temperature: float
    seeds: int
    mean: float
    low: float
    high: float
    n: int
    ungraded: int
    difference: Difference | None

    def to_dict(self) -> dict[str, Any]:
        """For JSON; a difference has its verdict."""
        row = asdict(self)
        if self.difference is not None:
            row["difference"]["verdict"] = self.difference.verdict
        return row


def compare_checkpoints(
    checkpoints: Sequence[str],
    tasks: Mapping[str, tuple[Any, RLConfig]],
    *,
    seeds: int = 1,
    service: ServiceClient,
) -> list[Reading]:
    """Readings by task, temperature and checkpoint, in the given order. Each is compared with the first checkpoint.

    Args:
        checkpoints: `mint://…` or names of base models.
        tasks: Name → adapter and its settings.
        seeds: Completions of each item at temperature 1, with a sampling seed for each; greedy ones need only one.

    Raises:
        InvalidRequestError: no or equal checkpoints, `seeds` below 1, or a task without a held-out set.
    """
    if not checkpoints or len(set(checkpoints)) < len(checkpoints):
        raise InvalidRequestError(
            "must be all different, and at least one",
            field="checkpoints",
            value=list(checkpoints),
            remedy="Name each checkpoint once",
        )
    if seeds < 1:
        raise InvalidRequestError("is not positive", field="seeds", value=seeds, remedy="Try 3")
    samplers = {name: checkpoint_sampler(service, name) for name in checkpoints}
    readings = []
    for name, (adapter, config) in tasks.items():
        task = as_task(adapter)
        items = heldout_items(task, config)
        for temperature in EVALUATION_TEMPERATURES:
            draws = 1 if temperature == GREEDY else seeds
            first: list[float] | None = None
            for checkpoint, sampler in samplers.items():
                rewards_N, ungraded = _rewards(task, config, sampler, items, temperature=temperature, seeds=draws)
                mean, low, high = reward_interval(task, rewards_N)
                difference = None if first is None else paired_difference(task, first, rewards_N)
                first = first if first is not None else rewards_N
                readings.append(
                    Reading(name, checkpoint, temperature, draws, mean, low, high, len(items), ungraded, difference)
                )
    return readings


def paired_difference(task: Task, first_N: Sequence[float], other_N: Sequence[float]) -> Difference:
    """`first` minus `other`, item by item; equal items leave the interval that so many equal items allow."""
    low, high = task.reward_range or (min(0.0, *first_N, *other_N), max(task.success_reward, *first_N, *other_N))
    differences_N = [float(first - other) for first, other in zip(first_N, other_N, strict=True)]
    return Difference(*interval(differences_N, bounds=(low - high, high - low)))


def _rewards(
    task: RLAdapter | MessageEnvAdapter,
    config: RLConfig,
    sampler: SamplingClient,
    items: Sequence[Any],
    *,
    temperature: float,
    seeds: int,
) -> tuple[list[float], int]:
    """The mean reward of each item over the seeds, and how many completions could not be graded (they count as 0)."""
    rewards_N = np.zeros(len(items))
    ungraded = 0
    for number in range(seeds):
        seeded = config.changed(seed=config.seed if number == 0 else mix_seed(config.seed, number) % 2**31)
        with closing(open_calls(seeded)) as calls:
            worker = RolloutWorker(task, config=seeded, tokenizer=sampler.get_tokenizer(), calls=calls)
            groups = sample_heldout(worker, sampler, items, temperature=temperature, completions=1)
        for place, group in enumerate(groups):
            reward = group.rollouts[0].reward if group.rollouts else None
            rewards_N[place] += (reward or 0.0) / seeds
            ungraded += reward is None
    return rewards_N.tolist(), ungraded
