"""An environment with tools: it answers the policy's tool calls, grades its final text, and subtracts costs."""

from __future__ import annotations

import asyncio
import inspect
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from mint.errors import InvalidRequestError
from mint.rl.adapter import Graded
from mint.rl.calls.call_pool import CallPool
from mint.rl.calls.user_call import CallResult, timed_out
from mint.rl.message_env import WRITTEN_AS, Message, MessageEnv, MessageStepResult
from mint.rl.reward import Reward, RewardRange
from mint.rl.tasks.chat_format import NOT_RENDERED
from mint.rl.tasks.tool_calls import Tool, ToolError, as_text
from mint.types.tool_call_formats import ToolCall, read_reply, with_ids

Grader = Callable[[str, Sequence[Message]], Graded | Awaitable[Graded]]
"""(final text, tool results so far) → the outcome. A result's `trace` holds tool, arguments, ok and ms."""


@dataclass(frozen=True)
class Costs:
    """Costs per tool call, per message of the policy, and per violation of the rules.

    The costs of an episode are limited to `at_most`, so that its reward stays within `range_of` the outcome.
    """

    per_call: float = 0.0
    per_step: float = 0.0
    per_violation: float = 0.0
    at_most: float = 1.0

    def range_of(self, outcome: RewardRange) -> RewardRange:
        """The range of the outcome minus costs, for `reward_range`."""
        return outcome[0] - self.at_most, outcome[1]


