"""`python -m benchmarks train`: gradient and optimizer step on the sequences of a GRPO step, by mint and its peers.

The sides take turns, and the limit of the machine is measured in the same turns. Tokens are counted alike for all
sides: those of all sequences, each prompt once for every sample. Each peer's module explains its settings.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

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
from benchmarks.compare.report import comparison_row, flops_row, limit_row, side_row, sides_of, unequal
from benchmarks.compare.sample import SEED, rates_of, step_spec
from benchmarks.compare.shapes import GrpoShape
from benchmarks.compare.turns import Measured, Say, take_turns
from benchmarks.compare.utilisation import datasheet_flops, training_flops
from mint.engine.machine_limits import Device, training_seconds, widest_rate
from mint.models.random_base import DType

WARM_UPS = 1

SMALL_VOCABULARY = 4096
"""Up to this, all sequences fit into one micro-batch of a peer's, as documentation has it."""

SETTINGS = {
    "hf": ({"micro_batch": 64}, {"micro_batch": 4}),
    "hf-best": (
        {"micro_batch": 32, "keep_only_targets": True, "contiguous": True, "lora_in_base_dtype": True},
        {"micro_batch": 4, "keep_only_targets": True, "contiguous": True, "lora_in_base_dtype": True},
    ),
}
"""Settings of each peer for a small vocabulary, and for a large one."""

SHARED = {"hf-shared": tuple(settings | {"shared_prompts": True} for settings in SETTINGS["hf-best"])}
"""The same of the peer that computes each prompt once, as mint does: for groups of several samples."""

GPU_ROWS = 4096
"""Tokens of a peer's micro-batch on a GPU: what it keeps of them for the backward, logits included, fits into 80 GB."""

PROBE_TOLERANCE: dict[DType, float] = {"float32": 1e-4, "bfloat16": 2e-2}
"""By dtype: how far a probe's mean logprob per token may differ between two sides, before and after training."""

LOSS_TOLERANCE: dict[DType, float] = {"float32": 1e-4, "bfloat16": 2e-2}
"""By dtype: how far the loss may differ, of which the terms' absolute values sum up to about 1."""

GRADIENT_TOLERANCE: dict[DType, float] = {"float32": 1e-3, "bfloat16": 5e-2}
"""By dtype: how far the norm of the gradient may differ, relative to mint's."""


