"""A release: links of its README, its notes, its version; and the package, built and installed on each Python."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from mint.version import VERSION

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
URL = "https://example.org/lab/mint"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_place_names_the_same_version() -> None:
    citation = (ROOT / "CITATION.cff").read_text()
    assert PROJECT["version"] == VERSION == script("release").read_version()
    assert f"\nversion: {VERSION}\n" in citation


def test_links_of_a_package_page_are_absolute() -> None:
    text = "![a curve](docs/a.png) [one](docs/a.md#part) [two](https://x.org/b) [three](#here) `x[0](1)`"
    made = script("readme_links").absolute_links(text, URL, "v1.2")
    assert f"![a curve]({URL}/raw/v1.2/docs/a.png)" in made and f"[one]({URL}/blob/v1.2/docs/a.md#part)" in made
    assert "[two](https://x.org/b) [three](#here)" in made
    readme = script("readme_links").absolute_links((ROOT / "README.md").read_text(), URL, "v1.2")
    assert re.findall(r"\]\((?!https?://|#)", readme) == []


def test_the_notes_of_a_release_are_its_section_of_the_changelog() -> None:
    changelog = "# Changelog\n\n## 0.2.0\n\n- new\n\n## 0.1.0 (2026-01-01)\n\n### Part\n\n- old\n"
    assert script("release").release_notes(changelog, "0.1.0") == "## 0.1.0 (2026-01-01)\n\n### Part\n\n- old\n"
    assert script("release").release_notes(changelog, "0.2.0") == "## 0.2.0\n\n- new\n"
    with pytest.raises(SystemExit, match=r"no section 0\.3\.0"):
        script("release").release_notes(changelog, "0.3.0")
    assert script("release").release_notes((ROOT / "CHANGELOG.md").read_text(), VERSION).startswith(f"## {VERSION}")


PYTHONS = [name.rpartition(" ")[2] for name in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", name)]


def interpreter(version: str) -> str:
    """A Python of this version: from the path, from pyenv, or from uv; the test is skipped where there is none."""
    installed = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
    for place in (shutil.which(f"python{version}"), *map(str, installed)):
        if place and subprocess.run([place, "-c", "import ensurepip"], stderr=subprocess.DEVNULL).returncode == 0:
            return place
    if shutil.which("uv"):
        found = subprocess.run(["uv", "python", "find", version], capture_output=True, text=True, check=False)
        if found.returncode == 0:
            return found.stdout.strip()
    pytest.skip(f"no Python {version} here")


LOCAL_COMMANDS = (
    *("demo math --yes", "serve", "serve --check", "keys list", "dashboard", "models list", "doctor math", "chaos"),
    *("recover", "runs list", "checkpoints list", "sessions list", "export a -o b", "bench", "train rl task=math"),
)
"""What needs the engine or the server on this machine."""


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel and the sdist, built from a copy of what git knows."""
    folder = tmp_path_factory.mktemp("packages")
    subprocess.run([sys.executable, "-m", "venv", folder / "tools"], check=True)
    python = folder / "tools" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "build", "twine"], check=True)
    environment = {**os.environ, "REPOSITORY_URL": URL}
    subprocess.run([python, "-m", "build", "--outdir", folder / "dist", ROOT], check=True, env=environment)
    [wheel], [sdist] = (folder / "dist").glob("*.whl"), (folder / "dist").glob("*.tar.gz")
    subprocess.run([python, "-m", "twine", "check", "--strict", wheel, sdist], check=True)
    return wheel, sdist


@pytest.mark.slow
def test_the_wheel_and_the_sdist_hold_what_they_should(packages: tuple[Path, Path]) -> None:
    wheel, sdist = packages
    script("release").check_wheel(wheel, VERSION, URL)
    script("release").check_sdist(sdist)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
@pytest.mark.parametrize("version", PYTHONS)
def test_the_package_installs_and_works_on_each_python(
    version: str, kind: str, packages: tuple[Path, Path], tmp_path: Path
) -> None:
    """The base install, without transformers, torch, a server or a command line; then the extra `cli`."""
    subprocess.run([interpreter(version), "-m", "venv", tmp_path / "bare"], check=True)
    bare = tmp_path / "bare" / "bin"
    package = packages[kind == "sdist"]
    pins = ROOT / "constraints" / "cpu.txt"
    subprocess.run([bare / "python", "-m", "pip", "install", "-q", "-c", pins, package], check=True)
    subprocess.run([bare / "python", "-I", "-c", script("release").SMOKE], check=True)
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"MINT_HOME": str(tmp_path)}
    told = subprocess.run([bare / "mint", "--version"], env=clean, capture_output=True, text=True, check=True)
    assert told.stdout == f"mint {VERSION}\n"
    alone = subprocess.run([bare / "mint", "runs", "list"], env=clean, capture_output=True, text=True)
    assert alone.returncode == 1 and "Traceback" not in alone.stderr
    assert all(f"pip install 'mint[{extra}] @ file://" in alone.stderr for extra in ("cli", "rl", "local"))
    assert script("release").installed_mb(tmp_path / "bare") <= script("release").MAX_BASE_MB
    subprocess.run([bare / "python", "-m", "pip", "install", "-q", "-c", pins, f"{package}[cli]"], check=True)
    for command in LOCAL_COMMANDS:
        ended = subprocess.run([bare / "mint", *command.split()], env=clean, capture_output=True, text=True)
        assert ended.returncode == 1 and "Traceback" not in ended.stderr, ended.stderr
        told = ended.stderr.splitlines()[-1]
        assert "pip install 'mint[local] @ file://" in told, command
