"""The code of the RL overview, as printed, in order, in one namespace, on the bundled model.

The files in `seed/` are the document's blocks. What the document leaves to its reader is bound here: `num_steps`,
`res`, `extract_answer`, `gold_answer`, `datums`, and the elision `[...]` of "collect samples (see RL demos)".
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from http_server import http_server

BLOCKS = Path(__file__).parent / "seed"


class _FillElision(ast.NodeTransformer):
    """`[...]` becomes `collect()`; everything else stays as printed."""

    def visit_List(self, node: ast.List) -> ast.AST:
        if len(node.elts) == 1 and isinstance(node.elts[0], ast.Constant) and node.elts[0].value is Ellipsis:
            return ast.copy_location(ast.parse("collect()", mode="eval").body, node)
        return node


def run(block: str, names: dict[str, Any]) -> None:
    tree = _FillElision().visit(ast.parse((BLOCKS / block).read_text(), filename=block))
    exec(compile(ast.fix_missing_locations(tree), block, "exec"), names)


def extract_answer(text: str) -> str:
    return "".join(re.findall(r"-?\d+", text)[:1])


@pytest.fixture(params=["embedded", "http"])
def _service(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The service that the document's code finds: in its own process, or where `MINT_BASE_URL` says."""
    monkeypatch.setenv("MINT_MODELS", "Qwen/Qwen3-0.6B=mint/tiny")
    if request.param == "embedded":
        yield
        return
    with http_server(tmp_path / "server") as url:
        monkeypatch.delenv("MINT_MODELS")
        monkeypatch.setenv("MINT_BASE_URL", url)
        yield


@pytest.mark.usefixtures("_service")
def test_every_block_of_the_rl_overview_runs_as_printed() -> None:
    names: dict[str, Any] = {"num_steps": 2, "extract_answer": extract_answer, "gold_answer": "8", "datums": []}

    def collect() -> list[Any]:
        run("2_sample.py", names)
        names["res"] = names["result"]
        names["datums"] = []
        run("3_advantages.py", names)
        return names["datums"]

    names["collect"] = collect
    run("1_minimal_loop.py", names)
    assert len(names["training_datums"]) == 8
    run("2_sample.py", names)
    result = names["result"]
    assert len(result.sequences) == 8
    assert all(len(seq.logprobs) == len(seq.tokens) > 0 for seq in result.sequences)
    names["res"], names["datums"] = result, []
    run("3_advantages.py", names)
    assert sum(names["advs"]) == pytest.approx(0)
    run("4_train.py", names)
    assert "loss:sum" in names["result"].metrics
    names["service_client"].close()
