"""Each program in examples/ runs to its end, as a user would start it, and does what it says."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

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


@pytest.mark.slow
def test_grpo_from_scratch_raises_the_reward_with_nothing_of_the_library() -> None:
    rewards = numbers(r"mean reward (\S+)", run("02_grpo_from_scratch.py"))
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.1
    imported = re.findall(r"^(?:from|import) (\S+)", (ROOT / "examples" / "02_grpo_from_scratch.py").read_text(), re.M)
    assert [name for name in imported if name.startswith("mint")] == ["mint", "mint"]


@pytest.mark.slow
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


def test_each_of_the_ten_changes_takes_at_most_ten_lines() -> None:
    tree = ast.parse((ROOT / "examples" / "06_ten_changes.py").read_text())
    changes = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert len(changes) == 10
    for change in changes:
        statements = [node for node in ast.walk(change) if isinstance(node, ast.stmt) and not is_docstring(node)]
        lines = {line for node in statements for line in (node.lineno, node.end_lineno)} - {change.lineno}
        assert len(lines) <= 10, f"{change.name} takes {len(lines)} lines"


def is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def test_each_of_the_ten_changes_takes_effect() -> None:
    shown = run("06_ten_changes.py")
    folders = {name: Path(path) for name, path in re.findall(r"^(my_\w+): \d+ samples, run (.+)$", shown, re.M)}
    assert len(folders) == 10
    settings = {name: json.loads((folder / "config.json").read_text()) for name, folder in folders.items()}
    steps = {name: read_lines(folder / "metrics.jsonl")[-1] for name, folder in folders.items()}
    rollouts = {name: read_lines(folder / "rollouts.jsonl") for name, folder in folders.items()}
    assert settings["my_advantage"]["advantage"] == "function by_rank"
    assert settings["my_baseline"]["baseline"] == "function median"
    assert settings["my_loss"]["loss_fn"] == "function cut_ratio"
    assert settings["my_weights"]["loss_weighting"] == "function weight"
    assert settings["my_filter"]["group_filter"] == "function in_between"
    assert 1 <= steps["my_metrics"]["custom/distinct"] <= 8
    assert {name for row in rollouts["my_reward"] for name in row["parts"]} == {"right", "number"}
    assert all(row["reward"] == 0 or 0.5 <= row["reward"] < 1 for row in rollouts["my_batch_reward"])
    assert {name for name in steps["my_mixture"] if name.startswith("category/")}
    assert {entry["role"] for row in rollouts["my_tool"] for entry in row["trace"]} >= {"user", "assistant"}


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
