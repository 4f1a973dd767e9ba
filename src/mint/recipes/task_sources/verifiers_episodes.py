"""Environments of the `verifiers` package in many turns: its own `run(task, agents)` plays, our policy is the agent.

verifiers asks its agent for the next message, mint asks its environment: so the environment runs as a task of its own,
which waits at each turn for the policy. Nothing is started: no harness, no process, no HTTP. Supported is one agent
that speaks text.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from mint.errors import InvalidRequestError
from mint.rl import MessageEnvAdapter
from mint.rl.message_env import Message, MessageEnv, MessageStepResult
from mint.rl.reward import UnsupportedError


class VerifiersEpisodesAdapter(MessageEnvAdapter):
    """The tasks of an environment. Rewards are those of its traces, without bounds."""

    def __init__(self, environment: Any, train: Sequence[Any], heldout: Sequence[Any], *, heldout_name: str) -> None:
        """`environment` is a `verifiers.v1.Env` of one agent; `train` and `heldout` are tasks of its taskset."""
        self._environment = environment
        self._train = train
        self._heldout = heldout
        self.heldout_name = heldout_name

    def build_dataset(self) -> Sequence[Any]:
        """The training tasks."""
        return self._train

    def build_heldout(self) -> Sequence[Any]:
        """The held-out tasks."""
        return self._heldout

    def item_key(self, item: Any) -> str:
        """The task's own key: a hash of its data, or what its author chose."""
        return item.key

    def make_env(self, item: Any) -> MessageEnv:
        """One episode of the task."""
        return VerifiersEpisode(self._environment, item)


class VerifiersEpisode(MessageEnv):
    """One episode. All its methods are called in one event loop."""

    def __init__(self, environment: Any, task: Any) -> None:
        self._environment = environment
        self._task = task
        self._asked: asyncio.Queue[list[Message] | None] = asyncio.Queue()
        """The messages of the environment to the policy; None when it has ended."""
        self._replies: asyncio.Queue[str | None] = asyncio.Queue()
        """The replies of the policy; None when a limit has ended the episode."""
        self._traces: list[Any] = []
        self._played: asyncio.Task[None] | None = None

    async def initial_observation(self) -> Sequence[Message]:
        """Starts the environment and waits for its first turn.

        Raises:
            UnsupportedError: it ended without asking the policy anything.
        """
        self._played = asyncio.create_task(self._play())
        opening = await self._asked.get()
        if opening is None:
            await self._played
            raise UnsupportedError("the environment ended before the policy's first turn")
        return opening

    async def step(self, message: Message) -> MessageStepResult:
        """Gives the environment the policy's reply."""
        return await self._answer(message["content"])

    async def cut_off(self, reason: str) -> MessageStepResult:
        """The environment sees a terminated turn, ends, and scores what there is."""
        return await self._answer(None)

    async def close(self) -> None:
        """Ends an environment that still waits for the policy, so that it gives back what it holds."""
        if self._played is not None and not self._played.done():
            self._played.cancel()
            await asyncio.wait({self._played})

    async def _answer(self, reply: str | None) -> MessageStepResult:
        assert self._played is not None
        self._replies.put_nowait(reply)
        asked = await self._asked.get()
        if asked is not None:
            return MessageStepResult(0.0, False, asked)
        await self._played  # raises what the environment has raised
        parts: dict[str, float] = {}
        metrics: dict[str, Any] = {}
        for trace in self._traces:
            parts |= {name: float(reward.value) for name, reward in trace.rewards.items() if reward is not None}
            metrics |= {name: value for name, value in trace.metrics.items() if value is not None}
        return MessageStepResult(sum(parts.values()), True, parts=parts, metrics=metrics)

    async def _play(self) -> None:
        """The whole episode, as `verifiers.v1.Env.run_episode` plays it: set up, run, finalize."""
        try:
            v1 = importlib.import_module("verifiers.v1")
            agents = importlib.import_module("verifiers.v1.agent").Agents(
                self._environment.config, lambda name, config: _Policy(self, name, config)
            )
            await self._environment.setup(agents)
            await self._environment.run(self._task, agents)
            traces = list(self._traces)
            info = importlib.import_module("verifiers.v1.episode").EnvInfo(id=self._environment.config.env_id)
            episode = v1.Episode(env=info, task=trace_task(v1, self._task), traces=traces, ok=True)
            await self._environment.finalize(self._task, episode)
        finally:
            self._asked.put_nowait(None)

    async def ask(self, messages: list[Message]) -> str | None:
        """The policy's reply to further messages; None if a limit has ended the episode."""
        self._asked.put_nowait(messages)
        return await self._replies.get()

    def add_trace(self, trace: Any) -> None:
        """Takes a finished and scored trace."""
        self._traces.append(trace)


