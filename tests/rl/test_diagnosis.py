"""What the rules see in a run log: synthetic runs with the noise of real ones, healthy or with one thing wrong."""

from __future__ import annotations

import importlib
import inspect
import math
import pkgutil
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mint.rl.analysis
from mint.rl.analysis.diagnosis import CODES, RULES, diagnose, is_contradicted
from mint.rl.analysis.policy_rules import first_order_gain
from mint.rl.analysis.run_record import RunRecord, StepView
from mint.rl.analysis.step_statistics import RewardTrend, reward_change, reward_trend
from mint.rl.finding import Finding
from mint.rl.training.datum_check import check_datums
from mint.rl.training.datums import policy_datum
from mint.types import Datum

GROUPS, SIZE = 16, 8
CONFIG = {"steps": 40, "max_tokens": 16, "success_reward": 1.0, "reward_range": None, "learning_rate": 3e-3}
READING = {"set": "held-out", "temperature": 0.0}

Change = Callable[[int, dict[str, float]], dict[str, float]]


def step_of(step: int, rate: float, random: np.random.Generator, groups: int) -> dict[str, float]:
    """The metrics of one step of a policy that succeeds at `rate`, on prompts of unequal difficulty."""
    concentration = 4.0
    rates = random.beta(rate * concentration + 1e-9, (1 - rate) * concentration + 1e-9, groups)
    successes = random.binomial(SIZE, rates)
    mean = float(successes.sum()) / (groups * SIZE)
    return {
        "step": float(step),
        "reward/mean": mean,
        "reward/std": math.sqrt(mean * (1 - mean)),
        "reward/min": 0.0 if mean < 1 else 1.0,
        "reward/max": 1.0 if mean > 0 else 0.0,
        "success/rate": mean,
        "groups/total": float(groups),
        "groups/failed": 0.0,
        "groups/used": float(((successes > 0) & (successes < SIZE)).sum()),
        "groups/all_good": float((successes == SIZE).sum()),
        "groups/all_bad": float((successes == 0).sum()),
        "rollouts/count": float(groups * SIZE),
        "rollouts/ungraded": 0.0,
        "rollouts/mean_length": random.normal(6.0, 0.1),
        "rollouts/truncated_share": 0.0,
        "rollouts/entropy_estimate": (1.05 - rate) * random.normal(0.3, 0.01),
        "datums": 64.0,
        "learning_rate": 3e-3,
        "train/ess": 1.0,
        "optim/grad_norm": random.gamma(10, 8),
        "optim/update_norm": random.uniform(0.2, 1.0),
        "optim/skipped_nonfinite": 0.0,
    }


def learning(step: int) -> float:
    return 0.9 - 0.6 * math.exp(-step / 15)


def run(
    rate: Callable[[int], float] = learning,
    *,
    seed: int = 0,
    steps: int = 40,
    change: Change | None = None,
    groups: int = GROUPS,
    **rest: Any,
) -> RunRecord:
    random = np.random.default_rng(seed)
    metrics = [step_of(step, rate(step), random, groups) for step in range(1, steps + 1)]
    if change is not None:
        metrics = [{**numbers, **change(int(numbers["step"]), numbers)} for numbers in metrics]
    evaluations = rest.pop("evaluations", [reading(0, 0.3)])
    return RunRecord(config={**CONFIG, **rest.pop("config", {})}, metrics=metrics, evaluations=evaluations, **rest)


def reading(step: int, mean: float, half: float = 0.04) -> dict[str, Any]:
    return {**READING, "step": step, "mean": mean, "low": mean - half, "high": mean + half}


FLAT = [reading(0, 0.3), reading(32, 0.3)]


def errors(record: RunRecord) -> list[str]:
    return [finding.code for finding in diagnose(record) if finding.severity == "error"]


def at_the_end(record: RunRecord) -> list[str]:
    return [finding.code for finding in diagnose(record) if not is_contradicted(finding, record)]


def find(record: RunRecord, code: str) -> Finding:
    return next(finding for finding in diagnose(record) if finding.code == code)


def row(step: int, group: int, text: str, reward: float | None, **fields: Any) -> dict[str, Any]:
    return {
        "step": step, "group": group, "item": group, "prompt": f"question {step} {group}", "text": text,
        "tokens": list(range(len(text))), "reward": reward, "error": None, "unsupported": False, "timed_out": False,
        **fields,
    }  # fmt: skip


# --- healthy ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_healthy_runs_raise_nothing_above_info(seed: int) -> None:
    found = diagnose(run(seed=seed, steps=80))
    assert [finding for finding in found if finding.severity != "info"] == []


