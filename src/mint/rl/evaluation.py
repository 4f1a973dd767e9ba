"""Held-out success with an interval, never a bare number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mint.client.sampling_client import SamplingClient
from mint.rl.adapter import RLAdapter
from mint.rl.config import RLConfig, mix_seed
from mint.rl.grading import Grader
from mint.rl.rollouts import Rollout, roll_out

Z95 = 1.959963984540054
EVALUATION_STREAM = 0x45564C


@dataclass(frozen=True)
class Estimate:
    """A mean over `n` samples with its 95 % interval; `ungraded` samples count as 0."""

    mean: float
    low: float
    high: float
    n: int
    temperature: float
    ungraded: int = 0

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def wilson(successes: float, n: int) -> tuple[float, float]:
    """The Wilson score interval (95 %) of a proportion (Wilson 1927); (0, 1) for n = 0."""
    if n == 0:
        return 0.0, 1.0
    share, spread = successes / n, Z95**2 / n
    middle = (share + spread / 2) / (1 + spread)
    half = Z95 * math.sqrt(share * (1 - share) / n + spread / (4 * n)) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)


def estimate(rewards: Sequence[float], *, temperature: float, ungraded: int = 0) -> Estimate:
    """Wilson's interval for rewards of 0 and 1, the normal one otherwise."""
    values = np.asarray(rewards, dtype=np.float64)
    n = len(values)
    mean = float(values.mean()) if n else 0.0
    if bool(np.isin(values, (0.0, 1.0)).all()):
        low, high = wilson(float(values.sum()), n)
    else:
        half = Z95 * float(values.std(ddof=1)) / math.sqrt(n) if n > 1 else math.inf
        low, high = mean - half, mean + half
    return Estimate(mean, low, high, n, temperature, ungraded)


def evaluate(
    sampler: SamplingClient,
    adapter: RLAdapter,
    samples: Sequence[Any],
    *,
    config: RLConfig,
    temperature: float,
    grader: Grader,
    tokenizer: Any,
) -> tuple[Estimate, list[Rollout]]:
    """One completion per sample at `temperature` (0: greedy); a completion that cannot be graded counts as 0."""
    groups = roll_out(
        sampler,
        adapter,
        samples,
        tokenizer=tokenizer,
        grader=grader,
        num_samples=1,
        params=[
            config.sampling_params(mix_seed(config.seed, EVALUATION_STREAM, index), temperature)
            for index in range(len(samples))
        ],
    )
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = [0.0 if rollout.reward is None else rollout.reward for rollout in rollouts]
    missing = len(samples) - len(rollouts) + sum(rollout.reward is None for rollout in rollouts)
    return estimate(
        [*rewards, *[0.0] * (len(samples) - len(rollouts))], temperature=temperature, ungraded=missing
    ), rollouts
