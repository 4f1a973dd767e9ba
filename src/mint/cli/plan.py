"""`mint plan`: what a step is expected to learn from, and what fits into the memory.

Reads its arguments, asks `mint.rl` or `mint.compose`, and prints the answer.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.text import Text

from mint.cli.terminal import Json, fail, print_pairs
from mint.errors import InvalidRequestError, MintError

DeviceName = Literal["cpu", "cuda"]

_NEEDED = {
    "context": "model",
    "group_size": "model",
    "rank": "model",
    "device": "model",
    "device_memory": "model",
    "gpus": "model",
    "throughput": "model",
    "tenants": "gpus",
    "batch_size": "pass_rate",
    "mean_tokens": "pass_rate",
}
"""The options of `mint plan` that another one gives a meaning, and that one."""

_OF_THIS_MACHINE = ("device", "device_memory", "throughput")
"""Those that `--gpus` takes the place of."""


def _tokens(text: str) -> int:
    """A number of tokens: `2048`, or `16k` for 16,384."""
    number, factor = (text[:-1], 1024) if text[-1:] in ("k", "K") else (text, 1)
    if not number.isdecimal() or int(number) < 1:
        raise typer.BadParameter(f"{text!r} is no number of tokens; write 2048 or 16k")
    return factor * int(number)


def plan(
    invoked: typer.Context,
    pass_rate: Annotated[float | None, typer.Option(min=0, max=1, help="share of completions that are right")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="prompts per step")] = 8,
    mean_tokens: Annotated[float, typer.Option(min=1, help="mean tokens of a completion")] = 16,
    model: Annotated[str | None, typer.Option(help="a base model: plan its memory")] = None,
    context: Annotated[
        int | None,
        typer.Option(
            parser=_tokens,
            metavar="TOKENS",
            help="of a sequence, with its prompt: 2048, 16k; without it 2048, or all of a shorter context",
        ),
    ] = None,
    group_size: Annotated[
        int,
        typer.Option(min=1, help="completions of each prompt: 8 as in the demos; a run of your own has 4"),
    ] = 8,
    rank: Annotated[int, typer.Option(min=1, help="of the LoRA, on the default matrices")] = 16,
    device: Annotated[DeviceName | None, typer.Option(help="the one that training would take, if not given")] = None,
    device_memory: Annotated[float | None, typer.Option(min=0.1, help="GiB of a device that is not here")] = None,
    gpus: Annotated[str | None, typer.Option(help="plan for these instead, such as 8xH100")] = None,
    tenants: Annotated[int, typer.Option(min=1, help="models in training, with --gpus")] = 1,
    throughput: Annotated[
        bool,
        typer.Option("--throughput", help="with --model: measure this CPU's products; tokens per second"),
    ] = False,
    as_json: Json = False,
) -> None:
    """With --pass-rate: what share of groups, and of tokens, to expect a signal from (`mint doctor TASK` measures the
    rate). With --model: what fits into the memory, without loading the weights. With both and --json, the memory is one
    line and the signal the next."""
    from mint.rl.analysis.planner import plan_for_rate  # deferred: `mint --help` answers at once
    from mint.rl.analysis.report import print_plan

    try:
        _refuse_without_effect(invoked)
    except InvalidRequestError as error:
        fail(error, as_json=as_json)
    if model is not None and gpus is not None:
        _plan_gpus(model, gpus, context, group_size, rank, tenants, as_json=as_json)
    elif model is not None:
        _plan_model(model, context, group_size, rank, device, device_memory, throughput=throughput, as_json=as_json)
    if pass_rate is None:
        if model is None:
            remedy = "Give --pass-rate to plan groups, or --model to plan memory"
            fail(
                InvalidRequestError("are missing", field="--pass-rate and --model", value="(missing)", remedy=remedy),
                as_json=as_json,
            )
        return

    planned = plan_for_rate(pass_rate, batch_size=batch_size, mean_tokens=mean_tokens)
    print_plan(Console(stderr=as_json), planned)
    if as_json:
        typer.echo(json.dumps(asdict(planned)))


def _refuse_without_effect(context: typer.Context) -> None:
    """Refuses an option that is not its default and would not change the plan.

    Raises:
        InvalidRequestError: there is one.
    """
    defaults = {option.name: option.default for option in context.command.params}
    given = {name: value for name, value in context.params.items() if value != defaults[name]}
    for name, needed in _NEEDED.items():
        if name in given and needed not in given:
            raise InvalidRequestError(
                f"has no effect without {_option(needed)}",
                field=_option(name),
                value=given[name],
                remedy=f"Give {_option(needed)}, or leave it out",
            )
    for name in _OF_THIS_MACHINE:
        if name in given and "gpus" in given:
            raise InvalidRequestError(
                "has no effect beside --gpus",
                field=_option(name),
                value=given[name],
                remedy="Leave it out, or --gpus",
            )


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _plan_model(
    model: str,
    context: int | None,
    group_size: int,
    rank: int,
    device: DeviceName | None,
    device_memory: float | None,
    *,
    throughput: bool,
    as_json: bool,
) -> None:
    from mint.compose.memory_plan import plan_model  # deferred: it imports torch
    from mint.compose.throughput import plan_throughput
    from mint.config import read_settings

    try:
        planned = plan_model(
            read_settings(),
            model,
            context=context,
            group=group_size,
            rank=rank,
            device=device,
            device_gib=device_memory,
        )
        rates = None
        if throughput:
            if planned.is_gpu:
                raise InvalidRequestError(
                    "is for a CPU", field="--throughput", value="cuda", remedy="Leave it out, or give --gpus 1xH100"
                )
            rates = plan_throughput(read_settings(), model, group=group_size, rank=rank)
    except MintError as error:
        fail(error, as_json=as_json)
    if as_json:
        derived: dict[str, Any] = {"sequences": planned.sequences, "fits_group": planned.fits_group}
        if rates is not None:
            derived |= {"sampled_per_second": rates.sampled, "trained_per_second": rates.trained}
        fitting = {name: planned.fits(getattr(planned, name)) for name in ("kept", "recomputed", "offloaded")}
        typer.echo(json.dumps({**asdict(planned), **derived, "fits": fitting}))
        return
    limits = planned.limits
    turns = "at once" if planned.fits_group else "in turns"
    rows = [
        ("free before loading", "unknown" if planned.free is None else _mib(planned.free)),
        ("base model", _mib(planned.base)),
        (f"LoRA of rank {rank}", f"{_mib(planned.model)} with gradient, moments and a copy to sample from"),
        (
            "KV cache",
            f"{_mib(planned.kv_cache)}, {planned.kv_token} bytes a token: {planned.sequences} sequences "
            f"of {planned.context}",
        ),
        (f"a group of {group_size}", f"sampled {turns}; {limits.rows} sequences decode together"),
        ("prompt", f"{_mib(planned.prompt)} for one of {planned.context} tokens, {limits.prefill_tokens} at once"),
        (f"training {planned.context} tokens", f"{_mib(planned.kept)}: {_fits(planned.fits(planned.kept))}"),
        ("with recomputation", f"{_mib(planned.recomputed)}: {_fits(planned.fits(planned.recomputed))}"),
        (
            "inputs offloaded, too",
            f"{_mib(planned.offloaded)}: {_fits(planned.fits(planned.offloaded))}; {_mib(planned.host)} of the host's "
            "memory, or of a file (MINT_OFFLOAD_ACTIVATIONS)",
        ),
        ("micro-batch", f"{planned.micro_batch_rows} rows; a longer sequence is recomputed"),
    ]
    if rates is not None:
        step = rates.step
        sizes = f"{step.prompts} prompts of {step.prompt_tokens} tokens, {step.group} completions of {step.max_tokens}"
        rows += [
            ("sampling", f"{rates.sampled:,.0f} tokens/s: {sizes}"),
            ("training", f"{rates.trained:,.0f} tokens/s, prompts counted once for each completion"),
        ]
    print_pairs([(name, Text(value)) for name, value in rows])
    if planned.is_gpu:
        Console().print(
            "A prediction; on an H100 two sums were 1 % and 4 % too small. CUDA itself takes some hundred MiB more."
        )
    else:
        Console().print("Python and torch take some 400 MiB more, and malloc keeps up to 256 MiB of freed memory.")


def _plan_gpus(
    model: str, gpus: str, context: int | None, group_size: int, rank: int, tenants: int, *, as_json: bool
) -> None:
    from mint.compose.memory_plan import plan_gpus  # deferred: it imports torch
    from mint.config import read_settings

    try:
        planned = plan_gpus(read_settings(), model, gpus, context=context, group=group_size, rank=rank, tenants=tenants)
    except MintError as error:
        fail(error, as_json=as_json)
    if as_json:
        typer.echo(json.dumps(asdict(planned)))
        return
    own, group = planned.plan, planned.group
    memory = int(group.kind.memory_gib * (1 << 30))
    verdict = "fits" if planned.fits else "does not fit, nor after any change that was tried; the last one"
    if planned.fits and planned.change is not None:
        verdict = "does not fit as it is; the smallest change with which it does"
    if planned.change is not None:
        verdict += f": {planned.change}"
    base = "in parts, two layers gathered at a time" if planned.is_sharded else "a copy on each GPU"
    shared = planned.group.count > 1
    split = f"{planned.trainers} GPUs train and {group.count - planned.trainers} sample" if shared else "in turns"
    rows = [
        ("verdict", verdict),
        ("of a GPU", f"{_mib(planned.needed)} of {_mib(memory)} with one model in training"),
        ("base model", f"{_mib(planned.base)}: {base}"),
        (
            "models",
            f"{_mib(planned.model)} of a GPU each: {planned.resident} of {planned.tenants} at once, "
            "others wait in files",
        ),
        ("a pass", f"{_mib(getattr(own, planned.activations))} for {own.context} tokens ({planned.activations})"),
        ("training", f"{planned.trained:,.0f} tokens/s if all {group.count} train"),
        ("sampling", f"{planned.sampled:,.0f} tokens/s if all sample, {planned.decoding} sequences at once"),
        ("split", f"{split}, if each sampled token is trained once"),
        ("gradient", f"{_mib(2 * planned.gradient)} sent and received by each rank and step" if shared else "stays"),
    ]
    print_pairs([(name, Text(value)) for name, value in rows])
    Console().print(
        "A prediction from data sheets and one H100 (docs/cluster.md). Clusters of this version run on CPUs."
    )


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.0f} MiB"


def _fits(fits: bool | None) -> str:
    return "unknown" if fits is None else "fits" if fits else "does not fit"
