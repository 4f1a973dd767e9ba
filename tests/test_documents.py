"""If it is not run, it is not documented: the Python blocks of README and docs, each document in one namespace."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path

import pytest
from http_server import http_server

from mint.config import Settings
from mint.rl import RLConfig

ROOT = Path(__file__).resolve().parent.parent
NEEDS_SERVER = 'os.environ["MINT_BASE_URL"]'
"""Documents that say this in a block run against a server of their own."""

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def python_blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_the_python_blocks_of_a_document_run_in_order(
    document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: dict[str, object] = {"__name__": "__document__"}
    blocks = python_blocks(document.read_text())
    with ExitStack() as stack:
        if any(NEEDS_SERVER in block for block in blocks):
            monkeypatch.setenv("MINT_BASE_URL", stack.enter_context(http_server(tmp_path / "server")))
        for number, block in enumerate(blocks, start=1):
            exec(compile(block, f"{document.name}, block {number}", "exec"), names)
    assert python_blocks(document.read_text()) or document.name not in {"README.md", "rl.md", "sdk.md"}


@pytest.mark.parametrize("document", [*DOCUMENTS, ROOT / "ARCHITECTURE.md"], ids=lambda path: path.name)
def test_every_relative_link_leads_somewhere(document: Path) -> None:
    links = re.findall(r"\]\((?!https?://|#)([^)#]+)", document.read_text())
    assert [link for link in links if not (document.parent / link).exists()] == []


def test_every_setting_of_a_run_is_documented() -> None:
    text = (ROOT / "docs" / "rl.md").read_text()
    assert [name for name in RLConfig.model_fields if f"`{name}`" not in text] == []


def test_every_environment_variable_is_documented() -> None:
    text = (ROOT / "docs" / "sdk.md").read_text()
    assert [name for name in Settings.model_fields if f"`MINT_{name.upper()}`" not in text] == []
