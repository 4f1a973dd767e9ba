"""Proof of the diagnosis on tasks and seeds on which no threshold was set: hits and false alarms with intervals.

    python -m benchmarks.detection.proof [--planted N] [--healthy N] [--first-seed N] [--output FILE]

The thresholds of the rules were set on `benchmarks.detection.faults`: arithmetic with exact match and chat, seeds 0 to
4. Here the tasks are `code` (functions, graded by tests in a sandbox), `digits` (arithmetic with partial credit: the
questions are of the kind used in tuning, the reward is not) and `tools` (several turns), with seeds from 2000 on. Seeds
50 and 1000 to 1003 showed which settings let `digits` learn: a healthy run must be one that improves. Fifteen kinds of
faults are planted into `digits` and `code`; healthy runs are of all three tasks, in turn.

A planted fault is named if the finding with its code is among the run's findings. A healthy run has a false alarm if it
has a warning or an error. `--output` keeps one JSON line per run; a second call with the same file makes only the runs
that are not in it. Intervals are Wilson's (95 %).
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.detection.faults import (
    Fault,
    StaleSampler,
    TemperedLogprobs,
    WrongSign,
    coin,
    fault,
    findings,
    off_by_one,
)
from mint.recipes.code import CodeAdapter, CodeProblem
from mint.recipes.datasets.arithmetic import Problem, draw_problems
from mint.recipes.tools import ToolsAdapter
from mint.rl import Reward, RLAdapter
from mint.rl.estimate import wilson

FIRST_SEED = 2000

Grade = Callable[["Digits | Code", float, str], float]
"""(task, the right reward, the response) → the reward."""


class Digits(RLAdapter):
    """Arithmetic; the reward is the share of the answer's digits that are in their places."""

    step = 1

    def __init__(self, seed: int, *, items: int = 1024, repeats: int = 1, grade: Grade | None = None) -> None:
        """`items` questions, each `repeats` times; `grade` replaces the right rewards."""
        self.seed = seed
        self.items = items
        self.repeats = repeats
        self.grade = grade

    def build_dataset(self) -> Sequence[Problem]:
        """Questions that are not held out."""
        return draw_problems(self.seed, self.items, heldout=False) * self.repeats

    def build_heldout(self) -> Sequence[Problem]:
        """Held-out questions."""
        return draw_problems(self.seed, 128, heldout=True)

    def make_prompt(self, item: Problem, tokenizer: Any) -> list[int]:
        """The question as plain text."""
        return tokenizer.encode(item.question)

    def compute_reward(self, response: str, item: Problem) -> float:
        """From 0 to 1."""
        text = response.strip().ljust(len(item.answer))
        right = sum(map(str.__eq__, text, item.answer)) / max(len(text), len(item.answer))
        return right if self.grade is None else self.grade(self, right, response)

    def evaluate(self, step: int, rewards: list[float], num_datums: int) -> None:
        """Keeps the step, for graders that change."""
        self.step = step + 1


class Code(CodeAdapter):
    """One-line functions."""

    step = 1

    def __init__(self, seed: int, *, items: int = 512, repeats: int = 1, grade: Grade | None = None) -> None:
        """`items` functions, each `repeats` times; `grade` replaces the right rewards."""
        super().__init__(seed=seed, train_size=items)
        self.repeats = repeats
        self.grade = grade

    def build_dataset(self) -> Sequence[CodeProblem]:
        """Drawn by the seed."""
        return [*super().build_dataset()] * self.repeats

    def compute_reward(self, response: str, item: CodeProblem) -> Reward:
        """The share of the tests that pass."""
        right = super().compute_reward(response, item)
        return right if self.grade is None else Reward(self.grade(self, right.value, response))

    def evaluate(self, step: int, rewards: list[float], num_datums: int) -> None:
        """Keeps the step, for graders that change."""
        self.step = step + 1


def raises_for_some(task: Digits | Code, right: float, response: str) -> float:
    """On about a third of the completions."""
    if len(response) % 3 == 0:
        raise ValueError("the grader has no answer")
    return right


_THROWN = itertools.count()

GRADERS: tuple[tuple[str, str, Grade, int], ...] = (
    ("every completion earns 0.4", "constant_reward", lambda task, right, response: 0.4, 4),
    ("every completion earns 0", "no_learning_signal_all_wrong", lambda task, right, response: 0.0, 4),
    ("grader raises on a third", "grader_failures", raises_for_some, 3),
    ("grader throws a coin", "inconsistent_reward", lambda task, right, response: coin(next(_THROWN)), 6),
    ("grader changes its mind", "inconsistent_reward", lambda task, right, response: coin(response, task.step), 32),
    ("reward is inverted from step 9 on", "reward_collapse", lambda task, right, response: right * (task.step < 9), 14),
)
"""Name, code, grader, steps."""

DIGITS: dict[str, Any] = {"max_tokens": 8}
CODE: dict[str, Any] = {"max_tokens": 40, "advantage": "std"}
TOOLS: dict[str, Any] = {"max_tokens": 48, "max_turns": 3, "learning_rate": 2e-3}


