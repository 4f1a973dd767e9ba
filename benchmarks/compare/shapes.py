"""What the comparisons compute: the shape of a GRPO step, and its prompts, made from a seed; the same for all sides."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from mint.engine.machine_limits import StepShape
from mint.models.random_base import ModelShape


@dataclass(frozen=True)
class GrpoShape(StepShape):
    """One GRPO step. Sampling and training, where they are timed alone, are its two halves."""

    model: ModelShape = field(default_factory=ModelShape)
    alpha: int = 32
    learning_rate: float = 1e-4


def make_prompts(shape: GrpoShape, *, steps: int, seed: int) -> list[str]:
    """The prompts of `make_prompt_ids` as text. Each word is one token."""
    return [" ".join(f"w{token}" for token in row) for row in make_prompt_ids(shape, steps=steps, seed=seed)]


def make_prompt_ids(shape: GrpoShape, *, steps: int, seed: int) -> list[list[int]]:
    """`steps` x `shape.prompts` different prompts, in the order in which all sides use them."""
    rng = np.random.default_rng(seed)
    size = (steps * shape.prompts, shape.prompt_tokens)
    ids: list[list[int]] = rng.integers(1, shape.model.vocabulary, size=size).tolist()
    return ids
