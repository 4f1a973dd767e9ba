"""`docs/troubleshooting.md` has an entry for each error and each warning that the code has, and for no other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "src" / "mint"
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()


def entries(section: str) -> list[str]:
    """The names in the first column of the tables of a section."""
    text = PAGE.split(f"\n## {section}\n")[1].split("\n## ")[0]
    first_columns = re.findall(r"^\| (`[^|]*) \|", text, re.MULTILINE)
    return [name for column in first_columns for name in re.findall(r"`(\w+)`", column)]


def public_errors() -> set[str]:
    """The classes below `MintError` anywhere in the package, read from the sources without importing them."""
    bases = {
        node.name: {base.id for base in node.bases if isinstance(base, ast.Name)}
        for path in SOURCES.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    }
    found = {"MintError"}
    while added := {name for name, parents in bases.items() if parents & found} - found:
        found |= added
    return {name for name in found if not name.startswith("_")}


def warning_codes() -> set[str]:
    """What stands before the colon of each warning about a batch."""
    tree = ast.parse((SOURCES / "server" / "worker" / "lint.py").read_text())
    constants = [
        node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    return {found[1] for text in constants if (found := re.match(r"([a-z_]+): ", text))}


def test_every_error_has_one_entry_and_every_entry_is_an_error() -> None:
    assert sorted(entries("Errors by name")) == sorted(public_errors())


def test_every_warning_about_training_data_has_one_entry() -> None:
    assert len(warning_codes()) > 10
    assert sorted(entries("Warnings about training data")) == sorted(warning_codes())
