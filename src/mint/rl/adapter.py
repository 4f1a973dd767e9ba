"""An RL task, as the user writes it: data, prompt, reward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence
from typing import Any


class RLAdapter(ABC):
    """The simple door to `run_grpo`: one prompt, one completion, one reward.

    A *sample* is whatever `build_dataset` yields; mint hands it back to `make_prompt` and `compute_reward` untouched.
    It is written to the rollout log with `str()`.
    """

    heldout_name: str = "held-out"
    """Names the held-out set in the output."""

    @abstractmethod
    def build_dataset(self) -> Sequence[Any]:
        """The training samples; called once. Order does not matter: each epoch is shuffled by the run's seed."""

    @abstractmethod
    def make_prompt(self, sample: Any, tokenizer: Any) -> list[int]:
        """Token ids that the policy continues."""

    @abstractmethod
    def compute_reward(self, response: str, sample: Any) -> float | Awaitable[float]:
        """The reward of one completion, a finite number, best kept in [0, 1].

        May be `async`. An exception or a time-out costs this completion alone: it is left out of its group, counted
        and shown. Called from several threads at once.
        """

    def build_heldout(self) -> Sequence[Any]:
        """Samples that are read before and after the run and never trained on. Empty: nothing is measured."""
        return ()

    def evaluate(self, step: int, rewards: list[float], num_datums: int) -> None:
        """Called after each step with all rewards of the step and the number of datums trained on."""
        return
