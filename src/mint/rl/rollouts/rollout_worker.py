"""Samples groups of rollouts and grades them: completions for an `RLAdapter`, episodes for a `MessageEnvAdapter`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from mint.rl.adapter import MessageEnvAdapter, RLAdapter
from mint.rl.calls.call_pool import CallPool
from mint.rl.calls.own_thread import run_in_own_thread
from mint.rl.calls.retries import Retries
from mint.rl.config import RLConfig
from mint.rl.rollout import Group, GroupRequest
from mint.rl.rollouts.completions import make_prompts, roll_out_completions
from mint.rl.rollouts.episodes import EpisodeLimits, roll_out_episodes
from mint.rl.rollouts.grading import Grader
from mint.rl.rollouts.swapping_sampler import PolicySampler
from mint.rl.tasks.chat_options import with_chat_options


def open_calls(config: RLConfig) -> CallPool:
    """The calls of a run, with the limits that its settings name."""
    return CallPool(
        timeout_s=config.grader_timeout_s, threads=config.grader_threads, in_flight=config.grader_concurrency
    )


class RolloutWorker:
    """Rolls out one task. Everything that a task raises costs one rollout or one group, never the batch.

    `tokenizer` renders chats with the options that the settings name.
    """

    def __init__(
        self, task: RLAdapter | MessageEnvAdapter, *, config: RLConfig, tokenizer: Any, calls: CallPool
    ) -> None:
        self.task = task
        self.config = config
        self.tokenizer = with_chat_options(tokenizer, config.chat_options)
        self.calls = calls

    def roll_out(
        self,
        sampling_client: PolicySampler,
        requests: Sequence[GroupRequest],
        *,
        group_size: int,
        policy_step: int = 0,
        grade_alone: bool = False,
    ) -> list[Group]:
        """`group_size` graded rollouts for each request, in order; all prompts are in flight at once.

        With `grade_alone`, graders of groups and batches are not asked. A prompt that cannot be made or sampled becomes
        a group with an `error`; the others go on.
        """
        return run_in_own_thread(self._roll_out_all(sampling_client, requests, group_size, policy_step, grade_alone))

    async def _roll_out_all(
        self,
        sampling_client: PolicySampler,
        requests: Sequence[GroupRequest],
        group_size: int,
        policy_step: int,
        grade_alone: bool,
    ) -> list[Group]:
        """Completions and episodes at once, where a mixture has both."""
        of_episodes = [isinstance(self.task.task_of(request.item), MessageEnvAdapter) for request in requests]
        turns = [request for request, several in zip(requests, of_episodes, strict=True) if several]
        singles = [request for request, several in zip(requests, of_episodes, strict=True) if not several]
        played, completed = await asyncio.gather(
            self._episodes(sampling_client, turns, group_size, policy_step),
            self._completions(sampling_client, singles, group_size, policy_step, grade_alone),
        )
        episodes, completions = iter(played), iter(completed)
        return [next(episodes if several else completions) for several in of_episodes]

    async def _episodes(
        self, sampling_client: PolicySampler, requests: Sequence[GroupRequest], group_size: int, policy_step: int
    ) -> list[Group]:
        config, task = self.config, self.task
        if not requests or not isinstance(task, MessageEnvAdapter):
            return []
        return await roll_out_episodes(
            sampling_client,
            task,
            requests,
            tokenizer=self.tokenizer,
            calls=self.calls,
            group_size=group_size,
            limits=EpisodeLimits(config.max_turns, config.max_episode_tokens, config.max_episode_s),
            policy_step=policy_step,
            tool_call_format=config.tool_call_format,
        )

    async def _completions(
        self,
        sampling_client: PolicySampler,
        requests: Sequence[GroupRequest],
        group_size: int,
        policy_step: int,
        grade_alone: bool,
    ) -> list[Group]:
        config, task = self.config, self.task
        if not requests or not isinstance(task, RLAdapter):
            return []
        return await roll_out_completions(
            sampling_client,
            Grader(task, self.calls, Retries(config.grader_retries, config.grader_backoff_s)),
            requests,
            make_prompts(task, requests, self.tokenizer),
            tokenizer=self.tokenizer,
            group_size=group_size,
            policy_step=policy_step,
            grade_alone=grade_alone,
        )
