"""Runs the recipes for `mint train` and `mint demo`, shows progress, and reports. `recipe_data` reads the arguments.

rl       task=NAME            any task of `mint.recipes.task_registry`
sft      task=NAME            a task that knows a good completion of its items (`RLAdapter.demonstrate`)
dpo      data=PATH            JSON lines with prompt, chosen, rejected
distill  task=NAME teacher=…  the task's prompts; the teacher is a checkpoint or the name of a base model

Arguments that name a field of the recipe's config are settings, which the config checks; the others are options of the
task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

import mint
from mint.cli.base_models import require_base_model
from mint.cli.recipes.recipe_data import read_pairs, single_turn_task, split_arguments, split_items, take
from mint.errors import InvalidRequestError, NotFoundError
from mint.recipes.distill import DistillConfig, run_distill
from mint.recipes.dpo import DPOConfig, Preference, run_dpo
from mint.recipes.question_task import Question, encode_prompt, is_heldout
from mint.recipes.sft import SFTConfig, run_sft
from mint.recipes.supervised import Demonstration, steps_per_epoch
from mint.recipes.task_registry import load_task, open_task
from mint.rl import Estimate, LiveProgress, RLConfig, RunResult, Task, run_grpo
from mint.rl.analysis.report import print_run
from mint.rl.heldout_evaluation import GREEDY, SAMPLED
from mint.rl.run_frame import require_startable
from mint.rl.tracking.plot import plot_run
from mint.runs.log import RunLog

HELDOUT_SHARE = 0.1


def train_recipe(
    recipe: str, arguments: dict[str, Any], *, run_dir: Path | None, resume: bool, console: Console, yes: bool = False
) -> dict[str, Any]:
    """Runs `recipe`, prints a report on `console` and returns it; `yes` downloads a missing base model unasked.

    Raises:
        InvalidRequestError: unknown task, setting or option, or data that cannot be read.
    """
    if run_dir is not None:
        arguments = {**arguments, "run_dir": run_dir}
    if recipe == "rl":
        return train_rl(arguments, resume=resume, console=console, yes=yes)
    runs = {"sft": train_sft, "dpo": train_dpo, "distill": train_distill}
    report = {"recipe": recipe, **runs[recipe](arguments, resume=resume, console=console, yes=yes)}
    print_report(console, report)
    return report


# --- RL ----------------------------------------------------------------------------------------------------------


def run_demo(
    task: str,
    *,
    steps: int | None,
    seed: int,
    run_dir: Path | None,
    resume: bool,
    console: Console,
    trackers: Sequence[str] = (),
    yes: bool = False,
) -> tuple[RunResult, dict[str, Any]]:
    """RL on a task with its own base model and settings; `steps` None is the task's own number. With `yes` a base
    model that is not here is downloaded without a question."""
    choice = load_task(task, seed=seed)
    steps = choice.config.steps if steps is None else steps
    settings: dict[str, Any] = {"seed": seed, "run_dir": run_dir, "steps": steps, "trackers": trackers}
    config = choice.config.changed(**settings)
    require_base_model(config.base_model, console, yes=yes)
    title = f"mint demo {task}: {config.base_model}, LoRA rank {config.rank}, seed {seed}"
    result = run_with_progress(choice.adapter, config, resume=resume, console=console, title=title)
    return result, rl_report(task, config, result)


def train_rl(arguments: dict[str, Any], *, resume: bool, console: Console, yes: bool) -> dict[str, Any]:
    """RL on the task and with the settings that the arguments name."""
    task = str(take(arguments, "task", "Add for example task=math or task=file:prompts.jsonl"))
    with open_task(task, arguments) as choice:
        config = choice.config.changed(run_dir=arguments.get("run_dir"))
        require_base_model(config.base_model, console, yes=yes)
        title = f"{task}: {config.base_model}"
        result = run_with_progress(choice.adapter, config, resume=resume, console=console, title=title)
    print_run(console, result, RunLog(result.run_dir).read("evaluations.jsonl"))
    return rl_report(task, config, result)


def run_with_progress(adapter: Task, config: RLConfig, *, resume: bool, console: Console, title: str) -> RunResult:
    """`run_grpo` with live progress on `console`, and the curve as `curve.png` in the run folder."""
    require_startable(config, resume=resume)
    with LiveProgress(config.steps, console=console, title=title) as progress:
        result = run_grpo(adapter, config, resume=resume, on_progress=progress)
    log = RunLog(result.run_dir)
    plot_run(result.run_dir / "curve.png", log.read("metrics.jsonl"), log.read("evaluations.jsonl"), title=title)
    return result


def rl_report(task: str, config: RLConfig, result: RunResult) -> dict[str, Any]:
    """The JSON object of `mint demo` and `mint train rl` with `--json`.

    `heldout_before` and `heldout_after` are greedy, `…_sampled` at temperature 1; None where nothing is held out.
    """

    def estimate(estimates: Mapping[float, Estimate], temperature: float) -> dict[str, Any] | None:
        return estimates[temperature].to_dict() if temperature in estimates else None

    return {
        "task": task,
        "base_model": config.base_model,
        "seed": config.seed,
        "steps": result.steps,
        "seconds": round(result.seconds, 3),
        "seconds_setup": round(result.seconds_setup, 3),
        "samples": result.samples,
        "tokens": result.tokens,
        "heldout_before": estimate(result.heldout_before, GREEDY),
        "heldout_after": estimate(result.heldout_after, GREEDY),
        "heldout_before_sampled": estimate(result.heldout_before, SAMPLED),
        "heldout_after_sampled": estimate(result.heldout_after, SAMPLED),
        "sampler_trainer_max_abs_logprob_diff": result.max_abs_logprob_diff,
        "findings": [finding.to_dict() for finding in result.findings],
        "stopped_by": result.stopped_by,
        "checkpoint": result.checkpoint,
        "best_checkpoint": result.best_checkpoint,
        "sampler_checkpoint": result.sampler_checkpoint,
        "state_digest": result.state_digest,
        "run_dir": str(result.run_dir),
    }


# --- SFT, DPO, distillation --------------------------------------------------------------------------------------


def train_sft(arguments: dict[str, Any], *, resume: bool, console: Console, yes: bool) -> dict[str, Any]:
    """Supervised fine-tuning on a task's demonstrations."""
    config, options = split_arguments(SFTConfig, arguments)
    source = {"recipe": "sft", "arguments": dict(options)}
    require_startable(config, resume=resume)
    require_base_model(config.base_model, console, yes=yes)
    with single_turn_task("sft", options, config) as adapter, mint.ServiceClient() as service:
        tokenizer = service.create_sampling_client(base_model=config.base_model).get_tokenizer()
        trained, heldout = (
            [
                Demonstration(list(adapter.make_prompt(item, tokenizer)), completion)
                for item in items
                if (completion := adapter.demonstrate(item)) is not None
            ]
            for items in split_items(adapter)
        )
        if not trained:
            raise InvalidRequestError(
                "knows no good completion of its items",
                field="task",
                value=type(adapter).__name__,
                remedy="Give it a demonstrate(item), or take task=file:PATH with prompts and answers",
            )
        steps = config.epochs * steps_per_epoch(len(trained), config.batch_size)
        with LiveProgress(steps, console=console, title=f"SFT: {config.base_model}", curve="train/loss") as progress:
            result = run_sft(
                trained,
                heldout,
                config,
                service_client=service,
                resume=resume,
                on_progress=progress,
                data_source=source,
            )
    return asdict(result)


