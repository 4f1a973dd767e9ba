"""Rolls out episodes of many turns. Each episode advances on its own; a slow environment holds up no other.

The first turn of a group is one request, so that its prompt is computed once. Later turns are one request per episode.
An environment that raises or hangs ends its own episode and no other. Sampled ids are never tokenized again
(`chat_format`).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mint.errors import InvalidRequestError, MintError, PromptTooLongError
from mint.rl.adapter import MessageEnvAdapter, Task
from mint.rl.calls.call_pool import CallPool
from mint.rl.calls.user_call import CallResult
from mint.rl.message_env import WRITTEN_AS, Message, MessageEnv, MessageStepResult
from mint.rl.reward import Reward, UnsupportedError
from mint.rl.rollout import Group, GroupRequest, GroupTimes, Rollout, RolloutStopReason, Turn
from mint.rl.rollouts.grading import checked_reward
from mint.rl.rollouts.swapping_sampler import PolicySampler, sampled_turn
from mint.rl.seeds import mix_seed
from mint.rl.tasks.chat_format import NOT_RENDERED, ChatFormat
from mint.rl.tasks.chat_options import template_text
from mint.types import ModelInput, SampledSequence, SamplingParams
from mint.types.tool_call_formats import ToolCall, ToolCallFormat


@dataclass(frozen=True)
class EpisodeLimits:
    """Limits of an episode: turns, sampled tokens (None: only the context), seconds of its environment.

    `wall_time_s` counts the calls of the episode's own environment and tools, not the wait for other episodes or the
    sampler, so it does not depend on the batch size. It is checked between turns.
    """

    max_turns: int = 8
    max_tokens: int | None = None
    wall_time_s: float = 60.0


async def roll_out_episodes(
    sampling_client: PolicySampler,
    adapter: MessageEnvAdapter,
    requests: Sequence[GroupRequest],
    *,
    tokenizer: Any,
    calls: CallPool,
    group_size: int,
    limits: EpisodeLimits,
    policy_step: int = 0,
    tool_call_format: ToolCallFormat | None = None,
) -> list[Group]:
    """`group_size` graded episodes for each request, in order; all of them are played at once.

    The first turn of a group draws from the request's own seed, turn t of its episode g from `mix_seed(seed, g, t)`. A
    group whose first turn cannot be sampled has an `error` and no rollouts. `tool_call_format` names how the policy
    writes tool calls; None is what the chat template or the tokenizer says.

    Raises:
        InvalidRequestError: the tokenizer has no chat template.
    """
    player = _Player(sampling_client, adapter, calls, limits, _Formats(tokenizer, tool_call_format))
    return list(await asyncio.gather(*(player.play_group(request, group_size, policy_step) for request in requests)))


@dataclass(eq=False)
class _Episode:
    """An episode in progress. `index` is its place in its group; `conversation` holds the messages rendered so far.
    `calls` are those of the last turn, `called` counts those of earlier ones.
    `opened` says that `env` has been made, `seconds` is the time of its calls."""

    index: int
    params: SamplingParams
    env: MessageEnv = field(init=False)
    chat: ChatFormat = field(init=False)
    conversation: list[Message] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    called: int = 0
    trace: list[dict[str, Any]] = field(default_factory=list)
    opened: bool = False
    seconds: float = 0.0
    reward: float = 0.0
    turn_rewards: list[float] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    tool_calls: int = 0
    retokenized_turns: int = 0
    cut: RolloutStopReason | None = None
    stop_reason: RolloutStopReason | None = None
    error: str | None = None
    unsupported: bool = False
    timed_out: bool = False
    began: float = 0.0
    ended: float = 0.0
    replied: float = 0.0

    @property
    def tokens(self) -> int:
        return sum(len(turn.tokens) for turn in self.turns)

    def fail(self, answer: CallResult) -> None:
        """Ends the episode without a reward."""
        self.stop_reason = "error"
        self.error = answer.failure
        self.timed_out = answer.timed_out
        self.unsupported = isinstance(answer.error, UnsupportedError)
        self.note([{"role": "error", "content": answer.failure}], answer.seconds)

    def note(self, messages: Sequence[Message], seconds: float) -> None:
        """Appends to the trace; a message's own facts (a tool's time) replace the time of the whole step."""
        for message in messages:
            shown = {key: value for key, value in message.items() if key != NOT_RENDERED}
            row = {"turn": len(self.turns), "ms": round(seconds * 1000, 3), **shown, **message.get(NOT_RENDERED, {})}
            # As JSON now: an environment may change its objects later, and the log takes JSON only.
            self.trace.append(json.loads(json.dumps(row, default=str)))

    def add_reply(self, sequence: SampledSequence, seconds: float, limits: EpisodeLimits) -> None:
        """Takes the policy's message."""
        self.turns.append(sampled_turn(self.prompt, sequence))
        self.texts.append(self.chat.reply(sequence.tokens))
        self.called += len(self.calls)
        self.calls = self.chat.calls(self.texts[-1], earlier=self.called)
        self.note([self.last_message], seconds)
        if sequence.stop_reason == "length":
            spent = limits.max_tokens is not None and self.tokens >= limits.max_tokens
            self.cut = "max_episode_tokens" if spent else "length"

    @property
    def last_message(self) -> Message:
        """The policy's last message."""
        message: Message = {"role": "assistant", "content": self.texts[-1]}
        written_as = self.chat.tool_call_format
        if written_as != "hermes":
            message[WRITTEN_AS] = written_as
        calls = [call.to_message() for call in self.calls if call.error is None]
        return {**message, "tool_calls": calls} if calls else message

    def add_result(self, result: MessageStepResult) -> None:
        """Adds reward, parts and metrics of the environment's answer; a reward without parts is the part "reward"."""
        reward = Reward(result.reward, result.parts)
        parts = reward.parts or ({"reward": reward.value} if reward.value else {})
        self.reward += reward.value
        self.turn_rewards += [0.0] * (len(self.turns) - len(self.turn_rewards))
        self.turn_rewards[-1] += reward.value
        for name, value in parts.items():
            self.parts[name] = self.parts.get(name, 0.0) + value
        for name, value in result.metrics.items():
            counted = isinstance(value, int | float) and isinstance(self.info.get(name), int | float)
            self.info[name] = self.info[name] + value if counted else value
        self.tool_calls += result.tool_calls

    def continue_with(self, following: Sequence[Message]) -> None:
        """Makes the next prompt."""
        turn = self.turns[-1]
        extended = self.chat.extend(
            self.conversation, following, prompt_P=turn.prompt, tokens_T=turn.tokens, calls=self.calls
        )
        self.prompt = extended.prompt
        self.retokenized_turns += not extended.kept
        self.conversation += extended.messages

    def to_rollout(self, task: Task, policy_step: int) -> Rollout:
        """The finished rollout, with its reward checked against the declared range of its item's task."""
        reward: Reward | None = None
        if self.error is None:
            parts = {} if self.parts.keys() <= {"reward"} else self.parts
            try:
                reward = checked_reward(task, Reward(self.reward, parts, self.info))
            except MintError as error:
                self.error = str(error)
        return Rollout(
            turns=self.turns,
            text="\n".join(self.texts),
            stop_reason=self.stop_reason or "error",
            reward=None if reward is None else reward.value,
            parts={} if reward is None else reward.parts,
            info=self.info,
            error=self.error,
            unsupported=self.unsupported,
            timed_out=self.timed_out,
            trace=self.trace,
            tool_calls=self.tool_calls,
            retokenized_turns=self.retokenized_turns,
            policy_step=next((turn.policy_steps[0] for turn in self.turns if turn.policy_steps), policy_step),
            turn_rewards=[] if reward is None else self.turn_rewards,
            grader_s=self.seconds,
        )


