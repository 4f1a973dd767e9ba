"""The command line. Each command reads its arguments, calls one function and prints; heavy imports wait inside."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from mint.errors import MintError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="LoRA fine-tuning and reinforcement learning of language models, on any machine.",
)


class DemoTask(StrEnum):
    """What `mint demo` can show."""

    MATH = "math"


class BenchWork(StrEnum):
    """What `mint bench` can time."""

    GRPO = "grpo"


class BenchDtype(StrEnum):
    """In which precision `mint bench` computes."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class ExportFormat(StrEnum):
    """What `mint export` can write."""

    PEFT = "peft"
    HF = "hf"


@app.callback()
def main() -> None:
    """LoRA fine-tuning and reinforcement learning of language models, on any machine."""


@app.command()
def demo(
    task: Annotated[DemoTask, typer.Argument(help="the task to learn")],
    steps: Annotated[int | None, typer.Option(min=0, help="RL steps; the task's own number if not given")] = None,
    seed: Annotated[int, typer.Option(min=0, help="same seed, same run, bit for bit")] = 0,
    run_dir: Annotated[Path | None, typer.Option(help="where the run is kept; a new folder if not given")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on with the run in --run-dir")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object as the last line")] = False,
) -> None:
    """RL end to end on the bundled model, in this process: no network, no GPU, no key."""
    from mint.recipes.demo import DEMOS, print_report, run_demo  # deferred: `mint --help` answers at once

    people = Console(stderr=as_json)
    try:
        result, report = run_demo(
            task.value, steps=steps, seed=seed, run_dir=run_dir, resume=resume, console=Console(stderr=True)
        )
    except MintError as error:
        _fail(error)
    print_report(people, DEMOS[task.value][0](seed), result)
    if as_json:
        typer.echo(json.dumps(report))


@app.command()
def export(
    checkpoint: Annotated[str, typer.Argument(help="mint://MODEL/weights/NAME or …/sampler_weights/NAME")],
    output: Annotated[Path, typer.Option(help="the folder to write; must not exist")],
    format: Annotated[ExportFormat, typer.Option(help="peft: a LoRA adapter; hf: a merged model")] = ExportFormat.PEFT,
    data_dir: Annotated[Path | None, typer.Option(help="where the checkpoint is; MINT_HOME if not given")] = None,
) -> None:
    """Writes a checkpoint as PEFT, vLLM and transformers load it."""
    from mint.export import export_checkpoint  # deferred: loads the service, its database and the engine

    try:
        export_checkpoint(checkpoint, output=output, format=format.value, data_dir=data_dir)
    except MintError as error:
        _fail(error)
    typer.echo(str(output))


@app.command()
def bench(
    work: Annotated[BenchWork, typer.Argument(help="what to time")],
    peer: Annotated[list[str] | None, typer.Option(help="whom to time against (trl); may be repeated")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="timed steps of each")] = 7,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of each")] = 1,
    dtype: Annotated[BenchDtype, typer.Option(help="of the frozen base model, on every side")] = BenchDtype.FLOAT32,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON line for each, on stdout")] = False,
) -> None:
    """Times mint and its peers in turns, in one run; peers are installed into their own environment."""
    from mint.bench.grpo import run_grpo_bench  # deferred: starts worker processes
    from mint.bench.report import print_table
    from mint.config import read_settings

    try:
        home = read_settings().home_dir
        rows = run_grpo_bench(peers=peer or [], repeats=repeats, threads=threads, home=home, dtype=dtype.value)
    except MintError as error:
        _fail(error)
    if as_json:
        for row in rows:
            typer.echo(json.dumps(row))
    else:
        print_table(rows)


def _fail(error: MintError) -> NoReturn:
    Console(stderr=True).print(f"[red]{type(error).__name__}[/red]: {error}", soft_wrap=True)
    raise typer.Exit(1) from error