def train_dpo(arguments: dict[str, Any], *, resume: bool, console: Console, yes: bool) -> dict[str, Any]:
    """Direct preference optimisation on a file of pairs."""
    path = Path(str(take(arguments, "data", "Add data=…: `mint train dpo` needs it")))
    style = arguments.pop("prompt_style", "chat")
    config = DPOConfig.from_texts(arguments)
    require_startable(config, resume=resume)
    rows = read_pairs(path)
    source = {"recipe": "dpo", "arguments": {"data": str(path.resolve()), "prompt_style": style}}
    require_base_model(config.base_model, console, yes=yes)
    with mint.ServiceClient() as service:
        tokenizer = service.create_sampling_client(base_model=config.base_model).get_tokenizer()
        trained: list[Preference] = []
        heldout: list[Preference] = []
        for row in rows:
            pair = Preference(encode_prompt(row["prompt"], tokenizer, style), row["chosen"], row["rejected"])
            side = heldout if is_heldout(Question(row["prompt"], ""), HELDOUT_SHARE) else trained
            side.append(pair)
        steps = config.epochs * steps_per_epoch(len(trained), config.batch_size)
        title = f"DPO: {config.base_model}"
        with LiveProgress(steps, console=console, title=title, curve="train/pair_loss") as progress:
            result = run_dpo(
                trained,
                heldout,
                config,
                service_client=service,
                resume=resume,
                on_progress=progress,
                data_source=source,
            )
    return asdict(result)


def train_distill(arguments: dict[str, Any], *, resume: bool, console: Console, yes: bool) -> dict[str, Any]:
    """On-policy distillation on a task's prompts."""
    teacher = str(take(arguments, "teacher", "Add teacher=…: `mint train distill` needs it"))
    config, options = split_arguments(DistillConfig, arguments)
    source = {"recipe": "distill", "arguments": {"teacher": teacher, **options}}
    require_startable(config, resume=resume)
    require_base_model(config.base_model, console, yes=yes)
    with single_turn_task("distill", options, config) as adapter, mint.ServiceClient() as service:
        sampler = teacher_sampler(service, teacher)
        tokenizer = sampler.get_tokenizer()
        trained, heldout = (
            [list(adapter.make_prompt(item, tokenizer)) for item in items] for items in split_items(adapter)
        )
        title = f"distillation: {config.base_model}"
        with LiveProgress(config.steps, console=console, title=title, curve="train/reverse_kl") as progress:
            result = run_distill(
                trained,
                heldout,
                sampler,
                config,
                service_client=service,
                resume=resume,
                on_progress=progress,
                data_source=source,
            )
    return asdict(result)


def teacher_sampler(service: mint.ServiceClient, teacher: str) -> mint.SamplingClient:
    """A sampler of the teacher, a checkpoint or the name of a base model.

    Raises:
        InvalidRequestError, NotFoundError: there is none; names the word `teacher`.
    """
    path, base = (teacher, None) if "://" in teacher else (None, teacher)
    try:
        sampler = service.create_sampling_client(model_path=path, base_model=base)
        sampler.get_base_model()  # the sampler is made by now, or refused
    except (InvalidRequestError, NotFoundError) as error:
        error.field = "teacher"
        raise
    return sampler


def print_report(console: Console, report: Mapping[str, Any], indent: str = "") -> None:
    """One line per value; a triple is a mean with its 95 % interval, and None is one of no held-out items."""
    for name, value in report.items():
        if isinstance(value, Mapping):
            console.print(f"{indent}{name}")
            print_report(console, value, f"{indent}  ")
            continue
        if value is None:
            value = "nothing is held out"
        elif isinstance(value, tuple) and len(value) == 3:
            value = "{:.3f}  (95 %: {:.3f} to {:.3f})".format(*value)
        console.print(f"{indent}{name:<18} {value}", soft_wrap=True, highlight=False)
