"""The models that programs of tinker-cookbook name: the bundled one under all these names, another one for teachers."""

from __future__ import annotations

from pathlib import Path

from tests.compat.stand_in_model import make_stand_in

MODELS = (
    *("Qwen/Qwen3-8B", "Qwen/Qwen3-4B-Instruct-2507"),
    *("Qwen/Qwen3.5-4B", "Qwen/Qwen3.5-9B", "Qwen/Qwen3.5-9B-Base", "Qwen/Qwen3.5-397B-A17B"),
    *("Qwen/Qwen3.6-27B", "Qwen/Qwen3.6-35B-A3B", "Qwen/Qwen3.6-35B-A3B:peft:262144", "Qwen/Qwen3.8-27B"),
    "moonshotai/Kimi-K2.6",
)
"""What the recipes and the tutorials name."""
TEACHERS = ("Qwen/Qwen3.5-9B", "Qwen/Qwen3.5-397B-A17B")
"""Those of them with other weights: a student learns nothing from a teacher that equals it."""

EXPORTED = "Qwen/Qwen3.5-4B"
"""The one that a tutorial merges a lora into, by a program that cannot do so where the embeddings are tied."""


def make_models(work_dir: Path) -> None:
    """Makes each name a folder below `work_dir`: a program that is started there finds its tokenizer by the name."""
    first, teacher = MODELS[0], TEACHERS[0]
    made = {
        first: make_stand_in(work_dir, first),
        teacher: make_stand_in(work_dir, teacher, noise=0.3),
        EXPORTED: make_stand_in(work_dir, EXPORTED, tied=False),
    }
    for name in MODELS:
        if name not in made:
            link = work_dir / name
            link.parent.mkdir(exist_ok=True)
            link.symlink_to(made[teacher if name in TEACHERS else first])


def served_models(work_dir: Path) -> list[str]:
    """The options of `mint serve` for the models that `make_models` has made there."""
    return [option for name in MODELS for option in ("--model", f"{name}={(work_dir / name).resolve()}")]
