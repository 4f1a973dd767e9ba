"""Rewards, environments and judges run at once: none waits for what it does not need, and results keep their order."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from scripted_policy import roll_out, says, tiny_tokenizer

from mint.recipes.math import DEMO
from mint.rl import (
    Message,
    MessageEnv,
    MessageEnvAdapter,
    MessageStepResult,
    Reward,
    RLAdapter,
    RunResult,
    ToolEnv,
    UnsupportedError,
    mixture,
    run_grpo,
    tool,
)
from mint.rl.calls.call_pool import CallPool
from mint.rl.calls.own_thread import run_in_own_thread
from mint.rl.calls.retries import Retries
from mint.rl.rollout import Group, GroupRequest
from mint.rl.rollouts.completions import roll_out_completions
from mint.rl.rollouts.grading import Grader
from mint.types import ModelInput, SampledSequence, SampleResponse, SamplingParams

PATIENCE_S = 20.0
"""Far more than any of these tests takes; what waits for something that never comes fails after it."""


class Words(RLAdapter):
    """The prompt of item n is the token n; the reward is the number of letters over 100."""

    def build_dataset(self) -> Sequence[int]:
        return [1, 2, 3, 4]

    def make_prompt(self, item: int, tokenizer: Any) -> list[int]:
        return [item]

    def compute_reward(self, response: str, item: int) -> Any:
        return len(response) / 100


class Sampler:
    """Answers each prompt with its own ids, once that prompt's event is set."""

    def __init__(self, prompts: int) -> None:
        self.may_answer = {prompt: threading.Event() for prompt in range(1, prompts + 1)}

    def sample(self, prompt: ModelInput, num_samples: int, params: SamplingParams) -> _Later:
        (item,) = prompt.to_ints()
        future: Future[SampleResponse] = Future()

        def answer() -> None:
            assert self.may_answer[item].wait(PATIENCE_S)
            tokens = [[40 + item, 50 + place] for place in range(num_samples)]
            sequences = [SampledSequence(tokens=one, logprobs=[-1.0, -1.0], stop_reason="stop") for one in tokens]
            future.set_result(SampleResponse(sequences=sequences))

        threading.Thread(target=answer, daemon=True).start()
        return _Later(future)


class _Later:
    def __init__(self, future: Future[SampleResponse]) -> None:
        self.future = future

    def __await__(self) -> Generator[Any, None, SampleResponse]:
        return asyncio.wrap_future(self.future).__await__()


def grade_all(
    adapter: RLAdapter, sampler: Sampler, *, groups: int, group_size: int, retries: Retries | None = None
) -> list[Group]:
    requests = [GroupRequest(item, item - 1, SamplingParams(max_tokens=2, seed=0)) for item in range(1, groups + 1)]
    with closing(CallPool(timeout_s=PATIENCE_S)) as calls:
        return run_in_own_thread(
            roll_out_completions(
                sampler,  # ty: ignore[invalid-argument-type]
                Grader(adapter, calls, retries),
                requests,
                [[request.item] for request in requests],
                tokenizer=tiny_tokenizer(),
                group_size=group_size,
                policy_step=0,
                grade_alone=False,
            )
        )


def ready(groups: int) -> Sampler:
    sampler = Sampler(groups)
    for event in sampler.may_answer.values():
        event.set()
    return sampler


def test_all_async_rewards_of_a_batch_are_in_flight_at_once() -> None:
    met = asyncio.Barrier(128)

    class Meets(Words):
        async def compute_reward(self, response: str, item: int) -> float:
            async with asyncio.timeout(PATIENCE_S / 2):
                await met.wait()  # only goes on once 128 have come
            return item / 10

    found = grade_all(Meets(), ready(8), groups=8, group_size=16)
    assert [group.rewards for group in found] == [[item / 10] * 16 for item in range(1, 9)]


