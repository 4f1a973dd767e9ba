"""The code of the RL overview under mindlab-toolkit, MinT's own package: `python toolkit_loop.py BLOCKS`.

Run in the toolkit's own environment, where `import mint` is the toolkit. `BLOCKS` holds the document's code as printed;
what it leaves to its reader is bound here. Prints one JSON line.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any

import mint


class _FillElision(ast.NodeTransformer):
    """`[...]` becomes `collect()`; everything else stays as printed."""

    def visit_List(self, node: ast.List) -> ast.AST:
        if len(node.elts) == 1 and isinstance(node.elts[0], ast.Constant) and node.elts[0].value is Ellipsis:
            return ast.copy_location(ast.parse("collect()", mode="eval").body, node)
        return node


def main(blocks: Path) -> None:
    """Two steps of the loop, and then each block once more."""
    names: dict[str, Any] = {"num_steps": 2, "gold_answer": "8", "datums": []}
    names["extract_answer"] = lambda text: "".join(re.findall(r"-?\d+", text)[:1])

    def run(block: str) -> None:
        tree = _FillElision().visit(ast.parse((blocks / block).read_text(), filename=block))
        exec(compile(ast.fix_missing_locations(tree), block, "exec"), names)

    def collect() -> list[Any]:
        run("2_sample.py")
        names["res"], names["datums"] = names["result"], []
        run("3_advantages.py")
        return names["datums"]

    names["collect"] = collect
    run("1_minimal_loop.py")
    data = collect()
    run("4_train.py")
    said = {"toolkit": mint.__version__, "tinker": mint.__tinker_version__, "file": mint.__file__}
    metrics = names["result"].metrics
    print(json.dumps({**said, "datums": len(data), "sequences": len(names["res"].sequences), "metrics": metrics}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
