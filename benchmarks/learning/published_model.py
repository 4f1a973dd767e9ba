"""A published model, SmolLM2-135M-Instruct, learns three tasks that others wrote: held-out reward before and after.

    mint models pull HuggingFaceTB/SmolLM2-135M-Instruct
    pip install -c constraints/cpu.txt '.[local,tasks,ifeval,textarena]'
    python -m benchmarks.learning.published_model [--task NAME …] [--seed N …] > rows.jsonl
    python -m benchmarks.learning.published_model --read rows.jsonl --plot docs/published-model.png

The settings were chosen on the seeds 0 and 100. Each run is one process of one thread. Prints a JSON line for each run;
with `--read` a table, and the picture.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import mint
from mint.recipes.task_sources.ifeval import IFEvalAdapter
from mint.recipes.task_sources.reasoning_gym import ReasoningGymAdapter
from mint.recipes.task_sources.textarena import TextArenaAdapter
from mint.rl import RLConfig, run_grpo
from mint.rl.adapter import Task
from mint.runs.log import RunLog

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
SEEDS = (2, 3, 4)
HELDOUT = 96
SUMS_HELDOUT = 256
"""More than of the others: an answer of a few tokens costs little."""


SETTINGS = RLConfig(
    base_model=MODEL,
    batch_size=6,
    group_size=8,
    steps=12,
    temperature=0.8,
    rank=16,
    learning_rate=3e-4,
    lr_schedule="linear",
    heldout_size=HELDOUT,
)
"""What the three tasks share."""

SHORT_CONSTRAINTS = (
    "change_case:english_lowercase,change_case:english_capital,detectable_format:title,startend:quotation,"
    "keywords:existence,detectable_format:number_highlighted_sections"
)
"""The constraints of IFEval that a sentence of 20 tokens can satisfy."""

CHAIN_SUM: dict[str, Any] = {
    "heldout_size": SUMS_HELDOUT,
    "prompt_style": "plain",
    "instruction": "State the final answer to the following arithmetic problem: 3 + 4 = 7\n",
    "min_terms": 2,
    "max_terms": 2,
    "min_digits": 2,
    "max_digits": 2,
}
"""Sums of two numbers of two digits, with one solved question before each."""


class GuessTheNumber(TextArenaAdapter):
    """textarena's GuessTheNumber, 1 to 20: with `max_turns=2` it allows three valid guesses, and one invalid one."""

    reward_range = (0.0, 1.0)

    def __init__(self, *, seed: int) -> None:
        """`seed` draws the training games."""
        instruction = " Reply with the number only."
        super().__init__("GuessTheNumber-v0", seed=seed, heldout_size=HELDOUT, instruction=instruction, max_turns=2)


@dataclass(frozen=True)
class Entry:
    """A task of the comparison: its name for people, and what its run differs in from `SETTINGS`."""

    title: str
    settings: Mapping[str, Any]


ENTRIES = {
    "sums": Entry(
        "reasoning-gym chain_sum",
        {
            "batch_size": 8,
            "steps": 32,
            "max_tokens": 6,
            "stop": ["\n"],
            "temperature": 1.0,
            "lr_schedule": "constant",
            "heldout_size": SUMS_HELDOUT,
        },
    ),
    "ifeval": Entry("IFEval constraints", {"max_tokens": 20, "steps": 14, "lr_schedule": "constant"}),
    "guess": Entry(
        "textarena GuessTheNumber",
        {"max_tokens": 6, "max_turns": 4, "stop": ["\n"], "steps": 10, "lr_schedule": "constant"},
    ),
}


def make_task(name: str, seed: int) -> Task:
    """The task with its training items drawn by `seed`; the held-out items are the same for every seed."""
    if name == "sums":
        return ReasoningGymAdapter("chain_sum", seed=seed, **CHAIN_SUM)
    if name == "ifeval":
        return IFEvalAdapter(SHORT_CONSTRAINTS, seed=seed, heldout_size=HELDOUT)
    return GuessTheNumber(seed=seed)


