"""An environment with tools: it answers the policy's tool calls, grades its final text, and subtracts costs."""

from __future__ import annotations

import inspect
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mint.errors import InvalidRequestError
from mint.rl.adapter import Graded
from mint.rl.calls.call_pool import CallPool
from mint.rl.message_env import WRITTEN_AS, Message, MessageEnv, MessageStepResult
from mint.rl.reward import Reward, RewardRange
from mint.rl.tasks.chat_format import NOT_RENDERED
from mint.rl.tasks.tool_call_formats import ToolCall, parse_tool_calls, without_reasoning
from mint.rl.tasks.tool_calls import Tool, ToolError, as_text

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
        calls = parse_tool_calls(content, message.get(WRITTEN_AS, "hermes"))
        if calls:
            results = self._answer(calls, violations)
            self._results += results
            return self._result(violations, calls=len(calls), following=results)
        graded = self._grade(without_reasoning(content), tuple(self._results))
        if inspect.isawaitable(graded):
            return self._finish_later(graded, violations)
        return self._result(violations, outcome=_outcome(graded))

    async def _finish_later(self, graded: Awaitable[Graded], violations: Counter[str]) -> MessageStepResult:
        return self._result(violations, outcome=_outcome(await graded))

    def _answer(self, calls: Sequence[ToolCall], violations: Counter[str]) -> list[Message]:
        pool = CallPool(timeout_s=self._timeout_s, threads=1)  # one thread: calls of a message run in order
        try:
            return [self._answer_one(call, pool, violations) for call in calls]
        finally:
            pool.close()

    def _answer_one(self, call: ToolCall, pool: CallPool, violations: Counter[str]) -> Message:
        began = time.monotonic()
        problem = call.error
        value = None
        if problem is not None:
            violations["malformed_call"] += 1
        elif call.name not in self._tools:
            violations["unknown_tool"] += 1
            problem = f"there is no tool {call.name!r}; there is {', '.join(self._tools)}"
        else:
            tool = self._tools[call.name]
            arguments = tool.typed(call.arguments or {}) if call.as_texts else call.arguments or {}
            (answer,) = pool.run([lambda: tool.call(arguments)])
            value = answer.value
            problem = answer.failure
            if isinstance(answer.error, ToolError):
                violations["bad_arguments"] += 1
                problem = str(answer.error)
            elif answer.error is not None:
                violations["tool_failures"] += 1
        facts = {
            "tool": call.name,
            "arguments": dict(call.arguments or {}),
            "ok": problem is None,
            "ms": round((time.monotonic() - began) * 1000, 3),
        }
        content = as_text(value) if problem is None else f"error: {problem}"
        return {"role": "tool", "name": call.name or "unknown", "content": content, NOT_RENDERED: facts}

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
