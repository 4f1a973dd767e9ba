"""Intervals against scipy."""

from __future__ import annotations

import itertools
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats
from scripted_policy import ScriptedPolicy, tiny_tokenizer

from mint.errors import RequestFailedError
from mint.recipes.math import DEMO, MathAdapter
from mint.rl import Group, Reward, RLAdapter, RLConfig, Rollout, Turn, run_grpo
from mint.rl.analysis.run_analysis import diagnose_run
from mint.rl.calls.call_pool import CallPool
from mint.rl.estimate import estimate, interval, pass_at_k, wilson
from mint.rl.heldout_evaluation import evaluate, without_heldout
from mint.rl.rollouts.rollout_worker import RolloutWorker
from mint.runs.log import RunLog


@pytest.mark.parametrize(("successes", "n"), [(0, 1), (0, 64), (1, 7), (32, 64), (64, 64), (487, 512), (1, 100_000)])
def test_wilson_intervals_are_scipy_s(successes: int, n: int) -> None:
    expected = stats.binomtest(successes, n).proportion_ci(confidence_level=0.95, method="wilson")
    assert wilson(successes, n) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_no_samples_say_nothing() -> None:
    assert wilson(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize(("n", "tolerance"), [(4, 0.05), (8, 0.01), (30, 1e-3), (200, 1e-4)])
def test_fractional_rewards_get_student_s_interval(n: int, tolerance: float) -> None:
    rewards = np.random.default_rng(0).uniform(size=n)
    half = stats.t.ppf(0.975, n - 1) * stats.sem(rewards)
    mean, low, high = interval(rewards.tolist())
    assert mean == pytest.approx(rewards.mean())
    assert (high - mean, mean - low) == pytest.approx((half, half), rel=tolerance)


def test_an_interval_stays_within_the_bounds_of_the_rewards() -> None:
    mean, low, high = interval([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0], bounds=(0.0, 1.5))
    assert (mean, low) == (0.25, 0.0)
    assert mean < high < 1.5


def test_the_interval_of_rates_ends_at_0_and_at_1() -> None:
    mean, low, high = interval([0.0, 0.0, 0.0, 0.25], proportion=True)
    assert (mean, low) == (0.0625, 0.0) and high > mean
    assert interval([1.0, 1.0, 0.75], proportion=True)[2] == 1.0
    assert interval([0.5], proportion=True) == (0.5, *(0.5 + side * 0.5 * wilson(0, 1)[1] for side in (-1, 1)))


def test_only_a_proportion_gets_wilson_s_interval() -> None:
    assert interval([0.0] * 16) == (0.0, 0.0, 0.0)
    assert interval([0.0] * 16, proportion=True) == (0.0, *wilson(0, 16))

    class Costs(Sums):
        reward_range = (-1.0, 1.0)

    groups = [Group(item, place, [1], [rollout(0.0)]) for place, item in enumerate("abcd")]
    assert estimate(Sums(), groups, completions=1, temperature=0.0).high == wilson(0, 4)[1]
    assert estimate(Costs(), groups, completions=1, temperature=0.0).high == wilson(0, 4)[1]


@pytest.mark.parametrize(
    ("declared", "low", "high"), [(None, 0.0, 1.0), ((0.0, 1.0), 0.0, 1.0), ((-1.0, 2.0), -1.0, 2.0)]
)
def test_equal_rewards_that_are_not_0_or_1_get_an_interval_with_a_width(
    declared: tuple[float, float] | None, low: float, high: float
) -> None:
    class Ranged(Sums):
        reward_range = declared

    groups = [Group(item, item, [1], [rollout(0.95)]) for item in range(48)]
    found = estimate(Ranged(), groups, completions=1, temperature=0.0)
    others = wilson(0, 48)[1]  # the largest share of the items that could have another reward
    assert found.mean == pytest.approx(0.95)
    assert found.low == pytest.approx(0.95 - others * (0.95 - low))
    assert found.high == pytest.approx(0.95 + others * (high - 0.95))


def test_the_interval_of_equal_rewards_covers_the_mean_of_rewards_that_seldom_differ() -> None:
    """Of 48 items, 1 in 50 fails: 38 % of the samples have equal rewards only."""
    random = np.random.default_rng(0)
    samples = np.where(random.uniform(size=(2000, 48)) < 0.02, 0.0, 0.95)
    equal = [sample for sample in samples if (sample == 0.95).all()]
    assert len(equal) > 500
    assert all(low <= 0.98 * 0.95 <= high for _, low, high in (interval(row.tolist(), bounds=(0, 1)) for row in equal))


@pytest.mark.parametrize("n", [1, 4, 7])
def test_pass_at_k_is_the_share_of_all_subsets_with_a_success(n: int) -> None:
    for successes, k in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations([1] * successes + [0] * (n - successes), k))
        assert pass_at_k(successes, n, k) == pytest.approx(np.mean([any(subset) for subset in subsets]))


