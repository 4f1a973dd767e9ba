"""Held-out success with an interval, never a bare number.

Letters: N held-out samples · K completions of each.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from mint.client.sampling_client import SamplingClient
from mint.errors import RequestFailedError
from mint.rl.adapter import Task
from mint.rl.config import RLConfig
from mint.rl.rollouts.calls import CallPool
from mint.rl.rollouts.completions import collect_groups
from mint.rl.rollouts.rollout import Group, Rollout
from mint.rl.seeds import mix_seed

Z95 = 1.959963984540054
EVALUATION_STREAM = 0x45564C


@dataclass(frozen=True)
class Estimate:
    """A mean reward over `n` samples with its 95 % interval; `ungraded` completions count as 0.

    `pass_at["4"]` estimates the chance that at least one of 4 completions is a success; `parts` are the means of the
    reward's named parts.
    """

    mean: float
    low: float
    high: float
    n: int
    temperature: float
    ungraded: int = 0
    success: float = 0.0
    pass_at: Mapping[str, float] = field(default_factory=dict)
    parts: Mapping[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Estimate:
        """From a row of `evaluations.jsonl`; its other fields are ignored."""
        return cls(**{name: row[name] for name in cls.__dataclass_fields__ if name in row})


def wilson(successes: float, n: int) -> tuple[float, float]:
    """The Wilson score interval (95 %) of a proportion (Wilson 1927); (0, 1) for n = 0."""
    if n == 0:
        return 0.0, 1.0
    share, spread = successes / n, Z95**2 / n
    middle = (share + spread / 2) / (1 + spread)
    half = Z95 * math.sqrt(share * (1 - share) / n + spread / (4 * n)) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)


def interval(means_N: Sequence[float]) -> tuple[float, float, float]:
    """Mean, low and high of one value per sample: Wilson's interval for values of 0 and 1, the normal one otherwise.

    With several completions per sample, give their mean: completions of one sample are not independent, and the error
    is that between samples (clustered errors, arXiv 2411.00640).
    """
    values = np.asarray(means_N, dtype=np.float64)
    n = len(values)
    mean = float(values.mean()) if n else 0.0
    if bool(np.isin(values, (0.0, 1.0)).all()):
        low, high = wilson(float(values.sum()), n)
        return mean, min(low, mean), max(high, mean)  # all right is 1 up to rounding
    half = Z95 * float(values.std(ddof=1)) / math.sqrt(n) if n > 1 else math.inf
    return mean, mean - half, mean + half


def pass_at_k(successes: int, n: int, k: int) -> float:
    """The unbiased estimate of P(at least one success in k) from `successes` of n >= k (arXiv 2107.03374)."""
    return 1.0 - math.comb(n - successes, k) / math.comb(n, k)


def estimate(task: Task, groups: Sequence[Group], *, samples: int, temperature: float) -> Estimate:
    """The reading of a held-out set of which each sample was to have `samples` completions."""
    rewards_NK = [_padded([rollout.reward or 0.0 for rollout in group.rollouts], samples) for group in groups]
    graded = [rollout for group in groups for rollout in group.rollouts if rollout.reward is not None]
    solved_N = [sum(map(task.is_success, rewards)) for rewards in rewards_NK]
    mean, low, high = interval([float(np.mean(rewards)) for rewards in rewards_NK])
    if task.reward_range is not None:  # the normal interval does not know that a reward is bounded
        low, high = max(low, min(mean, task.reward_range[0])), min(high, max(mean, task.reward_range[1]))
    names = sorted({name for rollout in graded for name in rollout.parts})
    total = max(1, samples * len(groups))
    return Estimate(
        mean=mean,
        low=low,
        high=high,
        n=len(groups),
        temperature=temperature,
        ungraded=samples * len(groups) - len(graded),
        success=sum(solved_N) / total,
        pass_at={
            str(k): float(np.mean([pass_at_k(solved, samples, k) for solved in solved_N]))
            for k in powers_of_two(samples)
            if groups
        },
        parts={name: sum(rollout.parts.get(name, 0.0) for rollout in graded) / total for name in names},
    )


def evaluate(
    sampler: SamplingClient,
    task: Task,
    samples: Sequence[Any],
    *,
    config: RLConfig,
    temperature: float,
    calls: CallPool,
    tokenizer: Any,
    num_samples: int = 1,
) -> tuple[Estimate, list[Rollout]]:
    """`num_samples` completions per sample at `temperature` (0: greedy, always one), each judged alone.

    Returns the estimate and the first completion of each sample that could be sampled. The draws depend on the run's
    seed alone, so readings of different weights are paired.

    Raises:
        RequestFailedError: not one sample could be sampled; a reading of 0 would say something else.
    """
    count = 1 if temperature == 0 else num_samples
    groups = collect_groups(
        sampler,
        task,
        samples,
        range(len(samples)),
        config=config,
        tokenizer=tokenizer,
        calls=calls,
        num_samples=count,
        seeds=[mix_seed(config.seed, EVALUATION_STREAM, index) for index in range(len(samples))],
        temperature=temperature,
        alone=True,
    )
    if groups and all(group.error for group in groups):
        raise RequestFailedError(f"no held-out prompt could be sampled; the first said: {groups[0].error}")
    reading = estimate(task, groups, samples=count, temperature=temperature)
    return reading, [group.rollouts[0] for group in groups if group.rollouts]


def content_hash(task: Task, sample: Any) -> str:
    """What tells held-out samples from training samples: 128 bits of SHA-256 over `task.sample_key(sample)`."""
    return hashlib.sha256(task.sample_key(sample).encode()).hexdigest()[:32]


def without_heldout(task: Task, dataset: Sequence[Any], heldout: Sequence[Any]) -> tuple[list[Any], int]:
    """The training samples that are not in the held-out set, by content, and how many were left out."""
    closed = {content_hash(task, sample) for sample in heldout}
    kept = [sample for sample in dataset if content_hash(task, sample) not in closed] if closed else list(dataset)
    return kept, len(dataset) - len(kept)


def powers_of_two(limit: int) -> list[int]:
    """1, 2, 4, … up to `limit`."""
    return [2**exponent for exponent in range(limit.bit_length()) if 2**exponent <= limit]


def _padded(rewards: list[float], count: int) -> list[float]:
    return rewards + [0.0] * (count - len(rewards))
