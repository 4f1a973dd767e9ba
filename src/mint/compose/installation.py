"""`mint doctor` without a task: what is installed on this machine, what is missing, and what to do about it.

Looks only; it installs nothing, and loads no model. torch is imported to ask it for its device.
"""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from mint.config import Settings
from mint.engine.cpu.build import COMPILERS, TESTED_HERE, NativeBuild
from mint.engine.cpu.build import REMEDY as COMPILER_REMEDY
from mint.engine.memory.machine_memory import free_memory_bytes, memory_bytes
from mint.errors import InvalidRequestError, MissingExtraError
from mint.extras import install_command
from mint.version import VERSION

State = Literal["ok", "missing", "problem"]

EXTRAS: dict[str, tuple[str, ...]] = {
    "local": (
        *("torch", "transformers", "starlette", "uvicorn", "httptools", "safetensors", "gguf", "zstandard"),
        *("python_multipart", "structlog", "prometheus_client", "matplotlib", "math_verify", "pydantic_monty"),
    ),
    "cli": ("rich", "typer"),
    "rl": ("numpy",),
    "structured": ("llguidance",),
    "tasks": ("datasets", "reasoning_gym"),
    "cluster": ("ray",),
    "mirror": ("obstore",),
    "verifiers": ("verifiers",),
    "textarena": ("textarena",),
    "openenv": ("openenv",),
    "ifeval": ("if_verifiable",),
    "trackers": ("pandas", "tensorboard", "trackio", "wandb"),
}
"""The modules of each extra. Only `local` is needed to train on this machine."""

LEAST_DISK_BYTES = 2 << 30
LEAST_MEMORY_BYTES = 2 << 30
"""The bundled model needs less; the smallest published one (98 MB) trains within it."""


@dataclass(frozen=True)
class Check:
    """One line of the report. `missing` is an option that nobody has to install; a `problem` stops something."""

    name: str
    state: State
    found: str
    remedy: str | None = None


def check_installation(settings: Settings) -> list[Check]:
    """Every check, in the order in which to read them."""
    return list(_checks(settings))


def _checks(settings: Settings) -> Iterator[Check]:
    yield Check("mint", "ok", f"{VERSION} in {Path(__file__).parents[1]}")
    yield Check("Python", "ok", f"{platform.python_version()} in {sys.prefix}")
    for extra in EXTRAS:
        yield _extra(extra)
    if find_spec("torch") is not None:
        yield _torch(settings.threads)
        yield _kernels(settings)
    yield _memory()
    yield _disk(settings.home_dir)


def _extra(extra: str) -> Check:
    missing = [module for module in EXTRAS[extra] if find_spec(module) is None]
    if not missing:
        return Check(f"mint[{extra}]", "ok", "installed")
    found = f"not installed: {', '.join(missing)}"
    if extra == "local":
        is_half = len(missing) < len(EXTRAS[extra])
        remedy = f"{install_command('local')} to train, sample and serve here; a client of a server does not need it"
        return Check("mint[local]", "problem" if is_half else "missing", found, remedy)
    return Check(f"mint[{extra}]", "missing", found, install_command(extra))


def _torch(threads: int) -> Check:
    try:
        from mint.engine.machine_rates import torch_description  # deferred: torch takes seconds
    except (ImportError, OSError) as error:  # OSError: a shared library of CUDA is missing
        return Check("torch", "problem", f"cannot be loaded: {error}", "install torch again")
    return Check("torch", "ok", torch_description(threads))


def _kernels(settings: Settings) -> Check:
    """Compiles mint's kernels in C unless they are there; that takes about a second."""
    folder = settings.native_folder
    if folder is None:
        return Check("kernels", "missing", "switched off by MINT_NATIVE=0", "unset it to compute faster on a CPU")
    if settings.native is None and not TESTED_HERE:
        return Check("kernels", "missing", f"not used on {sys.platform} {platform.machine()}, where torch's are")
    compilers = [path for name in COMPILERS if (path := shutil.which(name)) is not None]
    try:
        build = NativeBuild(folder, instructions=settings.instructions)
        libraries = build.libraries()
    except InvalidRequestError as error:
        return Check("kernels", "problem", f"{error.field} = {error.value} {error.message}", error.remedy)
    except MissingExtraError as error:
        return Check("kernels", "problem", error.message, COMPILER_REMEDY)
    by = f", by {compilers[0]}" if compilers else ""
    return Check("kernels", "ok", f"{len(libraries)} libraries for {build.instructions.name} in {folder}{by}")


def _memory() -> Check:
    total, free = memory_bytes(), free_memory_bytes()
    if total is None or free is None:
        return Check("memory", "ok", "unknown on this system")
    found = f"{_gigabytes(free)} free of {_gigabytes(total)}"
    if free >= LEAST_MEMORY_BYTES:
        return Check("memory", "ok", found)
    remedy = f"end other programs; a small model needs {_gigabytes(LEAST_MEMORY_BYTES)}"
    return Check("memory", "problem", found, remedy)


def _disk(home: Path) -> Check:
    """The disk of `MINT_HOME`, which may not exist yet."""
    there = next(folder for folder in (home, *home.parents) if folder.exists())
    free = shutil.disk_usage(there).free
    found = f"{_gigabytes(free)} free for {home}"
    if free >= LEAST_DISK_BYTES:
        return Check("disk", "ok", found)
    return Check("disk", "problem", found, "make room, or set MINT_HOME to a folder on another disk")


def _gigabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.1f} GB"
