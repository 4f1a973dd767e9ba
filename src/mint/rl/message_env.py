"""An environment that speaks messages: it opens a conversation, and answers each message of the policy.

Knows nothing of tokens: `episodes` renders messages with the model's chat template and keeps the sampled ids.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]
"""`{"role": "user", "content": "…"}`, as chat templates take it; an assistant's message may hold `tool_calls`."""


@dataclass(frozen=True)
class MessageStepResult:
    """What the environment makes of the policy's message.

    `reward` is added to the episode's reward and `parts` to its named parts (they add up to `reward` where given).
    `next_messages` are appended to the conversation after the policy's message; the episode goes on unless
    `episode_done`. `metrics` are facts for the log. `tool_calls` counts the calls that this message made.
    """

    reward: float = 0.0
    episode_done: bool = True
    next_messages: Sequence[Message] = ()
    parts: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    tool_calls: int = 0


class MessageEnv(ABC):
    """One episode. Both methods may be `async`; an exception costs this episode alone, and is counted and shown."""

    tools: Sequence[Mapping[str, Any]] = ()
    """JSON schemas of the tools, handed to the chat template as `tools=`."""

    @abstractmethod
    def initial_observation(self) -> Sequence[Message] | Awaitable[Sequence[Message]]:
        """The conversation up to the policy's first message; the same for every episode of one sample."""

    @abstractmethod
    def step(self, message: Message) -> MessageStepResult | Awaitable[MessageStepResult]:
        """The policy said `message` (role assistant; content without special tokens but with tool-call markup)."""

    def cut_off(self, reason: str) -> MessageStepResult:
        """A limit ended the episode (`max_turns`, `max_episode_tokens`, `wall_time`, `length`): the reward for that."""
        return MessageStepResult(0.0)
