"""The command line. Each command reads its arguments, calls one function and prints; heavy imports wait inside."""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mint.cli import dashboard as cli_dashboard
from mint.cli import runs as cli_looking
from mint.cli import serve as cli_serve
from mint.cli import storage as cli_tables
from mint.cli.bench import bench
from mint.cli.terminal import fail
from mint.errors import MintError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="LoRA fine-tuning and reinforcement learning of language models, on any machine.",
)
app.command()(cli_serve.serve)
app.command()(cli_dashboard.dashboard)
app.add_typer(cli_serve.keys_app, name="keys")
app.add_typer(cli_tables.runs_app, name="runs")
app.add_typer(cli_tables.checkpoints_app, name="checkpoints")
app.add_typer(cli_tables.sessions_app, name="sessions")
app.add_typer(cli_tables.models_app, name="models")
app.command()(bench)
app.command()(cli_looking.rollouts)
app.command()(cli_looking.plot)


class DemoTask(StrEnum):
    """What `mint demo` can show."""

    MATH = "math"
    CHAT = "chat"
    CODE = "code"
    TOOLS = "tools"


class Recipe(StrEnum):
    """What `mint train` can run."""

    RL = "rl"
    SFT = "sft"
    DPO = "dpo"
    DISTILL = "distill"


class ExportFormat(StrEnum):
    """What `mint export` can write."""

    PEFT = "peft"
    HF = "hf"
    GGUF_READY = "gguf-ready"


EXPORT_HELP = "peft: a LoRA adapter; hf: a merged model; gguf-ready: one for llama.cpp's converter"
Json = Annotated[bool, typer.Option("--json", help="print one JSON object as the last line")]
Seed = Annotated[int, typer.Option(min=0, help="same seed, same run, bit for bit")]
RunDir = Annotated[Path | None, typer.Option(help="where the run is kept; a new folder if not given")]
Resume = Annotated[bool, typer.Option("--resume", help="go on with the run in --run-dir")]
Assignments = Annotated[list[str] | None, typer.Argument(help="key=value: settings of the run, options of the task")]
TASK_HELP = "math, chat, code, tools, reasoning_gym:NAME, verifiers:NAME, file:PATH, module:Class or path.py:Class"


@app.callback()
def main() -> None:
    """LoRA fine-tuning and reinforcement learning of language models, on any machine."""


@app.command()
def demo(
    task: Annotated[DemoTask, typer.Argument(help="the task to learn")],
    steps: Annotated[int | None, typer.Option(min=0, help="RL steps; the task's own number if not given")] = None,
    seed: Seed = 0,
    run_dir: RunDir = None,
    resume: Resume = False,
    track: Annotated[
        list[str] | None, typer.Option(help="mirror it: tensorboard, wandb or trackio; repeatable")
    ] = None,
    as_json: Json = False,
) -> None:
    """RL end to end on the bundled model, in this process: no network, no GPU, no key."""
    from mint.recipes.demo import run_demo  # deferred: `mint --help` answers at once
    from mint.rl.analysis.report import print_run
    from mint.runs.log import RunLog

    try:
        result, report = run_demo(
            task.value,
            steps=steps,
            seed=seed,
            run_dir=run_dir,
            resume=resume,
            console=Console(stderr=True),
            trackers=track or (),
        )
    except MintError as error:
        fail(error)
    print_run(Console(stderr=as_json), result, RunLog(result.run_dir).read("evaluations.jsonl"))
    if as_json:
        typer.echo(json.dumps(report))


@app.command()
def train(
    recipe: Annotated[Recipe, typer.Argument(help="rl, sft, dpo or distill")],
    assignments: Assignments = None,
    run_dir: RunDir = None,
    resume: Resume = False,
    unsafe_sandbox: Annotated[
        bool, typer.Option("--unsafe-sandbox", help="run model-written code without any isolation")
    ] = False,
    as_json: Json = False,
) -> None:
    """A recipe on any model and data: `mint train rl task=reasoning_gym:chain_sum base_model=… steps=50`."""
    from mint.recipes.train import train as run_recipe  # deferred: `mint --help` answers at once

    try:
        report = run_recipe(
            recipe.value,
            assignments or [],
            run_dir=run_dir,
            resume=resume,
            unsafe_sandbox=unsafe_sandbox,
            console=Console(stderr=True),
        )
    except MintError as error:
        fail(error)
    if as_json:
        typer.echo(json.dumps(report, default=str))


@app.command(name="eval")
def evaluate(
    checkpoint: Annotated[str, typer.Argument(help="mint://… or the name of a base model")],
    task: Annotated[str, typer.Argument(help=TASK_HELP)],
    assignments: Assignments = None,
    as_json: Json = False,
) -> None:
    """Held-out reward of a checkpoint: mean with its 95 % interval, success, pass@k, parts."""
    from mint.client.service_client import ServiceClient  # deferred: `mint --help` answers at once
    from mint.recipes.train import chosen, parse
    from mint.rl.analysis.report import print_reading
    from mint.rl.heldout_evaluation import evaluate_checkpoint

    try:
        with chosen(task, parse(assignments or [])) as choice, ServiceClient() as service:
            readings = evaluate_checkpoint(checkpoint, choice.adapter, config=choice.config, service=service)
    except MintError as error:
        fail(error)
    print_reading(Console(stderr=as_json), f"{checkpoint} on {task}", readings)
    if as_json:
        typer.echo(json.dumps({f"{temperature:g}": reading.to_dict() for temperature, reading in readings.items()}))


