"""`python -m benchmarks sample`: samples with their logprobs from a base with a lora, by mint and its peers, in turns.

The limit of the machine is measured in the same turns. Each peer's module explains its settings.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.compare.base_models import adapter_files, base_model_folder
from benchmarks.compare.contenders import (
    BENCH_BASE,
    KEEP_FREED_MEMORY,
    Contender,
    Transport,
    check_peers,
    machine_facts,
    make_worker,
    mint_worker,
    peer_workers,
    work_folder,
)
from benchmarks.compare.report import bandwidth_row, comparison_row, limit_row, side_row, sides_of, unequal
from benchmarks.compare.shapes import GrpoShape, make_prompt_ids
from benchmarks.compare.turns import Measured, Say, take_turns
from benchmarks.compare.utilisation import decode_bytes
from mint.engine.machine_limits import Device, Rates, measured_rows, sampling_seconds
from mint.models.random_base import DType

WARM_UPS = 1
SEED = 0
MEMORY_LIMIT_BYTES = 12 * 2**30
"""Address space of a peer that is known to take all memory."""

COMPILED = {"contiguous": True, "lora_in_base_dtype": True, "static_cache": True}
BEST = {"contiguous": True, "running_logprobs": True, "lora_in_base_dtype": True}
PEERS = {
    "hf": Contender("hf", "trl", {"settings": {}, "memory_limit_bytes": MEMORY_LIMIT_BYTES}, may_fail=True),
    "hf-best": Contender("hf", "trl", {"settings": BEST}, KEEP_FREED_MEMORY),
    "hf-shared": Contender("hf", "trl", {"settings": BEST | {"shared_prompts": True}}, KEEP_FREED_MEMORY),
    "hf-merged": Contender(
        "hf", "trl", {"settings": BEST | {"shared_prompts": True, "merged": True}}, KEEP_FREED_MEMORY
    ),
    "hf-static": Contender("hf", "trl", {"settings": COMPILED}, KEEP_FREED_MEMORY, may_fail=True),
    "llama": Contender("llama", "llama", {"settings": {}}),
    "llama-separate": Contender("llama", "llama", {"settings": {"separate_caches": True}}),
    "llama-q8": Contender("llama", "llama", {"settings": {"quantized": True}}),
    **{
        f"mint-{kind}": Contender("mint_service", None, {"transport": "embedded"}, {"MINT_QUANTIZE": kind})
        for kind in ("int8", "nf4", "fp8")
    },
}
"""Peers by name: transformers + PEFT as documented; with its memory trap fixed and the fastest settings that were
found; the same, and each prompt computed once for its group; the same, and the adapter merged; for GPUs, a cache of
fixed size and compiled steps. llama.cpp without any adapter, and each prompt computed once: with one cache for all
sequences, with one for each, and with weights in 8 bits, whose logprobs are not compared. mint with a quantized base,
whose logprobs are compared with its own forward alone."""

PROBE_TOLERANCE: dict[DType, float] = {"float32": 1e-4, "bfloat16": 2e-2}
"""By dtype: how far a probe's mean logprob per token may differ between two sides."""

SAMPLE_TOLERANCE: dict[DType, float] = {"float32": 1e-3, "bfloat16": 0.2}
"""By dtype: how far a sampled token's logprob may be from that of the same token in one forward."""


