"""The peers' own environments: made on demand below `home/peers`, reused as long as their requirements are the same.

A peer never shares packages with mint; only torch, where a peer uses it, is pinned to the build that mint runs, so that
both sides compute with the same kernels. Knows nothing of what a peer is asked to do.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.compare.turns import Say
from mint.errors import RequestFailedError

TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""Where builds like 2.13.0+cpu come from, if the configured indexes do not have them."""

TRL_REQUIREMENTS = ("trl==1.16.*", "transformers>=5.17,<6", "peft", "accelerate")
"""These hold transformers and PEFT too, so that the peers without TRL share its environment."""

LLAMA_REQUIREMENTS = ("llama-cpp-python==0.3.36", "gguf", "numpy")
"""Builds llama.cpp from source, with the instructions of this processor: ten minutes of CPU, and needs a compiler."""

SKYRL_REQUIREMENTS = (
    *("skyrl-tx==0.3.*", "jax>=0.8,<1.0", "flax>=0.12.2", "optax>=0.2.5"),
    *("tinker>=0.8,<0.15", "uv"),
    *("fastapi[standard]", "sqlmodel", "sqlalchemy[asyncio]", "aiosqlite"),
)
"""The extras `tinker` and `jax` of skyrl-tx without CUDA and PostgreSQL; the Tinker SDK as old as that release, for
later ones speak protobuf only; and uv, with which its server starts its engine."""

STAMP_FILE = "installed.json"
OUTPUT_LINES_SHOWN = 15


@dataclass(frozen=True)
class PeerEnvironment:
    """A virtual environment in `folder` that holds `requirements` and, unless its version is None, torch."""

    folder: Path
    torch_version: str | None
    requirements: tuple[str, ...]
    interpreter: str = sys.executable

    @property
    def python(self) -> Path:
        """The environment's interpreter."""
        return self.folder / "bin" / "python"

    @property
    def wanted(self) -> list[str]:
        """The required packages, as the stamp file lists them after the installation."""
        torch = [] if self.torch_version is None else [f"torch=={self.torch_version}"]
        return [*torch, *self.requirements]

    @property
    def is_complete(self) -> bool:
        """Whether an earlier run has installed exactly these packages; an interrupted installation leaves no stamp."""
        try:
            installed = json.loads((self.folder / STAMP_FILE).read_text())
        except (OSError, ValueError):
            return False
        return self.python.exists() and bool(installed == self.wanted)

    def ensure(self, say: Say) -> Path:
        """Installs what is missing, and returns the interpreter.

        Raises:
            RequestFailedError: a command failed; the message names it and shows the end of its output.
        """
        if self.is_complete:
            return self.python
        if self.folder.exists():
            shutil.rmtree(self.folder)
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        say(f"making the peer's environment in {self.folder}")
        run([self.interpreter, "-m", "venv", str(self.folder)])
        pip = [str(self.python), "-m", "pip", "install", "--disable-pip-version-check"]
        if self.torch_version is not None:
            say(f"installing {self.wanted[0]}")
            self._install_torch(pip, self.wanted[0])
        say(f"installing {', '.join(self.requirements)} (a minute, or ten where it is built from source)")
        run([*pip, *self.wanted])
        (self.folder / STAMP_FILE).write_text(json.dumps(self.wanted))
        return self.python

    def _install_torch(self, pip: Sequence[str], torch: str) -> None:
        try:
            run([*pip, torch])
        except RequestFailedError:
            if "+cpu" not in torch:
                raise
            run([*pip, "--extra-index-url", TORCH_CPU_INDEX, torch])


def run(command: Sequence[str]) -> None:
    """Runs a command to its end.

    Raises:
        RequestFailedError: it cannot be started, or its exit code is not 0.
    """
    shown = " ".join(command)
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    except OSError as error:
        raise RequestFailedError(f"`{shown}` cannot be started: {error}") from error
    if done.returncode != 0:
        tail = "\n".join(done.stdout.splitlines()[-OUTPUT_LINES_SHOWN:])
        raise RequestFailedError(
            f"`{shown}` ended with exit code {done.returncode}:\n{tail}",
            remedy="Run it by hand to see all of its output; a package registry must be reachable",
        )