class Sums(RLAdapter):
    """Only its keys and its success reward matter here."""

    def build_dataset(self) -> list[str]:
        return ["1 + 1", "2 + 2", "3 + 3", "1 + 1"]

    def make_prompt(self, item: str, tokenizer: Any) -> list[int]:
        return [1]

    def compute_reward(self, response: str, item: str) -> float:
        return 0.0


def rollout(reward: float | None) -> Rollout:
    return Rollout([Turn([1], [2], [-0.5])], "x", "stop", reward=reward)


def test_several_completions_of_one_prompt_count_as_one_observation_and_give_pass_at_k() -> None:
    groups = [
        Group("a", 0, [1], [rollout(1.0), rollout(1.0), rollout(1.0), rollout(1.0)]),
        Group("b", 1, [1], [rollout(0.0), rollout(0.0), rollout(0.0), rollout(0.0)]),
        Group("c", 2, [1], [rollout(1.0), rollout(0.0), rollout(None), rollout(0.0)]),
    ]
    reading = estimate(Sums(), groups, completions=4, temperature=1.0)
    assert (reading.n, reading.ungraded) == (3, 1)
    assert reading.mean == pytest.approx((1 + 0 + 0.25) / 3)
    assert reading.high == 1.0 and reading.low == 0.0, "three items are too few, and a rate is from 0 to 1"
    more = estimate(Sums(), groups * 4, completions=4, temperature=1.0)
    assert more.high - more.mean == pytest.approx(stats.t.ppf(0.975, 11) * stats.sem([1, 0, 0.25] * 4), rel=0.01)
    assert reading.pass_at == pytest.approx({"1": 5 / 12, "2": (1 + 0 + 0.5) / 3, "4": 2 / 3})


@pytest.mark.learns
def test_a_grader_that_changes_between_the_evaluations_is_a_finding(tmp_path: Path) -> None:
    class Changing(MathAdapter):
        step = 0

        def compute_reward(self, response: str, item: Any) -> Reward:
            right = super().compute_reward(response, item).value
            return Reward(right if self.step == 0 else 1 - right)

        def evaluate(self, step: int, rewards: list[float], num_datums: int) -> None:
            self.step = step

    settings: dict[str, Any] = {"steps": 1, "learning_rate": 0.0, "batch_size": 2, "group_size": 2, "heldout_size": 16}
    found = {}
    for name, task in {"changing": Changing(), "constant": MathAdapter()}.items():
        run_dir = tmp_path / name
        result = run_grpo(task, DEMO.changed(**settings, run_dir=run_dir, print_progress=False))
        found[name] = [finding for finding in result.findings if finding.code == "inconsistent_reward"]
        assert all("replies" not in row for row in RunLog(run_dir).read("evaluations.jsonl"))
    assert found["constant"] == []
    (finding,) = found["changing"]
    assert (finding.severity, finding.step) == ("error", 1)
    assert finding.numbers["different_rewards"] == finding.numbers["repeated_texts"] >= 16
    assert finding.code in {one.code for one in diagnose_run(tmp_path / "changing")}


def test_what_is_held_out_is_never_trained_on_however_often_it_occurs() -> None:
    kept, left_out = without_heldout(Sums(), Sums().build_dataset(), ["1 + 1", "9 + 9"])
    assert (kept, left_out) == (["2 + 2", "3 + 3"], 2)


def test_a_reading_of_which_nothing_could_be_sampled_is_an_error_and_no_zero() -> None:
    with closing(CallPool(timeout_s=60)) as calls:
        worker = RolloutWorker(Sums(), config=RLConfig(), tokenizer=tiny_tokenizer(), calls=calls)
        policy: Any = ScriptedPolicy(lambda ids: RequestFailedError("the engine is out of order"))
        with pytest.raises(RequestFailedError, match=r"no held-out prompt could be sampled.*out of order"):
            evaluate(worker, policy, ["1 + 1", "2 + 2"], temperature=0.0)


def test_a_prompt_that_is_text_and_no_token_ids_is_named() -> None:
    class Texts(Sums):
        def make_prompt(self, item: str, tokenizer: Any) -> Any:
            return item

    with closing(CallPool(timeout_s=60)) as calls:
        worker = RolloutWorker(Texts(), config=RLConfig(), tokenizer=tiny_tokenizer(), calls=calls)
        with pytest.raises(RequestFailedError, match=r"Texts\.make_prompt\(\) returned text; return token ids"):
            evaluate(worker, ScriptedPolicy(lambda ids: []), ["1 + 1"], temperature=0.0)
