"""Syntax trees of source files, for tests of the house rules."""

from __future__ import annotations

import ast
from pathlib import Path

TRIES = 5


def parse(path: Path) -> ast.Module:
    """The tree of a file.

    Python 3.11 counts the depth of a tree for all threads together, so that it raises SystemError where another thread
    parses at the same time: then once more.
    """
    source = path.read_text()
    for _ in range(TRIES - 1):
        try:
            return ast.parse(source)
        except SystemError:
            continue
    return ast.parse(source)
