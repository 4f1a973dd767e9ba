"""Plants minus signs into losses and advantages of a user's own, and counts which are named, and how many healthy ones.

    python -m benchmarks.detection.reversed_signs [--first-seed N] [--seeds N]

The thresholds of both rules were chosen from what their formulas give, before any of these runs. Losses: a loop on the
SDK that trains on each batch three times by `forward_backward_custom`; from the second time on, its terms of KL work
against the advantages. Such a loop is named if any of its passes has the warning `reversed_loss`. Advantages:
`run_grpo` with an advantage function; named if the run has the finding `reversed_advantages`. Tasks: `digits` and
`code` of `benchmarks.detection.proof`, and chat. Intervals are Wilson's (95 %).
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import mint
from benchmarks.detection.faults import SMALL
from benchmarks.detection.lint_mutations import Run, Setting, codes, correct
from benchmarks.detection.proof import CODE, DIGITS, Code, Digits
from mint.recipes.chat import ChatAdapter
from mint.rl import RLAdapter, run_grpo
from mint.rl.analysis.run_analysis import diagnose_run
from mint.rl.estimate import wilson
from mint.types import AdamParams, Datum

Loss = Callable[[Any, Any, Any], Any]
"""Torch tensors of the trained tokens of one datum, each [T]: logprobs, the sampler's logprobs, advantages → a loss for
each token [T]."""

FIRST_SEED = 5000
STEPS, EPOCHS = 3, 3


def reinforce(logprobs: Any, sampled: Any, advantages: Any) -> Any:
    """Without a ratio."""
    return -advantages * logprobs


def ratio(logprobs: Any, sampled: Any, advantages: Any) -> Any:
    """Importance sampling."""
    return -advantages * (logprobs - sampled).exp()


def clipped(logprobs: Any, sampled: Any, advantages: Any) -> Any:
    """PPO."""
    free = (logprobs - sampled).exp()
    return -(free * advantages).minimum(free.clamp(0.8, 1.2) * advantages)


def cispo(logprobs: Any, sampled: Any, advantages: Any) -> Any:
    """A clipped ratio without a gradient."""
    return -advantages * (logprobs - sampled).exp().clamp(max=2.0).detach() * logprobs


def penalized(coef: float) -> Loss:
    """PPO with `coef` times KL (k3) to the policy that sampled."""

    def loss(logprobs: Any, sampled: Any, advantages: Any) -> Any:
        log_ratio = sampled - logprobs
        return clipped(logprobs, sampled, advantages) + coef * (log_ratio.exp() - log_ratio - 1)

    return loss


def spread_out(logprobs: Any, sampled: Any, advantages: Any) -> Any:
    """REINFORCE with a bonus for unlikely tokens."""
    return reinforce(logprobs, sampled, advantages) + 0.1 * logprobs


def scaled(logprobs: Any, sampled: Any, advantages: Any) -> Any:
    """Advantages that are a hundred times as large."""
    return 100 * ratio(logprobs, sampled, advantages)


LOSSES: dict[str, Loss] = {
    "REINFORCE": reinforce,
    "importance sampling": ratio,
    "PPO": clipped,
    "CISPO": cispo,
    "PPO, KL 0.1": penalized(0.1),
    "PPO, KL 1": penalized(1.0),
    "PPO, KL 5": penalized(5.0),
    "bonus for unlikely tokens": spread_out,
    "advantages times 100": scaled,
}


def ranks(rewards_G: np.ndarray) -> np.ndarray:
    """The place in the group."""
    return np.argsort(np.argsort(rewards_G, kind="stable"), kind="stable") - (len(rewards_G) - 1) / 2


def wins(rewards_G: np.ndarray) -> np.ndarray:
    """Completions that are better, less those that are worse."""
    return np.sign(rewards_G[:, None] - rewards_G).sum(axis=1)


def best_only(rewards_G: np.ndarray) -> np.ndarray:
    """1 for the best ones, less the mean."""
    best = (rewards_G == rewards_G.max()).astype(np.float64)
    return best - best.mean()


def softmax(rewards_G: np.ndarray) -> np.ndarray:
    """Boltzmann weights, less the mean."""
    weights = np.exp(3 * rewards_G)
    return weights / weights.sum() - 1 / len(rewards_G)


def above_the_median(rewards_G: np.ndarray) -> np.ndarray:
    """Cut to [-0.5, 0.5]."""
    return np.clip(rewards_G - np.median(rewards_G), -0.5, 0.5)


ADVANTAGES = (ranks, wins, best_only, softmax, above_the_median)


class TaskRun(Run):
    """A loop on the SDK, on one of the tasks of a run."""

    def __init__(self, service: mint.ServiceClient, seed: int, task: RLAdapter) -> None:
        """Starts from the base; a sample of `code` needs more than the loop's 16 tokens, and earns what it has."""
        super().__init__(service, Setting(seed, 1.0, 8, ""))
        self.task = task
        self.items = list(task.build_dataset())
        random.Random(seed).shuffle(self.items)

    def _ask(self) -> tuple[list[int], Callable[[str], float]]:
        item = self.items.pop()

        def reward(text: str) -> float:
            graded: Any = self.task.compute_reward(text.removesuffix("<|im_end|>"), item)
            return float(getattr(graded, "value", graded))

        return list(self.task.make_prompt(item, self.tokenizer)), reward


