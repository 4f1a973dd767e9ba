"""Mixtures of tasks: shares by weight, every item graded by its own task, readings for each task."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from typing import Any, cast

import numpy as np
import pytest
from scripted_policy import roll_out, says, tiny_tokenizer

from mint.errors import InvalidRequestError
from mint.rl import MessageEnv, MessageEnvAdapter, RLAdapter, RLConfig, Task, mixture, run_grpo
from mint.rl.message_env import Message, MessageStepResult
from mint.rl.rollout import GroupRequest
from mint.rl.rollouts.grading import Grade, Grader
from mint.rl.rollouts.rollout_worker import RolloutWorker, open_calls
from mint.rl.rollouts.swapping_sampler import PolicySampler
from mint.rl.tasks.mixture import MixedItem
from mint.types import SamplingParams


class Digits(RLAdapter):
    """Rewards one digit; its items are the numbers below `count`."""

    reward_range = (0.0, 1.0)

    def __init__(self, digit: str, count: int) -> None:
        self.digit, self.count, self.closed = digit, count, False

    def build_dataset(self) -> Sequence[int]:
        return range(self.count)

    def build_heldout(self) -> Sequence[int]:
        return range(1000, 1003)

    def make_prompt(self, item: int, tokenizer: Any) -> list[int]:
        return tokenizer.encode(f"Q: What is {item} + {self.digit}?\nA:")

    def compute_reward(self, response: str, item: int) -> float:
        return min(1.0, response.count(self.digit) / 4)

    def close(self) -> None:
        self.closed = True


class Says(MessageEnvAdapter):
    """One turn; the reward is whether the reply has the item."""

    def build_dataset(self) -> Sequence[str]:
        return ["yes"]

    def make_env(self, item: str) -> MessageEnv:
        class Once(MessageEnv):
            def initial_observation(self) -> Sequence[Message]:
                return [{"role": "user", "content": "?"}]

            def step(self, message: Message) -> MessageStepResult:
                return MessageStepResult(float(item in message["content"]))

        return Once()


class ToldToSay(Says):
    """As `Says`, over several numbers."""

    def build_dataset(self) -> Sequence[str]:
        return list("0123456789")


CONFIG = RLConfig(base_model="mint/tiny", max_tokens=6, learning_rate=2e-3, print_progress=False)


def test_an_epoch_has_the_shares_of_the_weights_and_every_item_of_a_task() -> None:
    mixed = mixture({"ones": Digits("1", 30), "twos": Digits("2", 7)}, weights={"ones": 3.0}, seed=4)
    items = mixed.build_dataset()
    counts = Counter(item.task for item in items)
    assert counts == {"ones": 30, "twos": 10}
    assert sorted(item.item for item in items if item.task == "ones") == list(range(30))
    repeated = Counter(item.item for item in items if item.task == "twos")
    assert len(repeated) == 7, "a whole round before any item comes twice"
    assert [str(item) for item in items] == [str(item) for item in mixed.build_dataset()]


def test_a_weight_of_zero_leaves_a_task_to_the_heldout_set() -> None:
    mixed = mixture({"ones": Digits("1", 5), "twos": Digits("2", 5)}, weights={"twos": 0})
    assert {item.task for item in mixed.build_dataset()} == {"ones"}
    assert [item.task for item in mixed.build_heldout()] == ["ones", "twos"] * 3
    assert len({mixed.item_key(item) for item in mixed.build_heldout()}) == 6, "equal items of two tasks differ"


class Batches(Digits):
    """Grades whole batches."""

    def compute_batch_rewards(self, responses: Sequence[Sequence[str]], items: Sequence[Any]) -> list[list[float]]:
        return [[0.0] * len(each) for each in responses]


class Scaled(Digits):
    """A success earns 10; the reward is ten times that of `Digits`."""

    success_reward = 10.0
    reward_range = (0.0, 10.0)

    def compute_reward(self, response: str, item: int) -> float:
        return 10 * super().compute_reward(response, item)


@pytest.mark.parametrize(
    ("tasks", "weights", "refusal"),
    [
        ({}, {}, r"mixture\.tasks = .*has no tasks"),
        ({"a": Digits("1", 2), "b": object()}, {}, "adapter = object: has no build_dataset"),
        ({"a": Batches("1", 2)}, {}, "grades whole batches"),
        ({"a": Digits("1", 2)}, {"b": 1.0}, r"weights = .*'b'.*The tasks are a"),
        ({"a": Digits("1", 2)}, {"a": 0.0}, "not all 0"),
        ({"a": Digits("1", 2)}, {"a": -1.0}, "at least 0"),
        ({"a": Digits("1", 2)}, {"a": "x"}, r"weights = .*'x'.*must be numbers of at least 0"),
        ({"": Digits("1", 2)}, {}, r"mixture\.tasks = '': has a task without a name"),
    ],
)
def test_a_mixture_that_cannot_work_is_refused(tasks: dict[str, Task], weights: dict[str, float], refusal: str) -> None:
    with pytest.raises(InvalidRequestError, match=refusal):
        mixture(tasks, weights=weights)


def test_tasks_of_many_turns_are_mixed_too() -> None:
    mixed = mixture({"a": Says(), "b": Says()})
    assert isinstance(mixed, MessageEnvAdapter)
    items = list(mixed.build_dataset())
    groups = roll_out(says("yes"), mixed, items=items)
    assert [(group.item.task, group.rewards) for group in groups] == [("a", [1.0]), ("b", [1.0])]


def test_tasks_of_one_turn_and_of_many_are_rolled_out_each_in_its_own_way() -> None:
    ones, says_yes = Digits("1", 2), Says()
    mixed = mixture({"ones": ones, "says": says_yes})
    items = list(mixed.build_dataset())
    policy, tokenizer = says("yes 11"), tiny_tokenizer()
    with closing(open_calls(CONFIG)) as calls:
        worker = RolloutWorker(mixed, config=CONFIG, tokenizer=tokenizer, calls=calls)
        requests = [GroupRequest(item, place, SamplingParams(max_tokens=16)) for place, item in enumerate(items)]
        groups = worker.roll_out(cast("PolicySampler", policy), requests, group_size=2)
    assert [str(group.item) for group in groups] == [str(item) for item in items], "in the order of the requests"
    for group in groups:
        assert group.error is None and len(group.rollouts) == 2
        if group.item.task == "ones":
            assert group.prompt == ones.make_prompt(group.item.item, tokenizer), "its own prompt, without a template"
            assert group.rewards == [0.5, 0.5] and group.rollouts[0].stop_reason == "stop"
        else:
            assert group.rewards == [1.0, 1.0] and group.rollouts[0].stop_reason == "env"


def test_each_task_keeps_its_own_success_and_its_own_range() -> None:
    mixed = mixture({"small": Digits("1", 1), "large": Scaled("1", 1)})
    small, large = (MixedItem(name, 0) for name in ("small", "large"))
    assert [mixed.task_of(small).is_success(1.0), mixed.task_of(large).is_success(1.0)] == [True, False]
    assert [mixed.task_of(small).solved_share(0.5), mixed.task_of(large).solved_share(5.0)] == [0.5, 0.5]
    nested = mixture({"inner": mixed})
    assert nested.task_of(MixedItem("inner", large)).success_reward == 10.0
    with closing(open_calls(CONFIG)) as calls:

        async def graded() -> list[Grade]:
            return await Grader(cast("RLAdapter", mixed), calls).one_by_one([("11", large), ("1111", small)])

        assert [grade.reward for grade in asyncio.run(graded())] == [5.0, 1.0]
        mixed.tasks["small"].reward_range = (0.0, 0.5)
        assert "outside its declared range [0, 0.5]" in str(asyncio.run(graded())[1].error)


def test_a_tiny_weight_does_not_repeat_the_other_task_without_end() -> None:
    items = mixture({"rare": Digits("1", 50), "often": Digits("2", 50)}, weights={"rare": 1e-9}).build_dataset()
    counts = Counter(item.task for item in items)
    assert counts == {"rare": 1, "often": 100 * 100}


@pytest.mark.learns
def test_a_run_on_mixed_turns_and_scales_reads_each_task_by_its_own_success() -> None:
    tasks = {"small": Digits("1", 8), "large": Scaled("2", 8), "says": ToldToSay()}
    config = CONFIG.changed(steps=2, batch_size=9, advantage="std")
    result = run_grpo(mixture(tasks), config)
    steps = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    rollouts = [json.loads(line) for line in (result.run_dir / "rollouts.jsonl").read_text().splitlines()]
    full = {"small": 1.0, "large": 10.0, "says": 1.0}
    for row in steps:
        rewards = {name: [] for name in full}
        for one in rollouts:
            if one["step"] == row["step"]:
                rewards[one["sample"].split(":")[0]].append(one["reward"])
        solved = {name: [reward >= full[name] for reward in own] for name, own in rewards.items()}
        assert all(rewards.values())
        for name in full:
            assert row[f"category/{name}/reward"] == pytest.approx(np.mean(rewards[name]))
            assert row[f"category/{name}/success"] == pytest.approx(np.mean(solved[name]))
        assert row["success/rate"] == pytest.approx(np.mean([flag for own in solved.values() for flag in own]))
    after = result.heldout_after[1.0].categories
    assert after.keys() == {"small", "large"}, "`says` holds out nothing"
    assert 0 <= after["small"]["low"] <= after["small"]["high"] <= 1.0
    assert after["large"]["high"] > 1.0 or after["large"]["mean"] == 0.0


@pytest.mark.learns
def test_each_task_has_its_own_reward_success_and_heldout_estimate() -> None:
    ones, twos = Digits("1", 8), Digits("2", 8)
    config = RLConfig(
        base_model="mint/tiny", steps=2, batch_size=6, max_tokens=6, learning_rate=2e-3, print_progress=False
    )
    result = run_grpo(mixture({"ones": ones, "twos": twos}), config)
    assert ones.closed and twos.closed
    assert result.run_dir.name.startswith("mixture-")
    steps = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    rollouts = [json.loads(line) for line in (result.run_dir / "rollouts.jsonl").read_text().splitlines()]
    for row in steps:
        for name in ("ones", "twos"):
            own = [each for each in rollouts if each["step"] == row["step"] and each["sample"].startswith(name)]
            assert row[f"category/{name}/reward"] == pytest.approx(np.mean([each["reward"] for each in own]))
            assert row[f"category/{name}/groups"] == len(own) / 4
    (after,) = [result.heldout_after[temperature] for temperature in (1.0,)]
    assert {name: numbers["n"] for name, numbers in after.categories.items()} == {"ones": 3.0, "twos": 3.0}
    assert np.mean([numbers["mean"] for numbers in after.categories.values()]) == pytest.approx(after.mean)


def test_items_that_a_small_weight_leaves_out_are_named(caplog: pytest.LogCaptureFixture) -> None:
    task = mixture({"many": Digits("7", 1000), "few": Digits("3", 400)}, weights={"many": 10_000})
    items = task.build_dataset()
    left = 400 - sum(item.task == "few" for item in items)
    assert left > 0
    assert f"leaves out {left} of the 400 items of few" in caplog.text


def test_a_mixture_refuses_tasks_without_names_and_classes() -> None:
    with pytest.raises(InvalidRequestError, match=r"mixture\.tasks = list: gives the tasks no names.*Give a dict"):
        mixture([Digits("3", 3)])  # ty: ignore[invalid-argument-type]
    with pytest.raises(InvalidRequestError, match=r"adapter = Digits: is a class.*Make one: Digits\(\)"):
        mixture({"digits": Digits})  # ty: ignore[invalid-argument-type]
