"""The kernels in C are called with the fields of their structs: all of them, by their names, in their order."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from mint.engine.cpu.build import HEADERS, SOURCES

STRUCT = re.compile(r"typedef struct \{(?P<body>[^}]*)\} (?P<name>\w+);")
KERNEL = re.compile(r"^int (?P<name>\w+)\(const (?P<struct>\w+) \*in, int64_t first, int64_t last\)", re.MULTILINE)
DYNAMIC = {
    "self._kernel": "draw_rows",
    "self._product": "product_floats",
    "product": "product_floats",
    "self.add_kernel": "add_lora",
    "self.gradient_kernel": "lora_gradient",
    "self._sum_groups": "sum_groups",
}
"""Kernels that are called through a variable; `kernel` stands for several, whose structs are compared by hand."""


def _fields(body: str) -> list[str]:
    body = re.sub(r"/\*.*?\*/", "", body, flags=re.DOTALL)
    declarations = [re.sub(r"^\s*(const )?\w+ ", "", own.strip()) for own in body.split(";") if own.strip()]
    names = [name for own in declarations for name in own.split(",")]
    return [re.sub(r"\W|const\b", "", re.sub(r"\[\d+\]", "", name)) for name in names]


def _structs_of_kernels() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    shared = [match for header in HEADERS for match in STRUCT.finditer(header.read_text())]
    for source in SOURCES:
        text = source.read_text()
        structs = {match["name"]: _fields(match["body"]) for match in (*shared, *STRUCT.finditer(text))}
        found |= {match["name"]: structs[match["struct"]] for match in KERNEL.finditer(text)}
    return found


def test_kernels_are_called_with_the_fields_of_their_structs() -> None:
    expected, called = _structs_of_kernels(), set[str]()
    for path in sorted(Path(SOURCES[0]).parent.parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or len(node.args) not in (2, 3) or not node.keywords:
                continue
            text = ast.unparse(node.func)
            kernel = DYNAMIC.get(text, text.rsplit(".", 1)[-1])
            if kernel in expected:
                called.add(kernel)
                assert [keyword.arg for keyword in node.keywords] == expected[kernel], f"{path.name}: {kernel}"
            else:
                library = re.search(r"_(library|rows|row_copies|draw)\.\w+$|libraries\[", text)
                assert not library, f"{path.name} calls {text}, which is no kernel"
    assert len(called) >= 25
