"""Each program in examples/ runs to its end, as a user would start it, and does what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from http_server import http_server

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.learns


def run(name: str, *arguments: str) -> str:
    """What the example prints."""
    command = [sys.executable, str(ROOT / "examples" / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def numbers(pattern: str, text: str) -> list[float]:
    return [float(found) for found in re.findall(pattern, text)]


def test_the_first_loop_learns_its_facts() -> None:
    assert "after: ['eight', 'four', 'one', 'seven']" in run("01_first_loop.py")


def test_grpo_from_scratch_raises_the_reward_with_nothing_of_the_library() -> None:
    rewards = numbers(r"mean reward (\S+)", run("02_grpo_from_scratch.py"))
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.1
    imported = re.findall(r"^(?:from|import) (\S+)", (ROOT / "examples" / "02_grpo_from_scratch.py").read_text(), re.M)
    assert [name for name in imported if name.startswith("mint")] == ["mint", "mint"]


@pytest.mark.parametrize("name", ["03_run_grpo.py", "04_tool_environment.py"])
def test_a_run_of_the_library_raises_the_held_out_reward(name: str) -> None:
    shown = run(name)
    before, after = numbers(r"(\S+) (?:before|after)\b", shown)[:2]
    assert after > before + 0.1
    assert "finding:" not in shown


def test_a_client_trains_on_a_server_and_takes_the_adapter_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with http_server(tmp_path / "server") as url:
        monkeypatch.setenv("MINT_BASE_URL", url)
        shown = run("05_server_and_export.py", str(tmp_path / "adapter"))
    assert f"server: {url}" in shown
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
