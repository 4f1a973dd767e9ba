"""Run folders as a run writes them, and the dashboard behind a socket."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from waiting import HANG_S

from mint.compose.dashboard_server import DashboardServer

API = "/dashboard/v1"
GROUPS, SAMPLES = 2, 3
HOSTILE = "<script>alert(1)</script>\x1b[31m\u202egnp.exe"


@contextmanager
def showing(data_dir: Path, *extra: Path, **flags: Any) -> Iterator[tuple[DashboardServer, httpx.Client]]:
    """`mint dashboard` over these folders, and a client at its address."""
    server = DashboardServer(data_dir, extra, **flags)
    started = threading.Event()
    thread = threading.Thread(target=server.run, args=(started.set,))
    thread.start()
    try:
        assert started.wait(HANG_S)
        with httpx.Client(base_url=server.url.replace("0.0.0.0", "127.0.0.1"), timeout=HANG_S) as client:
            yield server, client
    finally:
        server.stop()
        thread.join()


def write_run(folder: Path, steps: int, *, task: str = "math", planned: int | None = None) -> Path:
    """A run that has taken `steps` steps."""
    folder.mkdir(parents=True)
    config = {"task": task, "base_model": "mint/tiny", "steps": planned or steps, "seed": 0, "task_spec": None}
    (folder / "config.json").write_text(json.dumps(config))
    for step in range(1, steps + 1):
        add_step(folder, step)
    return folder


def add_step(folder: Path, step: int) -> None:
    """What a run writes at a step: rollouts first, then the metrics."""
    append(folder, "rollouts.jsonl", *(rollout(step, place) for place in range(GROUPS * SAMPLES)))
    append(folder, "metrics.jsonl", metrics(step))


def metrics(step: int) -> dict[str, float]:
    return {"step": float(step), "reward/mean": step / 10, "success/rate": step / 20, "time/train_s": 0.5}


def rollout(step: int, place: int) -> dict[str, Any]:
    group, sample = divmod(place, SAMPLES)
    return {
        "step": step,
        "group": group,
        "item": 100 * group + step % 2,
        "sample": f"Question {group}",
        "prompt": f"What is {group} + {step}?",
        "text": HOSTILE if place == 0 else f"answer {place} of step {step}",
        "tokens": [5, 6, place],
        "logprobs": [-0.5, -0.25, -0.125],
        "stop_reason": "stop",
        "truncated": sample == 2,
        "reward": None if sample == 2 else float(sample == 1),
        "parts": {"outcome": float(sample == 1)},
        "error": "the grader failed" if sample == 2 else None,
        "unsupported": False,
        "timed_out": False,
        "turns": 1,
        "tool_calls": 0,
        "advantage": 0.5 if sample == 1 else -0.5,
        "used": sample != 2,
    }


def evaluation(step: int, mean: float, *, temperature: float = 1.0, checkpoint: str | None = None) -> dict[str, Any]:
    return {
        "step": step,
        "when": "during",
        "set": "held out",
        "mean": mean,
        "low": mean - 0.1,
        "high": mean + 0.1,
        "n": 64,
        "temperature": temperature,
        "ungraded": 0,
        "success": mean,
        "pass_at": {},
        "parts": {},
        "checkpoint": checkpoint,
        "examples": [{"prompt": "1 + 1", "text": "2", "tokens": [5], "reward": 1.0}],
    }


def finding(code: str = "truncation", step: int = 2) -> dict[str, Any]:
    return {"code": code, "severity": "warning", "step": step, "evidence": "33%", "remedy": "More", "numbers": {}}


def append(folder: Path, name: str, *rows: dict[str, Any]) -> None:
    with (folder / name).open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
