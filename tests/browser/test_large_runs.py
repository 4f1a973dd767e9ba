"""Pages stay small however much a run folder holds: ten thousand runs, a hundred thousand steps with ten thousand
checkpoints, and samples of thirty thousand tokens. Fewer than 5,000 elements each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from waiting import wait_until

from tests.browser.browser_harness import Tab, path_of, started, texts
from tests.generated_runs import write_long, write_many, write_wide

pytestmark = pytest.mark.slow

RUNS, STEPS, GROUPS, TOKENS = 10_000, 100_000, 256, 30_000
MOST_ELEMENTS = 5_000
VIEWPORT = {"width": 1440, "height": 900}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    home = tmp_path_factory.mktemp("large")
    write_many(home / "runs", RUNS)
    write_long(home / "runs" / "long", steps=STEPS, checkpoint_every=10, eval_every=100)
    write_wide(home / "runs" / "wide", groups=GROUPS, samples=16, tokens=TOKENS)
    with started("dashboard", "--data-dir", str(home), "--port", "0", home=home) as (address, _):
        yield address


@pytest.fixture
def tab(chromium: Any, large: str) -> Iterator[Tab]:
    context = chromium.new_context(viewport=VIEWPORT)
    tab = Tab(context, large)
    yield tab
    tab.check()
    context.close()


def elements(page: Any) -> int:
    return page.evaluate("document.querySelectorAll('*').length")


def test_ten_thousand_runs_are_pages_of_fifty(tab: Tab) -> None:
    page = tab.open("/")
    wait_until(lambda: f"{RUNS + 2:,} runs" in page.locator("#count").inner_text())
    assert page.locator("#rows tr").count() == 50 and elements(page) < MOST_ELEMENTS
    page.locator("#rows tr input").first.check()
    page.locator("#page-after").click()
    wait_until(lambda: "51–100" in page.locator("#page-place").inner_text())
    page.locator("#rows tr input").first.check()
    assert page.locator("#compare").inner_text() == "Compare 2"
    page.locator("#filter").fill(f"run-{RUNS - 1:05d}")
    wait_until(lambda: page.locator("#rows tr").count() == 1)
    assert f"1 of {RUNS + 2:,} runs" in page.locator("#count").inner_text()


def test_a_hundred_thousand_steps_are_thinned_and_a_zoom_shows_each(tab: Tab) -> None:
    page = tab.open(path_of("long"))
    assert elements(page) < MOST_ELEMENTS
    page.goto(f"{tab.address}{path_of('long')}?zoom=50000~50040")
    tab.settled()
    page.locator("[data-chart=reward] .chart-toggle").last.click()
    wait_until(lambda: "50021" in texts(page, "[data-chart=reward] tbody th"))
    steps = [int(text) for text in texts(page, "[data-chart=reward] tbody th")]
    assert steps == list(range(50040, 49999, -1))


def test_ten_thousand_checkpoints_come_in_pages_and_comparing_stays_in_reach(tab: Tab) -> None:
    page = tab.open(path_of("long", "/checkpoints"))
    assert elements(page) < MOST_ELEMENTS
    rows = page.locator("#kept tr[data-step]").evaluate_all("rows => rows.map((row) => row.dataset.step)")
    assert rows[:3] == ["50000", "100000", "99990"] and len(rows) == 21
    for part in ("#compare-go", "#chat-send", "#kept"):
        assert page.locator(part).bounding_box()["y"] < VIEWPORT["height"] / 2
    page.locator(".pager a[rel=next]").click()
    page.wait_for_url("**offset=20#list")
    assert "21–40 of 10000" in page.locator(".pager").inner_text()


def test_samples_of_thirty_thousand_tokens_are_shown_in_windows(tab: Tab) -> None:
    page = tab.open(path_of("wide", "/rollouts?step=1&group=0"))
    assert elements(page) < MOST_ELEMENTS
    assert page.locator("#entries .entry").count() < GROUPS
    card = page.locator(".sample").first
    assert f"{TOKENS:,} tok" in card.locator(".sample-end").inner_text()
    card.locator(".more", has_text="load all").click()
    wait_until(lambda: "29," in card.locator(".tokens .more").inner_text())
    assert elements(page) < MOST_ELEMENTS
