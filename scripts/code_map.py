"""Prints the map of the code: every folder and file of `src/mint`, with the first sentence of its docstring.

    python scripts/code_map.py [--output FILE]

Needs only the standard library. Files in C are described by their first comment.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src"
SUFFIXES = {".py", ".c", ".h"}


def map_lines(package: Path) -> Iterator[str]:
    """Markdown: a heading for each folder, a line for each file."""
    folders = sorted({path.parent for path in package.rglob("*") if path.suffix in SUFFIXES})
    for folder in folders:
        if "__pycache__" in folder.parts:
            continue
        yield f"\n## {folder.relative_to(package.parent).as_posix()}/\n"
        yield first_sentence(folder / "__init__.py") + "\n"
        for path in sorted(folder.iterdir()):
            if path.suffix in SUFFIXES and path.name != "__init__.py":
                yield f"- `{path.name}`: {first_sentence(path)}"


def first_sentence(path: Path) -> str:
    """The first sentence of a Python file's docstring or a C file's first comment; empty if there is none."""
    if not path.is_file():
        return ""
    text = path.read_text()
    if path.suffix == ".py":
        described = ast.get_docstring(ast.parse(text)) or ""
    else:
        comment = re.match(r"/\*(.*?)\*/", text, re.DOTALL)
        described = comment[1] if comment is not None else ""
    paragraph = " ".join(described.strip().split("\n\n")[0].split())
    return re.split(r"(?<=[.!?])\s+(?=[A-Z`])", paragraph)[0]


def main() -> None:
    """Writes the map to stdout or to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    output: Path | None = parser.parse_args().output
    text = "# Map of the code\n" + "\n".join(map_lines(SOURCE / "mint")) + "\n"
    if output is None:
        print(text, end="")
    else:
        output.write_text(text)


if __name__ == "__main__":
    main()