def planted(name: str, task: type[Digits] | type[Code], seed: int, settings: dict[str, Any]) -> list[Fault]:
    """Fifteen faults of different kinds in one task."""

    def one(fault_name: str, code: str, *, data: dict[str, Any] | None = None, **fields: Any) -> Fault:
        arguments: dict[str, Any] = {"items": 512, **(data or {})}
        return fault(f"{name}: {fault_name}", code, lambda: task(seed, **arguments), **{**settings, **fields})

    return [
        *(one(what, code, data={"grade": grade}, steps=steps) for what, code, grade, steps in GRADERS),
        one("learning rate 0.08", "learning_rate_too_high", learning_rate=0.08, steps=12),
        one("learning rate 2e-7", "learning_rate_too_low", learning_rate=2e-7, steps=9),
        one("too few tokens", "truncation", max_tokens=1 if task is Digits else 6, steps=4),
        one("advantages with the wrong sign", "falling_reward", trainer=WrongSign, steps=24),
        one("six items", "overfitting", data={"items": 6}, steps=24, heldout_size=128),
        one("one prompt 300 times", "few_prompts", data={"items": 1, "repeats": 300}, steps=4),
        one("sampler stays behind", "sampler_trainer_mismatch", trainer=StaleSampler, learning_rate=1e-2, steps=5),
        one("logprobs tempered by 0.7", "sampler_trainer_mismatch", trainer=TemperedLogprobs, temperature=0.7, steps=3),
        one(
            "mask a token early",
            "masked_loss",
            steps=2,
            patched=("mint.rl.training.policy_update.rollout_datums", off_by_one),
        ),
    ]


def healthy(place: int, first_seed: int) -> Fault:
    """The healthy run of this place: the three tasks in turn."""
    seed = first_seed + place
    if place % 3 == 0:
        settings = {"steps": 28, "batch_size": 16, "learning_rate": 3e-3, "lr_schedule": "linear"}
        return fault("healthy digits", "", lambda: Digits(seed), **{**DIGITS, **settings})
    if place % 3 == 1:
        return fault("healthy code", "", lambda: Code(seed), **CODE, steps=14)
    return fault("healthy tools", "", lambda: ToolsAdapter(seed=seed), **TOOLS, steps=10)


def runs(planted_runs: int, healthy_runs: int, first_seed: int = FIRST_SEED) -> list[tuple[Fault, int]]:
    """The runs with their seeds, planted and healthy ones in turn."""
    in_digits = planted("digits", Digits, first_seed + 101, DIGITS)
    in_code = planted("code", Code, first_seed + 102, CODE)
    faults = [one for pair in zip(in_digits, in_code, strict=True) for one in pair]
    bad = [(one, first_seed + 200 + place) for place, one in enumerate(faults[:planted_runs])]
    good = [(healthy(place, first_seed), first_seed + place) for place in range(healthy_runs)]
    return [one for pair in itertools.zip_longest(bad, good) for one in pair if one is not None]


def run(one: Fault, seed: int) -> dict[str, Any]:
    """Runs it; the row of the table."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = findings(one, Path(folder) / "run", seed=seed)
    alarms = [finding.code for finding in found if finding.severity != "info"]
    return {
        "run": one.name,
        "seed": seed,
        "code": one.code,
        "right": one.code in {finding.code for finding in found} if one.code else not alarms,
        "errors": [finding.code for finding in found if finding.severity == "error"],
        "warnings": [finding.code for finding in found if finding.severity == "warning"],
        "seconds": round(time.monotonic() - began, 1),
    }


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Hits and false alarms with their intervals."""
    bad = [row for row in rows if row["code"]]
    good = [row for row in rows if not row["code"]]
    lines = []
    for what, count, of in (
        ("planted faults named", sum(row["right"] for row in bad), len(bad)),
        ("planted faults named, and no other error", sum(_alone(row) for row in bad), len(bad)),
        ("healthy runs with a warning or an error", sum(not row["right"] for row in good), len(good)),
        ("healthy runs with an error", sum(bool(row["errors"]) for row in good), len(good)),
    ):
        low, high = wilson(count, of)
        lines.append(f"{what}: {count} of {of} (95 %: {low:.2f} to {high:.2f})")
    return "\n".join(lines)


def _alone(row: dict[str, Any]) -> bool:
    return row["right"] and set(row["errors"]) <= {row["code"]}


def main() -> None:
    """Prints one line per run, and the summary."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--planted", type=int, default=30)
    parser.add_argument("--healthy", type=int, default=30)
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    known: dict[tuple[str, int], dict[str, Any]] = {}
    if arguments.output is not None and arguments.output.exists():
        for line in arguments.output.read_text().splitlines():
            row = json.loads(line)
            known[row["run"], row["seed"]] = row
    print("| run | seed | must be found | errors | warnings | s | |\n|---|---|---|---|---|---|---|")
    for one, seed in runs(arguments.planted, arguments.healthy, arguments.first_seed):
        row = known.get((one.name, seed)) or run(one, seed)
        rows.append(row)
        if arguments.output is not None and (one.name, seed) not in known:
            with arguments.output.open("a") as file:
                file.write(json.dumps(row) + "\n")
        cells = (row["run"], row["seed"], row["code"], ", ".join(row["errors"]), ", ".join(row["warnings"]))
        print(
            "|",
            " | ".join(map(str, cells)),
            f"| {row['seconds']} | {'ok' if row['right'] else '**wrong**'} |",
            flush=True,
        )
    print("\n" + summary(rows))


if __name__ == "__main__":
    main()
