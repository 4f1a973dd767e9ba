"""Checkpoints compared item by item: the paired interval against scipy's, and what the readings say."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

import mint
from mint.errors import InvalidRequestError
from mint.rl import RLAdapter, RLConfig
from mint.rl.analysis.comparison import Difference, compare_checkpoints, paired_difference


class Lengths(RLAdapter):
    """The reward is the share of `MAX_TOKENS` letters that were written: every checkpoint has another one."""

    reward_range = (0.0, 1.0)

    def build_dataset(self) -> Sequence[str]:
        return ["Q: What is 1 + 1?\nA:"]

    def build_heldout(self) -> Sequence[str]:
        return [f"Q: What is {number} + 4?\nA:" for number in range(12)]

    def make_prompt(self, item: str, tokenizer: Any) -> list[int]:
        return tokenizer.encode(item)

    def compute_reward(self, response: str, item: str) -> float:
        return min(1.0, len(response) / 20)


@pytest.mark.parametrize("seed", range(5))
def test_the_interval_of_a_difference_is_that_of_the_paired_differences(seed: int) -> None:
    rng = np.random.default_rng(seed)
    hard = rng.uniform(size=300)
    first, other = np.clip(hard + rng.normal(0.05, 0.1, 300), 0, 1), np.clip(hard, 0, 1)
    found = paired_difference(Lengths(), first.tolist(), other.tolist())
    half = stats.t.ppf(0.975, 299) * stats.sem(first - other)
    expected = (first - other).mean()
    assert (found.mean, found.low, found.high) == pytest.approx((expected, expected - half, expected + half), rel=1e-4)
    apart = stats.norm.ppf(0.975) * np.hypot(stats.sem(first), stats.sem(other))
    assert found.high - found.mean < apart  # paired: the spread between hard and easy items is gone


def test_equal_rewards_leave_an_interval_with_a_width() -> None:
    found = paired_difference(Lengths(), [1.0] * 20, [1.0] * 20)
    assert found.mean == 0
    assert found.low < 0 < found.high
    assert found.verdict == "not shown"


@pytest.mark.parametrize(
    ("low", "high", "verdict"), [(0.1, 0.3, "better"), (-0.3, -0.1, "worse"), (-0.1, 0.3, "not shown")]
)
def test_a_verdict_needs_an_interval_on_one_side_of_0(low: float, high: float, verdict: str) -> None:
    assert Difference((low + high) / 2, low, high).verdict == verdict


def test_every_task_and_checkpoint_is_read_with_the_same_items_and_draws(tmp_path: Path) -> None:
    config = RLConfig(base_model="mint/tiny", max_tokens=8, heldout_size=12)
    with mint.ServiceClient(data_dir=tmp_path) as service:
        trainer = service.create_lora_training_client(base_model="mint/tiny", rank=4, seed=0)
        untrained = trainer.save_weights_for_sampler(name="untrained").result().path
        readings = compare_checkpoints(
            ["mint/tiny", untrained], {"lengths": (Lengths(), config)}, seeds=2, service=service
        )
        with pytest.raises(InvalidRequestError, match="all different"):
            compare_checkpoints([untrained, untrained], {"lengths": (Lengths(), config)}, service=service)
    assert [(one.task, one.checkpoint, one.temperature, one.seeds) for one in readings] == [
        ("lengths", "mint/tiny", 0.0, 1),
        ("lengths", untrained, 0.0, 1),
        ("lengths", "mint/tiny", 1.0, 2),
        ("lengths", untrained, 1.0, 2),
    ]
    assert {one.n for one in readings} == {12}
    for base, same in (readings[:2], readings[2:]):
        # An untrained lora is the base model: with the same draws each item has the same reward.
        assert base.difference is None
        assert same.mean == base.mean
        assert same.difference is not None
        assert same.difference.mean == 0
        assert same.to_dict()["difference"]["verdict"] == "not shown"
    assert 0 < readings[2].mean < 1