def test_a_group_is_graded_while_another_is_still_sampled() -> None:
    sampler = Sampler(2)
    sampler.may_answer[2].set()

    class Frees(Words):
        async def compute_reward(self, response: str, item: int) -> float:
            sampler.may_answer[1].set()
            return float(item)

    first, second = grade_all(Frees(), sampler, groups=2, group_size=2)
    assert (first.rewards, second.rewards) == ([1.0, 1.0], [2.0, 2.0])
    assert first.times is not None
    assert second.times is not None
    assert second.times.sampling[1] <= first.times.sampling[1]


def test_a_batch_reward_sees_all_completions_once_and_in_order() -> None:
    seen: list[Any] = []

    class Batch(Words):
        async def compute_batch_rewards(self, responses: Sequence[Sequence[str]], items: Sequence[Any]) -> Any:
            seen.append((responses, items))
            return [
                [len(items) * item + place for place in range(len(one))]
                for one, item in zip(responses, items, strict=True)
            ]

    found = grade_all(Batch(), ready(3), groups=3, group_size=2)
    assert [group.rewards for group in found] == [[3.0, 4.0], [6.0, 7.0], [9.0, 10.0]]
    [(responses, items)] = seen
    assert (items, [len(one) for one in responses]) == ([1, 2, 3], [2, 2, 2])
    assert [list(one) for one in responses] == [[rollout.text for rollout in group.rollouts] for group in found]


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (RuntimeError("away"), "RuntimeError: away"),
        ([[1.0, 1.0]], "RewardError: Batch returned 1 groups for 2"),
        ([[1.0], [1.0, 1.0]], "RewardError: Batch returned 1 rewards for 2"),
    ],
)
def test_a_batch_reward_that_fails_says_why_and_one_that_passes_leaves_it_to_the_others(
    answer: Any, error: str
) -> None:
    class Batch(Words):
        def compute_batch_rewards(self, responses: Sequence[Sequence[str]], items: Sequence[Any]) -> Any:
            if isinstance(answer, Exception):
                raise answer
            return answer

    failed = grade_all(Batch(), ready(2), groups=2, group_size=2)
    assert (failed[0].rollouts[0].error or "").startswith(error)

    class Passes(Words):
        def compute_batch_rewards(self, responses: Sequence[Sequence[str]], items: Sequence[Any]) -> Any:
            return None

    passed, plain = (grade_all(task, ready(2), groups=2, group_size=2) for task in (Passes(), Words()))
    assert [group.rewards for group in passed] == [group.rewards for group in plain]


def test_a_grader_that_fails_is_asked_again_unless_it_cannot_judge() -> None:
    asked: dict[int, int] = {}
    lock = threading.Lock()

    class Flaky(Words):
        def compute_reward(self, response: str, item: int) -> float:
            with lock:
                asked[item] = asked.get(item, 0) + 1
            if item == 3:
                raise UnsupportedError("not here")
            if asked[item] <= item:
                raise ConnectionError(f"failure {asked[item]}")
            return float(item)

    found = grade_all(Flaky(), ready(3), groups=3, group_size=1, retries=Retries(1, 0.0))
    (once,), (given_up,), (unsupported,) = (group.rollouts for group in found)
    assert (once.reward, once.grader_retries) == (1.0, 1)
    assert (given_up.reward, given_up.error, given_up.grader_retries) == (None, "ConnectionError: failure 2", 1)
    assert (unsupported.unsupported, asked[3]) == (True, 1)


# --- episodes -----------------------------------------------------------------------------------------------------


