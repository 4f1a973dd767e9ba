"""The shared loop by the names of MinT's public demos: `RLAdapter`, `RLConfig` (mutable, from the environment),
`run_grpo(adapter, cfg) -> path`.

An adapter written for `demos/rl/rl_core.py` runs unchanged with `from mint.rl.rl_core import RLAdapter, RLConfig,
run_grpo`. New code takes `mint.rl`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

import mint.rl.adapter as adapter_module
import mint.rl.config as config_module
from mint.rl.loop import run_grpo as run_loop

_CONSOLE = Console()


class RLAdapter(adapter_module.RLAdapter):
    """A task; `evaluate` prints the step's accuracy unless it is overridden."""

    def evaluate(self, step: int, rewards: list[float], num_datums: int) -> None:
        """One line per step."""
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
        """As `MINT_BASE_MODEL, MINT_LORA_RANK, MINT_RL_STEPS, …` say, else the defaults."""
        found = config_module.RLConfig.from_env(**cls()._fields())
        return cls(**{ours: getattr(found, theirs) for ours, theirs in _NAMES.items()})

    def _fields(self) -> dict[str, Any]:
        return {_NAMES[name]: value for name, value in asdict(self).items()}

    def to_config(self) -> config_module.RLConfig:
        """The same settings for `mint.rl.run_grpo`; nothing is held out, as in the demos."""
        return config_module.RLConfig(**self._fields(), heldout_size=0)


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
