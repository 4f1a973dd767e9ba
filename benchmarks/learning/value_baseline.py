"""Does a learned value help as a baseline? A second LoRA that predicts the reward of a prompt, beside means of rewards.

    python -m benchmarks.learning.value_baseline [--first-seed N] [--seeds N] [--steps N] [--group N]

The value is σ of a scalar head on the last token of the prompt, as in `mint.recipes.reward_model`, and is trained on
the rewards of the steps before by cross-entropy. So it never depends on the rewards from which it is subtracted, and
the gradient stays unbiased. All arms see the same items and seeds, as many samples, and take as many steps; the value
costs a forward for each group and four passes for each step.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import mint
from mint import types
from mint.recipes.math import DEMO, MathAdapter
from mint.recipes.reward_model import default_head
from mint.rl import Group, run_grpo
from mint.rl.estimate import interval
from mint.runs.log import RunLog

SAMPLES = 64
"""Of a step, whatever the size of its groups."""

PASSES = 4
VALUE_BATCH = 64
REMEMBERED = 512
"""Optimizer steps of the value after each step of the policy, the groups of each, and the newest groups from which they
are drawn: one step has too few rewards to learn from."""


class LearnedValue:
    """A baseline for `RLConfig`: what a second LoRA of the same base predicts for the group's prompt."""

    def __init__(self, service: mint.ServiceClient, *, groups: int, seed: int, learning_rate: float = 1e-3) -> None:
        """`groups` of a step: after so many, the value is trained on their rewards."""
        self.trainer = service.create_lora_training_client(base_model=DEMO.base_model, rank=DEMO.rank, seed=seed)
        self.head = default_head(self.trainer.get_tokenizer())
        self.groups = groups
        self.learning_rate = learning_rate
        self.random = random.Random(f"value {seed}")
        self.seen: deque[tuple[types.Datum, float]] = deque(maxlen=REMEMBERED)
        self.errors: list[tuple[float, float]] = []
        """(value, mean reward) of every group so far."""

    def __call__(self, group: Group) -> float:
        """The predicted reward; the group's own rewards are learned from once the step is over."""
        if self.errors and len(self.errors) % self.groups == 0:
            self._train()
        datum = self._datum(group.rollouts[0].turns[0].prompt)
        row = self.trainer.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()[-1]
        value = 1 / (1 + math.exp(float(row[1]) - float(row[0])))
        reward = float(np.mean(group.rewards))
        self.seen.append((datum, reward))
        self.errors.append((value, reward))
        return value

    def explained(self) -> float:
        """The share of the variance of the groups' mean rewards that the values explain, of the last half."""
        values, rewards = np.asarray(self.errors[len(self.errors) // 2 :]).T
        return float(1 - ((rewards - values) ** 2).mean() / rewards.var())

    def _train(self) -> None:
        for _ in range(PASSES):
            drawn = self.random.sample(list(self.seen), min(VALUE_BATCH, len(self.seen)))
            self.trainer.forward_backward_custom([datum for datum, _ in drawn], soft_labels([of for _, of in drawn]))
            self.trainer.optim_step(types.AdamParams(learning_rate=self.learning_rate)).result()

    def _datum(self, prompt: Sequence[int]) -> types.Datum:
        targets = np.tile(np.asarray(self.head, dtype=np.int64), (len(prompt), 1))
        weights = np.zeros(targets.shape, dtype=np.float32)
        weights[-1] = 1.0
        inputs = {
            "target_tokens": types.TensorData.from_numpy(targets),
            "weights": types.TensorData.from_numpy(weights),
        }
        return types.Datum(types.ModelInput.from_ints(list(prompt)), inputs)


def soft_labels(rewards: Sequence[float]) -> Any:
    """The cross-entropy of σ(score) with mean rewards from 0 to 1, summed, for `forward_backward_custom`."""

    def loss(data: list[types.Datum], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        scores = [row[-1, 0] - row[-1, 1] for row in logprobs]
        # -r·log σ(s) - (1 - r)·log σ(-s), in the form that does not overflow
        terms = [
            score.neg().logaddexp(0 * score) + (1 - reward) * score
            for score, reward in zip(scores, rewards, strict=True)
        ]
        return sum(terms), {}

    return loss


ARMS: dict[str, dict[str, Any]] = {
    "mean of the group": {},
    "mean of the batch": {"baseline": "batch"},
    "learned value": {},
}


def run(arm: str, seed: int, steps: int, group: int) -> dict[str, float]:
    """Held-out reward at temperature 1 and its items, the mean training reward, CPU time, what the value explains."""
    with tempfile.TemporaryDirectory() as folder, mint.ServiceClient(data_dir=Path(folder) / "service") as service:
        cpu = time.process_time()
        learned = LearnedValue(service, groups=SAMPLES // group, seed=seed) if arm == "learned value" else None
        fields = ARMS[arm] | ({"baseline": learned} if learned else {})
        config = DEMO.changed(
            steps=steps, seed=seed, batch_size=SAMPLES // group, group_size=group, heldout_size=256,
            print_progress=False, run_dir=Path(folder) / "run", **fields,
        )  # fmt: skip
        result = run_grpo(MathAdapter(seed=seed), config, service_client=service)
        after = result.heldout_after[1.0]
        return {
            "heldout": after.mean,
            "items": after.n,
            "reward": float(np.mean([row["reward/mean"] for row in RunLog(result.run_dir).read("metrics.jsonl")])),
            "cpu_s": time.process_time() - cpu,
            "explained": learned.explained() if learned else math.nan,
        }


def main() -> None:
    """A row for each arm."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--group", type=int, default=2, help="completions of a prompt")
    options = parser.parse_args()
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    found: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    for seed in seeds:
        for arm, rows in found.items():  # in turns, so that other load meets all arms alike
            rows.append(run(arm, seed, options.steps, options.group))
            print(f"seed {seed}, {arm}: {rows[-1]}", file=sys.stderr, flush=True)
    print(
        f"\n{options.steps} steps of {SAMPLES} samples, groups of {options.group}, seeds {' '.join(map(str, seeds))}\n"
    )
    print("| baseline | held-out at T=1 (95 %) | per seed | training reward | variance explained | CPU s |")
    print("|---|---|---|---|---|---|")
    for arm, rows in found.items():
        right = [(round(row["heldout"] * row["items"]), int(row["items"])) for row in rows]
        answers = [float(place < count) for count, items in right for place in range(items)]
        mean, low, high = interval(answers, proportion=True)
        each = " ".join(f"{row['heldout']:.3f}" for row in rows)
        reward, explained, cpu_s = (np.mean([row[name] for row in rows]) for name in ("reward", "explained", "cpu_s"))
        print(
            f"| {arm} | {mean:.3f} ({low:.3f} to {high:.3f}) | {each} | {reward:.3f} | {explained:.2f} | {cpu_s:.0f} |"
        )


if __name__ == "__main__":
    main()