@pytest.mark.parametrize("seed", [13, 15, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(13))])
def test_long_runs_that_hover_with_tiny_batches_raise_no_error(seed: int) -> None:
    assert errors(run(lambda step: 0.5, seed=seed, steps=100, groups=2)) == []
    assert errors(run(lambda step: 0.15, seed=seed, steps=100, groups=3)) == []


def test_a_solved_task_is_an_info_and_not_a_fault() -> None:
    found = diagnose(run(lambda step: min(1.0, 0.3 + step / 20)))
    assert {finding.code for finding in found} == {"saturation", "no_learning_signal_all_right"}
    assert {finding.severity for finding in found} == {"info"}


def test_a_curriculum_that_moves_on_to_harder_items_is_no_collapse() -> None:
    record = run(lambda step: 0.8 if step < 20 else 0.35, config={"curriculum": True})
    assert errors(record) == []


# --- the signal ---------------------------------------------------------------------------------------------------


def test_no_success_at_all_says_all_wrong_and_what_to_do() -> None:
    finding = find(run(lambda step: 0.0), "no_learning_signal_all_wrong")
    assert (finding.severity, finding.step) == ("error", 3)
    assert finding.numbers["all_bad"] == 48
    assert "easier" in finding.remedy


def test_three_small_silent_steps_may_still_be_chance() -> None:
    assert errors(run(lambda step: 0.0, groups=2, steps=5)) == []


def test_all_right_from_the_first_step_is_a_warning() -> None:
    finding = find(run(lambda step: 1.0), "no_learning_signal_all_right")
    assert finding.severity == "warning"
    assert "from the first step" in finding.evidence


def test_one_and_the_same_reward_for_different_texts_is_a_grader_that_does_not_discriminate() -> None:
    constant = {"reward/mean": 0.5, "reward/min": 0.5, "reward/max": 0.5, "reward/std": 0.0, "success/rate": 0.0}
    silent = {"groups/used": 0.0, "groups/all_bad": 16.0, "groups/all_good": 0.0}
    rows = [row(step, group, f"text {place}", 0.5) for step in (1, 2, 3) for group in range(16) for place in range(8)]
    record = run(steps=4, change=lambda step, numbers: {**constant, **silent}, rollouts=rows)
    assert errors(record) == ["constant_reward"]
    (found,) = [one for one in diagnose(record) if one.code == "constant_reward"]
    assert "0 all right, 48 alike with partial credit" in found.evidence


def test_a_fallen_reward_is_a_collapse_that_names_the_good_step() -> None:
    finding = find(run(lambda step: learning(step) if step <= 25 else 0.05), "reward_collapse")
    assert 26 <= finding.step <= 28
    assert 15 <= finding.numbers["best_step"] <= 25


def test_a_fallen_heldout_reading_is_a_collapse() -> None:
    evaluations = [reading(0, 0.3), reading(20, 0.7), reading(40, 0.3)]
    fading = run(lambda step: min(0.6 + step / 75, 0.98 - 0.012 * step), evaluations=evaluations)
    assert errors(fading) == ["reward_collapse"]


def test_a_jump_between_two_steps_is_a_spike_and_steady_learning_is_not() -> None:
    codes = [finding.code for finding in diagnose(run(lambda step: 0.2 if step < 20 else 0.85))]
    assert codes == ["reward_spike"]


def test_a_run_without_a_heldout_set_is_told_so() -> None:
    assert [finding.code for finding in diagnose(run(evaluations=[]))] == ["no_heldout"]


def test_a_judge_that_shares_out_a_fixed_sum_is_not_called_all_wrong_when_all_replies_are_as_good() -> None:
    def change(step: int, numbers: dict[str, float]) -> dict[str, float]:
        tied = {"groups/used": 0.0, "groups/all_bad": 16.0, "groups/all_good": 0.0, "reward/std": 0.0}
        judged = {"reward/mean": 0.5, "success/rate": 0.0, "reward/min": 0.0, "rollouts/entropy_estimate": 0.3 / step}
        return {**judged, **(tied if step > 20 else {"reward/std": 0.3})}

    record = run(lambda step: 0.5, change=change)
    assert errors(record) == []
    assert find(record, "no_learning_signal").severity == "warning"


def test_equal_rewards_of_partial_credit_are_not_called_wrong() -> None:
    """A run of mean reward 0.8, in which no reward is a full success."""

    def change(step: int, numbers: dict[str, float]) -> dict[str, float]:
        rewards = {"reward/mean": 0.8, "reward/min": 0.6, "reward/max": 0.9, "reward/std": 0.1, "success/rate": 0.0}
        return {**rewards, "groups/used": 0.0, "groups/all_good": 0.0, "groups/all_bad": 16.0}

    found = {finding.code: finding for finding in diagnose(run(steps=4, change=change))}
    assert "no_learning_signal_all_wrong" not in found
    assert "0.800" in found["no_learning_signal"].evidence


