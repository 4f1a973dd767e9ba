"""`mint bench grpo`: the same GRPO step by mint and its peers, in turns, in one run.

Each contender is one process that computes only in its turn (`turns`); here the turns are given and the answers
collected. What a step is, is said once, in `GrpoShape`, and sent to every side as one JSON file.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from mint.bench.peers import TRL_REQUIREMENTS, PeerEnvironment, Say
from mint.bench.report import Measured, check_same_work, comparison_row, contender_row
from mint.bench.shapes import GrpoShape, make_prompts, write_base_model
from mint.bench.turns import Worker
from mint.errors import InvalidRequestError, MissingExtraError

Transport = Literal["embedded", "http"]
DType = Literal["float32", "bfloat16"]
"""Of the frozen base, on both sides; the lora and its optimizer are float32."""

WARM_UP_STEPS = 2
START_TIMEOUT_S = 300.0
STEP_TIMEOUT_S = 600.0
SEED = 0

REMOTE_VARIABLES = ("MINT_BASE_URL", "TINKER_BASE_URL", "MINT_MODELS")
"""Settings of the caller's that would change what mint's side measures."""

KEEP_FREED_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    "MALLOC_TRIM_THRESHOLD_": str(2**34),
    "MALLOC_TOP_PAD_": str(2**28),
}
"""glibc keeps freed activations instead of returning each to the kernel, which saves the page faults of every step."""


@dataclass(frozen=True)
class TrlSettings:
    """What one entry of TRL runs with: `overrides` of its `GRPOConfig`, and its environment."""

    overrides: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


PEERS = {
    "trl": TrlSettings(),
    "trl-best": TrlSettings(
        overrides={"per_device_train_batch_size": 16, "gradient_accumulation_steps": 4}, environment=KEEP_FREED_MEMORY
    ),
}
"""Peers by name: TRL as its documentation has it, and with the fastest settings that were found for it."""


def run_grpo_bench(
    *,
    peers: list[str],
    repeats: int,
    threads: int,
    home: Path,
    dtype: DType = "float32",
    transport: Transport = "embedded",
) -> list[dict[str, Any]]:
    """One row for mint, one for each peer, and a last one with the ratios (`mint.bench.report` has their fields).

    `transport` "http" adds mint over HTTP, with a server in a process of its own, to be compared with mint embedded.

    Peers are installed below `home/peers`, once. Progress is told on stderr.

    Raises:
        InvalidRequestError: a peer is unknown.
        MissingExtraError: mint's own engine is not installed.
        RequestFailedError: an installation or a worker failed, or the sides did not do the same work.
    """
    say = Console(stderr=True, highlight=False).print
    shape = GrpoShape()
    check_peers(peers)
    python = trl_environment(home, torch_version()).ensure(say) if peers else None
    (home / "bench").mkdir(parents=True, exist_ok=True)
    work_dir = Path(tempfile.mkdtemp(prefix="grpo-", dir=home / "bench"))
    say(f"working in {work_dir}")
    write_base_model(work_dir / "base", shape.model, seed=SEED)
    spec = make_spec(shape, base_model=work_dir / "base", steps=WARM_UP_STEPS + repeats, threads=threads, dtype=dtype)
    workers = [mint_worker(spec, work_dir, transport) for transport in dict.fromkeys(("embedded", transport))]
    workers += [trl_worker(name, PEERS[name], python, spec, work_dir) for name in peers if python is not None]
    load_before = os.getloadavg()[0]
    sides = take_turns(workers, repeats=repeats, say=say)
    machine = {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load_before": load_before,
        "load_after": os.getloadavg()[0],
    }
    check_same_work(sides, shape)
    shutil.rmtree(work_dir)  # kept after a failure, whose message names the log in it
    rows = [contender_row(side, shape) for side in sides]
    return [*rows, comparison_row(rows, machine)]


def check_peers(peers: Sequence[str]) -> None:
    """Raises InvalidRequestError for a peer that is unknown or named twice."""
    for name in peers:
        if name not in PEERS or list(peers).count(name) > 1:
            raise InvalidRequestError(
                "is given twice" if name in PEERS else "is not a peer that mint knows how to run",
                field="peer",
                value=name,
                remedy=f"Choose from {', '.join(PEERS)}, each once",
            )


def trl_environment(home: Path, torch: str) -> PeerEnvironment:
    """TRL's environment below `home`, with the given version of torch."""
    return PeerEnvironment(folder=home / "peers" / "trl", torch_version=torch, requirements=TRL_REQUIREMENTS)


