"""The shared RL loop by the names of MinT's documents: those of its demos, and `Reward(score=, metadata=)`.

An adapter may also be a function of texts: `__call__(prompt, response)` answers a number or a `Reward`, and what
`build_dataset` gives are prompts, or mappings with a `prompt`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mint.rl.reward as reward_module
import mint.rl.rl_core as rl_core_module
from mint.errors import InvalidRequestError
from mint.rl.rl_core import RLConfig, run_grpo

__all__ = ["RLAdapter", "RLConfig", "Reward", "run_grpo"]


class Reward(reward_module.Reward):
    """A score with facts about it, which are logged with the rollout."""

    def __init__(self, score: float, metadata: Mapping[str, Any] | None = None) -> None:
        """`score` is the reward's value."""
        super().__init__(value=float(score), info=dict(metadata or {}))

    @property
    def score(self) -> float:
        """The reward's value."""
        return self.value

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Facts about the verdict."""
        return self.info


class RLAdapter(rl_core_module.RLAdapter):
    """A task: `build_dataset`, and either `make_prompt` and `compute_reward`, or `__call__(prompt, response)`."""

    _tokenizer: Any = None

    def get_tokenizer(self) -> Any:
        """The model's tokenizer; None before the first prompt was made."""
        return self._tokenizer

    def make_prompt(self, sample: Any, tokenizer: Any) -> list[int]:
        """The sample's prompt as token ids."""
        self._tokenizer = tokenizer
        return list(tokenizer.encode(_prompt_of(sample)))

    def compute_reward(self, response: str, sample: Any) -> float | reward_module.Reward:
        """What `__call__` says of the prompt and the response."""
        judge: Any = self
        if not callable(judge):
            raise InvalidRequestError(
                "has neither compute_reward nor __call__", field="adapter", value=type(self).__name__
            )
        return judge(_prompt_of(sample), response)


def _prompt_of(sample: Any) -> str:
    return str(sample["prompt"]) if isinstance(sample, Mapping) and "prompt" in sample else str(sample)