class _Formats:
    """Caches chat formats by their tools, and the ids of the conversations that several episodes begin with."""

    def __init__(self, tokenizer: Any, written_as: ToolCallFormat | None) -> None:
        self._tokenizer = tokenizer
        self._written_as: ToolCallFormat | None = written_as
        self._formats: dict[str, ChatFormat] = {}
        self._prompts: dict[str, list[int]] = {}
        if not template_text(tokenizer):
            self.format(())  # fails here if the tokenizer has no template, instead of in each episode

    def format(self, tools: Sequence[Mapping[str, Any]]) -> ChatFormat:
        key = json.dumps(list(tools), default=str)
        if key not in self._formats:
            self._formats[key] = ChatFormat(self._tokenizer, tools, written_as=self._written_as)
        return self._formats[key]

    def prompt(self, chat: ChatFormat, conversation: Sequence[Message]) -> list[int]:
        key = json.dumps([id(chat), conversation], default=str)
        if key not in self._prompts:
            self._prompts[key] = chat.prompt(conversation)
        return self._prompts[key]


class _Player:
    """Plays episodes of one task with one policy."""

    def __init__(
        self,
        sampling_client: PolicySampler,
        adapter: MessageEnvAdapter,
        calls: CallPool,
        limits: EpisodeLimits,
        formats: _Formats,
    ) -> None:
        self._sampling_client = sampling_client
        self._adapter = adapter
        self._calls = calls
        self._limits = limits
        self._formats = formats

    async def play_group(self, request: GroupRequest, group_size: int, policy_step: int) -> Group:
        """The episodes of one item. They begin together and then go on by themselves."""
        episodes = [_Episode(index, request.params) for index in range(group_size)]
        try:
            return await self._play_together(episodes, request, policy_step)
        finally:
            await asyncio.gather(*map(self._close, episodes))

    async def _play_together(self, episodes: Sequence[_Episode], request: GroupRequest, policy_step: int) -> Group:
        await asyncio.gather(*(self._open(episode, request.item) for episode in episodes))
        began = time.monotonic()
        error = await self._sample_first_turns([one for one in episodes if one.stop_reason is None])
        if error is not None:
            return Group(request.item, request.index, _first_prompt(episodes), [], error=error)
        await asyncio.gather(*(self._play(episode) for episode in episodes))
        task = self._adapter.task_of(request.item)
        rollouts = [episode.to_rollout(task, policy_step) for episode in episodes]
        times = GroupTimes(
            (began, max(episode.replied for episode in episodes) or began),
            episodes=[(episode.began, episode.ended) for episode in episodes],
        )
        return Group(request.item, request.index, _first_prompt(episodes), rollouts, times=times)

    async def _open(self, episode: _Episode, item: Any) -> None:
        """Makes the environment and the first prompt."""
        episode.began = episode.ended = time.monotonic()
        made = await self._call(episode, self._adapter.make_env, item)
        if made is None:
            return
        episode.env = made.value
        episode.opened = isinstance(made.value, MessageEnv)
        observed = await self._call(episode, episode.env.initial_observation)
        if observed is None:
            return
        with _FailsEpisode(episode):
            episode.conversation = _messages(observed.value)
            episode.note(episode.conversation, observed.seconds)
            episode.chat = self._formats.format(episode.env.tools)
            episode.prompt = self._formats.prompt(episode.chat, episode.conversation)

    async def _close(self, episode: _Episode) -> None:
        """Closes the environment; an error of that is in the trace and does not change the episode."""
        if not episode.opened:
            return
        answer = await self._calls.call(episode.env.close)
        if answer.error is not None:
            episode.note([{"role": "error", "content": f"close(): {answer.failure}"}], answer.seconds)

    async def _sample_first_turns(self, episodes: Sequence[_Episode]) -> str | None:
        """Samples the first message of each episode; returns the error of a request that failed, in words.

        Environments of one group may begin with different prompts: then there is a request for each.
        """
        by_prompt: dict[tuple[int, ...], list[_Episode]] = {}
        for episode in episodes:
            by_prompt.setdefault(tuple(episode.prompt), []).append(episode)
        errors = await asyncio.gather(*map(self._sample, by_prompt.values()))
        return next((str(error) for error in errors if error is not None), None)

    async def _play(self, episode: _Episode) -> None:
        """Alternates between environment and policy until the episode ends, from the policy's first message on."""
        while episode.stop_reason is None:
            if episode.cut is not None:
                await self._cut_off(episode)
            elif await self._step(episode):
                await self._sample([episode])
        episode.ended = time.monotonic()

    async def _sample(self, episodes: Sequence[_Episode]) -> MintError | None:
        """Samples the next message of episodes with one prompt. A full context cuts them off, a failed request ends
        them; then its error is returned."""
        began = time.monotonic()
        prompt = ModelInput.from_ints(episodes[0].prompt)
        try:
            sent = self._sampling_client.sample(prompt, len(episodes), self._params(episodes[0]))
            sequences = (await sent).sequences
        except MintError as error:
            for episode in episodes:
                if episode.turns and isinstance(error, PromptTooLongError):
                    episode.cut = "max_episode_tokens"
                else:
                    episode.fail(CallResult(error=error))
            return error
        for episode, sequence in zip(episodes, sequences, strict=True):
            episode.replied = time.monotonic()
            with _FailsEpisode(episode):
                episode.add_reply(sequence, episode.replied - began, self._limits)
        return None

    def _params(self, episode: _Episode) -> SamplingParams:
        params = episode.params
        changes = dict[str, Any]()
        if episode.turns and params.seed is not None:
            changes["seed"] = mix_seed(params.seed, episode.index, len(episode.turns))
        if self._limits.max_tokens is not None:
            left = self._limits.max_tokens - episode.tokens
            changes["max_tokens"] = left if params.max_tokens is None else min(left, params.max_tokens)
        return params.model_copy(update=changes) if changes else params

    async def _step(self, episode: _Episode) -> bool:
        """Asks the environment; returns whether the policy goes on: neither the environment nor a limit ends it."""
        answer = await self._call(episode, episode.env.step, episode.last_message)
        if answer is None:
            return False
        with _FailsEpisode(episode):
            result = self._add_result(episode, answer)
            if result.episode_done:
                episode.stop_reason = "env"
                return False
            episode.cut = self._limit_reached(episode)
            if episode.cut is None:
                episode.continue_with(_messages(result.next_messages))
                return True
        return False

    async def _cut_off(self, episode: _Episode) -> None:
        """Asks the environment for the reward of an episode that a limit has ended."""
        answer = await self._call(episode, episode.env.cut_off, str(episode.cut))
        if answer is None:
            return
        with _FailsEpisode(episode):
            self._add_result(episode, answer)
            episode.stop_reason = episode.cut

    def _add_result(self, episode: _Episode, answer: CallResult) -> MessageStepResult:
        result = answer.value
        if not isinstance(result, MessageStepResult):
            raise InvalidRequestError(
                f"is a {type(result).__name__}",
                field=f"{type(episode.env).__name__}.step()",
                value=result,
                remedy="Return a MessageStepResult",
            )
        episode.add_result(result)
        episode.note(_messages(result.next_messages), answer.seconds)
        return result

    def _limit_reached(self, episode: _Episode) -> RolloutStopReason | None:
        limits = self._limits
        if len(episode.turns) >= limits.max_turns:
            return "max_turns"
        if limits.max_tokens is not None and episode.tokens >= limits.max_tokens:
            return "max_episode_tokens"
        return "wall_time" if episode.seconds >= limits.wall_time_s else None

    async def _call(self, episode: _Episode, function: Callable[..., Any], *arguments: Any) -> CallResult | None:
        """The result of a call of the episode's environment; None if it failed or hung, which ends the episode."""
        answer = await self._calls.call(function, *arguments)
        episode.seconds += answer.seconds
        if answer.error is not None:
            episode.fail(answer)
            return None
        return answer


class _FailsEpisode:
    """Ends an episode if handling its data raises: policies and environments may return anything."""

    def __init__(self, episode: _Episode) -> None:
        self._episode = episode

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, Exception):
            self._episode.fail(CallResult(error=error))
            return True
        return False


def _messages(answered: Any) -> list[Message]:
    messages = list(answered)
    for message in messages:
        if not (isinstance(message, dict) and isinstance(message.get("role"), str)):
            raise InvalidRequestError(
                "is no message", field="messages", value=message, remedy='Give {"role": …, "content": …}'
            )
    return messages


def _first_prompt(episodes: Sequence[_Episode]) -> list[int]:
    return next((episode.turns[0].prompt for episode in episodes if episode.turns), [])
