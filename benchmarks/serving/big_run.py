"""A run folder as large as long runs get, made from a real small run, and how fast it is read.

    python -m benchmarks.serving.big_run make SMALL_RUN BIG_RUN [STEPS] [ROLLOUTS] [MEAN_TOKENS]
    python -m benchmarks.serving.big_run read BIG_RUN

`make` repeats the rollouts of a run (`mint demo tools --steps 5` leaves one) over STEPS steps of ROLLOUTS each, drawn
out to lengths around MEAN_TOKENS; rewards rise and completions become longer, so that charts and filters have something
to show. `read` opens it as a dashboard would, each question in a process of its own where it is asked cold.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mint.runs.json_lines import read_lines
from mint.runs.log import ResumePoint, RunLog
from mint.runs.process import recorded_process
from mint.runs.reader import RolloutQuery, RunReader

GROUP_SIZE, ITEMS, STEP_S = 8, 4_096, 0.45
EVAL_EVERY, SAVE_EVERY = 50, 10


def make(source: Path, target: Path, *, steps: int = 2_000, rollouts: int = 64, mean_tokens: int = 200) -> None:
    """Writes `target` from the rollouts, metrics and evaluations of the run in `source`."""
    log, rng = RunLog(target), np.random.default_rng(0)
    log.start({**json.loads((source / "config.json").read_text()), "steps": steps}, resume=False)
    models = [row for row in map(json.loads, read_lines(source / "rollouts.jsonl")) if row.get("tokens")]
    metrics = [json.loads(line) for line in read_lines(source / "metrics.jsonl")]
    evaluations = [json.loads(line) for line in read_lines(source / "evaluations.jsonl")][:2]
    began_at = time.time() - steps * STEP_S
    with recorded_process(target):
        log.append_all("tokens.jsonl", [json.loads(line) for line in read_lines(source / "tokens.jsonl")])
        log.append_all("evaluations.jsonl", evaluations)
        for step in range(1, steps + 1):
            progress = step / steps
            rows = [
                _rollout(models, rng, step=step, place=place, progress=progress, mean_tokens=mean_tokens)
                for place in range(rollouts)
            ]
            _centre(rows)
            log.append_rollouts(step, rows)
            rewards = [row["reward"] for row in rows]
            log.append(
                "metrics.jsonl",
                {
                    **{
                        name: value * float(rng.normal(1, 0.02)) for name, value in metrics[step % len(metrics)].items()
                    },
                    "step": float(step),
                    "reward/mean": float(np.mean(rewards)),
                    "success/rate": float(np.mean(rewards)),
                    "rollouts/count": float(rollouts),
                    "rollouts/ungraded": 0.0,
                    "rollouts/tokens": float(sum(len(row["tokens"]) for row in rows)),
                    "rollouts/mean_length": float(np.mean([len(row["tokens"]) for row in rows])),
                    "time/unix_s": began_at + step * STEP_S,
                },
            )
            if step % EVAL_EVERY == 0:
                log.append_all("evaluations.jsonl", [_reading(row, step, progress) for row in evaluations])
            if step % SAVE_EVERY == 0:
                checkpoint = f"mint://big:train:0/weights/step-{step:06d}"
                log.append("checkpoints.jsonl", {"step": step, "checkpoint": checkpoint})
                log.save_point(ResumePoint(step, checkpoint, {}))


def _rollout(
    models: list[dict[str, Any]], rng: np.random.Generator, *, step: int, place: int, progress: float, mean_tokens: int
) -> dict[str, Any]:
    model = models[int(rng.integers(len(models)))]
    length = max(2, int(rng.lognormal(np.log(mean_tokens * (0.5 + progress)), 0.5)))
    times = -(-length // len(model["tokens"]))
    item = (step * 31 + place // GROUP_SIZE * 7) % ITEMS
    return {
        **model,
        "step": step,
        "group": place // GROUP_SIZE,
        "item": item,
        "text": " ".join([f"Step {step}, sample {place}.", *[model["text"]] * times])[: 4 * length],
        "tokens": (model["tokens"] * times)[:length],
        "logprobs": (-rng.exponential(0.3, length)).astype(np.float32).tolist(),
        "turn_lengths": [length],
        "reward": float(rng.random() < 0.2 + 0.7 * progress),
        "policy_step": step - 1,
    }


def _centre(rows: list[dict[str, Any]]) -> None:
    for first in range(0, len(rows), GROUP_SIZE):
        group = rows[first : first + GROUP_SIZE]
        mean = float(np.mean([row["reward"] for row in group]))
        for row in group:
            row["advantage"] = row["reward"] - mean
            row["used"] = len({other["reward"] for other in group}) > 1


def _reading(row: dict[str, Any], step: int, progress: float) -> dict[str, Any]:
    mean = 0.2 + 0.6 * progress
    return {**row, "step": step, "when": "during", "mean": mean, "low": mean - 0.04, "high": mean + 0.04}


def _questions() -> dict[str, Callable[[RunReader], Any]]:
    def middle(reader: RunReader) -> int:
        steps = reader.steps()
        return steps[len(steps) // 2]

    best = RolloutQuery(sort="-reward", flags=frozenset({"used"}), length_min=50, limit=50)
    return {
        "summary": lambda reader: reader.summary(),
        "charts (all columns)": lambda reader: reader.columns(),
        "steps": lambda reader: reader.steps(),
        "one step's rows": lambda reader: reader.rows(middle(reader)),
        "first page of all": lambda reader: reader.rollouts(RolloutQuery(limit=50)),
        "filtered and sorted": lambda reader: reader.rollouts(best),
        "filtered, last page": lambda reader: reader.rollouts(RolloutQuery(reward_min=0.5, offset=60_000)),
        "one item's history": lambda reader: reader.item_history(31),
        "text, found at once": lambda reader: reader.rollouts(RolloutQuery(text="sample 7.")),
        "text, in one of all": lambda reader: list(_searched(reader, "Step 1999, sample 63.")),
        "text, in none": lambda reader: list(_searched(reader, "no one has said this")),
    }


def _searched(reader: RunReader, text: str) -> Iterator[int]:
    """The rows found by each answer, until there is nothing left to search."""
    offset: int | None = 0
    while offset is not None:
        page = reader.rollouts(RolloutQuery(text=text, offset=offset))
        offset = page.next_offset
        yield len(page.rows)


def read(folder: Path) -> None:
    """Prints milliseconds and memory, each question in a fresh process (cold) and asked again there (warm)."""
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{folder}: {size / 1e6:.0f} MB\n| question | cold ms (CPU) | warm ms (CPU) | answers | memory, MB |")
    print("|---|---|---|---|---|")
    for name in _questions():
        command = [sys.executable, "-m", "benchmarks.serving.big_run", "ask", str(folder), name]
        print(subprocess.run(command, check=True, capture_output=True, text=True).stdout, end="")


def ask(folder: Path, name: str) -> None:
    """One question, cold and warm, as a line of the table."""
    question, before = _questions()[name], _memory_mb()
    reader: list[RunReader] = []
    cold, cold_cpu, _ = _timed(lambda: question(_opened(folder, reader)))
    warm, warm_cpu, answer = _timed(lambda: question(reader[0]))
    answers = len(answer) if isinstance(answer, list) else 1
    cells = (f"{cold:.1f} ({cold_cpu:.1f})", f"{warm:.1f} ({warm_cpu:.1f})", answers, f"{_memory_mb() - before:.0f}")
    print(f"| {name} | {' | '.join(map(str, cells))} |")


def _opened(folder: Path, kept: list[RunReader]) -> RunReader:
    kept.append(RunReader(folder))
    return kept[0]


def _timed(act: Callable[[], Any]) -> tuple[float, float, Any]:
    """Milliseconds by the clock, those of this process alone, and what came of it."""
    began, began_cpu = time.perf_counter(), time.process_time()
    answer = act()
    return (time.perf_counter() - began) * 1e3, (time.process_time() - began_cpu) * 1e3, answer


def _memory_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    what, *words = sys.argv[1:]
    if what == "make":
        numbers = dict(zip(("steps", "rollouts", "mean_tokens"), map(int, words[2:]), strict=False))
        make(Path(words[0]), Path(words[1]), **numbers)
    elif what == "ask":
        ask(Path(words[0]), words[1])
    else:
        read(Path(words[0]))
