"""docs/checklist.md promises nothing without a command: each test that it names exists, each command is understood."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from typer.main import get_command

from mint.cli.main import app

ROOT = Path(__file__).resolve().parent.parent
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs" / "checklist.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| what it says")
]


def test_the_checklist_is_a_table_of_both_documents() -> None:
    assert len(ROWS) >= 60
    assert all(len(row) == 3 for row in ROWS)


def test_every_promise_has_a_command_that_exists() -> None:
    missing = []
    for promise, _, commands in ROWS:
        shown = re.findall(r"`([^`]+)`", commands)
        missing += [f"{promise}: {command}" for command in shown if not exists(command)]
        missing += [] if shown else [promise]
    assert missing == []


def exists(command: str) -> bool:
    """Whether `mint …` is a command, or `path::name` a test."""
    if command.startswith("mint "):
        return command.split()[1] in get_command(app).commands  # type: ignore[attr-defined]
    path, _, test = command.partition("::")
    return test in functions_of(ROOT / path)


@cache
def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text()) if path.is_file() else ast.Module([], [])
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