class _Policy:
    """The policy as an agent of verifiers: `run` for one turn, `interaction` for many."""

    trainable = True

    def __init__(self, episode: VerifiersEpisode, name: str, config: Any) -> None:
        self._episode = episode
        self._name = name
        self._config = config

    async def run(self, task: Any, **_: Any) -> Any:
        """The trace of the task's own prompt and one reply."""
        async with self.interaction(task) as interaction:
            await interaction.turn()
        return interaction.trace

    @asynccontextmanager
    async def interaction(self, task: Any, **_: Any) -> AsyncGenerator[_Interaction]:
        """A conversation; at its end it is scored by the task's rewards and judges."""
        v1 = importlib.import_module("verifiers.v1")
        trace = v1.Trace(
            task=trace_task(v1, task),
            agent=v1.AgentInfo(config=self._config, name=self._name),
            state=importlib.import_module("verifiers.v1.state").state_cls(type(task))(),
        )
        interaction = _Interaction(self._episode, trace)
        yield interaction
        trace.stop("user_closed")
        trace.ok = True
        await task.score(trace)
        self._episode.add_trace(trace)


class _Interaction:
    """One conversation between an environment and the policy."""

    def __init__(self, episode: VerifiersEpisode, trace: Any) -> None:
        self.trace = trace
        self._episode = episode
        self._v1 = importlib.import_module("verifiers.v1")
        self._segment = importlib.import_module("verifiers.v1.agent").Segment

    async def turn(self, message: str | Sequence[Any] | None = None) -> Any:
        """The policy's reply to a user's message, as a `Segment`; without one, to the prompt of the task."""
        said = self._opening() if not self.trace.nodes else []
        said += [] if message is None else _typed(self._v1, message)
        for one in said:
            self._add(one, sampled=False)
        reply = await self._episode.ask([_as_message(one) for one in said])
        if reply is None:
            return self._segment(messages=[], terminated=True)
        answer = self._v1.AssistantMessage(content=reply)
        self._add(answer, sampled=True)
        return self._segment(messages=[answer])

    def _opening(self) -> list[Any]:
        """The task's system prompt and prompt."""
        data = self.trace.task.data
        system = [self._v1.SystemMessage(content=data.system_prompt)] if data.system_prompt else []
        return [*system, *(_typed(self._v1, data.prompt) if data.prompt else [])]

    def _add(self, message: Any, *, sampled: bool) -> None:
        parent = len(self.trace.nodes) - 1 if self.trace.nodes else None
        self.trace.nodes.append(self._v1.MessageNode(parent=parent, message=message, sampled=sampled))


def trace_task(v1: Any, task: Any) -> Any:
    """The task as a trace records it; `v1` is the module `verifiers.v1`."""
    return v1.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)


def _typed(v1: Any, message: str | Sequence[Any]) -> list[Any]:
    """A user's turn as messages of verifiers: a text, or messages of both kinds, typed or as dicts."""
    if isinstance(message, str):
        return [v1.UserMessage(content=message)]
    parse = importlib.import_module("verifiers.v1.dialects").parse_message
    return [parse(one) if isinstance(one, Mapping) else one for one in message]


def _as_message(message: Any) -> Message:
    if not isinstance(message.content, str):
        raise InvalidRequestError(
            "is not plain text", field="messages", value=message.role, remedy="Play it in verifiers' own harness"
        )
    return {"role": message.role, "content": message.content}
