"""An environment of messages: it begins a conversation and answers each message of the policy.

Knows nothing of tokens; `rollouts/episodes.py` renders messages with the model's chat template.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, SupportsFloat

import numpy as np

from mint.errors import InvalidRequestError

Message = dict[str, Any]
"""`{"role": "user", "content": "…"}`, as chat templates take it; an assistant's message may hold `tool_calls`."""


WRITTEN_AS = "tool_call_format"
"""The key of an assistant's message that names the format of its tool calls, where it is not `hermes`."""


@dataclass(frozen=True)
class MessageStepResult:
    """The environment's answer to a message of the policy.

    `reward` is added to the episode's reward and `parts` to its named parts (if given, they add up to `reward`).
    `next_messages` are appended to the conversation after the policy's message; the episode goes on unless
    `episode_done`. `metrics` are logged. `tool_calls` counts the tool calls in this message.
    """

    reward: float = 0.0
    episode_done: bool = True
    next_messages: Sequence[Message] = ()
    parts: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    tool_calls: int = 0

    def __post_init__(self) -> None:
        """Raises InvalidRequestError for a field of another kind, as after arguments in another order."""
        expected = {
            "reward": (SupportsFloat, "number"),
            "episode_done": (bool | np.bool_, "bool"),
            "next_messages": (list | tuple, "list of messages"),
            "parts": (Mapping, "mapping"),
            "metrics": (Mapping, "mapping"),
            "tool_calls": (int, "whole number"),
        }
        for name, (kind, words) in expected.items():
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise InvalidRequestError(
                    f"is no {words}",
                    field=f"MessageStepResult.{name}",
                    value=value,
                    remedy="The order is reward, episode_done, next_messages, parts, metrics; or name the arguments",
                )


class MessageEnv(ABC):
    """One episode. Its methods may be `async`. An exception ends this episode alone; it is counted and logged."""

    tools: Sequence[Mapping[str, Any]] = ()
    """JSON schemas of the tools, passed to the chat template as `tools=`."""

    @abstractmethod
    def initial_observation(self) -> Sequence[Message] | Awaitable[Sequence[Message]]:
        """The conversation up to the policy's first message; the same for every episode of one item."""

    @abstractmethod
    def step(self, message: Message) -> MessageStepResult | Awaitable[MessageStepResult]:
        """Answers the policy's `message` (role assistant; content without special tokens, with tool-call markup)."""

    def cut_off(self, reason: str) -> MessageStepResult | Awaitable[MessageStepResult]:
        """The reward when a limit ends the episode (`max_turns`, `max_episode_tokens`, `wall_time`, `length`)."""
        return MessageStepResult(0.0)

    def close(self) -> Awaitable[None] | None:
        """Called once when the episode is over, whatever ended it; ends what the environment has started."""
        return None
