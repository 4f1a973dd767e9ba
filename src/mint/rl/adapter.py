"""An RL task, as the user writes it: data, prompt, reward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

from mint.rl.message_env import MessageEnv
from mint.rl.reward import Reward, RewardRange

SUCCESS_TOLERANCE = 1e-9
"""What a sum of named parts may lose to rounding."""

Answered = float | Reward
"""What a grader gives for one completion."""


class Task(ABC):
    """What both doors to `run_grpo` share.

    A *sample* is whatever `build_dataset` yields; mint hands it back untouched. It is written to the rollout log with
    `str()`, and a hash of its content keeps held-out samples out of the training set.
    """

    heldout_name: str = "held-out"
    """Names the held-out set in the output."""

    reward_range: RewardRange | None = None
    """The declared bounds of a reward. One outside is a grader's error and trains nothing; None declares no bounds."""

    success_reward: float = 1.0
    """A rollout counts as a success from this reward on."""

    spec: Mapping[str, Any] | None = None
    """How the command line names this task (`task`, `seed`, `options`), so that a finished run can be read again."""

    @abstractmethod
    def build_dataset(self) -> Sequence[Any]:
        """The training samples; called once. Order does not matter: each epoch is shuffled by the run's seed."""

    def build_heldout(self) -> Sequence[Any]:
        """Samples that are read before and after the run and never trained on. Empty: nothing is measured."""
        return ()

    def demonstrate(self, sample: Any) -> str | None:
        """A completion that would earn full reward, where one is known: what `mint train sft` trains on."""
        return None

    def sample_key(self, sample: Any) -> str:
        """What makes a sample the same as another: the text that is hashed, `repr` by default."""
        return repr(sample)

    def is_success(self, reward: float) -> bool:
        """Whether a rollout with this reward has solved its sample."""
        return reward >= self.success_reward - SUCCESS_TOLERANCE

    def evaluate(self, step: int, rewards: list[float], num_datums: int) -> None:
        """Called after each step with all rewards of the step and the number of datums trained on."""
        return

    def close(self) -> None:
        """Called once at the end of a run: ends whatever the task has started (processes, connections)."""
        return


class RLAdapter(Task):
    """The simple door to `run_grpo`: one prompt, one completion, one reward."""

    @abstractmethod
    def make_prompt(self, sample: Any, tokenizer: Any) -> list[int]:
        """Token ids that the policy continues."""

    @abstractmethod
    def compute_reward(self, response: str, sample: Any) -> Answered | Awaitable[Answered]:
        """The reward of one completion: a finite number, or a `Reward` with named parts. Best kept in [0, 1].

        May be `async`. An exception or a time-out costs this completion alone: it is left out of its group, counted
        and shown; `UnsupportedError` says that it cannot be judged here. Called from several threads at once.
        """

    def compute_group_rewards(
        self, responses: Sequence[str], sample: Any
    ) -> Sequence[Answered | None] | Awaitable[Sequence[Answered | None]] | None:
        """The rewards of a whole group at once, in order, for judges that compare (None: not graded).

        Returning None, as here, means that each completion is judged alone by `compute_reward`. Held-out completions
        are always judged alone. May be `async`; one exception costs the group.
        """
        return None


class MessageEnvAdapter(Task):
    """The general door to `run_grpo`: each rollout is an episode of an environment that speaks messages."""

    @abstractmethod
    def make_env(self, sample: Any) -> MessageEnv:
        """A fresh environment for one episode; called once per rollout, from several threads at once."""