def run_sample_bench(
    *,
    peers: Sequence[str],
    shape: GrpoShape,
    dtype: DType,
    repeats: int,
    threads: int,
    home: Path,
    say: Say,
    device: Device = "cpu",
    transport: Transport = "embedded",
    peer_python: Path | None = None,
) -> list[dict[str, Any]]:
    """One row for mint, for each peer and for the limit, and a last one that compares them.

    Peers run in their own environments, or all with the interpreter `peer_python`, which has what they need.

    Raises:
        InvalidRequestError: a peer is unknown.
        MissingExtraError: mint's own engine is not installed.
        RequestFailedError: an installation or a worker failed, or the sides did not do the same work.
    """
    check_peers(peers, PEERS)
    base = base_model_folder(home, shape.model, seed=SEED, say=say)
    adapter = adapter_files(home, shape, seed=SEED, base_name=BENCH_BASE)
    spec = step_spec(
        "sample", shape, base_model=base, steps=WARM_UPS + repeats, threads=threads, dtype=dtype, device=device
    )
    spec |= {"adapter": str(adapter.folder), "adapter_archive": str(adapter.archive)}
    load_before = os.getloadavg()[0]
    with work_folder("sample", home, say) as folder:
        workers = [mint_worker(spec, folder, transport)]
        workers += peer_workers(peers, PEERS, spec, folder, home, say, peer_python)
        workers.append(make_worker("limit", Contender("limits"), spec, folder))
        *sides, limit = take_turns(workers, warm_ups=WARM_UPS, repeats=repeats, say=say)
        check_same_samples(sides, shape)
    seconds = [sampling_seconds(shape, rates_of(turn), dtype, device) for turn in limit.steps]
    limits = limit_row("sample", shape.sampled_tokens, seconds, limit.steps)
    rows = [side_row(side, "sample") | _checked(side) for side in sides]
    if device == "cuda":
        rows = [bandwidth_row(row, decode_bytes(shape, dtype), limits) for row in rows]
    return [*rows, limits, comparison_row(rows, machine_facts(load_before, limit.ready["device"]), limits)]


def rates_of(turn: Mapping[str, Any]) -> Rates:
    """The rates that the worker of the limits measured in one turn."""
    return {"block": turn["block"], "unembedding": turn["unembedding"], "read": turn["read"]}


def step_spec(
    work: str, shape: GrpoShape, *, base_model: Path, steps: int, threads: int, dtype: DType, device: Device = "cpu"
) -> dict[str, Any]:
    """The spec for every side: work, shape, the prompts of all steps as ids, and the settings that must be equal."""
    model = shape.model
    return {
        "work": work,
        "base_model": str(base_model),
        "prompts": make_prompt_ids(shape, steps=steps, seed=SEED + 1),
        "prompts_per_step": shape.prompts,
        "group_size": shape.group,
        "max_tokens": shape.max_tokens,
        "learning_rate": shape.learning_rate,
        "probe_tokens": list(range(1, 1 + min(shape.prompt_tokens + shape.max_tokens, model.vocabulary - 1))),
        "seed": SEED,
        "threads": threads,
        "dtype": dtype,
        "device": device,
        "rank": shape.rank,
        "model": asdict(model),
        "vocabulary": model.vocabulary,
        "rows": measured_rows(shape, device),
    }


def check_same_samples(sides: Sequence[Measured], shape: GrpoShape) -> None:
    """That every side sampled every token, from the same weights, and told the logprobs that one forward gives.

    A side without a lora is compared by what the base alone gives, and one with quantized weights not at all.

    Raises:
        RequestFailedError: the sides did not do the same work, so their times must not be compared.
    """
    mint = sides[0]
    tokens = shape.prompt_tokens + shape.max_tokens
    full = [shape.max_tokens] * shape.sequences
    for side in sides_of(sides):
        dtype: DType = side.ready["dtype"]
        if any(step["completion_lengths"] != full for step in side.steps):
            raise unequal(f"{side.name} did not sample {shape.sequences} x {shape.max_tokens} tokens in every step")
        for key in ("probe_logprob", "base_probe_logprob"):
            theirs = side.ready.get(key, mint.ready[key])
            if not side.name.startswith("mint-") and abs(theirs - mint.ready[key]) > PROBE_TOLERANCE[dtype] * tokens:
                raise unequal(f"{side.name} has a {key} of {theirs}, {mint.name} one of {mint.ready[key]}")
        error = side.finished["sample_logprob_error"]
        if error > SAMPLE_TOLERANCE[dtype]:
            raise unequal(f"{side.name}'s logprobs are {error} away from those of one forward")
        for setting in ("dtype", "threads"):
            if side.ready[setting] != mint.ready[setting]:
                raise unequal(f"{side.name} has {setting} {side.ready[setting]}, {mint.name} {mint.ready[setting]}")


def _checked(side: Measured) -> dict[str, Any]:
    if side.failure:
        return {}
    return {
        "lora": "probe_logprob" in side.ready,
        "probe_logprob": side.ready.get("probe_logprob"),
        "base_probe_logprob": side.ready.get("base_probe_logprob"),
        "sample_logprob_error": side.finished["sample_logprob_error"],
    }
