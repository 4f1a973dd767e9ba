"""If it is not run, it is not documented: the Python blocks of README and docs, each document in one namespace."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from pkgutil import resolve_name

import pytest
from http_server import http_server

import mint.rl
from mint.client import session
from mint.config import Settings
from mint.recipes.math import DEMO, MathAdapter
from mint.rl import Group, RLConfig, mixture, run_grpo

ROOT = Path(__file__).resolve().parent.parent
NEEDS_SERVER = 'os.environ["MINT_BASE_URL"]'
"""Documents that say this in a block run against a server of their own."""

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [
    path
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/*.md", "examples/*.md", "src/**/*.md", "scripts/**/*.md")
    for path in sorted(ROOT.glob(pattern))
]


def python_blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


@pytest.fixture
def no_service_left() -> Iterator[None]:
    """Ends the services that a document leaves open, as the end of a program does: their folder goes with the test, and
    they would go on to fail, and to log it beside other tests."""
    before = set(session._open_sessions)
    yield
    for left in set(session._open_sessions) - before:
        if left.is_embedded:
            left.close()


@pytest.mark.usefixtures("no_service_left")
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


def prose(path: Path) -> str:
    """The document without its blocks of code."""
    return re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(path: Path) -> set[str]:
    """What links can point to in a document, as GitHub names it."""
    found: set[str] = set()
    for title in re.findall(r"^#{1,6} +(.+)$", prose(path), re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", re.sub(r"\]\([^)]*\)", "]", title).lower()).strip().replace(" ", "-")
        found.add(next(name for name in (slug, *(f"{slug}-{n}" for n in range(1, 99))) if name not in found))
    return found


def test_every_relative_link_and_anchor_leads_somewhere() -> None:
    broken = []
    for page in PAGES:
        for path, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)#?([^)\s]*)\)", prose(page)):
            target = page.parent / path if path else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                broken.append(f"{page.relative_to(ROOT)}: {path}#{anchor}")
    assert broken == []


@pytest.mark.parametrize("page", ["SECURITY.md", "docs/reliability.md"])
def test_every_test_that_a_promise_names_exists(page: str) -> None:
    missing = []
    for path, chosen in re.findall(r"((?:\w+/)+test_\w+\.py)(?: -k ('[^'`]+'|\w+))?", (ROOT / page).read_text()):
        file = ROOT / "tests" / path.removeprefix("tests/")
        names = re.findall(r"def (test_\w+)", file.read_text()) if file.is_file() else []
        words = chosen.strip("'").split(" or ")
        if not any(word in name for name in names for word in words):
            missing.append(f"{path} -k {chosen}")
    assert missing == []


def reference() -> list[str]:
    """The names that the API reference documents."""
    return [
        name
        for page in (ROOT / "docs" / "api").glob("*.md")
        for name in re.findall(r"^::: (\S+)", page.read_text(), re.M)
    ]


def test_the_api_reference_names_only_what_exists_and_every_public_name_of_the_rl_library() -> None:
    assert [name for name in reference() if resolve_name(name) is None] == []
    assert {f"mint.rl.{name}" for name in mint.rl.__all__} <= set(reference())
    clients = ("ServiceClient", "TrainingClient", "SamplingClient", "RestClient", "APIFuture")
    assert {f"mint.{name}" for name in clients} <= set(reference())


def test_the_map_of_the_code_describes_every_file() -> None:
    shown = subprocess.run(
        [sys.executable, "scripts/code_map.py"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    lines = [line for line in shown.stdout.splitlines() if line.startswith("- ")]
    files = [path for suffix in ("py", "c", "h") for path in (ROOT / "src" / "mint").rglob(f"*.{suffix}")]
    assert len(lines) == len([path for path in files if path.name != "__init__.py"])
    assert [line for line in lines if line.endswith(": ")] == []


def test_every_setting_of_a_run_is_documented() -> None:
    text = (ROOT / "docs" / "rl.md").read_text()
    assert [name for name in RLConfig.model_fields if f"`{name}`" not in text] == []


@pytest.mark.learns
def test_every_metric_of_a_run_is_documented(tmp_path: Path) -> None:
    tasks = {"one": MathAdapter(seed=0), "two": MathAdapter(seed=1)}
    config = DEMO.changed(
        steps=1,
        batch_size=4,
        heldout_size=0,
        loss_fn="ppo",
        kl_penalty_coef=0.01,
        correction="token_truncate",
        metrics=(count_groups,),
        run_dir=tmp_path / "run",
    )
    run_grpo(mixture(tasks), config)
    [row] = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    columns = re.findall(r"^\| (`[^|]*) \|", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE)
    listed = [name for column in columns for name in re.findall(r"`([^`]+)`", column)]
    patterns = [re.escape(name).replace("NAME", ".+").replace(r"\*", ".+") for name in listed]
    assert [name for name in row if not any(re.fullmatch(pattern, name) for pattern in patterns)] == []
    assert len(row) > 60


def count_groups(groups: Sequence[Group]) -> dict[str, float]:
    return {"groups": float(len(groups))}


def test_every_environment_variable_is_documented() -> None:
    text = (ROOT / "docs" / "sdk.md").read_text()
    assert [name for name in Settings.model_fields if f"`MINT_{name.upper()}`" not in text] == []
