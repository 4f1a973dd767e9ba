"""The contenders of a comparison: worker, environment and settings of each, and how to start them together.

A comparison describes its work once, in a spec that every side reads from a JSON file, and has a table of its peers by
name. Only the comparison and its workers know what a spec means.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.compare.environments import LLAMA_REQUIREMENTS, SKYRL_REQUIREMENTS, TRL_REQUIREMENTS, PeerEnvironment
from benchmarks.compare.turns import Say, Worker
from mint.errors import InvalidRequestError, MissingExtraError
from mint.extras import install_command

Transport = Literal["embedded", "http", "engine"]
"""How mint's side reaches the engine: through the service in its own process, through a socket, or directly. The last
needs only the engine's packages."""

BENCH_BASE = "bench/base"
"""The name under which mint's side offers the base model."""

REMOTE_VARIABLES = ("MINT_BASE_URL", "TINKER_BASE_URL", "MINT_MODELS")
"""The caller's settings that would change what mint's side measures."""

KEEP_FREED_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    "MALLOC_TRIM_THRESHOLD_": str(2**34),
    "MALLOC_TOP_PAD_": str(2**28),
}
"""glibc keeps freed activations instead of returning each to the kernel, which saves the page faults of every step."""


@dataclass(frozen=True)
class Contender:
    """One entry of a benchmark. `overrides` is added to the spec that all sides get.

    `worker` is a module of `benchmarks.peers`. It runs with the interpreter of `environment`, or with mint's own where
    that is None. If it `may_fail`, the others go on without it.
    """

    worker: str
    environment: str | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    may_fail: bool = False


@dataclass(frozen=True)
class Needs:
    """The packages of an environment; with `torch`, the same build as mint's."""

    requirements: tuple[str, ...]
    torch: bool = True
    interpreter: str = sys.executable


ENVIRONMENTS = {
    "trl": Needs(TRL_REQUIREMENTS),
    "llama": Needs(LLAMA_REQUIREMENTS, torch=False),
    "skyrl": Needs(SKYRL_REQUIREMENTS),
}
"""Environments by name; each is a folder below `home/peers`."""


def peer_environment(name: str, home: Path) -> PeerEnvironment:
    """The environment `name` of `ENVIRONMENTS` below `home`.

    Raises:
        MissingExtraError: it pins torch to mint's, and there is none.
    """
    needs = ENVIRONMENTS[name]
    version = torch_version() if needs.torch else None
    return PeerEnvironment(home / "peers" / name, version, needs.requirements, needs.interpreter)


def check_peers(peers: Sequence[str], known: Mapping[str, Contender]) -> None:
    """Raises InvalidRequestError for a peer that is unknown or named twice."""
    for name in peers:
        if name not in known or list(peers).count(name) > 1:
            raise InvalidRequestError(
                "is given twice" if name in known else "is not a peer that mint knows how to run here",
                field="peer",
                value=name,
                remedy=f"Choose from {', '.join(known)}, each once",
            )


def torch_version() -> str:
    """The torch build that mint runs; peers get the same one.

    Raises:
        MissingExtraError: there is none.
    """
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError as error:
        raise MissingExtraError("the benchmark needs mint's engine", remedy=install_command("local")) from error


@contextmanager
def work_folder(bench: str, home: Path, say: Say) -> Generator[Path]:
    """A new folder below `home` for specs and logs; kept after a failure, whose message names the log in it."""
    (home / "bench").mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{bench}-", dir=home / "bench"))
    say(f"working in {folder}")
    yield folder
    shutil.rmtree(folder)


def peer_workers(
    names: Sequence[str],
    known: Mapping[str, Contender],
    spec: Mapping[str, Any],
    work_dir: Path,
    home: Path,
    say: Say,
    python: Path | None = None,
) -> list[Worker]:
    """A worker for each peer, in its environment, which is installed if it is not there yet; or all with the
    interpreter `python`, which has what they need.

    Raises:
        RequestFailedError: an installation failed.
    """
    pythons = {
        name: python or peer_environment(name, home).ensure(say)
        for name in dict.fromkeys(known[peer].environment for peer in names)
        if name is not None
    }
    return [make_worker(name, known[name], spec, work_dir, pythons) for name in names]


def make_worker(
    name: str,
    contender: Contender,
    spec: Mapping[str, Any],
    work_dir: Path,
    pythons: Mapping[str, Path] | None = None,
) -> Worker:
    """The contender's process. `pythons` has the interpreters of the environments."""
    path = work_dir / f"{name}.json"
    overrides = dict(contender.overrides)
    if spec.get("device", "cpu") != "cpu":
        overrides.pop("memory_limit_bytes", None)  # a GPU's driver reserves far more addresses than any limit
    path.write_text(json.dumps({**spec, "work_dir": str(work_dir / name), **overrides}))
    if contender.environment is None:
        python, without, mints = sys.executable, REMOTE_VARIABLES, _mint_variables(spec, work_dir / name)
    else:
        python, without, mints = str((pythons or {})[contender.environment]), ("PYTHONPATH",), {}
    return Worker(
        name,
        [python, "-m", f"benchmarks.peers.{contender.worker}", str(path)],
        log_path=work_dir / f"{name}.log",
        environment={**_variables(spec), **mints, **contender.variables},
        without=without,
        may_fail=contender.may_fail,
    )


def mint_worker(spec: Mapping[str, Any], work_dir: Path, transport: Transport = "embedded") -> Worker:
    """mint's own process, with a data folder of its own on the disk that `home` is on."""
    name = "mint" if transport == "embedded" else f"mint-{transport}"
    if transport == "engine":
        return make_worker(name, Contender("mint_engine"), spec, work_dir)
    return make_worker(name, Contender("mint_service", overrides={"transport": transport}), spec, work_dir)


def machine_facts(load_before: float, device: str = "cpu") -> dict[str, Any]:
    """The machine of the measurement; `load_before` is the load average before it, `device` a GPU's name."""
    return {
        "device": device,
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load_before": load_before,
        "load_after": os.getloadavg()[0],
    }


def cpu_name() -> str:
    """The processor's name, as the kernel has it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _variables(spec: Mapping[str, Any]) -> dict[str, str]:
    """No network, no GPU unless asked for, and as many threads as asked for also where torch is not asked."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if spec.get("device", "cpu") == "cpu" else {}
    return {**hidden, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(spec["threads"])}


def _mint_variables(spec: Mapping[str, Any], home: Path) -> dict[str, str]:
    return {
        "MINT_HOME": str(home),
        "MINT_THREADS": str(spec["threads"]),
        "MINT_DTYPE": spec["dtype"],
        "MINT_MODELS": f"{BENCH_BASE}={spec['base_model']}",
    }
