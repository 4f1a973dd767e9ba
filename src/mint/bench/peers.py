"""The peers' own environments: made on demand below `home/peers`, reused as long as their requirements are the same.

A peer never shares packages with mint; only torch is pinned to the build that mint runs, so that both sides compute
with the same kernels. Knows nothing of what a peer is asked to do.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mint.errors import RequestFailedError

TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""Where builds like 2.13.0+cpu come from, if the configured indexes do not have them."""

TRL_REQUIREMENTS = ("trl==1.16.*", "transformers>=5.17,<6", "peft", "accelerate")

STAMP_FILE = "installed.json"
OUTPUT_LINES_SHOWN = 15

Say = Callable[[str], None]


@dataclass(frozen=True)
class PeerEnvironment:
    """A virtual environment in `folder` that holds torch and `requirements`."""

    folder: Path
    torch_version: str
    requirements: tuple[str, ...]

    @property
    def python(self) -> Path:
        """The environment's interpreter."""
        return self.folder / "bin" / "python"

    @property
    def wanted(self) -> list[str]:
        """What must be installed, as the stamp file notes it once it is."""
        return [f"torch=={self.torch_version}", *self.requirements]

    @property
    def is_complete(self) -> bool:
        """Whether an earlier run has installed exactly this; a broken-off installation has left no stamp."""
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
        run([sys.executable, "-m", "venv", str(self.folder)])
        torch, *others = self.wanted
        pip = [str(self.python), "-m", "pip", "install", "--disable-pip-version-check"]
        say(f"installing {torch}")
        self._install_torch(pip, torch)
        say(f"installing {', '.join(others)} (about a minute)")
        run([*pip, torch, *others])
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
