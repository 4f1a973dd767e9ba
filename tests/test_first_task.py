"""The page `docs/first_task.md` works as it is written: its files are saved and its commands run, in order."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ports import free_port

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "first_task.md"
INSTALLATION = "pip install"
"""The block of commands that says this needs a package registry."""

LOOK_AT_DASHBOARD = """
mint dashboard --port {port} & dashboard=$!
until python -c "import urllib.request as web; web.urlopen('http://127.0.0.1:{port}/')" 2> /dev/null; do
    kill -0 $dashboard
    sleep 0.2
done
kill $dashboard
wait $dashboard || true
"""
"""In place of `mint dashboard`, which runs until it is stopped."""


def parts(page: Path) -> list[tuple[str, str]]:
    """(the name of a file, its lines) and ("", commands), in the order of the page."""
    blocks = re.findall(
        r"^```(?:python title=\"([^\"]+)\"|bash)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE
    )
    assert len(blocks) == len(re.findall(r"^```(?:python|bash)", page.read_text(), re.MULTILINE))
    return blocks


def follow(page: Path, folder: Path, *, install: bool) -> str:
    """Does what the page says in one shell, and returns what its commands print."""
    script = ["set -e"]
    for name, text in parts(page):
        if name:
            script += [f"cat > {name} <<'END_OF_FILE'", text + "END_OF_FILE"]
        elif text == "mint dashboard\n":
            script.append(LOOK_AT_DASHBOARD.format(port=free_port()))
        elif install or INSTALLATION not in text:
            script.append(text)
    environment = {**os.environ, "MINT_HOME": str(folder / "home"), "MINT_THREADS": "1"}
    if install:
        environment.pop("PYTHONPATH", None)
    else:
        environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    done = subprocess.run(
        ["bash", "-c", "\n".join(script)], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check(printed: str, folder: Path) -> None:
    """The page's outcome: the doctor agrees, both runs learn, the better reward gives better answers."""
    assert "short_answers.py:ShortAnswers  go:" in printed
    first, second = (evaluations(run) for run in sorted((folder / "home" / "runs").iterdir()))
    for before, after in (first, second):
        assert after["low"] > before["high"]
    assert re.search(r"^trained: .*\bowl\b.*\b(animal|bird)\b", printed, re.MULTILINE)
    assert (folder / "my-task" / "curve.png").stat().st_size > 0
    assert (folder / "my-task" / "adapter" / "adapter_model.safetensors").is_file()


def evaluations(run: Path) -> list[dict[str, Any]]:
    """The greedy held-out evaluations of a run, before and after."""
    rows = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    greedy = [row for row in rows if row["temperature"] == 0]
    return [greedy[0], greedy[-1]]


@pytest.mark.slow
def test_the_first_task_is_written_trained_read_and_exported_as_the_page_says(tmp_path: Path) -> None:
    check(follow(PAGE, tmp_path, install=False), tmp_path)


@pytest.mark.slow
def test_the_first_task_works_in_a_fresh_environment(tmp_path: Path) -> None:
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(tmp_path / "mint")], check=True)
    folder = tmp_path / "mint"
    check(follow(PAGE, folder, install=True), folder)
