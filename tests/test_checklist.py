"""docs/checklist.md promises nothing without a command: each test that it names exists, each command is understood."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
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


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:50])
def test_a_promise_has_a_command_that_exists(row: list[str]) -> None:
    shown = re.findall(r"`([^`]+)`", row[2])
    assert shown, row[0]
    for command in shown:
        if command.startswith("mint "):
            name = command.split()[1]
            assert name in get_command(app).commands, command  # type: ignore[attr-defined]
            continue
        path, _, test = command.partition("::")
        names = {
            node.name
            for node in ast.walk(ast.parse((ROOT / path).read_text()))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        assert test in names, command
