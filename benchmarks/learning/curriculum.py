"""How many samples "just hard enough" saves: a training set of which two thirds teach nothing, on mint/tiny.

    python -m benchmarks.learning.curriculum [--seeds N] [--steps N]

A third of the items is solved before training (the clean format), a third is hopeless (four-digit products), a third
are the arithmetic questions that can be learned. Held out: questions. Arms: uniform choice, dynamic sampling, the
curriculum, both. Read every few steps; told is the number of samples generated until held-out success at temperature 1
first reaches the target.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mint.recipes.datasets.arithmetic import draw_problems
from mint.recipes.math import exact_match
from mint.rl import RLAdapter, RLConfig, run_grpo
from mint.runs.log import RunLog

TARGET, ITEMS_OF_A_KIND, EVAL_EVERY = 0.8, 96, 4

ARMS: dict[str, dict[str, Any]] = {
    "uniform": {},
    "dynamic sampling": {"dynamic_sampling": True},
    "curriculum": {"curriculum": True},
    "both": {"curriculum": True, "dynamic_sampling": True},
}

Item = tuple[str, str]


class MixedDifficulty(RLAdapter):
    """(prompt, answer) pairs of three kinds."""

    reward_range = (0.0, 1.0)

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def build_dataset(self) -> Sequence[Item]:
        rng = random.Random(self.seed)
        learnable = draw_problems(self.seed, 2 * ITEMS_OF_A_KIND, heldout=False)
        solved = [(f"{one.expression} =", one.answer) for one in learnable[:ITEMS_OF_A_KIND]]
        pairs = [(rng.randint(1000, 9999), rng.randint(1000, 9999)) for _ in range(ITEMS_OF_A_KIND)]
        hopeless = [(f"Q: What is {a} * {b}?\nA:", str(a * b)) for a, b in pairs]
        return [*solved, *hopeless, *((one.question, one.answer) for one in learnable[ITEMS_OF_A_KIND:])]

    def build_heldout(self) -> Sequence[Item]:
        return [(one.question, one.answer) for one in draw_problems(self.seed, 256, heldout=True)]

    def make_prompt(self, item: Item, tokenizer: Any) -> list[int]:
        return tokenizer.encode(item[0])

    def compute_reward(self, response: str, item: Item) -> float:
        return float(exact_match(response, item[1]))


def samples_to_target(arm: str, seed: int, steps: int) -> tuple[float, float, float]:
    """Samples until the target (infinite if never), the share of groups with a signal, and the last reading."""
    with tempfile.TemporaryDirectory() as folder:
        config = RLConfig(
            base_model="mint/tiny",
            batch_size=16,
            group_size=8,
            steps=steps,
            max_tokens=8,
            temperature=1.0,
            learning_rate=2e-3,
            seed=seed,
            eval_every=EVAL_EVERY,
            heldout_size=256,
            save_every=1000,
            run_dir=Path(folder) / "run",
            **ARMS[arm],
        )
        run_grpo(MixedDifficulty(seed), config)
        log = RunLog(Path(folder) / "run")
        metrics = log.read("metrics.jsonl")
        generated = np.cumsum([row["rollouts/count"] for row in metrics])
        evaluations = [row for row in log.read("evaluations.jsonl") if row["temperature"] == 1.0 and row["step"] > 0]
        reached = [generated[row["step"] - 1] for row in evaluations if row["success"] >= TARGET]
        used = sum(row["groups/used"] for row in metrics) / sum(row["groups/total"] for row in metrics)
        return (float(reached[0]) if reached else float("inf")), used, evaluations[-1]["success"]


def main() -> None:
    """Prints a row per arm."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    print(f"| arm | samples to {TARGET:.0%} held-out, per seed | median | groups with a signal | last held-out |")
    print("|---|---|---|---|---|")
    for arm in ARMS:
        runs = [samples_to_target(arm, seed, options.steps) for seed in range(options.seeds)]
        counts = [run[0] for run in runs]
        print(
            f"| {arm} | {' '.join(f'{count:.0f}' for count in counts)} | {np.median(counts):.0f} | "
            f"{np.mean([run[1] for run in runs]):.2f} | {' '.join(f'{run[2]:.3f}' for run in runs)} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
