"""`python -m benchmarks`: times mint and its peers in turns, in one run.

Each command reads its arguments and calls one function of `benchmarks.compare`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console

from benchmarks.compare import report
from benchmarks.compare import tenants as tenants_bench
from benchmarks.compare.grpo import run_grpo_bench
from benchmarks.compare.sample import run_sample_bench
from benchmarks.compare.shapes import GrpoShape
from benchmarks.compare.train import SHARED, peers_of, run_train_bench, workloads
from mint.cli.terminal import fail
from mint.config import read_settings
from mint.errors import InvalidRequestError, MintError
from mint.models.random_base import SHAPES, ModelShape

T = TypeVar("T")

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Times mint and its peers in turns, in one run; peers are installed into their own environments.",
)


class DTypeName(StrEnum):
    """Precisions of the base model."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class DeviceName(StrEnum):
    """Where all sides compute."""

    CPU = "cpu"
    CUDA = "cuda"


class TransportName(StrEnum):
    """How mint's side reaches the service."""

    EMBEDDED = "embedded"
    HTTP = "http"


Peers = Annotated[list[str] | None, typer.Option("--peer", help="whom to time against; may be repeated")]
Repeats = Annotated[int, typer.Option(min=1, help="timed steps of each")]
Threads = Annotated[int, typer.Option(min=1, help="CPU threads of each")]
Dtype = Annotated[DTypeName, typer.Option(help="of the frozen base model, on every side")]
Device = Annotated[DeviceName, typer.Option(help="on which all sides compute")]
PeerPython = Annotated[
    Path | None, typer.Option(help="interpreter with what the peers need, instead of environments of their own")
]
AsJson = Annotated[bool, typer.Option("--json", help="one JSON line for each, on stdout")]
Shape = Annotated[
    str, typer.Option(help="of the base model, whose weights are random: tiny, qwen3-0.6b, qwen3-4b, qwen3-8b")
]
Prompts = Annotated[int, typer.Option(min=1, help="prompts of a step")]
Group = Annotated[int, typer.Option(min=1, help="samples of each prompt")]
PromptTokens = Annotated[int, typer.Option(min=1, help="tokens of each prompt")]
New = Annotated[int, typer.Option(min=2, help="tokens of each sample")]


@app.command()
def grpo(
    peer: Peers = None,
    shape: Shape = "tiny",
    dtype: Dtype = DTypeName.FLOAT32,
    prompts: Prompts = 8,
    group: Group = 8,
    prompt_tokens: PromptTokens = 48,
    new: New = 32,
    repeats: Repeats = 7,
    threads: Threads = 1,
    transport: Annotated[
        TransportName, typer.Option(help="http: time mint over HTTP too, beside mint embedded")
    ] = TransportName.EMBEDDED,
    device: Device = DeviceName.CPU,
    peer_python: PeerPython = None,
    as_json: AsJson = False,
) -> None:
    """A whole GRPO step, against trl, trl-best, skyrl and skyrl-best."""

    def run() -> list[dict[str, Any]]:
        return run_grpo_bench(
            peers=peer or [],
            shape=_step(shape, prompts=prompts, group=group, prompt_tokens=prompt_tokens, max_tokens=new),
            repeats=repeats,
            threads=threads,
            home=read_settings().home_dir,
            dtype=dtype.value,
            transport=transport.value,
            device=device.value,
            peer_python=peer_python,
        )

    _show(run, report.print_table, as_json=as_json)


@app.command()
def sample(
    peer: Peers = None,
    shape: Shape = "tiny",
    dtype: Dtype = DTypeName.FLOAT32,
    prompts: Prompts = 8,
    group: Group = 8,
    prompt_tokens: PromptTokens = 48,
    new: New = 32,
    repeats: Repeats = 5,
    threads: Threads = 1,
    device: Device = DeviceName.CPU,
    peer_python: PeerPython = None,
    as_json: AsJson = False,
) -> None:
    """Samples with logprobs from a lora, against hf, hf-best, -shared, -merged and -static, llama, and the limit."""

    def run() -> list[dict[str, Any]]:
        return run_sample_bench(
            peers=peer or [],
            shape=_step(shape, prompts=prompts, group=group, prompt_tokens=prompt_tokens, max_tokens=new),
            dtype=dtype.value,
            repeats=repeats,
            threads=threads,
            home=read_settings().home_dir,
            say=_say,
            device=device.value,
            peer_python=peer_python,
        )

    _show(run, report.print_table, as_json=as_json)


