"""axe-core finds nothing on any page: names of links and controls, contrast, landmarks, focus; light and dark, from a
telephone to a wide screen.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.browser.browser_harness import RUN_PAGES, Tab, path_of, started
from tests.browser.test_every_page import HOSTILE_PAGES, PAGES
from tests.generated_runs import write_states

pytestmark = pytest.mark.slow

SIZES = {"wide": (2560, 1300), "large": (1440, 900), "telephone": (390, 844)}
SCHEMES = ("light", "dark")
STATES = ("failed-at-once", "stopped", "stale", "waiting")


@pytest.fixture(scope="module")
def axe() -> str:
    """The script, which the page's policy would not load; playwright runs it past the policy."""
    spec = find_spec("axe_playwright_python")
    if spec is None or spec.origin is None:
        pytest.skip("needs axe-core: pip install 'mint[dev]'")
    return (Path(spec.origin).parent / "axe.min.js").read_text()


@pytest.fixture(params=[(size, scheme) for size in SIZES for scheme in SCHEMES], ids="-".join)
def contexts(request: pytest.FixtureRequest, chromium: Any) -> Iterator[Any]:
    """A browser context of each size in each scheme."""
    size, scheme = request.param
    width, height = SIZES[size]
    context = chromium.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    yield context
    context.close()


def violations(page: Any, axe: str) -> list[str]:
    """What axe-core finds, one line for each element."""
    page.evaluate(axe)
    found = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")["violations"]
    return [f"{rule['id']}: {node['html'][:160]}" for rule in found for node in rule["nodes"]]


def test_axe_finds_nothing_on_any_page(contexts: Any, address: str, axe: str) -> None:
    tab = Tab(contexts, address)
    for path in (*PAGES, *HOSTILE_PAGES):
        page = tab.open(path)
        assert violations(page, axe) == [], path
        page.evaluate("for (const fold of document.querySelectorAll('details')) fold.open = true")
        assert violations(page, axe) == [], f"{path}, with all folds open"


def test_axe_finds_nothing_on_runs_in_any_state(contexts: Any, tmp_path: Path, axe: str) -> None:
    write_states(tmp_path / "runs")
    with started("dashboard", "--data-dir", str(tmp_path), "--port", "0", home=tmp_path) as (address, _):
        tab = Tab(contexts, address)
        for path in ("/", *(path_of(run, page) for run in STATES for page in RUN_PAGES)):
            assert violations(tab.open(path), axe) == [], path


def test_axe_finds_nothing_on_the_pages_of_a_server(contexts: Any, tmp_path: Path, axe: str) -> None:
    with started("serve", "--data-dir", str(tmp_path), "--port", "0", "--model", "mint/tiny", home=tmp_path) as (
        address,
        _,
    ):
        tab = Tab(contexts, address)
        page = tab.open("/service")
        page.locator("#routes tbody tr").first.wait_for()
        assert violations(page, axe) == []
        page.goto(f"{tab.address}/docs")
        page.evaluate("for (const fold of document.querySelectorAll('details')) fold.open = true")
        assert violations(page, axe) == []


def test_axe_sees_what_it_is_there_for(contexts: Any, address: str, axe: str) -> None:
    page = Tab(contexts, address).open("/")
    page.evaluate("document.querySelector('main').append(document.createElement('button'))")
    assert any(line.startswith("button-name") for line in violations(page, axe))