@app.command()
def diagnose(
    run: Annotated[Path, typer.Argument(help="a run folder")],
    as_json: Json = False,
) -> None:
    """Why a run does not learn: every finding with its evidence and a remedy, and where the tokens went."""
    from mint.rl.analysis.report import print_findings, print_token_counts
    from mint.rl.analysis.run_analysis import diagnose_run, run_token_counts  # deferred: `mint --help` answers at once

    try:
        findings, ledger, items = diagnose_run(run), *run_token_counts(run)
    except MintError as error:
        fail(error)
    people = Console(stderr=as_json)
    print_findings(people, findings)
    print_token_counts(people, ledger, items)
    if as_json:
        typer.echo(json.dumps({"findings": [finding.to_dict() for finding in findings], "ledger": asdict(ledger)}))


@app.command()
def bisect(
    run: Annotated[Path, typer.Argument(help="a run folder")],
    metric: Annotated[str, typer.Option(help="heldout, heldout_sampled or success")] = "heldout",
    task: Annotated[str | None, typer.Option(help="the task, if the run folder does not name it")] = None,
    as_json: Json = False,
) -> None:
    """Between which two checkpoints a metric fell, by reading only as many as needed."""
    from mint.client.service_client import ServiceClient  # deferred: `mint --help` answers at once
    from mint.recipes.train import chosen_of_run
    from mint.rl.analysis.report import print_regression
    from mint.rl.analysis.run_analysis import bisect_run
    from mint.rl.heldout_evaluation import evaluate_checkpoint

    try:
        with chosen_of_run(run, task) as choice, ServiceClient() as service:
            regression = bisect_run(
                run,
                metric,
                lambda path: evaluate_checkpoint(path, choice.adapter, config=choice.config, service=service),
            )
    except MintError as error:
        fail(error)
    print_regression(Console(stderr=as_json), metric, regression)
    if as_json:
        typer.echo(json.dumps(asdict(regression)))


@app.command()
def doctor(
    task: Annotated[str, typer.Argument(help=TASK_HELP)],
    assignments: Assignments = None,
    prompts: Annotated[int, typer.Option(min=1, help="samples of the task to look at")] = 64,
    samples: Annotated[int, typer.Option(min=2, help="completions of each")] = 8,
    as_json: Json = False,
) -> None:
    """Samples a task with the base model and says which lever fits: RL, SFT first, preferences, harder data."""
    from mint.recipes.train import chosen, parse  # deferred: `mint --help` answers at once
    from mint.rl.analysis.doctor import examine
    from mint.rl.analysis.report import print_examination

    try:
        with chosen(task, parse(assignments or [])) as choice:
            examination = examine(
                choice.adapter, choice.config, prompts=prompts, samples=samples, seed=choice.config.seed
            )
    except MintError as error:
        fail(error)
    print_examination(Console(stderr=as_json), task, examination)
    if as_json:
        typer.echo(json.dumps(examination.to_dict(), default=str))


@app.command()
def plan(
    pass_rate: Annotated[float, typer.Option(min=0, max=1, help="how often a completion is right")],
    batch_size: Annotated[int, typer.Option(min=1, help="prompts per step")] = 8,
    tokens: Annotated[float, typer.Option(min=1, help="mean tokens of a completion")] = 16,
    as_json: Json = False,
) -> None:
    """What share of groups, and of tokens, to expect a signal from; `mint doctor TASK` measures the pass rate."""
    from mint.rl.analysis.planner import plan_for_rate  # deferred: `mint --help` answers at once
    from mint.rl.analysis.report import print_plan

    planned = plan_for_rate(pass_rate, batch_size=batch_size, mean_tokens=tokens)
    print_plan(Console(stderr=as_json), planned)
    if as_json:
        typer.echo(json.dumps(asdict(planned)))


@app.command()
def export(
    checkpoint: Annotated[str, typer.Argument(help="mint://MODEL/weights/NAME or …/sampler_weights/NAME")],
    output: Annotated[Path, typer.Option(help="the folder to write; must not exist")],
    format: Annotated[ExportFormat, typer.Option(help=EXPORT_HELP)] = ExportFormat.PEFT,
    data_dir: Annotated[
        Path | None, typer.Option(help="where it is; if not given the server at MINT_BASE_URL, else MINT_HOME")
    ] = None,
) -> None:
    """Writes a checkpoint as PEFT, vLLM and transformers load it."""
    from mint.cli.export import export_checkpoint  # deferred: loads the service, its database and the engine

    try:
        export_checkpoint(checkpoint, output=output, format=format.value, data_dir=data_dir)
    except MintError as error:
        fail(error)
    typer.echo(str(output))
