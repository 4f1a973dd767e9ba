"""Run folders larger than any test could train, written line by line as a run writes them: many runs, many steps, long
rollouts, and one run in each state in which a run can be found.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

TASKS = ("math", "tools", "chat", "code")
VOCABULARY = 97


def write_many(runs: Path, count: int) -> None:
    """`count` finished runs of two steps, the last one the newest."""
    now = time.time()
    for place in range(count):
        began_at = now - 60.0 * (count - place)
        folder = begin(runs / f"run-{place:05d}", steps=2, task=TASKS[place % len(TASKS)], seed=place)
        _lines(folder, "metrics.jsonl", (_metrics(step, began_at + step, place) for step in (1, 2)))
        write_process(folder, began_at=began_at, ended_at=began_at + 3, outcome="finished")


def write_long(folder: Path, *, steps: int, checkpoint_every: int, eval_every: int) -> Path:
    """A run of very many steps, with a checkpoint and an evaluation every so often. The best evaluation is not the last
    one."""
    begin(folder, steps=steps, save_every=checkpoint_every, eval_every=eval_every)
    began_at = time.time() - steps
    _lines(folder, "metrics.jsonl", (_metrics(step, began_at + step, step) for step in range(1, steps + 1)))
    saved = range(checkpoint_every, steps + 1, checkpoint_every)
    _lines(folder, "checkpoints.jsonl", ({"step": step, "checkpoint": f"mint://long/weights/{step}"} for step in saved))
    evaluated = [0, *range(eval_every, steps + 1, eval_every)]
    middle = evaluated[len(evaluated) // 2]
    _lines(folder, "evaluations.jsonl", (evaluation(step, 0.9 if step == middle else 0.5) for step in evaluated))
    write_process(folder, began_at=began_at, ended_at=time.time(), outcome="finished")
    return folder


def write_wide(folder: Path, *, groups: int, samples: int, tokens: int) -> Path:
    """A run of one step with `groups` groups; in the first one, `samples` rollouts of `tokens` tokens each."""
    begin(folder, steps=1)
    began_at = time.time() - 60
    words = [{"step": 1, "id": id, "text": f" word{id}", "special": False} for id in range(VOCABULARY)]
    _lines(folder, "tokens.jsonl", words)
    rows = [
        rollout(group, sample, length=tokens if group == 0 else 4)
        for group in range(groups)
        for sample in range(samples if group == 0 else 2)
    ]
    write_rollouts(folder, 1, rows)
    _lines(folder, "metrics.jsonl", [_metrics(1, began_at + 1, 0)])
    write_process(folder, began_at=began_at, ended_at=began_at + 3, outcome="finished")
    return folder


def write_states(runs: Path) -> None:
    """One run in each state: failed and stopped before and after the first step, died, stale, and waiting for its first
    step."""
    now = time.time()
    ended: dict[str, Any] = {"began_at": now - 90, "ended_at": now - 60}
    error = "RequestFailedError: the base model cannot be loaded: no space is left on the device"
    write_process(begin(runs / "failed-at-once", steps=50), **ended, outcome="failed", error=error)
    write_process(begin(runs / "stopped-at-once", steps=50), **ended, outcome="stopped", error="interrupted")
    failed, stopped, died, stale = (begin(runs / name, steps=50) for name in ("failed", "stopped", "died", "stale"))
    for folder in (failed, stopped, died, stale):
        _lines(folder, "metrics.jsonl", (_metrics(step, now - 90 + step, step) for step in range(1, 6)))
    write_process(failed, **ended, outcome="failed", error=error)
    write_process(stopped, **ended, outcome="stopped", error="interrupted by a request to stop")
    write_process(died, began_at=now - 90, pid=2**22 + 1)
    write_process(stale, began_at=now)
    write_process(begin(runs / "waiting", steps=50), began_at=now)
    for path in stale.iterdir():
        os.utime(path, (now - 7200, now - 7200))


def begin(folder: Path, *, steps: int, task: str = "math", **settings: Any) -> Path:
    """A run folder with its settings."""
    folder.mkdir(parents=True)
    config = {"task": task, "base_model": "mint/tiny", "steps": steps, "batch_size": 4, "group_size": 4, **settings}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def evaluation(step: int, mean: float) -> dict[str, Any]:
    """A held-out evaluation at temperature 1."""
    when = "before" if step == 0 else "during"
    numbers = {"mean": mean, "low": mean - 0.05, "high": mean + 0.05, "n": 64, "temperature": 1.0, "success": mean}
    return {"step": step, "when": when, "set": "held out", **numbers, "checkpoint": None, "examples": []}


def rollout(group: int, sample: int, *, length: int, text: str | None = None) -> dict[str, Any]:
    """A row of rollouts.jsonl."""
    ids = [(group + sample + place) % VOCABULARY for place in range(length)]
    return {
        "step": 1,
        "group": group,
        "item": group,
        "sample": f"question {group}",
        "prompt": f"What is {group}?",
        "text": "".join(f" word{id}" for id in ids) if text is None else text,
        "tokens": ids,
        "logprobs": [-0.5] * length,
        "stop_reason": "stop",
        "truncated": False,
        "reward": float(sample % 2),
        "parts": {"outcome": float(sample % 2)},
        "error": None,
        "unsupported": False,
        "timed_out": False,
        "turns": 1,
        "tool_calls": 0,
        "advantage": 0.5 if sample % 2 else -0.5,
        "used": True,
    }


def write_rollouts(folder: Path, step: int, rows: list[dict[str, Any]]) -> None:
    """The rollouts of a step, with their index."""
    from mint.runs.log import RunLog

    RunLog(folder).append_rollouts(step, rows)


def _metrics(step: int, at: float, seed: int) -> dict[str, float]:
    noise = (seed * 2654435761 % 1000) / 1000
    return {
        "step": float(step),
        "time/unix_s": at,
        "time/rollouts_s": 0.4,
        "time/train_s": 0.5,
        "reward/mean": 0.5 + 0.4 * noise,
        "success/rate": noise,
        "rollouts/count": 16.0,
        "rollouts/tokens": 400.0,
        "rollouts/mean_length": 20 + 10 * noise,
        "rollouts/max_length": 40.0,
        "train/entropy": 1 - 0.5 * noise,
        "train/kl_k1": 0.0,
        "train/kl_k3": 0.0,
        "train/ratio": 1.0,
        "optim/grad_norm": 0.1 + noise,
        "mismatch/mean_abs_logprob_diff": 0.0,
        "mismatch/max_abs_logprob_diff": 0.0,
        "learning_rate": 1e-3,
    }


def write_process(folder: Path, *, began_at: float, pid: int | None = None, **end: Any) -> None:
    """What a process writes of itself into a run folder; `pid` is this process where it is left out."""
    process = {"pid": pid or os.getpid(), "host": socket.gethostname(), "began_at": began_at}
    ended = {"ended_at": None, "outcome": None, "error": None} | end
    (folder / "process.json").write_text(json.dumps(process | ended))


def _lines(folder: Path, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
    with (folder / name).open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
