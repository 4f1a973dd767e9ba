"""`mint demo`: one recipe on the bundled model, end to end, and the report that scripts and people read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mint.recipes import math
from mint.rl import LiveProgress, RLAdapter, RLConfig, RunResult, run_grpo
from mint.rl.loop import GREEDY, SAMPLED
from mint.rl.plot import plot_run
from mint.rl.run_log import RunLog

EXAMPLES = 3

DEMOS: dict[str, tuple[Callable[[int], RLAdapter], RLConfig]] = {
    "math": (lambda seed: math.MathAdapter(seed=seed), math.DEMO),
}
"""Task name → (adapter from seed, settings)."""


def run_demo(
    task: str, *, steps: int | None, seed: int, run_dir: Path | None, resume: bool, console: Console
) -> tuple[RunResult, dict[str, Any]]:
    """Runs a demo with live progress on `console`; returns the result and the JSON report of the command line."""
    make_adapter, config = DEMOS[task]
    config = config.model_copy(
        update={"seed": seed, "run_dir": run_dir, "steps": config.steps if steps is None else steps}
    )
    adapter = make_adapter(seed)
    with LiveProgress(config.steps, console=console) as progress:
        result = run_grpo(adapter, config, resume=resume, on_progress=progress)
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


def print_report(console: Console, adapter: RLAdapter, result: RunResult) -> None:
    """The table, the sample rollouts and where things are, for people."""
    table = Table(title=adapter.heldout_name)
    for heading in ("", "before RL", "after RL", "n"):
        table.add_column(heading)
    for temperature, name in ((GREEDY, "greedy"), (SAMPLED, "temperature 1")):
        before, after = result.heldout_before[temperature], result.heldout_after[temperature]
        cells = [f"{each.mean:.3f}  ({each.low:.3f} to {each.high:.3f})" for each in (before, after)]
        table.add_row(name, *cells, str(after.n))
    console.print(table)
    problems = list(adapter.build_heldout())[:EXAMPLES]
    examples = Table(title="held-out completions at temperature 1")
    for heading in ("question", "before RL", "after RL"):
        examples.add_column(heading)
    pairs = zip(result.heldout_rollouts["before"], result.heldout_rollouts["after"], strict=False)
    for problem, (before, after) in zip(problems, pairs, strict=False):
        cells = [f"{rollout.text.strip()}  (reward {rollout.reward:g})" for rollout in (before, after)]
        examples.add_row(problem.question.replace("\n", " "), *cells)
    console.print(examples)
    rate = result.samples / result.seconds if result.seconds else 0.0
    console.print(
        f"{result.steps} steps in {result.seconds:.1f} s ({result.seconds_setup:.1f} s of setup before), "
        f"{result.samples} completions ({rate:.0f}/s), "
        f"the logprobs of sampler and trainer {_agreement(result.max_abs_logprob_diff)}"
    )
    for finding in result.findings:
        console.print(f"[yellow]{finding.name}[/yellow] (step {finding.step}): {finding.evidence}. {finding.remedy}.")
    console.print(f"run folder  {result.run_dir}  (curve.png, metrics.jsonl, rollouts.jsonl)", soft_wrap=True)
    console.print(f"checkpoint  {result.checkpoint}", soft_wrap=True)
    console.print(f"export it   mint export {result.checkpoint} --format peft --output adapter", soft_wrap=True)


def _agreement(max_abs_diff: float) -> str:
    return "are equal to the last bit" if max_abs_diff == 0 else f"differ by at most {max_abs_diff:.1e}"