class ToolEnv(MessageEnv):
    """A conversation with tools and a grade for the final text, which is the first message without a tool call.

    An unknown tool, bad arguments, a malformed call or a forbidden pattern is a violation: the metrics count it, it
    has a cost, and the policy reads it as the result of its call. A tool that raises or hangs is no violation; the
    policy reads the error.
    """

    def __init__(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        grade: Grader,
        *,
        costs: Costs | None = None,
        forbidden: Sequence[str] = (),
        tool_timeout_s: float = 5.0,
        describe_tools: bool = True,
    ) -> None:
        """`forbidden` are regular expressions that no message of the policy may match. Without `describe_tools`, the
        chat template does not get the tools; then the messages should describe them."""
        self._messages = list(messages)
        self._grade = grade
        self._timeout_s = tool_timeout_s
        self._tools = {each.name: each for each in tools}
        if len(self._tools) < len(tools):
            names = [each.name for each in tools]
            raise InvalidRequestError("are not distinct", field="tools", value=names, remedy="Rename one of them")
        self._costs = costs or Costs()
        self._charged = 0.0
        self._forbidden = [re.compile(pattern) for pattern in forbidden]
        self._results: list[Message] = []
        self.tools = [each.schema for each in tools] if describe_tools else ()

    def initial_observation(self) -> Sequence[Message]:
        """The opening messages."""
        return self._messages

    def step(self, message: Message) -> MessageStepResult | Awaitable[MessageStepResult]:
        """Answers the tool calls in the message, or grades it as the final text."""
        content = message["content"]
        violations = Counter(forbidden=sum(1 for pattern in self._forbidden if pattern.search(content)))
        reply = read_reply(content, message.get(WRITTEN_AS, "hermes"), self._tools)
        calls = with_ids(reply.calls, len(self._results))
        if calls and any(self._is_async(call) for call in calls):
            return self._answer_later(calls, violations)
        if calls:
            return self._answered(calls, self._answer(calls, violations), violations)
        graded = self._grade(reply.text, tuple(self._results))
        if inspect.isawaitable(graded):
            return self._finish_later(graded, violations)
        return self._result(violations, outcome=_outcome(graded))

    async def _finish_later(self, graded: Awaitable[Graded], violations: Counter[str]) -> MessageStepResult:
        return self._result(violations, outcome=_outcome(await graded))

    def _is_async(self, call: ToolCall) -> bool:
        return call.name in self._tools and inspect.iscoroutinefunction(self._tools[call.name].function)

    def _answer(self, calls: Sequence[ToolCall], violations: Counter[str]) -> list[Message]:
        """Answers calls of plain functions, in order."""
        pool = CallPool(timeout_s=self._timeout_s, threads=1)
        try:
            return [
                self._reply(call, pool.run([self._run(call)])[0] if self._can_run(call) else None, violations)
                for call in calls
            ]
        finally:
            pool.close()

    async def _answer_later(self, calls: Sequence[ToolCall], violations: Counter[str]) -> MessageStepResult:
        """Answers calls of which one is `async`, in order, without blocking the event loop."""
        with closing(CallPool(timeout_s=self._timeout_s, threads=1)) as pool:
            replies = []
            for call in calls:
                if not self._can_run(call):
                    answer = None
                elif self._is_async(call):
                    answer = await self._await_tool(call)
                else:
                    answer = await pool.call(self._run(call))
                replies.append(self._reply(call, answer, violations))
        return self._answered(calls, replies, violations)

    def _answered(
        self, calls: Sequence[ToolCall], replies: Sequence[Message], violations: Counter[str]
    ) -> MessageStepResult:
        self._results += replies
        return self._result(violations, calls=len(calls), following=replies)

    def _can_run(self, call: ToolCall) -> bool:
        return call.error is None and call.name in self._tools

    def _run(self, call: ToolCall) -> Callable[[], Any]:
        """The call of the tool's function, which may return an awaitable."""
        tool = self._tools[call.name]
        arguments = tool.typed(call.arguments or {}) if call.as_texts else call.arguments or {}
        return lambda: tool.call(arguments)

    async def _await_tool(self, call: ToolCall) -> CallResult:
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._timeout_s):
                return CallResult(await self._run(call)(), seconds=time.monotonic() - began)
        except TimeoutError:
            return timed_out(self._timeout_s)
        except Exception as error:  # noqa: BLE001 - the boundary to the user's tool: the policy reads its error
            return CallResult(error=error, seconds=time.monotonic() - began)

    def _reply(self, call: ToolCall, answer: CallResult | None, violations: Counter[str]) -> Message:
        """What the policy reads: the tool's result, or what was wrong. `answer` is None for a call that cannot run."""
        if answer is None and call.error is not None:
            violations["malformed_call"] += 1
            problem: str | None = call.error
        elif answer is None:
            violations["unknown_tool"] += 1
            problem = f"there is no tool {call.name!r}; there is {', '.join(self._tools)}"
        elif isinstance(answer.error, ToolError):
            violations["bad_arguments"] += 1
            problem = str(answer.error)
        else:
            violations["tool_failures"] += answer.error is not None
            problem = answer.failure
        facts = {
            "tool": call.name,
            "arguments": dict(call.arguments or {}),
            "ok": problem is None,
            "ms": round(1000 * (0.0 if answer is None else answer.seconds), 3),
        }
        content = as_text(None if answer is None else answer.value) if problem is None else f"error: {problem}"
        name = call.name or "unknown"
        return {"role": "tool", "name": name, "tool_call_id": call.id, "content": content, NOT_RENDERED: facts}

    def _result(
        self,
        counted: Counter[str],
        *,
        calls: int = 0,
        following: Sequence[Message] = (),
        outcome: Reward | None = None,
    ) -> MessageStepResult:
        """The reward of one message: the outcome if it was the final one, minus its costs."""
        failures = counted.pop("tool_failures", 0)
        violations = counted.total()
        costs = self._costs
        parts = {
            "call_cost": self._charge(costs.per_call, calls),
            "step_cost": self._charge(costs.per_step, 1),
            "violation_cost": self._charge(costs.per_violation, violations),
        }
        parts = {name: value for name, value in parts.items() if value}
        info: dict[str, Any] = {"violations": violations, "tool_failures": failures, **counted}
        if outcome is not None:
            parts |= outcome.parts or {"outcome": outcome.value}
            info |= outcome.info
        return MessageStepResult(
            reward=sum(parts.values()),
            episode_done=outcome is not None,
            next_messages=following,
            parts=parts,
            metrics=info,
            tool_calls=calls,
        )

    def _charge(self, price: float, count: int) -> float:
        """A negative part, limited so that the episode is not charged more than `at_most`."""
        charge = max(0.0, min(price * count, self._costs.at_most * _JUST_BELOW - self._charged))
        self._charged += charge
        return -charge


_JUST_BELOW = 1 - 1e-12
"""Keeps a sum of costs within the declared range despite rounding."""


def _outcome(graded: Graded) -> Reward:
    if isinstance(graded, Reward):
        return graded
    if isinstance(graded, int | float):
        return Reward(float(graded))
    raise InvalidRequestError(
        "is no number and no Reward", field="grade()", value=graded, remedy="Return one, or raise an exception"
    )
