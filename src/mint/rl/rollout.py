"""A turn, a rollout, the group of one prompt, the batch of a step. Data only.

Letters: P prompt tokens · T sampled tokens · G rollouts of one prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mint.types import SamplingParams

RolloutStopReason = Literal["stop", "length", "env", "max_turns", "max_episode_tokens", "wall_time", "error"]
"""Why a rollout ended: an end token, `max_tokens` of a turn, the environment, a limit of the episode, or an error."""

CUT_OFF: frozenset[str] = frozenset({"length", "max_turns", "max_episode_tokens", "wall_time"})
"""The stop reasons of a rollout that was cut off before the policy had finished."""


@dataclass(frozen=True)
class Turn:
    """One sampled continuation: prompt ids [P], sampled ids [T], and the sampler's logprobs [T].

    `policy_steps` are the optimizer steps behind the weights of each token [T]; empty: those of the rollout.
    """

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    policy_steps: Sequence[int] = ()


@dataclass(frozen=True)
class Rollout:
    """One episode of the policy: one turn for a plain completion, several with tools.

    `text` is the policy's text without special tokens. `reward` is None if it was not graded; then `error` says why,
    and `unsupported` that the grader cannot judge it on this machine. `parts` add up to the reward. `trace` holds one
    dict per message, tool call and result of a multi-turn episode; `info` facts from the grader. `policy_step` counts
    the optimizer steps behind the weights that sampled its first token. `turn_rewards` are those of an episode's turns,
    which add up to the reward. `grader_s` is the time of the call that graded it (in an episode, of all calls of its
    environment), after `grader_retries` failures, and `grader_seconds` that of each grader by name.
    """

    turns: list[Turn] = field(repr=False)
    text: str
    stop_reason: RolloutStopReason
    reward: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    unsupported: bool = False
    timed_out: bool = False
    trace: Sequence[Mapping[str, Any]] = ()
    info: Mapping[str, Any] = field(default_factory=dict)
    tool_calls: int = 0
    retokenized_turns: int = 0
    policy_step: int = 0
    turn_rewards: Sequence[float] = ()
    grader_s: float = 0.0
    grader_retries: int = 0
    grader_seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def tokens(self) -> list[int]:
        """All sampled ids, turns joined [T]."""
        return [token for turn in self.turns for token in turn.tokens]

    @property
    def logprobs(self) -> list[float]:
        """The sampler's logprobs (temperature 1) of `tokens` [T]."""
        return [logprob for turn in self.turns for logprob in turn.logprobs]

    @property
    def policy_steps(self) -> list[int]:
        """The optimizer steps behind the weights of each token [T]."""
        return [
            version for turn in self.turns for version in (turn.policy_steps or [self.policy_step] * len(turn.tokens))
        ]

    @property
    def truncated(self) -> bool:
        """Whether a limit cut it off."""
        return self.stop_reason in CUT_OFF


@dataclass(frozen=True)
class GroupRequest:
    """A group to sample: the item, its place in the dataset, and how to sample its first turn."""

    item: Any
    index: int
    params: SamplingParams


Span = tuple[float, float]
"""Begin and end in seconds of a monotonic clock."""


@dataclass(frozen=True)
class GroupTimes:
    """When a group was sampled and graded. In a group of episodes both alternate: then `sampling` is the time from the
    first request to the last reply, and `episodes` are those of its episodes."""

    sampling: Span
    grading: Span | None = None
    episodes: Sequence[Span] = ()


@dataclass(frozen=True)
class Group:
    """The rollouts of one dataset item; if sampling failed, `error` says why and there are none.

    `index` is the item's place in the dataset; `prompt` the prompt ids of the first turn.
    """

    item: Any
    index: int
    prompt: list[int] = field(repr=False)
    rollouts: list[Rollout]
    error: str | None = None
    times: GroupTimes | None = None

    @property
    def graded(self) -> list[Rollout]:
        """The rollouts that have a reward and at least one token."""
        return [rollout for rollout in self.rollouts if rollout.reward is not None and rollout.tokens]

    @property
    def rewards(self) -> list[float]:
        """The rewards of `graded`."""
        return [rollout.reward for rollout in self.graded if rollout.reward is not None]


@dataclass(frozen=True)
class RolloutBatch:
    """The groups that a step trains on, and those that dynamic sampling replaced.

    `policy_step` counts the optimizer steps behind the weights that sampled them.
    """

    step: int
    groups: list[Group]
    replaced: list[Group] = field(default_factory=list)
    policy_step: int = 0
    temperature: float = 1.0

    @property
    def all_groups(self) -> list[Group]:
        """All groups that were sampled."""
        return [*self.groups, *self.replaced]