def test_right_and_wrong_groups_without_a_signal_are_not_called_solved() -> None:
    def change(step: int, numbers: dict[str, float]) -> dict[str, float]:
        split = {"groups/used": 0.0, "groups/all_good": 9.0, "groups/all_bad": 7.0}
        return split if step > 10 else {}

    found = diagnose(run(lambda step: 0.55, change=change, steps=14))
    assert [finding.code for finding in found] == ["no_learning_signal"]
    assert "27 all right, 21 all wrong" in found[0].evidence


# --- progress -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rate", "groups"), [(0.07, 8), (0.15, 8), (0.5, 32)])
def test_a_signal_that_leads_nowhere_is_reported_after_thirty_steps(rate: float, groups: int) -> None:
    for seed in range(5):
        record = run(lambda step: rate, seed=seed, steps=32, groups=groups, evaluations=FLAT)
        assert [(finding.code, finding.severity) for finding in diagnose(record)] == [("no_progress", "warning")]
        assert at_the_end(record) == ["no_progress"]


@pytest.mark.parametrize("steps", [32, 60])
@pytest.mark.parametrize("late", [0, 15])
def test_a_run_that_gains_a_quarter_of_what_was_missing_rarely_ends_with_no_progress(late: int, steps: int) -> None:
    """Of 8 prompts a step, most of what the training rewards show is noise."""

    def rate(step: int) -> float:
        return 0.16 + 0.21 * max(0.0, (step - late) / (steps - late))

    runs = [run(rate, seed=seed, steps=steps, groups=8, config={"steps": steps}) for seed in range(20)]
    assert sum("no_progress" in at_the_end(record) for record in runs) <= 2


def test_a_slow_run_with_little_left_to_gain_is_seldom_told_that_it_makes_no_progress() -> None:
    """It gains three tenths of what was missing, and its held-out items are too few to show that."""
    readings = [reading(0, 0.6, 0.15), reading(28, 0.65, 0.15)]
    runs = [
        run(lambda step: 0.7 + 0.09 * step / 28, seed=seed, steps=28, config={"steps": 28}, evaluations=readings)
        for seed in range(40)
    ]
    assert sum("no_progress" in at_the_end(record) for record in runs) <= 3


def test_a_run_that_rises_early_and_keeps_its_level_is_judged_by_the_last_heldout_reading() -> None:
    def rate(step: int) -> float:
        return 0.16 + 0.21 * (1 - math.exp(-step / 5))

    readings = [reading(0, 0.16), reading(60, 0.37)]
    for seed in range(20):
        record = run(rate, seed=seed, steps=60, groups=8, config={"steps": 60}, evaluations=readings)
        assert "no_progress" not in at_the_end(record)


def test_a_slow_gain_a_plateau_after_a_gain_or_a_heldout_gain_is_progress() -> None:
    assert diagnose(run(lambda step: 0.3 + 0.006 * step)) == []
    assert diagnose(run(lambda step: min(0.7, 0.3 + 0.05 * step), steps=80)) == []
    assert diagnose(run(lambda step: 0.5, evaluations=[reading(0, 0.3), reading(20, 0.5)])) == []


def test_a_run_too_noisy_to_judge_is_not_judged() -> None:
    assert diagnose(run(lambda step: 0.5, groups=1, steps=30)) == []


@pytest.mark.parametrize("seed", range(5))
def test_a_reward_that_falls_from_the_first_step_on_points_to_the_sign(seed: int) -> None:
    """What a flipped sign of the advantages does to a run."""
    record = run(lambda step: 0.5 * math.exp(-step / 8), seed=seed, steps=25)
    assert errors(record)[0] == "falling_reward"
    assert "sign of the advantages" in find(record, "falling_reward").remedy


def grouped(prompt: Callable[[int, int], str], **fields: Any) -> list[dict[str, Any]]:
    return [
        {**row(step, group, f"text {place}", float(place)), "prompt": prompt(step, group), **fields}
        for step in range(36, 41)
        for group in range(16)
        for place in range(2)
    ]


def with_advantages(advantage: Callable[[np.ndarray], np.ndarray], *, seed: int = 0, groups: int = 8) -> RunRecord:
    """One step of a loop that logs no metrics."""
    random = np.random.default_rng(seed)
    rows = []
    for group in range(groups):
        rewards = random.choice([0.0, 0.3, 1.0], SIZE)
        rows += [
            row(1, group, f"answer {place}", float(reward), advantage=float(given))
            for place, (reward, given) in enumerate(zip(rewards, advantage(rewards), strict=True))
        ]
    return RunRecord(metrics=[{"step": 1.0}], rollouts=rows)


