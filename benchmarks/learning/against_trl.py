"""Learning per sample and per second: mint's `run_grpo` against TRL's `GRPOTrainer`, whole runs of the same task.

    python -m benchmarks.learning.against_trl [--task math|chain_sum] [--seed 0 …] [--steps N] [--threads 1]
                                              [--peer trl …] [--plot FILE] > rows.jsonl
    python -m benchmarks.learning.against_trl --read rows.jsonl     summarises and plots earlier rows again

`math` is the arithmetic task on the bundled model, `chain_sum` that of reasoning-gym on SmolLM2-135M-Instruct, as in
`published_model` (`mint models pull SmolLM2-135M-Instruct`, and the `tasks` extra).

Each run is one process; one run at a time, the sides in turns. Prints JSON lines: one for each (side, seed), then one
for each peer that compares it with mint. Writes the curves to `--plot` if it is given, progress to stderr.
Needs the `dev` extra. `benchmarks/README.md` says what is equal on both sides and what is not.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from scipy.stats import t as student_t
from tokenizers import Tokenizer

from benchmarks.compare.contenders import KEEP_FREED_MEMORY, REMOTE_VARIABLES, cpu_name, peer_environment
from benchmarks.compare.turns import Worker
from benchmarks.learning.mint_run import make_task, run_config
from benchmarks.learning.published_model import MODEL, SUMS_HELDOUT
from mint.config import read_settings
from mint.errors import RequestFailedError
from mint.models.registry import resolve
from mint.rl.estimate import interval
from mint.rl.rollouts.item_order import ItemOrder

RANK, ALPHA = 16, 32
WINDOW = 10
"""Steps whose mean is "the reward at" a step."""
SHARE = 0.95
"""The second goal: this share of the way from the first step's reward to TRL's final reward."""
PROBE_TOLERANCE = {"float32": 1e-3, "bfloat16": 10.0}
"""By how many nats the logprob of a fixed sequence may differ; bfloat16 (of 470) is rounded in other places."""
TIMEOUT_S = 1800.0

COLOURS = {"mint": "#0072B2", "trl": "#D55E00", "trl-best": "#009E73"}
"""Colours of Okabe and Ito, which the colour-blind tell apart."""


@dataclass(frozen=True)
class Peer:
    """One entry of TRL: `overrides` of its `GRPOConfig`, and environment variables."""

    overrides: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


PEERS = {
    "trl": Peer(),
    "trl-best": Peer({"gradient_accumulation_steps": 4}, KEEP_FREED_MEMORY),
}
"""TRL as its documentation has it, and with the fastest settings that were found for it: micro-batches of a quarter."""


@dataclass(frozen=True)
class SharedTask:
    """What both sides train on, and how. `reward` is a name of `answer_rewards`."""

    title: str
    base_model: str
    reward: str
    prompts: int
    group: int
    steps: int
    max_tokens: int
    learning_rate: float
    schedule: str
    heldout: int
    dtype: str = "float32"
    """Of the base model; loras and their optimizer are in float32."""
    ends: tuple[str, ...] | None = None
    """Tokens that end a completion; None: the model's own."""


TASKS = {
    "math": SharedTask("arithmetic questions, mint/tiny", "mint/tiny", "exact", 32, 8, 60, 8, 3e-3, "linear", 512),
    "chain_sum": SharedTask(
        "reasoning-gym chain_sum, SmolLM2-135M-Instruct",
        MODEL,
        "number",
        prompts=8,
        group=8,
        steps=32,
        max_tokens=6,
        learning_rate=3e-4,
        schedule="constant",
        heldout=SUMS_HELDOUT,
        dtype="bfloat16",
        ends=("<|im_end|>", "\n"),
    ),
}