def test_an_episode_goes_on_while_the_environment_of_another_is_slow() -> None:
    done = threading.Event()

    class Env(MessageEnv):
        def __init__(self, slow: bool) -> None:
            self.slow = slow
            self.steps = 0

        def initial_observation(self) -> Sequence[Message]:
            return [{"role": "user", "content": "Count."}]

        async def step(self, message: Message) -> MessageStepResult:  # type: ignore[override]
            self.steps += 1
            if self.slow and self.steps == 1:  # its first turn lasts until the other episode is over
                assert await asyncio.to_thread(done.wait, PATIENCE_S)
            if self.steps < 3:
                return MessageStepResult(0.0, episode_done=False, next_messages=[{"role": "user", "content": "Next."}])
            if not self.slow:
                done.set()
            return MessageStepResult(1.0)

    class Task(MessageEnvAdapter):
        def build_dataset(self) -> Sequence[bool]:
            return [True, False]

        def make_env(self, item: bool) -> Env:
            return Env(item)

    slow, quick = roll_out(says("one", "two", "three"), Task(), items=(True, False))
    assert [group.rollouts[0].text for group in (slow, quick)] == ["one\ntwo\nthree"] * 2
    assert [group.rewards for group in (slow, quick)] == [[1.0], [1.0]]


def test_async_tools_of_many_episodes_are_in_flight_at_once() -> None:
    met = asyncio.Barrier(32)

    @tool
    async def meet(name: str) -> str:
        """Wait until all have come."""
        await met.wait()
        return name

    def all_met(text: str, results: Sequence[Message]) -> float:
        return float(all(result["trace"]["ok"] for result in results))

    class Task(MessageEnvAdapter):
        def build_dataset(self) -> Sequence[int]:
            return [1]

        def make_env(self, item: int) -> ToolEnv:
            opening = [{"role": "user", "content": "Meet."}]
            return ToolEnv(opening, [meet], all_met, tool_timeout_s=PATIENCE_S / 2)

    policy = says('<tool_call>{"name": "meet", "arguments": {"name": "a"}}</tool_call>', "done")
    groups = roll_out(policy, Task(), items=range(8), group_size=4)
    assert [group.rewards for group in groups] == [[1.0] * 4] * 8


# --- calls --------------------------------------------------------------------------------------------------------


def test_async_calls_in_flight_are_bounded() -> None:
    now = most = 0

    async def counted() -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.001)
        now -= 1

    with closing(CallPool(timeout_s=PATIENCE_S, in_flight=5)) as calls:
        calls.run([counted] * 40)
    assert most == 5


def test_an_async_function_that_blocks_its_event_loop_holds_up_none_of_those_that_wait() -> None:
    release = threading.Event()

    async def blocks() -> None:
        release.wait()

    async def answers() -> int:
        await asyncio.sleep(0)
        return 7

    with closing(CallPool(timeout_s=0.2, in_flight=1)) as calls:
        blocked, *others = calls.run([blocks, answers, answers])
        assert blocked.timed_out
        assert [other.value for other in others] == [7, 7]
        release.set()


def test_calls_work_where_an_event_loop_runs_already() -> None:
    async def in_a_notebook() -> list[Any]:
        with closing(CallPool(timeout_s=PATIENCE_S)) as calls:
            return [result.value for result in calls.run([lambda: 1, lambda: 2])]

    assert asyncio.run(in_a_notebook()) == [1, 2]


def test_a_function_that_ends_its_thread_costs_its_own_call() -> None:
    def leaves() -> None:
        raise SystemExit(3)

    async def leaves_later() -> None:
        raise SystemExit(4)

    with closing(CallPool(timeout_s=PATIENCE_S, threads=1)) as calls:
        results = calls.run([leaves, leaves_later, lambda: 5])
    assert [result.failure for result in results] == ["SystemExit: 3", "SystemExit: 4", None]


# --- a run --------------------------------------------------------------------------------------------------------


class Jitter(RLAdapter):
    """Rewards digits, after a time that differs from run to run."""

    def __init__(self, delays: Sequence[float]) -> None:
        self.delays = delays
        self.calls = 0

    def build_dataset(self) -> Sequence[str]:
        return [f"{one} + {one}" for one in range(1, 9)]

    def make_prompt(self, item: str, tokenizer: Any) -> list[int]:
        return tokenizer.encode(f"Q: What is {item}?\nA:")

    async def compute_reward(self, response: str, item: str) -> float:
        self.calls += 1
        await asyncio.sleep(self.delays[self.calls % len(self.delays)])
        return sum(character.isdigit() for character in response) / 16


