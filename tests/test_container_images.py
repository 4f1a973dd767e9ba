"""The container images: what their file names is there, and its RUN steps install a mint that works.

No test here builds an image, which needs a daemon and base images. The slow test runs the steps of the image for CPUs
in a folder instead of a container.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from mint.config import ServeSettings

ROOT = Path(__file__).parents[1]
FILE = ROOT / "deploy" / "Dockerfile"
KNOWN = {"ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "RUN", "STOPSIGNAL", "USER"}
KNOWN |= {"VOLUME", "WORKDIR"}


def read_stages() -> dict[str, list[tuple[str, str]]]:
    """Stage → its instructions: (name, arguments), with continued lines joined and comments left out."""
    lines = [line for line in FILE.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    stages: dict[str, list[tuple[str, str]]] = {}
    steps: list[tuple[str, str]] = []
    for line in filter(None, joined.splitlines()):
        name, _, arguments = line.partition(" ")
        if name == "FROM":
            steps = stages.setdefault(arguments.rpartition(" AS ")[2], [])
        steps.append((name, arguments.strip()))
    return stages


STAGES = read_stages()


def arguments_of(stage: str, name: str) -> list[str]:
    return [arguments for instruction, arguments in STAGES[stage] if instruction == name]


def test_there_are_images_for_cpus_for_gpus_and_for_clusters() -> None:
    assert list(STAGES) == ["base", "wheel", "cpu", "cluster", "cuda"]
    assert {name for steps in STAGES.values() for name, _ in steps} <= KNOWN
    for target in ("cpu", "cuda", "cluster"):
        assert arguments_of(target, "FROM") == [f"base AS {target}"]
        assert arguments_of(target, "USER")[-1].isdecimal(), "a number, so that hosts can check that it is not root"
        assert (
            f"--target {target}" in FILE.read_text()
            and f"--target {target}"
            in (ROOT / "docs/operations.md").read_text() + (ROOT / "docs/cluster.md").read_text()
        )


def test_everything_that_is_copied_is_there_and_in_the_context() -> None:
    kept = {line[1:] for line in (FILE.parent / "Dockerfile.dockerignore").read_text().splitlines() if line[0] == "!"}
    copied = [
        source
        for steps in STAGES.values()
        for name, arguments in steps
        if name == "COPY" and not arguments.startswith("--from")
        for source in arguments.split()[:-1]
    ]
    assert copied
    for source in copied:
        assert (ROOT / source).exists() and source.partition("/")[0] in kept, source


def test_the_image_serves_with_settings_that_mint_reads_and_asks_a_route_that_needs_no_key() -> None:
    assert json.loads(arguments_of("base", "ENTRYPOINT")[0]) == ["mint"]
    assert json.loads(arguments_of("base", "CMD")[0]) == ["serve"]
    environment = dict(word.partition("=")[::2] for word in arguments_of("base", "ENV")[0].split())
    served = {name.removeprefix("MINT_SERVE_").lower() for name in environment if name.startswith("MINT_SERVE_")}
    assert served == {"host", "log_format"} and served <= ServeSettings.model_fields.keys()
    assert "127.0.0.1:8500/healthz" in arguments_of("base", "HEALTHCHECK")[0]
    assert arguments_of("base", "EXPOSE") == [str(ServeSettings.model_fields["port"].default)]


def test_the_images_install_extras_that_there_are() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for stage, needed in (("cpu", {"local"}), ("cluster", {"local", "cluster"})):
        [named] = re.findall(r"mint-\*\.whl\)\[([\w,]+)\]", " ".join(arguments_of(stage, "RUN")))
        assert needed <= set(named.split(",")) <= extras.keys()


STEP_LIMIT_S = 1200
"""torch alone takes minutes from a slow index, on a busy machine."""


@pytest.mark.slow
@pytest.mark.timeout(4 * STEP_LIMIT_S)
def test_the_steps_of_the_image_for_cpus_install_a_mint_that_works(tmp_path: Path) -> None:
    """Every RUN of the stages `wheel` and `cpu`, with the folders of the image below a temporary one. Debian's packages
    and the user of the image are left out. Of the extras only `local` is installed, torch comes from the index that pip
    uses here, and pip keeps what it has downloaded: the image's own way takes more than an hour on a slow index."""
    venv, wheels = tmp_path / "mint", tmp_path / "wheels"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    (venv / "cpu.txt").write_text((ROOT / "constraints" / "cpu.txt").read_text())
    index = subprocess.run(
        [venv / "bin" / "pip", "config", "get", "global.index-url"], capture_output=True, text=True, check=False
    ).stdout.strip()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "PATH": f"{venv / 'bin'}:{os.environ['PATH']}",
        "TORCH_INDEX": index or "https://pypi.org/simple",
        "MINT_HOME": str(tmp_path / "data"),
    }
    source = tmp_path / "source"
    source.mkdir()
    archive = subprocess.run(["git", "-C", ROOT, "archive", "HEAD"], check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", source], input=archive, check=True)
    for stage in ("wheel", "cpu"):
        for step in arguments_of(stage, "RUN"):
            placed = step.replace("/opt/mint", str(venv)).replace("/wheels", str(wheels))
            smaller = re.sub(r"\[local,[\w,]+\]", "[local]", placed.replace(" --no-cache-dir", ""))
            subprocess.run(["sh", "-ec", smaller], cwd=source, env=environment, check=True, timeout=STEP_LIMIT_S)
    version = subprocess.run(["mint", "--version"], env=environment, capture_output=True, text=True, check=True).stdout
    assert version.startswith("mint ")
    checked = subprocess.run(["mint", "serve", "--check", "--host", "127.0.0.1"], env=environment, check=False)
    assert checked.returncode == 0