def make_spec(name: str, *, seed: int, steps: int | None, threads: int) -> dict[str, Any]:
    """The spec for both sides. The prompts are in the order in which `run_grpo` takes them with this seed."""
    chosen = TASKS[name]
    base = resolve(chosen.base_model, read_settings().model_aliases)
    spec: dict[str, Any] = {
        "task": name,
        "base_model": str(base),
        "seed": seed,
        "steps": steps or chosen.steps,
        "threads": threads,
        "dtype": chosen.dtype,
        "prompts_per_step": chosen.prompts,
        "group_size": chosen.group,
        "max_tokens": chosen.max_tokens,
        "end_token_ids": None if chosen.ends is None else token_ids(base, chosen.ends),
        "reward": chosen.reward,
        "rank": RANK,
        "alpha": ALPHA,
        "learning_rate": chosen.learning_rate,
        "schedule": chosen.schedule,
        "probe_tokens": list(range(1, 41)),
        "work_dir": "",
    }
    task = make_task(spec)
    dataset, count = task.build_dataset(), spec["steps"] * chosen.prompts
    asked = [dataset[place] for place in ItemOrder(len(dataset), run_config(spec)).take(1, count)]
    return spec | {
        "heldout": [(task.item_key(problem), problem.answer) for problem in task.build_heldout()[: chosen.heldout]],
        "prompts": [task.item_key(problem) for problem in asked],
        "solutions": [problem.answer for problem in asked],
    }


def token_ids(base: Path, texts: Sequence[str]) -> list[int]:
    """The ids of texts of one token each."""
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    return [tokenizer.encode(text, add_special_tokens=False).ids[0] for text in texts]


def make_worker(side: str, spec: dict[str, Any], work_dir: Path, trl_python: Path) -> Worker:
    """The process of one run; `work_dir` is its own."""
    own = spec | {"work_dir": str(work_dir)}
    shared = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(spec["threads"])}
    path = work_dir / "spec.json"
    if side == "mint":
        path.write_text(json.dumps(own))
        return Worker(
            side,
            [sys.executable, "-m", "benchmarks.learning.mint_run", str(path)],
            log_path=work_dir / "log",
            environment=shared
            | {"MINT_HOME": str(work_dir), "MINT_THREADS": str(spec["threads"]), "MINT_DTYPE": spec["dtype"]},
            without=REMOTE_VARIABLES,
        )
    peer = PEERS[side]
    batch = spec["prompts_per_step"] * spec["group_size"] // peer.overrides.get("gradient_accumulation_steps", 1)
    overrides = {"lr_scheduler_type": spec["schedule"], "per_device_train_batch_size": batch, **peer.overrides}
    path.write_text(json.dumps(own | {"overrides": overrides}))
    return Worker(
        side,
        [str(trl_python), "-m", "benchmarks.learning.trl_run", str(path)],
        log_path=work_dir / "log",
        environment=shared | peer.environment,
        without=("PYTHONPATH",),
    )


def run_side(side: str, spec: dict[str, Any], trl_python: Path) -> dict[str, Any]:
    """One whole run, as a row of the output."""
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix=f"learning-{side}-") as folder:
        worker = make_worker(side, spec, Path(folder), trl_python)
        started_s = time.monotonic()
        with worker:
            ready = worker.hear("ready", timeout_s=TIMEOUT_S)
            steps = [worker.hear("step", timeout_s=TIMEOUT_S) for _ in range(spec["steps"])]
            peak_rss_bytes = worker.peak_rss_bytes
            load_after = os.getloadavg()[0]
            facts = ready | worker.hear("finished", timeout_s=TIMEOUT_S)
    seconds = [step["at_s"] - facts["first_step_at_s"] for step in steps]
    return {
        "side": side,
        "task": spec["task"],
        "seed": spec["seed"],
        "steps": spec["steps"],
        "samples": steps[-1]["samples"],
        "tokens": facts["tokens"],
        "seconds": seconds[-1],
        "seconds_from_start": steps[-1]["at_s"] - started_s,
        "cpu_seconds": facts["cpu_seconds"],
        "reward_mean": statistics.fmean(step["reward"] for step in steps),
        "reward_final": float(smoothed([step["reward"] for step in steps])[-1]),
        "heldout_greedy": reading(facts["heldout_greedy"]),
        "heldout_sampled": reading(facts["heldout_sampled"]),
        "peak_rss_mib": peak_rss_bytes / 2**20,
        **{name: facts[name] for name in ("trained_parameters", "dtype", "threads", "probe_logprob", "versions")},
        "load_before": load_before,
        "load_after": load_after,
        "rewards": [step["reward"] for step in steps],
        "seconds_at": seconds,
    }


