"""`mint demo`: one recipe on the bundled model, end to end, with the settings that suit it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from mint.recipes.registry import load_task
from mint.recipes.train import report, run_watched
from mint.rl import RLConfig, RunResult

DEMOS = ("math", "chat", "code", "tools")


def run_demo(
    task: str,
    *,
    steps: int | None,
    seed: int,
    run_dir: Path | None,
    resume: bool,
    console: Console,
    trackers: Sequence[str] = (),
) -> tuple[RunResult, dict[str, Any]]:
    """Runs a demo with live progress on `console`; returns the result and the JSON report of the command line."""
    choice = load_task(task, seed=seed)
    steps = choice.config.steps if steps is None else steps
    changed = {"seed": seed, "run_dir": run_dir, "steps": steps, "trackers": trackers}
    settings: dict[str, Any] = {**choice.config.model_dump(), **changed}
    config = RLConfig(**settings)
    title = f"mint demo {task}: {config.base_model}, LoRA rank {config.rank}, seed {seed}"
    result = run_watched(choice.adapter, config, resume=resume, console=console, title=title)
    return result, report(task, config, result)