@app.command()
def train(
    peer: Peers = None,
    shape: Shape = "tiny",
    dtype: Dtype = DTypeName.FLOAT32,
    prompts: Prompts = 8,
    group: Group = 8,
    prompt_tokens: PromptTokens = 48,
    new: New = 32,
    peer_prompts: Annotated[
        int | None, typer.Option(min=1, help="prompts of a step of peers, where a whole one takes too long")
    ] = None,
    repeats: Repeats = 5,
    threads: Threads = 1,
    device: Device = DeviceName.CPU,
    peer_python: PeerPython = None,
    as_json: AsJson = False,
) -> None:
    """Gradient and optimizer step of a lora, against hf, hf-best, hf-shared, and the machine's limit: with prompts that
    a group shares, and with as many sequences that have nothing in common."""

    def run(workload: GrpoShape) -> list[dict[str, Any]]:
        known = peers_of(workload)
        return run_train_bench(
            peers=[name for name in peer or [] if name in known or name not in SHARED],
            shape=workload,
            peer_prompts=peer_prompts and peer_prompts * group // workload.group,
            dtype=dtype.value,
            repeats=repeats,
            threads=threads,
            home=read_settings().home_dir,
            say=_say,
            device=device.value,
            peer_python=peer_python,
        )

    sizes = {"prompts": prompts, "group": group, "prompt_tokens": prompt_tokens, "max_tokens": new}
    for workload in workloads(_checked(lambda: _step(shape, **sizes))):
        _show(partial(run, workload), report.print_table, as_json=as_json)


@app.command()
def tenants(
    count: Annotated[int, typer.Option("--tenants", min=2, help="loops at once")] = 8,
    steps: Annotated[int, typer.Option(min=1, help="steps of each in a round")] = 4,
    shape: Shape = "tiny",
    dtype: Dtype = DTypeName.FLOAT32,
    transport: Annotated[
        list[TransportName] | None, typer.Option(help="how they reach the service; may be repeated, both by default")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="rounds of all together, and of one client alone")] = 3,
    threads: Threads = 1,
    as_json: AsJson = False,
) -> None:
    """Many GRPO loops on one service at once, against one loop with the same total work."""

    def run() -> list[dict[str, Any]]:
        _shape(shape)
        return tenants_bench.run_tenants_bench(
            home=read_settings().home_dir,
            tenants=count,
            steps=steps,
            repeats=repeats,
            threads=threads,
            shape=shape,
            transports=[how.value for how in transport or (TransportName.HTTP, TransportName.EMBEDDED)],
            dtype=dtype.value,
        )

    _show(run, tenants_bench.print_table, as_json=as_json)


def _shape(name: str) -> ModelShape:
    if name not in SHAPES:
        raise InvalidRequestError(
            "is not a shape that mint knows", field="shape", value=name, remedy=f"Choose from {', '.join(SHAPES)}"
        )
    return SHAPES[name]


def _step(shape: str, **sizes: int) -> GrpoShape:
    model = _shape(shape)
    tokens = sizes["prompt_tokens"] + sizes["max_tokens"]
    if tokens > model.context:
        raise InvalidRequestError(
            f"and the samples are longer than the context of {model.context} tokens",
            field="prompt_tokens",
            value=sizes["prompt_tokens"],
            remedy="Take shorter prompts or samples",
        )
    return GrpoShape(model=model, **sizes)


def _say(text: str) -> None:
    Console(stderr=True, highlight=False).print(text, markup=False)


def _checked(run: Callable[[], T]) -> T:
    """What `run` returns; an error ends the command."""
    try:
        return run()
    except MintError as error:
        fail(error)


def _show(
    run: Callable[[], list[dict[str, Any]]], print_rows: Callable[[list[dict[str, Any]]], None], *, as_json: bool
) -> None:
    rows = _checked(run)
    if as_json:
        for row in rows:
            typer.echo(json.dumps(row))
    else:
        print_rows(rows)


if __name__ == "__main__":
    app()