def reading(rewards: Sequence[float]) -> dict[str, float]:
    """The mean of rewards from 0 to 1, with its 95 % interval."""
    mean, low, high = interval(rewards, proportion=True)
    return {"mean": mean, "low": low, "high": high, "n": len(rewards)}


def smoothed(rewards: Sequence[float]) -> np.ndarray:
    """The mean of the last `WINDOW` steps at each step; of fewer at the beginning."""
    return np.array([np.mean(rewards[max(0, end - WINDOW) : end]) for end in range(1, len(rewards) + 1)])


def seconds_to(row: dict[str, Any], goal: float) -> float | None:
    """When the smoothed reward first is `goal`; None: never. The first steps do not count: they are not yet smooth."""
    curve = smoothed(row["rewards"])
    reached = [
        at
        for step, (value, at) in enumerate(zip(curve, row["seconds_at"], strict=True), start=1)
        if value >= goal and step >= min(WINDOW, len(curve))
    ]
    return reached[0] if reached else None


def check_same_task(rows: Iterable[dict[str, Any]]) -> None:
    """Raises RequestFailedError unless all sides trained the same layers of the same base with the same budget."""
    rows = list(rows)
    for name in ("task", "steps", "samples", "trained_parameters", "dtype", "threads"):
        if len({row[name] for row in rows}) > 1:
            found = {row["side"]: row[name] for row in rows}
            raise RequestFailedError(f"the sides did not do the same: {name} is {found}")
    probes = [row["probe_logprob"] for row in rows]
    if max(probes) - min(probes) > PROBE_TOLERANCE[rows[0]["dtype"]]:
        raise RequestFailedError(f"the base models are not the same: a fixed sequence has the logprobs {probes}")


def compare(ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """mint against one peer, seed by seed. A ratio is the peer's time over mint's."""
    pairs = list(zip(ours, theirs, strict=True))
    differences = [our["reward_mean"] - their["reward_mean"] for our, their in pairs]
    finals = [their["reward_final"] for their in theirs]
    nearly = [their["rewards"][0] + SHARE * (their["reward_final"] - their["rewards"][0]) for their in theirs]
    return {
        "comparison": f"{theirs[0]['side']} / mint",
        "seeds": [our["seed"] for our in ours],
        "reward_mean_difference": spread(differences),
        "reward_final_difference": spread([our["reward_final"] - their["reward_final"] for our, their in pairs]),
        "seconds_ratio": ratios([(our["seconds"], their["seconds"]) for our, their in pairs]),
        "cpu_seconds_ratio": ratios([(our["cpu_seconds"], their["cpu_seconds"]) for our, their in pairs]),
        "seconds_from_start_ratio": ratios(
            [(our["seconds_from_start"], their["seconds_from_start"]) for our, their in pairs]
        ),
        "seconds_to_peers_final_reward": time_to(pairs, finals),
        f"seconds_to_{SHARE:.0%}_of_the_way": time_to(pairs, nearly),
        "machine": {"cpu": cpu_name(), "cores": os.cpu_count(), "python": platform.python_version()},
    }


def time_to(pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]], goals: Sequence[float]) -> dict[str, Any]:
    """When both sides reach each seed's goal, and the ratios of the seeds where both do."""
    times = [(seconds_to(our, goal), seconds_to(their, goal)) for (our, their), goal in zip(pairs, goals, strict=True)]
    both = [(our, their) for our, their in times if our is not None and their is not None]
    return {
        "goals": list(goals),
        "mint": [our for our, _ in times],
        "peer": [their for _, their in times],
        "ratio": ratios(both) if both else None,
    }