def test_a_call_that_grades_many_counts_its_failures_once() -> None:
    class Batches(Words):
        calls = 0

        def compute_batch_rewards(self, responses: Any, items: Any) -> Any:
            self.calls += 1
            if self.calls < 3:
                raise ConnectionError("later")
            return [[1.0] * len(own) for own in responses]

    class Groups(Words):
        calls = 0

        def compute_group_rewards(self, responses: Any, item: Any) -> Any:
            self.calls += 1
            if self.calls < 3:
                raise ConnectionError("later")
            return [1.0] * len(responses)

    for adapter, groups in ((Batches(), 4), (Groups(), 1)):
        found = grade_all(adapter, ready(groups), groups=groups, group_size=8, retries=Retries(3, 0.0))
        assert [group.rewards for group in found] == [[1.0] * 8] * groups
        assert sum(rollout.grader_retries for group in found for rollout in group.rollouts) == 2


def logged(result: RunResult, name: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (result.run_dir / name).read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.startswith("time/")} for line in lines]


def test_the_order_in_which_rewards_arrive_changes_no_bit_of_a_run(tmp_path: Path) -> None:
    config = DEMO.changed(steps=2, batch_size=4, group_size=4, heldout_size=0)
    one = run_grpo(Jitter([0.0, 0.02, 0.005]), config.changed(run_dir=tmp_path / "one"))
    other = run_grpo(Jitter([0.03, 0.0]), config.changed(run_dir=tmp_path / "other", grader_concurrency=3))
    assert one.state_digest == other.state_digest is not None
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        assert logged(one, name) == logged(other, name)
    timeline = logged(one, "timeline.jsonl")
    assert [(row["step"], row["group"]) for row in timeline] == [(step, group) for step in (1, 2) for group in range(4)]
    assert all(row["sampling"][0] <= row["sampling"][1] <= row["grading"][1] for row in timeline)
    metrics = [json.loads(line) for line in (one.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert all(row["time/grader_max_s"] >= row["time/grader_mean_s"] > 0 for row in metrics)


def test_the_cost_that_graders_report_is_added_up(tmp_path: Path) -> None:
    class Costly(Jitter):
        async def compute_reward(self, response: str, item: str) -> Reward:  # type: ignore[override]
            return Reward(len(response) / 100, info={"cost": 0.25})

    config = DEMO.changed(steps=1, batch_size=2, group_size=4, heldout_size=0, run_dir=tmp_path)
    result = run_grpo(Costly([0.0]), config)
    assert logged(result, "metrics.jsonl")[0]["grader/cost"] == 2.0


def test_each_of_several_graders_has_its_own_time_and_cost_in_the_log(tmp_path: Path) -> None:
    class Costly(Jitter):
        async def compute_reward(self, response: str, item: str) -> Reward:  # type: ignore[override]
            length = len(response) / 100
            return Reward(length, info={"cost": 0.25}, grader_seconds={"format": 0.5, "judge": 2.0})

    class Free(Jitter):
        async def compute_reward(self, response: str, item: str) -> float:
            await asyncio.sleep(0.05)
            return len(response) / 100

    config = DEMO.changed(steps=1, batch_size=2, group_size=4, heldout_size=0, run_dir=tmp_path)
    result = run_grpo(mixture({"costly": Costly([0.0]), "free": Free([0.0])}), config)
    row = json.loads((result.run_dir / "metrics.jsonl").read_text())
    assert (row["time/grader/format_mean_s"], row["time/grader/judge_mean_s"]) == (0.5, 2.0)
    assert row["time/category/free/grader_mean_s"] >= 0.05
    assert row["category/costly/grader_cost"] == row["grader/cost"] == 1.0
    assert "category/free/grader_cost" not in row
