"""Samples groups of rollouts and grades them: completions for an `RLAdapter`, episodes for a `MessageEnvAdapter`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mint.client.sampling_client import SamplingClient
from mint.rl.adapter import MessageEnvAdapter, RLAdapter
from mint.rl.call_pool import CallPool
from mint.rl.config import RLConfig
from mint.rl.rollout import Group, GroupRequest
from mint.rl.rollouts.completions import roll_out_completions
from mint.rl.rollouts.episodes import EpisodeLimits, roll_out_episodes


class RolloutWorker:
    """Rolls out one task. Everything that a task raises costs one rollout or one group, never the batch."""

    def __init__(
        self, task: RLAdapter | MessageEnvAdapter, *, config: RLConfig, tokenizer: Any, calls: CallPool
    ) -> None:
        self.task = task
        self.config = config
        self.tokenizer = tokenizer
        self.calls = calls

    def roll_out(
        self,
        sampling_client: SamplingClient,
        requests: Sequence[GroupRequest],
        *,
        group_size: int,
        policy_step: int = 0,
        grade_alone: bool = False,
    ) -> list[Group]:
        """`group_size` graded rollouts for each request, in order; all prompts are in flight at once.

        With `grade_alone`, `compute_group_rewards` is not asked. A prompt that cannot be made or sampled becomes a
        group with an `error`; the others go on.
        """
        if isinstance(self.task, MessageEnvAdapter):
            config = self.config
            return roll_out_episodes(
                sampling_client,
                self.task,
                requests,
                tokenizer=self.tokenizer,
                calls=self.calls,
                group_size=group_size,
                limits=EpisodeLimits(config.max_turns, config.max_episode_tokens, config.max_episode_s),
                policy_step=policy_step,
            )
        return roll_out_completions(
            sampling_client,
            self.task,
            requests,
            tokenizer=self.tokenizer,
            calls=self.calls,
            group_size=group_size,
            policy_step=policy_step,
            grade_alone=grade_alone,
        )