def run_task(name: str, seed: int, folder: Path) -> dict[str, Any]:
    """One run in this process, as a row of the output."""
    config = SETTINGS.changed(seed=seed, run_dir=folder / "run", **ENTRIES[name].settings)
    task = make_task(name, seed)
    with mint.ServiceClient(data_dir=folder / "service") as service:
        began_s, cpu_began_s = time.monotonic(), time.process_time()
        result = run_grpo(task, config, service_client=service)
        seconds, cpu_seconds = time.monotonic() - began_s, time.process_time() - cpu_began_s
    return {
        "task": name,
        "seed": seed,
        "steps": config.steps,
        "samples": result.samples,
        "before": {f"{temperature:g}": reading.to_dict() for temperature, reading in result.heldout_before.items()},
        "after": {f"{temperature:g}": reading.to_dict() for temperature, reading in result.heldout_after.items()},
        "rewards": [row["reward/mean"] for row in RunLog(result.run_dir).read("metrics.jsonl")],
        "findings": [finding.code for finding in result.findings],
        "seconds": round(seconds, 1),
        "cpu_seconds": round(cpu_seconds, 1),
        "load": round(os.getloadavg()[1], 1),
    }


def run_in_own_process(name: str, seed: int) -> dict[str, Any]:
    """One run with one thread; its progress goes to stderr."""
    command = [sys.executable, "-m", "benchmarks.learning.published_model", "--one", name, "--seed", str(seed)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MINT_THREADS": "1"}
    process = subprocess.run(command, stdout=subprocess.PIPE, env=environment, text=True, check=True)
    return json.loads(process.stdout.splitlines()[-1])


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Held-out reward before → after with 95 % intervals, and the minutes of one core."""
    print("| task | seed | greedy before → after | temperature 1 before → after | minutes of one core |")
    print("|---|---|---|---|---|")
    for row in rows:
        pairs = [[reading(row[when][temperature]) for when in ("before", "after")] for temperature in ("0", "1")]
        cells = " | ".join(f"{before} → {after}" for before, after in pairs)
        print(f"| {ENTRIES[row['task']].title} | {row['seed']} | {cells} | {row['cpu_seconds'] / 60:.1f} |")


def reading(estimate: Mapping[str, float]) -> str:
    """`0.16 (0.10–0.23)`."""
    return f"{estimate['mean']:.2f} ({estimate['low']:.2f}–{estimate['high']:.2f})"


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """One chart for each task: the training reward of each seed, and the held-out reward before and after."""
    names = [name for name in ENTRIES if any(row["task"] == name for row in rows)]
    figure = Figure(figsize=(4.2 * len(names), 3.8), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    colours = ("#0072B2", "#D55E00", "#009E73")
    for name, axes in zip(names, figure.subplots(1, len(names), sharey=True, squeeze=False)[0], strict=True):
        for place, row in enumerate(one for one in rows if one["task"] == name):
            colour, last = colours[place % len(colours)], row["steps"]
            axes.plot(range(1, last + 1), row["rewards"], color=colour, alpha=0.45, linewidth=1)
            ends = [row[when]["0"] for when in ("before", "after")]
            spread = [[end["mean"] - end["low"] for end in ends], [end["high"] - end["mean"] for end in ends]]
            shift = 0.02 * last * (place - 1)
            axes.errorbar(
                [shift, last + shift],
                [end["mean"] for end in ends],
                yerr=spread,
                fmt="o",
                color=colour,
                capsize=3,
                label=f"seed {row['seed']}",
            )
        axes.set(title=ENTRIES[name].title, xlabel="step", ylim=(-0.02, 1.02))
        axes.grid(alpha=0.25)
        axes.legend(loc="upper left", frameon=False)
    figure.axes[0].set(ylabel="reward")
    figure.suptitle("SmolLM2-135M-Instruct, one CPU thread. Lines: training. Dots: held-out, greedy, 95 %")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", action="append", choices=list(ENTRIES), help="default: all three")
    parser.add_argument("--seed", action="append", type=int, help="default: 2, 3 and 4")
    parser.add_argument("--one", choices=list(ENTRIES), help="one run, in this process")
    parser.add_argument("--read", type=Path, metavar="ROWS", help="no runs: the rows of earlier ones")
    parser.add_argument("--plot", type=Path, help="where the picture goes")
    options = parser.parse_args()
    seeds = options.seed or SEEDS
    if options.one:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(run_task(options.one, seeds[0], Path(folder))))
        return
    if options.read is not None:
        rows = [json.loads(line) for line in options.read.read_text().splitlines()]
        print_table(rows)
    else:
        rows = []
        for name in options.task or ENTRIES:
            for seed in seeds:
                rows.append(run_in_own_process(name, seed))
                print(json.dumps(rows[-1]), flush=True)
    if options.plot is not None:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()
