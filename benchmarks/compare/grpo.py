"""`python -m benchmarks grpo`: the same GRPO step by mint and its peers, in turns, in one run.

`GrpoShape` defines the step once; every side reads it from one JSON file.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.compare.base_models import base_model_folder
from benchmarks.compare.contenders import (
    KEEP_FREED_MEMORY,
    Contender,
    Transport,
    check_peers,
    machine_facts,
    mint_worker,
    peer_workers,
    work_folder,
)
from benchmarks.compare.report import check_same_work, comparison_row, contender_row
from benchmarks.compare.shapes import GrpoShape, make_prompts
from benchmarks.compare.turns import take_turns
from mint.engine.machine_limits import Device
from mint.models.random_base import DType

WARM_UP_STEPS = 2
SEED = 0

PEERS = {
    "trl": Contender("trl", "trl", {"overrides": {}}),
    "trl-best": Contender(
        "trl",
        "trl",
        {"overrides": {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 4}},
        KEEP_FREED_MEMORY,
    ),
    "skyrl": Contender("skyrl", "skyrl", {"settings": {"backend": {}, "warm_up_steps": 4}}, may_fail=True),
    "skyrl-best": Contender(
        "skyrl",
        "skyrl",
        {
            "settings": {
                "backend": {"max_lora_adapters": 2, "max_lora_rank": 16, "sample_max_num_sequences": 64},
                "warm_up_steps": 1,
            }
        },
        may_fail=True,
    ),
}
"""Peers by name, each as its documentation has it, and with the fastest settings that were found for it. `overrides`
are of TRL's `GRPOConfig`. SkyRL tx computes for all slots of adapters, used or not (32 by default, of rank 32); and it
compiles once only if every batch of samples is filled up to the same size."""


def run_grpo_bench(
    *,
    peers: list[str],
    shape: GrpoShape,
    repeats: int,
    threads: int,
    home: Path,
    dtype: DType = "float32",
    transport: Transport = "embedded",
    device: Device = "cpu",
    peer_python: Path | None = None,
) -> list[dict[str, Any]]:
    """One row for mint, one for each peer, and a last one with the ratios; `benchmarks.compare.report` has the fields.

    `transport` "http" adds mint over HTTP, with a server in a process of its own, to be compared with mint embedded.

    Peers are installed below `home/peers`, once, unless the interpreter `peer_python` has what they need. Progress
    is told on stderr.

    Raises:
        InvalidRequestError: a peer is unknown.
        MissingExtraError: mint's own engine is not installed.
        RequestFailedError: an installation or a worker failed, or the sides did not do the same work.
    """
    say = Console(stderr=True, highlight=False).print
    check_peers(peers, PEERS)
    base = base_model_folder(home, shape.model, seed=SEED, say=say)
    spec = make_spec(shape, base_model=base, steps=WARM_UP_STEPS + repeats, threads=threads, dtype=dtype)
    spec["device"] = device
    load_before = os.getloadavg()[0]
    with work_folder("grpo", home, say) as folder:
        workers = [mint_worker(spec, folder, how) for how in dict.fromkeys(("embedded", transport))]
        workers += peer_workers(peers, PEERS, spec, folder, home, say, peer_python)
        sides = take_turns(workers, warm_ups=WARM_UP_STEPS, repeats=repeats, say=say)
        check_same_work(sides, shape)
    rows = [contender_row(side, shape) for side in sides]
    return [*rows, comparison_row(rows, machine_facts(load_before, device))]


def make_spec(
    shape: GrpoShape, *, base_model: Path, steps: int, threads: int, dtype: DType = "float32"
) -> dict[str, Any]:
    """The spec for every side: the shape, the prompts of all steps, and the settings that must be equal."""
    return {
        "work": "grpo",
        "base_model": str(base_model),
        "steps": steps,
        "prompts": make_prompts(shape, steps=steps, seed=SEED + 1),
        "prompts_per_step": shape.prompts,
        "group_size": shape.group,
        "max_tokens": shape.max_tokens,
        "rank": shape.rank,
        "alpha": shape.alpha,
        "learning_rate": shape.learning_rate,
        "probe_tokens": list(range(1, 1 + shape.prompt_tokens + shape.max_tokens)),
        "seed": SEED,
        "threads": threads,
        "dtype": dtype,
    }
