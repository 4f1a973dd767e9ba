"""`mint demo`: one recipe on the bundled model, end to end, and the report that scripts and people read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from mint.recipes.tasks import load_task
from mint.rl import LiveProgress, RLConfig, RunResult, run_grpo
from mint.rl.plot import plot_run
from mint.rl.readings import GREEDY, SAMPLED
from mint.rl.run_log import RunLog

DEMOS = ("math", "chat", "code", "tools")


def run_demo(
    task: str, *, steps: int | None, seed: int, run_dir: Path | None, resume: bool, console: Console
) -> tuple[RunResult, dict[str, Any]]:
    """Runs a demo with live progress on `console`; returns the result and the JSON report of the command line."""
    choice = load_task(task, seed=seed)
    config = choice.config.model_copy(
        update={"seed": seed, "run_dir": run_dir, "steps": choice.config.steps if steps is None else steps}
    )
    with LiveProgress(config.steps, console=console) as progress:
        result = run_grpo(choice.adapter, config, resume=resume, on_progress=progress)
    log = RunLog(result.run_dir)
    plot_run(
        result.run_dir / "curve.png",
        log.read("metrics.jsonl"),
        log.read("evaluations.jsonl"),
        title=f"mint demo {task}: {config.base_model}, LoRA rank {config.rank}, seed {seed}",
    )
    return result, report(task, config, result)


def report(task: str, config: RLConfig, result: RunResult) -> dict[str, Any]:
    """The JSON object of `mint demo --json`. `heldout_before` and `heldout_after` are greedy; `…_sampled` at
    temperature 1."""
    return {
        "task": task,
        "base_model": config.base_model,
        "seed": config.seed,
        "steps": result.steps,
        "seconds": round(result.seconds, 3),
        "seconds_setup": round(result.seconds_setup, 3),
        "samples": result.samples,
        "tokens": result.tokens,
        "heldout_before": result.heldout_before[GREEDY].to_dict(),
        "heldout_after": result.heldout_after[GREEDY].to_dict(),
        "heldout_before_sampled": result.heldout_before[SAMPLED].to_dict(),
        "heldout_after_sampled": result.heldout_after[SAMPLED].to_dict(),
        "sampler_trainer_max_abs_logprob_diff": result.max_abs_logprob_diff,
        "findings": [finding.to_dict() for finding in result.findings],
        "checkpoint": result.checkpoint,
        "sampler_checkpoint": result.sampler_checkpoint,
        "state_digest": result.state_digest,
        "run_dir": str(result.run_dir),
    }