def named_losses(run: TaskRun, loss: Loss, sign: float) -> tuple[int, int]:
    """Trains; (passes with the warning, passes)."""

    def whole(data: list[Datum], rows: list[Any]) -> tuple[Any, dict[str, float]]:
        total = 0 * rows[0].sum()
        for datum, row in zip(data, rows, strict=True):
            columns = {key: datum.loss_fn_inputs[key].to_torch() for key in ("weights", "logprobs", "advantages")}
            kept = columns["weights"] != 0
            total = total + loss(row[kept], columns["logprobs"][kept], columns["advantages"][kept]).sum()
        return sign * total, {}

    named = passes = 0
    for _ in range(STEPS):
        data = correct(run.batch())
        for _ in range(EPOCHS if data else 0):
            output = run.model.forward_backward_custom(data, whole).result()
            run.model.optim_step(AdamParams(learning_rate=2e-3)).result()
            named += "reversed_loss" in codes(output.warnings)
            passes += 1
    return named, passes


def named_advantages(function: Callable[[np.ndarray], np.ndarray], sign: int, task: RLAdapter, **fields: Any) -> bool:
    """Whether two steps with the function, times `sign`, are named."""

    def advantage(rewards_G: np.ndarray) -> np.ndarray:
        return sign * function(rewards_G)

    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        config = SMALL.changed(run_dir=run_dir, steps=2, heldout_size=0, print_progress=False, **fields)
        run_grpo(task, config.changed(advantage=advantage))
        return any(finding.code == "reversed_advantages" for finding in diagnose_run(run_dir))


def tasks(seed: int) -> Iterator[tuple[str, RLAdapter, dict[str, Any]]]:
    """The tasks with their settings in `run_grpo`."""
    yield "digits", Digits(seed), DIGITS
    yield "code", Code(seed), {"max_tokens": CODE["max_tokens"]}
    yield "chat", ChatAdapter(seed=seed), {"max_tokens": 32}


def share(count: int, of: int) -> str:
    """With its interval."""
    low, high = wilson(count, of)
    return f"{count} of {of} ({low:.2f} to {high:.2f})"


def print_table(tried: Counter[tuple[str, bool]], named: Counter[tuple[str, bool]], kinds: Sequence[str]) -> None:
    """Healthy and reversed, named and tried."""
    print("| | reversed, named | healthy, named |\n|---|---|---|")
    for kind in kinds:
        cells = [share(named[kind, wrong], tried[kind, wrong]) for wrong in (True, False)]
        print(f"| {kind} | {' | '.join(cells)} |")


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED)
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    tried: Counter[tuple[str, bool]] = Counter()
    named: Counter[tuple[str, bool]] = Counter()

    def note(kind: str, what: str, wrong: bool, count: int, of: int) -> None:
        print(f"{what}, {'reversed' if wrong else 'healthy'}: {count} of {of}", file=sys.stderr, flush=True)
        runs, passes = f"{kind}: runs", f"{kind}: passes"
        tried[runs, wrong] += 1
        named[runs, wrong] += count > 0
        tried[passes, wrong] += of
        named[passes, wrong] += count

    service = mint.ServiceClient()
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for name, task, fields in tasks(seed):
            for wrong in (False, True):
                for loss_name, loss in LOSSES.items():
                    count, of = named_losses(TaskRun(service, seed, task), loss, -1.0 if wrong else 1.0)
                    note("losses", f"{name}, seed {seed}, {loss_name}", wrong, count, of)
                for function in ADVANTAGES:
                    found = named_advantages(function, -1 if wrong else 1, task, seed=seed, **fields)
                    note("advantages", f"{name}, seed {seed}, {function.__name__}", wrong, int(found), 1)
            task.close()
    print_table(tried, named, ["losses: runs", "losses: passes", "advantages: runs"])


if __name__ == "__main__":
    main()
