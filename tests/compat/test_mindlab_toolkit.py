"""MinT's own package, unmodified, runs the loop of its documents against `mint serve`; what it is beside mint."""

from __future__ import annotations

import json
import subprocess
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compat.sdk_environments import TOOLKIT, toolkit_python
from tests.compat.served import Served, mint_serve
from tests.compat.stand_in_model import make_stand_in

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

HERE = Path(__file__).parent
NAME = "Qwen/Qwen3-0.6B"
"""What the document names."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("work")


@pytest.fixture(scope="module")
def served(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with mint_serve(tmp_path_factory.mktemp("served"), "--model", f"{NAME}={make_stand_in(folder, NAME)}") as running:
        yield running


def test_the_loop_of_the_document_runs_with_mints_own_package(served: Served, folder: Path) -> None:
    script, blocks = HERE / "toolkit_loop.py", str(HERE.parent / "seed")
    done = served.run(toolkit_python(), script, blocks, owner="ann", cwd=folder, timeout_s=300, variables="MINT")
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert (said["toolkit"], said["tinker"]) == ("0.2.0", "0.22.0")
    assert said["sequences"] == said["datums"] == 8
    assert said["metrics"]["ratio_max:max"] < 1.05  # what was just sampled, at temperature 0.8, is on-policy
    assert said["metrics"]["tokens:sum"] > 0


def test_whichever_is_installed_last_is_what_import_mint_finds(tmp_path: Path) -> None:
    """What docs/migrate.md says of one environment with both."""
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"

    def pip(*arguments: str) -> None:
        subprocess.run([python, "-m", "pip", "--quiet", *arguments], check=True, timeout=300, cwd=tmp_path)

    def belongs_to_toolkit() -> bool:
        [package] = (tmp_path / "env" / "lib").glob("python*/site-packages/mint/__init__.py")
        return "Mind Lab Toolkit" in package.read_text()

    pip("wheel", "--no-deps", "--wheel-dir", str(tmp_path), str(HERE.parents[1]))
    [ours] = tmp_path.glob("mint-*.whl")
    pip("install", "--no-deps", TOOLKIT)
    assert belongs_to_toolkit()
    pip("install", "--no-deps", str(ours))
    assert not belongs_to_toolkit()
    pip("install", "--no-deps", "--force-reinstall", TOOLKIT)
    assert belongs_to_toolkit()
    pip("uninstall", "--yes", "mindlab-toolkit")
    assert not list((tmp_path / "env" / "lib").glob("python*/site-packages/mint/__init__.py"))