def torch_version() -> str:
    """The torch build that mint runs; peers get the same one.

    Raises:
        MissingExtraError: there is none.
    """
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError as error:
        raise MissingExtraError("the benchmark needs mint's engine", remedy="pip install 'mint[local]'") from error


def make_spec(
    shape: GrpoShape, *, base_model: Path, steps: int, threads: int, dtype: DType = "float32"
) -> dict[str, Any]:
    """What every side is told: the shape, the prompts of all steps, and the settings that must be the same."""
    return {
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


def mint_worker(spec: dict[str, Any], work_dir: Path, transport: Transport = "embedded") -> Worker:
    """mint's own process, with a data folder of its own on the disk that `home` is on."""
    name = "mint" if transport == "embedded" else f"mint-{transport}"
    return Worker(
        name,
        [
            sys.executable,
            "-m",
            "mint.bench.mint_peer",
            str(_write_spec(spec | {"transport": transport}, work_dir, name)),
        ],
        log_path=work_dir / f"{name}.log",
        environment=_environment(spec)
        | {"MINT_HOME": str(work_dir / name), "MINT_THREADS": str(spec["threads"])}
        | {"MINT_DTYPE": spec["dtype"]},
        without=REMOTE_VARIABLES,
    )


def trl_worker(name: str, settings: TrlSettings, python: Path, spec: dict[str, Any], work_dir: Path) -> Worker:
    """A process with TRL's trainer, in TRL's environment."""
    path = _write_spec(spec | {"overrides": settings.overrides, "work_dir": str(work_dir / name)}, work_dir, name)
    return Worker(
        name,
        [str(python), str(Path(__file__).parent / "trl_peer.py"), str(path)],
        log_path=work_dir / f"{name}.log",
        environment=_environment(spec) | settings.environment,
        without=("PYTHONPATH",),
    )


def take_turns(workers: Sequence[Worker], *, repeats: int, say: Say) -> list[Measured]:
    """Starts all workers, then gives each its turn, round by round; every second round goes in the opposite order."""
    steps: dict[str, list[dict[str, Any]]] = {worker.name: [] for worker in workers}
    with ExitStack() as running:
        for worker in workers:  # one after the other, so that nobody loads while another one does
            say(f"starting {worker.name}")
            running.enter_context(worker)
            steps[worker.name].append(worker.hear("ready", timeout_s=START_TIMEOUT_S))
        for turn in range(WARM_UP_STEPS + repeats):
            for worker in workers if turn % 2 == 0 else reversed(workers):
                steps[worker.name].append(worker.ask("step", answer="step", timeout_s=STEP_TIMEOUT_S))
            label = f"step {turn - WARM_UP_STEPS + 1} of {repeats}" if turn >= WARM_UP_STEPS else "warm-up"
            say(f"{label}: " + ", ".join(f"{name} {answers[-1]['wall_s']:.3f} s" for name, answers in steps.items()))
        return [_finish(worker, *steps[worker.name]) for worker in workers]


def _finish(worker: Worker, ready: dict[str, Any], *steps: dict[str, Any]) -> Measured:
    peak_rss_bytes = worker.peak_rss_bytes
    finished = worker.ask("finish", answer="finished", timeout_s=START_TIMEOUT_S)
    return Measured(
        name=worker.name,
        ready=ready,
        steps=steps[WARM_UP_STEPS:],
        finished=finished,
        peak_rss_bytes=peak_rss_bytes,
    )


def cpu_name() -> str:
    """The processor's name, as the kernel has it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _environment(spec: dict[str, Any]) -> dict[str, str]:
    """No GPU, no network, and as many threads as asked for also where torch is not asked."""
    return {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(spec["threads"])}


def _write_spec(spec: dict[str, Any], work_dir: Path, name: str) -> Path:
    path = work_dir / f"{name}.json"
    path.write_text(json.dumps(spec))
    return path