def ratios(times: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Theirs over ours: the median, and each."""
    each = [their / our for our, their in times]
    return {"median": statistics.median(each), "each": each}


def spread(differences: Sequence[float]) -> dict[str, Any]:
    """The mean of paired differences, their standard deviation and Student's 95 % interval (None for one pair)."""
    n, mean = len(differences), statistics.fmean(differences)
    deviation = statistics.stdev(differences) if n > 1 else None
    half = None if deviation is None else float(student_t.ppf(0.975, n - 1)) * deviation / n**0.5
    return {
        "mean": mean,
        "deviation": deviation,
        "low": None if half is None else mean - half,
        "high": None if half is None else mean + half,
        "each": list(differences),
    }


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Training reward by samples and by seconds: every run thin, the mean of a side thick."""
    figure = Figure(figsize=(11, 4.4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    by_samples, by_seconds = figure.subplots(1, 2, sharey=True)
    names = {"mint": "mint run_grpo", "trl": "TRL GRPOTrainer", "trl-best": "TRL, fastest settings found"}
    for side in dict.fromkeys(row["side"] for row in rows):
        runs = [row for row in rows if row["side"] == side]
        color, style = COLOURS[side], "-" if side == "mint" else "--"
        samples = np.arange(1, runs[0]["steps"] + 1) * (runs[0]["samples"] / runs[0]["steps"])
        for run in runs:
            by_samples.plot(samples, run["rewards"], color=color, linewidth=0.7, alpha=0.35)
            by_seconds.plot(run["seconds_at"], run["rewards"], color=color, linewidth=0.7, alpha=0.35)
        rewards = np.mean([run["rewards"] for run in runs], axis=0)
        seconds = np.mean([run["seconds_at"] for run in runs], axis=0)
        label = f"{names[side]}: {seconds[-1]:.0f} s"
        by_samples.plot(samples, rewards, style, color=color, linewidth=2.4, label=names[side])
        by_seconds.plot(seconds, rewards, style, color=color, linewidth=2.4, label=label)
    seeds, threads = len({row["seed"] for row in rows}), rows[0]["threads"]
    by_samples.set(xlabel="samples", ylabel="mean training reward of a step", title="Learning per sample")
    by_seconds.set(xlabel="seconds since the first step began", title="Learning per second")
    for axes in (by_samples, by_seconds):
        axes.set_xlim(left=0)
        axes.grid(alpha=0.25)
        axes.legend(loc="lower right", frameon=False)
    title = TASKS[rows[0].get("task", "math")].title
    figure.suptitle(f"{title}, LoRA rank {RANK}, CPU threads: {threads}; {seeds} seeds (thin), mean (thick)")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def run_all(
    task: str, sides: Sequence[str], *, seeds: Sequence[int], steps: int | None, threads: int
) -> list[dict[str, Any]]:
    """Every side with every seed, one after the other; every second seed in the opposite order."""
    say = Console(stderr=True, highlight=False).print
    python = peer_environment("trl", read_settings().home_dir).ensure(say)
    rows = []
    for place, seed in enumerate(seeds):
        spec = make_spec(task, seed=seed, steps=steps, threads=threads)
        for side in sides if place % 2 == 0 else reversed(sides):
            row = run_side(side, spec, python)
            say(
                f"seed {seed}, {side}: {row['seconds']:.1f} s ({row['cpu_seconds']:.1f} s of CPU), reward "
                f"{row['reward_mean']:.3f}, last steps {row['reward_final']:.3f}, load {row['load_after']:.1f}"
            )
            print(json.dumps(row), flush=True)
            rows.append(row)
    return rows


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=list(TASKS), default="math")
    parser.add_argument("--seed", action="append", type=int, help="default: 0, 1 and 2")
    parser.add_argument("--steps", type=int, help="default: 60 of math, 32 of chain_sum")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--peer", action="append", choices=list(PEERS))
    parser.add_argument("--plot", type=Path, help="where the picture goes (that of math: docs/learning.png)")
    parser.add_argument("--read", type=Path, metavar="ROWS", help="no runs: the rows of earlier ones")
    options = parser.parse_args()
    sides = ["mint", *(options.peer or ["trl"])]
    if options.read is None:
        rows = run_all(
            options.task, sides, seeds=options.seed or range(3), steps=options.steps, threads=options.threads
        )
    else:
        lines = [json.loads(line) for line in options.read.read_text().splitlines()]
        rows = [line for line in lines if "side" in line]
    check_same_task(rows)
    by_side = {
        side: sorted((row for row in rows if row["side"] == side), key=lambda row: row["seed"])
        for side in ["mint", *PEERS]
    }
    for peer in PEERS:
        if by_side[peer]:
            print(json.dumps(compare(by_side["mint"], by_side[peer])))
    if options.plot is not None:
        plot([row for side in by_side.values() for row in side], options.plot)


if __name__ == "__main__":
    main()