def test_advantages_against_the_rewards_are_named_without_any_metrics() -> None:
    def centred(rewards: np.ndarray) -> np.ndarray:
        return rewards - rewards.mean()

    finding = find(with_advantages(lambda rewards: -centred(rewards)), "reversed_advantages")
    assert finding.severity == "error" and finding.numbers["correlation"] == pytest.approx(-1)
    healthy = (
        centred,
        lambda rewards: np.argsort(np.argsort(rewards)) - 3.5,
        lambda rewards: np.maximum(centred(rewards), 0),
        lambda rewards: np.minimum(centred(rewards), 0),
        lambda rewards: np.sign(centred(rewards)),
        np.zeros_like,
    )
    for advantage in healthy:
        found = diagnose(with_advantages(advantage))
        assert "reversed_advantages" not in {finding.code for finding in found}


@pytest.mark.parametrize("seed", range(20))
def test_advantages_that_have_nothing_to_do_with_the_rewards_have_no_sign(seed: int) -> None:
    random = np.random.default_rng(seed)
    record = with_advantages(lambda rewards: random.normal(size=len(rewards)), seed=seed)
    assert "reversed_advantages" not in {finding.code for finding in diagnose(record)}


def test_one_prompt_over_and_over_is_named() -> None:
    finding = find(run(rollouts=grouped(lambda step, group: "What is 1 + 1?")), "few_prompts")
    assert finding.numbers == {"prompts": 1.0, "groups": 16.0}
    sixteen = run(rollouts=grouped(lambda step, group: f"{group}"))
    assert "few_prompts" not in {finding.code for finding in diagnose(sixteen)}