def peers_of(shape: GrpoShape, device: Device = "cpu") -> dict[str, Contender]:
    """Peers by name: transformers + PEFT as documented, with full logits; and the fastest that was found. A GPU gets as
    many sequences at once as should fit."""
    large = shape.model.vocabulary > SMALL_VOCABULARY
    by_name = SETTINGS | (SHARED if shape.group > 1 else {})
    sequences = max(1, GPU_ROWS // (shape.prompt_tokens + shape.max_tokens)) if device == "cuda" else None
    return {
        name: Contender(
            "hf",
            "trl",
            {"settings": settings[large] | ({} if sequences is None else {"micro_batch": sequences})},
            {} if name == "hf" else KEEP_FREED_MEMORY,
            may_fail=True,
        )
        for name, settings in by_name.items()
    }


def workloads(shape: GrpoShape) -> list[GrpoShape]:
    """The two kinds of training, each with as many sequences: groups of samples that share a prompt, and sequences that
    have nothing in common, as in supervised fine-tuning."""
    distinct = replace(shape, prompts=shape.sequences, group=1)
    return [distinct] if shape.group == 1 else [shape, distinct]


def workload_name(shape: GrpoShape) -> str:
    """Which of `workloads` a shape is."""
    return "distinct prompts" if shape.group == 1 else "shared prompts"


def computed_rows(name: str, shape: GrpoShape) -> int:
    """Rows that a side runs through the blocks in one step."""
    return shape.computed_rows if name == "mint" or name in SHARED else shape.trained_tokens


def run_train_bench(
    *,
    peers: Sequence[str],
    shape: GrpoShape,
    peer_prompts: int | None,
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

    Peers run in their own environments, or all with the interpreter `peer_python`, which has what they need. With
    `peer_prompts`, peers do only so many of a step's prompts; then only the first step's sequences could be compared,
    and the loss is not.

    Raises:
        InvalidRequestError: a peer is unknown.
        MissingExtraError: mint's own engine is not installed.
        RequestFailedError: an installation or a worker failed, or the sides did not do the same work.
    """
    known = peers_of(shape, device)
    check_peers(peers, known)
    base = base_model_folder(home, shape.model, seed=SEED, say=say)
    adapter = adapter_files(home, shape, seed=SEED, base_name=BENCH_BASE)
    settings: dict[str, Any] = {"base_model": base, "steps": WARM_UPS + repeats, "threads": threads}
    settings |= {"dtype": dtype, "device": device}
    more = {"adapter": str(adapter.folder), "adapter_archive": str(adapter.archive)}
    spec = train_spec(shape, **settings) | more
    small = replace(shape, prompts=peer_prompts or shape.prompts)
    peer_spec = train_spec(small, **settings) | more
    load_before = os.getloadavg()[0]
    with work_folder("train", home, say) as folder:
        workers = [mint_worker(spec, folder, transport)]
        workers += peer_workers(peers, known, peer_spec, folder, home, say, peer_python)
        workers.append(make_worker("limit", Contender("limits"), spec, folder))
        *sides, limit = take_turns(workers, warm_ups=WARM_UPS, repeats=repeats, say=say)
        check_same_training(sides, same_sequences=small == shape)
    seconds = [training_seconds(shape, rates_of(turn), device) for turn in limit.steps]
    limits = limit_row("train", shape.trained_tokens, seconds, limit.steps)
    rows = [
        side_row(side, "train") | _checked(side) | {"computed_rows": computed_rows(side.name, own)}
        for side, own in zip(sides, (shape, *[small] * len(peers)), strict=True)
    ]
    name = limit.ready["device"]
    if device == "cuda":
        peak = widest_rate(rates_of(limit.steps[-1]), device)
        flops = [training_flops(own) for own in (shape, *[small] * len(peers))]
        rows = [flops_row(row, done, peak, datasheet_flops(name)) for row, done in zip(rows, flops, strict=True)]
    comparison = comparison_row(rows, machine_facts(load_before, name), limits)
    return [row | {"workload": workload_name(shape)} for row in (*rows, limits, comparison)]


def train_spec(
    shape: GrpoShape, *, base_model: Path, steps: int, threads: int, dtype: DType, device: Device = "cpu"
) -> dict[str, Any]:
    """As `step_spec`, and the sequences: random completions, with advantages that cancel out within a group.

    The policy that sampled them is said to have drawn every token alike, which makes the ratio differ from 1.
    """
    rng = np.random.default_rng(SEED + 2)
    rows = steps * shape.sequences
    completions = rng.integers(1, shape.model.vocabulary, size=(rows, shape.max_tokens))
    drawn = rng.standard_normal((steps * shape.prompts, shape.group))
    centred = drawn - drawn.mean(axis=1, keepdims=True) if shape.group > 1 else drawn
    settings: dict[str, Any] = {"steps": steps, "threads": threads, "dtype": dtype, "device": device}
    return step_spec("train", shape, base_model=base_model, **settings) | {
        "completions": completions.tolist(),
        "advantages": (centred.ravel() / (shape.sequences * shape.max_tokens)).tolist(),
        "behaviour_logprob": -math.log(shape.model.vocabulary),
    }


def check_same_training(sides: Sequence[Measured], *, same_sequences: bool) -> None:
    """That every side trained as many parameters of the same model on the same loss, with the same gradient, to the
    same effect. Of sides that were given fewer sequences, only the beginning is compared.

    Raises:
        RequestFailedError: the sides did not do the same work, so their times must not be compared.
    """
    mint = sides[0]
    for side in sides_of(sides):
        dtype: DType = side.ready["dtype"]
        for setting in ("dtype", "threads", "trained_parameters"):
            if side.ready[setting] != mint.ready[setting]:
                raise unequal(f"{side.name} has {setting} {side.ready[setting]}, {mint.name} {mint.ready[setting]}")
        if side.ready["probe_logprob"] == side.finished["probe_logprob"]:
            raise unequal(f"{side.name}'s probe logprob is still {side.ready['probe_logprob']} after training")
        pairs = [("probe logprob before", side.ready["probe_logprob"], mint.ready["probe_logprob"], "probe")]
        if same_sequences:
            after = (side.finished["probe_logprob"], mint.finished["probe_logprob"])
            pairs += [("probe logprob after", *after, "probe")]
            pairs += [("loss", *both, "loss") for both in zip(side.column("loss"), mint.column("loss"), strict=True)]
            norms = zip(side.column("gradient_norm"), mint.column("gradient_norm"), strict=True)
            pairs += [("gradient norm", *both, "gradient") for both in norms]
        for what, theirs, ours, kind in pairs:
            tolerance = {
                "probe": PROBE_TOLERANCE[dtype] * 100,
                "loss": LOSS_TOLERANCE[dtype],
                "gradient": GRADIENT_TOLERANCE[dtype] * abs(ours),
            }[kind]
            if not abs(theirs - ours) <= tolerance:
                raise unequal(f"{side.name} has a {what} of {theirs}, {mint.name} one of {ours}")


def _checked(side: Measured) -> dict[str, Any]:
    if side.failure:
        return {}
    return {
        "trained_parameters": side.ready["trained_parameters"],
        "loss": side.column("loss"),
        "gradient_norm": side.column("gradient_norm"),
        "probe_logprob_before": side.ready["probe_logprob"],
        "probe_logprob_after": side.finished["probe_logprob"],
    }
