"""`mint bench`: how fast this installation is, and how fast this machine could be at most."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from mint.cli.terminal import Json, fail
from mint.errors import MintError

if TYPE_CHECKING:
    from mint.compose.throughput import ThroughputReport

MAX_PROMPTS = 4096
MAX_GROUP_SIZE = 1024


class BenchDtype(StrEnum):
    """Precisions of the base model."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


def bench(
    model: Annotated[
        str, typer.Option(help="a base model, or a shape with random weights: tiny, qwen3-0.6b, qwen3-4b, qwen3-8b")
    ] = "mint/tiny",
    dtype: Annotated[BenchDtype | None, typer.Option(help="of the base model; MINT_DTYPE if not given")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; MINT_THREADS if not given")] = None,
    batch_size: Annotated[int, typer.Option(min=1, max=MAX_PROMPTS, help="prompts of a step")] = 8,
    group_size: Annotated[
        int, typer.Option(min=1, max=MAX_GROUP_SIZE, help="completions of each prompt: 8 as in the demos")
    ] = 8,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="tokens of each prompt")] = 48,
    max_tokens: Annotated[int, typer.Option(min=2, help="tokens of each completion")] = 32,
    repeats: Annotated[int, typer.Option(min=1, help="measured steps")] = 5,
    as_json: Json = False,
) -> None:
    """Tokens per second of sampling and training on this machine, beside the most that it could do."""
    from mint.compose.throughput import measure_throughput  # deferred: `mint --help` answers at once
    from mint.config import read_settings

    progress = Console(stderr=True, highlight=False)
    given = {"dtype": dtype.value if dtype is not None else None, "threads": threads}
    try:
        report = measure_throughput(
            model,
            settings=read_settings().model_copy(
                update={name: value for name, value in given.items() if value is not None}
            ),
            say=lambda text: progress.print(text, markup=False),
            repeats=repeats,
            prompts=batch_size,
            group=group_size,
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
        )
    except MintError as error:
        fail(error, as_json=as_json)
    if as_json:
        typer.echo(json.dumps(report.as_json()))
    else:
        print_report(Console(highlight=False), report)


def print_report(console: Console, report: ThroughputReport) -> None:
    """The table for people."""
    table = Table("", "tokens/s", "the machine's limit", "reached", "s/step", "min-max")
    for name, speed in (("sampling", report.sampling), ("training", report.training)):
        table.add_row(
            name,
            f"{speed.tokens_per_second:,.0f}",
            f"{speed.limit_tokens_per_second:,.0f}",
            f"{speed.share_of_limit:.0%}",
            f"{speed.tokens / speed.tokens_per_second:.3f}",
            f"{min(speed.seconds):.3f}-{max(speed.seconds):.3f}",
        )
    console.print(table)
    products = ", ".join(
        f"{rate / 1e9:,.0f} with {rows} rows" for rows, rate in report.product_flops_per_second.items()
    )
    settings = report.settings
    console.print(
        f"{report.model} in {settings['dtype']} on {settings['device']}, {settings['threads']} thread(s), "
        f"kernels: {settings['kernels']}, load {report.load:.1f} before\n"
        f"memory: {report.read_bytes_per_second / 1e9:,.0f} GB/s read; "
        f"matrix products, GFLOP/s: {products}",
        markup=False,
        soft_wrap=True,
    )
