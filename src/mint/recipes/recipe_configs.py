"""The recipes by name, and the class of each one's settings."""

from __future__ import annotations

from mint.recipes.distill import DistillConfig
from mint.recipes.dpo import DPOConfig
from mint.recipes.sft import SFTConfig
from mint.rl import RLConfig
from mint.rl.run_config import RunConfig

CONFIGS: dict[str, type[RunConfig]] = {"rl": RLConfig, "sft": SFTConfig, "dpo": DPOConfig, "distill": DistillConfig}
"""Recipe → the class of its settings, as `mint train RECIPE` names it."""
