"""Functions of a user's own objective: checked when the config is made, composed with what exists, kept by name."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from digits_task import ManyDigits

from mint.errors import InvalidRequestError
from mint.recipes.task_registry import open_task_of_run
from mint.rl import Group, RLConfig, Rollout, run_grpo
from mint.rl.objective import function_name
from mint.rl.rollout import Turn
from mint.rl.tracking.custom_metrics import custom_metrics
from mint.rl.training.advantages import loss_weights, passes_filter, rollout_advantages
from mint.rl.training.custom_loss import custom_loss
from mint.types import Datum, ModelInput, TensorData

SMALL = RLConfig(
    base_model="mint/tiny", steps=2, batch_size=3, group_size=4, max_tokens=6, temperature=1.0, learning_rate=2e-3,
    heldout_size=0, print_progress=False,
)  # fmt: skip


def rollout(reward: float, length: int = 2) -> Rollout:
    return Rollout([Turn([1], [2] * length, [-1.0] * length)], "x", "stop", reward=reward)


def group(*rewards: float) -> Group:
    return Group("item", 0, [1], [rollout(reward, place + 1) for place, reward in enumerate(rewards)])


def advantages(groups: Sequence[Group], config: RLConfig) -> list[float]:
    return [one.advantage for one in rollout_advantages(groups, config)]


def ranks(rewards: np.ndarray) -> np.ndarray:
    return np.argsort(np.argsort(rewards)) - (len(rewards) - 1) / 2


def best_of_group(group: Group) -> float:
    return max(group.rewards)


def short_ones(rollout: Rollout, advantage: float, scale: float = 1.0) -> float:
    return scale / len(rollout.tokens)


def positive(group: Group) -> bool:
    return max(group.rewards) > 0


def reinforce(logprobs: Any, sampled: Any, advantages: Any, weights: Any) -> Any:
    return -(logprobs - sampled).exp() * advantages * weights


def spread(groups: Sequence[Group]) -> Mapping[str, float]:
    return {"spread": max(max(group.rewards) for group in groups) - min(min(group.rewards) for group in groups)}


def test_an_advantage_function_gets_the_rewards_of_a_group() -> None:
    config = RLConfig(advantage=ranks)
    assert advantages([group(0.1, 0.9, 0.5), group(3.0, 2.0)], config) == [-1.0, 1.0, 0.0, 0.5, -0.5]


def test_a_baseline_is_subtracted_before_every_estimator() -> None:
    groups = [group(0.0, 1.0, 0.5), group(1.0, 1.0, 1.0)]
    rewards = np.array([0, 1, 0.5, 1, 1, 1])
    less_best = rewards - 1.0
    of_group = np.repeat([np.std([0, 1, 0.5], ddof=1), 0.0], 3)
    expected = {
        "center": less_best,
        "std": less_best / (of_group + 1e-4),
        "std_batch": less_best / (rewards.std(ddof=1) + 1e-4),
    }
    for name, values in expected.items():
        assert advantages(groups, RLConfig(advantage=name, baseline=best_of_group)) == pytest.approx(values)
    assert advantages(groups, RLConfig(baseline="batch")) == pytest.approx(rewards - rewards.mean())
    assert advantages(groups, RLConfig(advantage=np.sign, baseline="batch")) == np.sign(rewards - 0.75).tolist()


def test_a_weight_multiplies_the_normalization() -> None:
    chosen = rollout_advantages([group(0.0, 1.0, 0.5)], RLConfig())
    assert loss_weights(chosen, RLConfig(loss_weighting=short_ones)) == [1.0, 1 / 2, 1 / 3]
    config = RLConfig(loss_weighting=partial(short_ones, scale=2.0), loss_normalization="token")
    assert loss_weights(chosen, config) == pytest.approx([2 / 6, 1 / 6, 2 / 18])


def test_a_filter_sees_the_rollouts_that_count() -> None:
    config = RLConfig(group_filter=positive, truncation="mask")
    cut = Rollout([Turn([1], [2], [-1.0])], "x", "length", reward=1.0)
    assert passes_filter(group(0.0, 1.0), config)
    assert not passes_filter(Group("item", 0, [1], [cut, rollout(0.0)]), config)


def two_arguments(one: Any, two: Any) -> Any:
    return one


async def waits(group: Group) -> bool:
    return True


@pytest.mark.parametrize(
    ("fields", "refusal"),
    [
        ({"advantage": lambda rewards: rewards}, r"RLConfig\.advantage = <lambda>: has no name.*def"),
        ({"advantage": two_arguments}, r"advantage = two_arguments: cannot be called.*Let it take \(rewards\)"),
        ({"group_filter": waits}, r"RLConfig\.group_filter = waits: is async"),
        ({"loss_fn": ranks}, r"loss_fn = ranks: cannot.*\(logprobs, sampled_logprobs, advantages, weights\)"),
        ({"loss_fn": reinforce, "loss_fn_config": {"tis_cap": 2.0}}, r"loss_fn_config = .*functools\.partial"),
        ({"advantage": "rloo", "baseline": best_of_group}, r"baseline = function best_of_group: .*advantage = rloo"),
        ({"credit": "turn", "baseline": "batch"}, r"RLConfig\.baseline = batch: .*credit = turn"),
        ({"baseline": "median"}, r"RLConfig\.baseline = median: .*'group' or 'batch'.*or give a function"),
        ({"loss_weighting": 3}, r"loss_weighting = 3: .*Give a function, or None"),
        ({"metrics": two_arguments}, r"RLConfig\.metrics = two_arguments: .*\(groups\)"),
        ({"metrics": (two_arguments,)}, r"RLConfig\.metrics = two_arguments: .*\(groups\)"),
    ],
)
def test_a_function_that_cannot_work_is_refused_when_the_config_is_made(fields: dict[str, Any], refusal: str) -> None:
    with pytest.raises(InvalidRequestError, match=refusal):
        RLConfig(**fields)


def test_one_function_of_metrics_needs_no_tuple() -> None:
    assert RLConfig(metrics=spread) == RLConfig(metrics=(spread,)) == RLConfig(metrics=[spread])


def nan(rewards: np.ndarray) -> np.ndarray:
    return rewards * np.nan


def too_few(rewards: np.ndarray) -> np.ndarray:
    return rewards[1:]


def huge(rewards: np.ndarray) -> np.ndarray:
    return rewards * 1e300


def imaginary(rewards: np.ndarray) -> np.ndarray:
    return rewards * 1j


def nested(rewards: np.ndarray) -> list[Any]:
    return [torch.ones(1, requires_grad=True), [1.0, 2.0], 3.0]


@pytest.mark.parametrize("wrong", [nan, too_few, huge, imaginary, nested])
def test_what_a_function_must_not_return_is_refused_by_its_name(wrong: Callable[[np.ndarray], np.ndarray]) -> None:
    with pytest.raises(InvalidRequestError, match=rf"advantage = {wrong.__name__}: returned .*Return 3 finite numbers"):
        advantages([group(0.0, 1.0, 2.0)], RLConfig(advantage=wrong))


def with_gradient(rewards: np.ndarray) -> Any:
    return torch.tensor(rewards, dtype=torch.bfloat16, requires_grad=True) - 1


def list_of_tensors(rewards: np.ndarray) -> list[Any]:
    return list(torch.tensor(rewards, requires_grad=True) - 1)


@pytest.mark.parametrize("function", [with_gradient, list_of_tensors])
def test_an_advantage_may_be_a_tensor_with_a_gradient(function: Callable[[np.ndarray], Any]) -> None:
    assert advantages([group(0.0, 1.0, 2.0)], RLConfig(advantage=function)) == [-1.0, 0.0, 1.0]


def fails(*arguments: Any) -> Any:
    raise KeyError("no such item")


@pytest.mark.parametrize("field", ["advantage", "baseline", "group_filter", "loss_weighting"])
def test_a_function_that_raises_is_named_with_its_line(field: str) -> None:
    config = RLConfig(**{field: fails})
    groups = [group(0.0, 1.0)]
    with pytest.raises(InvalidRequestError, match=rf"{field} = fails: raised KeyError: .*test_objective\.py, line \d+"):
        passes_filter(groups[0], config)
        loss_weights(rollout_advantages(groups, config), config)


def test_metrics_that_raise_or_share_a_name_are_refused_by_the_names_of_the_functions() -> None:
    def count(groups: Sequence[Group]) -> dict[str, float]:
        return {"count": float(len(groups))}

    def count_again(groups: Sequence[Group]) -> dict[str, float]:
        return {"count": 0.0}

    def logged(*functions: Any) -> dict[str, float]:
        return custom_metrics([group(0.0, 1.0)], functions)

    assert logged(count)["custom/count"] == 1.0
    with pytest.raises(InvalidRequestError, match=r"metrics = fails: raised KeyError: 'no such item'"):
        logged(fails)
    with pytest.raises(InvalidRequestError, match=r"metrics = count_again: returns 'count', and so does count"):
        logged(count, count_again)


@pytest.mark.parametrize("wrong", [None, "0.5", [1.0], 1 + 2j, np.array(1 + 2j), {}, object()])
def test_a_metric_that_is_no_number_is_refused_by_name(wrong: Any) -> None:
    def odd(groups: Sequence[Group]) -> dict[str, Any]:
        return {"odd": wrong}

    with pytest.raises(InvalidRequestError, match=r"metrics = odd: returned .* for 'odd'.*Return one number"):
        custom_metrics([group(0.0, 1.0)], [odd])


@pytest.mark.parametrize("given", [1, True, np.float32(1), np.array(1.0), torch.ones((), requires_grad=True)])
def test_a_metric_may_be_any_real_number(given: Any) -> None:
    def one(groups: Sequence[Group]) -> dict[str, Any]:
        return {"one": given}

    assert custom_metrics([group(0.0, 1.0)], [one]) == {"custom/one": 1.0}


@pytest.mark.learns
def test_metrics_that_are_not_finite_are_left_out_of_their_step_with_one_warning() -> None:
    calls: list[int] = []

    def lengths(groups: Sequence[Group]) -> dict[str, float]:
        calls.append(1)
        missing = len(calls) > 1
        return {"right": math.nan if missing else 2.0, "worst": -math.inf if missing else 1.0, "calls": len(calls)}

    result = run_grpo(ManyDigits(), SMALL.changed(steps=3, metrics=lengths))
    rows = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    own = [{name: value for name, value in row.items() if name.startswith("custom/")} for row in rows]
    assert own == [{"custom/right": 2, "custom/worst": 1, "custom/calls": 1}, {"custom/calls": 2}, {"custom/calls": 3}]
    (finding,) = [finding for finding in result.findings if finding.code == "custom_metric_not_finite"]
    assert (finding.severity, finding.step) == ("warning", 2)
    assert "custom/right = nan, custom/worst = -inf at step 2" in finding.evidence
    assert "nonfinite_or_skipped_steps" not in finding_codes(result)


def test_a_function_is_recorded_by_its_name() -> None:
    config = RLConfig(advantage=ranks, loss_weighting=partial(short_ones, scale=2.0))
    written = config.model_dump(mode="json")
    assert (written["advantage"], written["loss_weighting"]) == ("function ranks", "function short_ones(scale=2.0)")
    assert config.changed(steps=3).advantage is ranks
    assert function_name(ManyDigits()) == "ManyDigits"


@pytest.mark.learns
def test_a_loss_function_takes_the_steps_of_the_servers_own_loss() -> None:
    """Equal in every step: gradient norm, metrics of the ratio, and rewards of the next step."""

    def steps(config: RLConfig) -> list[dict[str, float]]:
        result = run_grpo(ManyDigits(), config)
        return [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]

    server = steps(SMALL.changed(optim_steps_per_batch=2))
    own = steps(SMALL.changed(optim_steps_per_batch=2, loss_fn=reinforce))
    names = ("reward/mean", "optim/grad_norm", "train/loss", "train/ratio", "train/kl_k3", "train/ess", "train/entropy")
    for one, other in zip(server, own, strict=True):
        assert {name: other[name] for name in names} == pytest.approx({name: one[name] for name in names}, rel=1e-4)
        assert other["mismatch/max_abs_logprob_diff"] == 0


def in_place(logprobs: Any, sampled: Any, advantages: Any, weights: Any) -> Any:
    """The loss of `reinforce`."""
    logprobs -= sampled
    sampled.fill_(7.0)
    return -logprobs.exp() * advantages * weights


def test_a_loss_that_changes_its_tensors_has_the_same_gradient_and_metrics() -> None:
    random = np.random.default_rng(5)
    columns = {name: random.normal(size=6).astype(np.float32) for name in ("logprobs", "advantages", "weights")}
    inputs = {name: TensorData.from_numpy(column) for name, column in columns.items()}
    datum = Datum(
        ModelInput.from_ints([1] * 6), {"target_tokens": TensorData.from_numpy(np.ones(6, np.int64)), **inputs}
    )

    def computed(function: Any) -> tuple[float, Mapping[str, float], list[float]]:
        row = torch.tensor(columns["logprobs"] + 0.25, requires_grad=True)
        loss, metrics = custom_loss(function)([datum], [row])
        loss.backward()
        assert row.grad is not None
        return float(loss.detach()), metrics, row.grad.tolist()

    loss, metrics, slope = computed(in_place)
    expected = computed(reinforce)
    assert (loss, slope) == (pytest.approx(expected[0]), pytest.approx(expected[2]))
    assert metrics == expected[1]
    assert metrics["abs_logprob_diff:mean"] == pytest.approx(0.25, rel=1e-6)


def only_the_right(rollout: Rollout, advantage: float) -> float:
    return float(advantage > 0)


def none_of_them(group: Group) -> bool:
    return False


def first_item(group: Group) -> bool:
    return group.index == 0


def finding_codes(result: Any) -> set[str]:
    return {finding.code for finding in result.findings}


@pytest.mark.learns
def test_training_on_the_right_answers_alone_is_no_mistake() -> None:
    large = SMALL.changed(steps=3, batch_size=8, group_size=8, loss_weighting=only_the_right)
    result = run_grpo(ManyDigits(), large)
    assert finding_codes(result).isdisjoint({"masked_loss", "server_warnings", "nothing_trained"}), result.findings


@pytest.mark.learns
def test_groups_that_a_filter_leaves_out_are_not_counted_as_used() -> None:
    result = run_grpo(ManyDigits(), SMALL.changed(steps=1, group_filter=first_item, group_size=8))
    (row,) = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert (row["groups/total"], row["groups/used"], row["groups/untrained"]) == (3, 1, 1)


@pytest.mark.learns
def test_a_filter_that_refuses_every_group_is_a_finding_by_its_name() -> None:
    result = run_grpo(ManyDigits(), SMALL.changed(steps=4, group_filter=none_of_them))
    (finding,) = [finding for finding in result.findings if finding.code == "nothing_trained"]
    assert (finding.severity, finding.step) == ("error", 3)
    assert "group_filter (function none_of_them)" in finding.remedy
    assert not any(code.startswith("no_learning_signal") for code in finding_codes(result))


@pytest.mark.learns
def test_a_filter_is_called_once_when_groups_are_collected_and_once_when_they_are_trained() -> None:
    seen: list[Rollout] = []

    def refuses_three(group: Group) -> bool:
        seen.append(group.rollouts[0])
        return len(seen) > 3

    run_grpo(ManyDigits(), SMALL.changed(steps=1, group_filter=refuses_three, dynamic_sampling=True, max_refill=9.0))
    times = [sum(one is other for other in seen) for one in seen]
    assert times[:3] == [1, 1, 1], "the refused groups were replaced"
    assert times[3:] == [2] * 6


def constant(logprobs: Any, sampled: Any, advantages: Any, weights: Any) -> Any:
    return torch.ones(())


@pytest.mark.learns
def test_a_loss_that_does_not_depend_on_the_policy_is_refused_by_its_name() -> None:
    with pytest.raises(InvalidRequestError, match=r"loss_fn = constant: returned a value that does not depend"):
        run_grpo(ManyDigits(), SMALL.changed(loss_fn=constant))


@pytest.mark.learns
def test_a_run_with_functions_is_resumed_only_with_functions_of_the_same_names(tmp_path: Path) -> None:
    config = SMALL.changed(
        run_dir=tmp_path, advantage=ranks, loss_weighting=short_ones, group_filter=positive, metrics=(spread,)
    )
    result = run_grpo(ManyDigits(), config)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert all(row["custom/spread"] == pytest.approx(row["reward/max"] - row["reward/min"]) for row in rows)
    with pytest.raises(InvalidRequestError, match=r"another value of `advantage`: function ranks, not center"):
        run_grpo(ManyDigits(), config.changed(advantage="center"), resume=True)
    with pytest.raises(InvalidRequestError, match=r"function ranks, not function nan"):
        run_grpo(ManyDigits(), config.changed(advantage=nan), resume=True)
    assert run_grpo(ManyDigits(), config, resume=True).state_digest == result.state_digest
    with open_task_of_run(tmp_path, "sums") as choice:
        assert (choice.config.advantage, choice.config.max_tokens) == ("center", 6)


def undecided(group: Group) -> None:
    """As a filter whose author forgot to return something."""


def nothing(rollout: Rollout, advantage: float) -> float:
    return 0.0


def test_a_filter_that_decides_nothing_is_refused_by_name() -> None:
    config = SMALL.changed(group_filter=undecided)
    with pytest.raises(InvalidRequestError, match=r"RLConfig.group_filter = undecided: returned None"):
        passes_filter(group(0.0, 1.0), config)


@pytest.mark.parametrize("kept", [True, 1, np.True_, torch.tensor(True), np.array(1.0)])
def test_a_filter_may_return_any_truth_value(kept: Any) -> None:
    def keeps(group: Group) -> Any:
        return kept

    def drops(group: Group) -> Any:
        return kept * 0

    assert passes_filter(group(0.0, 1.0), SMALL.changed(group_filter=keeps))
    assert not passes_filter(group(0.0, 1.0), SMALL.changed(group_filter=drops))


@pytest.mark.parametrize("wrong", [2, 0.5, math.nan, "yes", [True]])
def test_a_filter_that_returns_another_number_is_refused(wrong: Any) -> None:
    def odd(group: Group) -> Any:
        return wrong

    with pytest.raises(InvalidRequestError, match=r"group_filter = odd: returned .*Return True"):
        passes_filter(group(0.0, 1.0), SMALL.changed(group_filter=odd))


def test_a_weighting_that_leaves_nothing_takes_no_step() -> None:
    result = run_grpo(ManyDigits(), SMALL.changed(loss_weighting=nothing))
    steps = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [step["datums"] for step in steps] == [0, 0]