def test_environments_that_hide_their_item_from_the_first_prompt_have_many_prompts() -> None:
    hidden = grouped(lambda step, group: "Guess my number.", turns=3)
    for place, one in enumerate(hidden):
        one["sample"] = str(place // 2)
    assert diagnose(run(rollouts=hidden)) == []


def test_items_learned_by_heart_are_named_and_a_heldout_gain_is_not() -> None:
    def read(after: float) -> list[dict[str, Any]]:
        return [{**reading(step, mean), "temperature": 1.0} for step, mean in ((0, 0.3), (40, after))]

    five = grouped(lambda step, group: f"question {group % 5}")
    found = run(rollouts=five, evaluations=read(0.31))
    assert errors(found) == ["overfitting"]
    assert "only 5 different prompts" in find(found, "overfitting").evidence
    assert errors(run(rollouts=five, evaluations=read(0.8))) == []
    many = grouped(lambda step, group: f"question {step} {group}")
    assert errors(run(rollouts=many, evaluations=read(0.31))) == []


def test_the_trend_is_the_least_squares_line_of_numpy() -> None:
    steps = run(learning, steps=25).metrics
    rewards = [step["reward/mean"] for step in steps]
    slope, _ = np.polyfit(range(25), rewards, 1)
    trend = reward_trend(steps)
    assert trend.rise == pytest.approx(24 * slope)
    (variance, _), _ = np.polyfit(range(25), rewards, 1, cov=True)[1]
    assert trend.scatter == pytest.approx(24 * math.sqrt(variance))
    assert trend.error >= trend.scatter


def test_the_change_since_the_start_is_a_difference_of_means() -> None:
    steps = run(learning, steps=25).metrics
    rewards = [step["reward/mean"] for step in steps]
    change = reward_change(steps, 5)
    assert change.rise == pytest.approx(np.mean(rewards[5:]) - np.mean(rewards[:5]))
    early, late = np.array(rewards[:5]), np.array(rewards[5:])
    pooled = (4 * early.var(ddof=1) + 19 * late.var(ddof=1)) / 23
    assert change.scatter == pytest.approx(math.sqrt(pooled * (1 / 5 + 1 / 20)))
    assert change.error >= change.scatter


@pytest.mark.parametrize("estimate", [reward_trend, lambda steps: reward_change(steps, 5)])
def test_the_errors_of_trend_and_change_cover_flat_runs(estimate: Callable[[Any], RewardTrend]) -> None:
    rises = [estimate(run(lambda step: 0.4, seed=seed, steps=25).metrics) for seed in range(200)]
    assert sum(abs(each.rise) > 1.96 * each.error for each in rises) <= 20
    assert sum(abs(each.rise) > 2.07 * each.scatter for each in rises) <= 20


# --- the policy ---------------------------------------------------------------------------------------------------


def test_entropy_that_goes_without_buying_reward_is_a_collapse() -> None:
    def change(step: int, numbers: dict[str, float]) -> dict[str, float]:
        return {"rollouts/entropy_estimate": 0.3 * 0.8**step, "groups/used": max(1.0, 16.0 - step)}

    assert errors(run(lambda step: 0.4, change=change)) == ["entropy_collapse"]


def test_length_that_grows_without_reward_is_a_runaway() -> None:
    record = run(lambda step: 0.4, change=lambda step, numbers: {"rollouts/mean_length": 6.0 + step})
    assert [finding.code for finding in diagnose(record)] == ["length_runaway", "no_progress"]


def test_truncation_warns_above_five_percent_and_is_an_error_where_the_limit_is_graded() -> None:
    few = run(change=lambda step, numbers: {"rollouts/truncated_share": 0.03})
    assert [finding.code for finding in diagnose(few)] == []
    some = run(change=lambda step, numbers: {"rollouts/truncated_share": 0.2})
    assert find(some, "truncation").severity == "warning"
    assert "truncation='mask'" in find(some, "truncation").remedy
    masked = replace(some, config={**some.config, "truncation": "mask"})
    assert "truncation=" not in find(masked, "truncation").remedy
    hopeless = run(lambda step: 0.0, change=lambda step, numbers: {"rollouts/truncated_share": 1.0})
    assert errors(hopeless) == ["truncation"]
    assert "follows from truncation" in find(hopeless, "no_learning_signal_all_wrong").evidence


def test_a_limit_that_a_policy_learns_to_live_with_is_no_error() -> None:
    assert errors(run(change=lambda step, numbers: {"rollouts/truncated_share": 1.0})) == []


@pytest.mark.parametrize(
    "numbers",
    [{"train/kl_k2": 0.2}, {"train/ess": 0.1}, {"train/clip_low_fraction": 0.2, "train/clip_high_fraction": 0.2}],
)
def test_a_policy_that_left_its_samples_is_drift(numbers: dict[str, float]) -> None:
    drifted = run(change=lambda step, _: numbers)
    on_policy = find(drifted, "off_policy_drift").remedy
    assert on_policy.startswith("Lower learning_rate; or use loss_fn='ppo'")
    several = {"max_staleness": 2, "epochs_per_batch": 3, "loss_fn": "ppo"}
    remedy = find(replace(drifted, config={**drifted.config, **several}), "off_policy_drift").remedy
    assert remedy == "Lower max_staleness, epochs_per_batch or learning_rate"


def test_a_mismatch_on_the_same_weights_names_the_temperature_and_is_not_called_drift() -> None:
    record = run(change=lambda step, numbers: {"mismatch/mean_abs_logprob_diff": 0.06, "train/kl_k2": 0.3})
    assert [finding.code for finding in diagnose(record)] == ["sampler_trainer_mismatch"]
    assert "temperature" in find(record, "sampler_trainer_mismatch").remedy
    bf16 = run(change=lambda step, numbers: {"mismatch/mean_abs_logprob_diff": 0.01})
    assert diagnose(bf16) == []


def test_a_small_mismatch_of_a_sure_policy_is_judged_by_the_size_of_its_logprobs() -> None:
    def differs(mean: float, share: float) -> list[str]:
        numbers = {"mismatch/mean_abs_logprob_diff": mean, "mismatch/relative_logprob_diff": share}
        return [finding.code for finding in diagnose(run(change=lambda step, _: numbers))]

    assert differs(0.012, 0.4) == ["sampler_trainer_mismatch"]
    assert differs(0.012, 0.05) == [], "rounding"
    assert differs(0.001, 0.4) == [], "nothing to learn from"


def test_logprobs_of_another_temperature_are_a_mismatch_however_small() -> None:
    tempered = [(2, "temperature_logprobs: the logprobs look like those of sampling temperature 0.71")]
    found = find(run(warnings=tempered), "sampler_trainer_mismatch")
    assert (found.step, found.severity) == (2, "error")
    assert "temperature 0.71" in found.evidence
    asked = run(warnings=tempered, config={"logprobs_mode": "processed"})
    assert "sampler_trainer_mismatch" not in at_the_end(asked), "the run asked for them"


@pytest.mark.parametrize("numbers", [{"optim/skipped_nonfinite": 1.0}, {"train/loss": math.nan}])
def test_a_skipped_step_is_an_error(numbers: dict[str, float]) -> None:
    record = run(change=lambda step, _: numbers if step == 7 else {})
    assert find(record, "nonfinite_or_skipped_steps").step == 7


def test_a_collapse_after_enormous_steps_is_blamed_on_the_learning_rate() -> None:
    enormous = {"optim/update_norm": 10.0}
    record = run(lambda step: 0.5 if step < 3 else 0.02, change=lambda step, numbers: enormous)
    assert errors(record) == ["learning_rate_too_high"]
    assert find(record, "reward_collapse").severity == "warning"


def test_steps_that_cannot_matter_are_blamed_on_the_learning_rate() -> None:
    tiny = {"optim/update_norm": 3e-4}
    finding = find(run(lambda step: 0.5, change=lambda step, numbers: tiny), "learning_rate_too_low")
    assert finding.step == 8
    assert finding.numbers["first_order_gain_of_the_run"] < 0.1


def test_the_first_order_gain_of_a_step_bounds_what_a_step_on_a_known_policy_gives() -> None:
    """A bandit with success p = sigmoid(θ): dE[R]/dθ = p(1 − p), whatever the number of rollouts."""
    p, rollouts, update = 0.3, 64, 0.01
    gradient = rollouts * p * (1 - p)
    metrics = {
        "rollouts/count": rollouts, "rollouts/ungraded": 0.0, "reward/std": math.sqrt(p * (1 - p)), "datums": rollouts,
        "optim/grad_norm": gradient, "optim/update_norm": update,
    }  # fmt: skip
    theta = math.log(p / (1 - p)) + update
    gain = 1 / (1 + math.exp(-theta)) - p
    bound = first_order_gain(metrics, {})
    assert bound == pytest.approx(gain / math.sqrt(p * (1 - p)), rel=0.01)
    scaled = {**metrics, "optim/grad_norm": gradient / (rollouts * 16)}
    assert first_order_gain(scaled, {"loss_normalization": "constant", "max_tokens": 16}) == pytest.approx(bound)


# --- the reward and the grader ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [learning, lambda step: 0.5 + step / 200])
def test_heldout_down_while_training_is_not_is_suspected_hacking(rate: Callable[[int], float]) -> None:
    evaluations = [reading(0, 0.6), reading(20, 0.3)]
    assert errors(run(rate, evaluations=evaluations)) == ["suspected_reward_hacking"]


def test_a_greedy_fall_is_no_hacking_where_held_out_samples_earn_surely_more() -> None:
    """A run whose greedy reply began better than its samples: 0.99 to 0.88 greedy, 0.52 to 0.75 sampled."""
    greedy = [{**reading(0, 0.99, 0.01), "temperature": 0.0}, {**reading(20, 0.88, 0.06), "temperature": 0.0}]
    sampled = [{**reading(0, 0.52, 0.1), "temperature": 1.0}, {**reading(20, 0.75, 0.09), "temperature": 1.0}]
    assert errors(run(learning, evaluations=[*greedy, *sampled])) == []
    assert errors(run(learning, evaluations=greedy)) == ["suspected_reward_hacking"]


def test_one_text_that_wins_on_every_prompt_is_suspected_and_a_common_answer_is_not() -> None:
    wins = [row(40, group, " The  Answer", 1.0) for group in range(16) for _ in range(3)]
    wins += [row(40, group, f"no {group}", 0.0) for group in range(16)]
    finding = find(run(rollouts=wins), "suspected_reward_hacking")
    assert finding.severity == "warning"
    assert "the answer" in finding.evidence
    labels = [row(40, group, "yes", float(group % 2)) for group in range(32)]
    assert diagnose(run(rollouts=labels)) == []


def test_a_reward_that_length_explains_is_suspected_once_the_length_grows() -> None:
    random = np.random.default_rng(0)
    lengths = random.integers(5, 40, size=(16, 8))
    rows = [row(40, group, "x" * length, length / 40) for group in range(16) for length in lengths[group].tolist()]

    def change(step: int, numbers: dict[str, float]) -> dict[str, float]:
        return {"rollouts/mean_length": 10.0 + step / 2}

    assert "length explains" in find(run(change=change, rollouts=rows), "suspected_reward_hacking").evidence
    assert diagnose(run(rollouts=rows)) == []


def test_a_part_that_pays_for_another_is_suspected() -> None:
    def change(step: int, numbers: dict[str, float]) -> dict[str, float]:
        return {"reward/part/style": numbers["reward/mean"] + step / 50, "reward/part/truth": 0.6 - step / 50}

    assert "'truth' fell" in find(run(change=change), "suspected_reward_hacking").evidence


def test_equal_texts_of_a_group_with_different_rewards_are_a_fault_of_the_grader() -> None:
    random = np.random.default_rng(0)
    same = [row(40, group, f"text {place % 4}", float(random.integers(2))) for group in range(16) for place in range(8)]
    finding = find(run(rollouts=same), "inconsistent_reward")
    assert (finding.severity, finding.numbers["repeated_texts"]) == ("error", 64.0)
    consistent = [row(40, group, f"text {place % 4}", float(place % 4)) for group in range(16) for place in range(8)]
    assert diagnose(run(rollouts=consistent)) == []
    used_tools = [{**one, "tool_calls": 2} for one in same]
    assert diagnose(run(rollouts=used_tools)) == []


def test_a_grader_that_changes_between_evaluations_is_named_by_replies_that_came_again() -> None:
    def evaluations(changed: int) -> list[dict[str, Any]]:
        """Three evaluations of 16 items with the same replies; the last grades `changed` of them otherwise."""
        return [
            {**reading(step, 0.5), "replies": {item: float(step == 40 and item < changed) for item in range(16)}}
            for step in (0, 20, 40)
        ]

    finding = find(run(evaluations=evaluations(9)), "inconsistent_reward")
    assert (finding.step, finding.severity) == (40, "error")
    assert "of 16 texts" in finding.evidence and "9 earned" in finding.evidence
    assert find(run(evaluations=evaluations(4)), "inconsistent_reward").severity == "warning"
    assert "inconsistent_reward" not in at_the_end(run(evaluations=evaluations(1)))
    greedy, sampled = (
        evaluations(0)[0],
        {**evaluations(0)[0], "temperature": 1.0, "replies": dict.fromkeys(range(16), 1.0)},
    )
    assert "inconsistent_reward" not in at_the_end(run(evaluations=[greedy, sampled])), "one step is no comparison"


def test_a_reward_that_falls_from_the_start_is_so_named_though_a_window_lay_above_the_start_by_chance() -> None:
    """The best of some twenty windows lies two standard errors above the start in one run of forty."""

    def falling(step: int) -> float:
        return 0.7 if step < 8 else max(0.02, 0.7 - 0.05 * (step - 8))

    runs = (run(falling, seed=seed, steps=24, groups=8, config={"steps": 24}) for seed in range(40))
    assert all("falling_reward" in {finding.code for finding in diagnose(record)} for record in runs)


def test_a_few_failures_warn_and_many_are_an_error() -> None:
    few = run(change=lambda step, numbers: {"rollouts/ungraded": 2.0})
    assert find(few, "grader_failures").severity == "warning"
    many = run(change=lambda step, numbers: {"rollouts/ungraded": 100.0})
    assert errors(many) == ["grader_failures"]


def test_a_fault_that_gets_worse_is_reported_at_its_worst() -> None:
    worse = run(change=lambda step, numbers: {"rollouts/ungraded": 2.0 if step < 20 else 100.0})
    assert find(worse, "grader_failures").severity == "error"
    assert find(worse, "grader_failures").step > 20


@pytest.mark.parametrize(("kind", "code"), [("timeouts", "grader_timeouts"), ("unsupported", "unsupported_rewards")])
def test_timeouts_and_unsupported_answers_have_their_own_names(kind: str, code: str) -> None:
    record = run(
        change=lambda step, numbers: {f"rollouts/{kind}": 128.0, "rollouts/ungraded": 128.0, "groups/failed": 16.0}
    )
    assert errors(record) == [code]


def test_a_reward_out_of_its_range_names_the_grader() -> None:
    message = "the reward 3 of MyGrader is outside its declared range [0, 1]"
    rows = [row(5, 0, "text", None, error=message)]
    record = run(change=lambda step, numbers: {"rollouts/ungraded": float(step == 5)}, rollouts=rows)
    assert errors(record) == ["reward_out_of_range"]
    assert "MyGrader" in find(record, "reward_out_of_range").evidence


def test_the_words_of_the_server_are_passed_on() -> None:
    assert find(run(warnings=[(3, "datum 3: raw rewards?")]), "server_warnings").evidence == "datum 3: raw rewards?"


def test_a_mismatch_with_weights_that_are_known_to_be_older_is_no_finding() -> None:
    warnings = [(3, "mismatch: the logprobs differ by 0.031 on average")]
    lagging = run(change=lambda step, numbers: {"staleness/max": 2.0}, warnings=warnings)
    assert diagnose(lagging) == []
    assert [finding.code for finding in diagnose(run(warnings=warnings))] == ["server_warnings"]


def test_large_advantages_of_rewards_on_a_large_scale_are_no_finding() -> None:
    warnings = [(3, "large_advantages: the root mean square of the advantages is 40")]
    wide = run(warnings=warnings, config={"reward_range": (0.0, 100.0)})
    assert "server_warnings" not in {finding.code for finding in diagnose(wide)}
    assert [finding.code for finding in diagnose(run(warnings=warnings))] == ["server_warnings"]


# --- the whole ----------------------------------------------------------------------------------------------------


def test_a_judge_that_prefers_a_place_or_fails_is_named_with_its_own_words() -> None:
    def judged(**info: Any) -> list[dict[str, Any]]:
        facts = {"judge_pairs": 3, "judge_failed_pairs": 0, "judge_flipped_pairs": 0, **info}
        row = {"step": 4, "reward": 0.5, "text": "x", "item": 0, "group": 0, "tokens": [1], "info": facts}
        return [row] * 20

    assert "judge_unreliable" not in {one.code for one in diagnose(run(steps=4, rollouts=judged()))}
    biased = find(run(steps=4, rollouts=judged(judge_flipped_pairs=2)), "judge_unreliable")
    assert (biased.severity, "67% of 30 pairs" in biased.evidence) == ("warning", True)
    failing = find(run(steps=4, rollouts=judged(judge_failed_pairs=2, judge_last_error="503")), "judge_unreliable")
    assert "40 of 60 comparisons failed, the last with: 503" in failing.evidence


def test_live_diagnosis_step_by_step_finds_what_the_whole_log_shows() -> None:
    record = run(lambda step: learning(step) if step <= 25 else 0.0)
    seen: dict[str, Finding] = {}
    for place in range(len(record.metrics)):
        live = RunRecord(record.config, record.metrics[: place + 1], record.evaluations)
        for finding in diagnose(live, since=place, known=seen.values()):
            seen[finding.code] = finding
    assert sorted(seen.values(), key=lambda one: one.code) == sorted(diagnose(record), key=lambda one: one.code)
    assert "reward_collapse" in seen


def test_each_code_comes_at_most_once_and_all_are_declared_with_their_worst_severity() -> None:
    rank = {"info": 0, "warning": 1, "error": 2}
    bad = {"optim/skipped_nonfinite": 1.0, "rollouts/truncated_share": 1.0, "rollouts/ungraded": 4.0}
    found = diagnose(run(lambda step: 0.0, change=lambda step, numbers: bad, warnings=[(1, "a"), (2, "b")]))
    assert len(found) == len({finding.code for finding in found}) >= 4
    assert all(rank[finding.severity] <= rank[CODES[finding.code]] for finding in found)


def test_every_rule_fires() -> None:
    modules = [
        importlib.import_module(f"mint.rl.analysis.{found.name}")
        for found in pkgutil.iter_modules(mint.rl.analysis.__path__)
        if found.name.endswith("_rules")
    ]
    rules = {
        function
        for module in modules
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if not name.startswith("_") and function.__annotations__.get("return") == "Finding | None"
    }
    assert rules - set(RULES) == set(), "these are not in RULES (rl/analysis/diagnosis.py)"
    assert len(RULES) == len(set(RULES)) == len(rules)


def test_every_code_is_in_the_source_and_in_the_document() -> None:
    root = Path(__file__).parents[2]
    sources = [*(root / "src/mint/rl/analysis").glob("*_rules.py"), root / "src/mint/rl/training/datum_check.py"]
    text = "".join(path.read_text() for path in sources)
    raised = set(re.findall(r'(?:Finding|_grading)\(\s*(?:view,\s*)?"([a-z_]+)"', text)) | {"suspected_reward_hacking"}
    assert raised - CODES.keys() == set(), "these are not in CODES (rl/analysis/diagnosis.py)"
    assert CODES.keys() - raised == set(), "no rule raises these"
    documented = re.findall(r"^\| `([a-z_]+)` \|", (root / "docs/diagnosis.md").read_text(), re.MULTILINE)
    assert CODES.keys() - set(documented) == set(), "these have no row in docs/diagnosis.md"
    assert len(documented) == len(set(documented))


# --- the check before training ------------------------------------------------------------------------------------


def datum(prompt: int = 4, completion: int = 3, **columns: list[float]) -> Datum:
    made = policy_datum(
        list(range(prompt)), list(range(completion)), logprobs_T=[-1.0] * completion, advantages_T=np.ones(completion)
    )
    for name, values in columns.items():
        made.loss_fn_inputs[name] = made.loss_fn_inputs[name].model_copy(update={"data": values})
    return made


def test_a_right_batch_passes_the_check() -> None:
    assert check_datums([datum(), datum(1, 5), datum(9, 1)], [4, 1, 9]) == []


@pytest.mark.parametrize(
    "columns",
    [
        {"weights": [0.0, 0.0, 1.0, 1.0, 1.0, 1.0]},  # one prompt token
        {"advantages": [0.5, 0.0, 0.0, 1.0, 1.0, 1.0]},
        {"weights": [1.0] * 6},
        {"weights": [0.0] * 6},  # nothing at all
    ],
)
def test_weights_or_advantages_on_the_prompt_are_an_error_that_names_the_datum(columns: dict[str, list[float]]) -> None:
    (finding,) = check_datums([datum(), datum(**columns)], [4, 4])
    assert (finding.code, finding.severity) == ("masked_loss", "error")
    assert "datum 1" in finding.evidence


def test_the_range_of_rewards_is_known_before_any_step_was_logged() -> None:
    view = StepView(config={}, metrics=[], evaluations=[], rows_by_step={}, warnings=[])
    assert (view.reward_floor, view.reward_ceiling) == (0.0, 1.0)
