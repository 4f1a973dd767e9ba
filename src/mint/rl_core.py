"""The RL loop by the names of MinT's documents and demos.

`RLAdapter`, a mutable `RLConfig` that reads the environment, `Reward(score=, metadata=)`, and
`run_grpo(adapter, cfg) -> path`. An adapter of MinT's demos runs unchanged after
`from mint.rl_core import RLAdapter, RLConfig, run_grpo`. New code uses `mint.rl`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

import mint.rl.adapter as adapter_module
import mint.rl.config as config_module
import mint.rl.reward as reward_module
from mint.errors import InvalidRequestError
from mint.rl.loop import run_grpo as run_loop

__all__ = ["RLAdapter", "RLConfig", "Reward", "run_grpo"]

_CONSOLE = Console()


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


class RLAdapter(adapter_module.RLAdapter):
    """A task: `build_dataset`, and either `make_prompt` and `compute_reward`, or `__call__(prompt, response)`.

    With `__call__`, which returns a number or a `Reward`, the dataset holds prompts, or mappings with a `prompt`.
    """

    _tokenizer: Any = None

    def get_tokenizer(self) -> Any:
        """The model's tokenizer; None before the first prompt was made."""
        return self._tokenizer

    def make_prompt(self, sample: Any, tokenizer: Any) -> list[int]:
        """The sample's prompt as token ids."""
        self._tokenizer = tokenizer
        return list(tokenizer.encode(_prompt_of(sample)))

    def compute_reward(self, response: str, sample: Any) -> float | reward_module.Reward:
        """Calls `__call__` with the prompt and the response.

        Raises:
            InvalidRequestError: the adapter has neither this method nor `__call__`.
        """
        reward_function: Any = self
        if not callable(reward_function):
            raise InvalidRequestError(
                "has neither compute_reward nor __call__",
                field="adapter",
                value=type(self).__name__,
                remedy="Define one of the two",
            )
        return reward_function(_prompt_of(sample), response)

    def evaluate(self, step: int, rewards: list[float], num_datums: int) -> None:
        """Prints the step's accuracy on one line."""
        accuracy = sum(reward > 0 for reward in rewards) / len(rewards) if rewards else 0.0
        _CONSOLE.print(f"Step {step}: accuracy={accuracy:.1%}, datums={num_datums}")


@dataclass
class RLConfig:
    """The demos' settings, by their names and defaults."""

    model: str = "Qwen/Qwen3-0.6B"
    rank: int = 16
    steps: int = 5
    batch: int = 8
    group: int = 4
    lr: float = 1e-4
    max_tokens: int = 16
    temperature: float = 1.0

    @classmethod
    def from_env(cls) -> RLConfig:
        """Reads `MINT_BASE_MODEL`, `MINT_LORA_RANK`, `MINT_RL_STEPS`, …; unset variables keep the defaults."""
        found = config_module.RLConfig.from_env(**cls()._fields())
        return cls(**{ours: getattr(found, theirs) for ours, theirs in _NAMES.items()})

    def _fields(self) -> dict[str, Any]:
        return {_NAMES[name]: value for name, value in asdict(self).items()}

    def to_config(self) -> config_module.RLConfig:
        """The same settings for `mint.rl.run_grpo`. Nothing is held out, and the adapter prints, as in the demos."""
        return config_module.RLConfig(**self._fields(), heldout_size=0, print_progress=False)


_NAMES = {
    "model": "base_model",
    "rank": "rank",
    "steps": "steps",
    "batch": "batch_size",
    "group": "group_size",
    "lr": "learning_rate",
    "max_tokens": "max_tokens",
    "temperature": "temperature",
}


def run_grpo(adapter: Any, cfg: RLConfig | None = None) -> str:
    """Runs the shared loop; returns the path of the final sampler weights."""
    result = run_loop(adapter, (cfg or RLConfig.from_env()).to_config())
    _CONSOLE.print(f"Saved: {result.sampler_checkpoint}", soft_wrap=True)
    return result.sampler_checkpoint


def _prompt_of(sample: Any) -> str:
    return str(sample["prompt"]) if isinstance(sample, Mapping) and "prompt" in sample else str(sample)
