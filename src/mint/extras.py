"""The command that installs an optional part (an extra) of mint, from where this installation came.

The package index has another project named `mint`, so a checkout is named by its path.
"""

from __future__ import annotations

import json
import shlex
import shutil
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

_SOURCE = Path(__file__).parents[2]


def install_command(extras: str) -> str:
    """The command of pip for `extras`, which are names with commas between them.

    A checkout is installed with its constraints: those for a GPU where `nvidia-smi` is found.
    """
    origin = _origin()
    checkout = _checkout(origin)
    if checkout is not None:
        pins = checkout / "constraints" / ("gpu.txt" if shutil.which("nvidia-smi") is not None else "cpu.txt")
        return f"pip install -c {shlex.quote(str(pins))} {shlex.quote(f'{checkout}[{extras}]')}"
    requirement = f"mint[{extras}]"
    if "url" in origin:
        version_control = origin.get("vcs_info", {})
        place = (
            f"{version_control['vcs']}+{origin['url']}@{version_control['commit_id']}"
            if version_control
            else origin["url"]
        )
        requirement = f"{requirement} @ {place}"
    return f"pip install {shlex.quote(requirement)}"


def _origin() -> dict[str, Any]:
    """What pip noted about the origin (PEP 610, `direct_url.json`); empty for a package of an index."""
    try:
        return json.loads(distribution("mint").read_text("direct_url.json") or "{}")
    except PackageNotFoundError:
        return {}


def _checkout(origin: dict[str, Any]) -> Path | None:
    """The checkout that runs or was installed, if it is still there."""
    found = [_SOURCE]
    if "dir_info" in origin:
        found.append(Path(url2pathname(urlsplit(origin["url"]).path)))
    return next((folder for folder in found if (folder / "constraints" / "cpu.txt").is_file()), None)
