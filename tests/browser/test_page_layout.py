"""What a reader sees at a glance: samples as wide as the screen allows, nothing that says only "nothing", and buttons
beside the names of what they act on.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from tests.browser.browser_harness import Tab, is_too_wide, location, path_of, started
from tests.generated_runs import write_states

pytestmark = pytest.mark.slow

LARGE = {"width": 1920, "height": 1080}
TELEPHONE = {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A dashboard over one run in each state."""
    home: Path = tmp_path_factory.mktemp("states")
    write_states(home / "runs")
    with started("dashboard", "--data-dir", str(home), "--port", "0", home=home) as (address, _):
        yield address


@pytest.fixture
def screen(chromium: Any) -> Iterator[Any]:
    """Makes watched tabs of any size."""
    contexts, tabs = [], []

    def made(address: str, viewport: dict[str, int]) -> Tab:
        contexts.append(chromium.new_context(viewport=viewport))
        tabs.append(Tab(contexts[-1], address))
        return tabs[-1]

    yield made
    for tab in tabs:
        tab.check()
    for context in contexts:
        context.close()


def right_edge(page: Any, selector: str) -> float:
    """Of the element that reaches farthest to the right."""
    boxes = page.locator(selector).evaluate_all("all => all.map((one) => one.getBoundingClientRect().right)")
    return max(boxes)


def test_the_samples_of_a_group_fill_a_wide_screen(screen: Any, address: str) -> None:
    page = screen(address, LARGE).open(path_of("tools", "/rollouts"))
    if page.locator(".samples-grid > .sample").count() > 1:
        assert right_edge(page, ".samples-grid > .sample") == pytest.approx(right_edge(page, "#stage-head"), abs=2)
    else:
        assert page.locator(".sample").bounding_box()["width"] > 600


def test_charts_and_samples_of_a_finding_fill_a_wide_screen(screen: Any, address: str) -> None:
    page = screen(address, LARGE).open(path_of("stuck", "/diagnosis"))
    page.locator(".finding .shown").first.wait_for()
    card = page.locator(".finding").first
    edge = card.bounding_box()["x"] + card.bounding_box()["width"]
    for part in (".finding:first-child .finding-charts .chart", ".finding:first-child .shown"):
        assert edge - right_edge(page, part) < 20
    assert (
        card.locator(".finding-charts").bounding_box()["x"] > card.locator(".finding-facts").bounding_box()["x"] + 300
    )


def test_a_telephone_leaves_out_cells_that_hold_nothing(screen: Any, states: str) -> None:
    page = screen(states, TELEPHONE).open("/")
    cells = page.locator("#rows tr[data-run=failed-at-once] td[data-label]").all()
    shown = [cell.inner_text().strip() for cell in cells if cell.is_visible()]
    assert "–" not in shown and "math" in shown and not is_too_wide(page)
    assert not page.locator("#rows tr[data-run=failed-at-once] [data-label=Reward]").is_visible()
    assert page.locator("#rows tr[data-run=failed] [data-label=Reward]").is_visible()


@pytest.mark.parametrize("name", ["failed-at-once", "stopped-at-once"])
def test_a_run_without_steps_offers_nothing_to_chart_and_no_best_reward(screen: Any, states: str, name: str) -> None:
    tab = screen(states, LARGE)
    page = tab.open(path_of(name))
    assert not page.locator(".headline [data-cell=best]").is_visible()
    assert not page.locator("#smoothing").is_visible() and page.locator("#no-steps").is_visible()
    page = tab.open(path_of(name, "/rollouts"))
    assert "This run has no rollouts." in page.locator("#stage-empty").inner_text()
    assert not page.locator("#colours").is_visible()


def test_a_filter_is_cleared_by_a_button_and_by_escape(screen: Any, states: str) -> None:
    page = screen(states, LARGE).open("/?q=failed")
    rows = page.locator("#rows tr")
    assert rows.count() == 2 and "2 of 7 runs" in page.locator("#count").inner_text()
    page.locator("#clear").click()
    wait_until(lambda: rows.count() == 7)
    assert not page.locator("#clear").is_visible() and page.evaluate("document.activeElement.id") == "filter"
    wait_until(lambda: "q=" not in location(page))
    page.keyboard.type("died")
    wait_until(lambda: rows.count() == 1)
    assert page.locator("#count").inner_text() == "1 of 7 runs" and page.locator("#clear").is_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")
    wait_until(lambda: rows.count() == 7)


def test_the_buttons_of_a_checkpoint_stand_beside_its_step(screen: Any, address: str) -> None:
    page = screen(address, LARGE).open(path_of("tools", "/checkpoints"))
    for row in page.locator("#kept tbody tr").all():
        step, button = row.locator("th").bounding_box(), row.locator("[data-chat]").bounding_box()
        assert button["x"] - (step["x"] + step["width"]) < 30


def test_a_reading_is_rounded_alike_on_every_page(screen: Any, address: str) -> None:
    """A half goes away from zero in the scripts; Python alone would take 0.5625 for 0.562."""
    page = screen(address, LARGE).open(path_of("tools", "/checkpoints"))
    texts = page.locator("#kept [data-cell=mean]").all_inner_texts()
    means = page.evaluate(
        "fetch('/dashboard/v1/runs/tools/columns').then((answer) => answer.json())"
        ".then(({evaluations}) => evaluations.map(({mean}) => mean.toFixed(3)))"
    )
    assert texts and set(texts) <= set(means)


def test_low_samples_lie_below_each_other_beside_a_high_one(tab: Tab) -> None:
    page = tab.open(path_of("tools", "/rollouts?step=1"))
    wait_until(lambda: page.locator(".samples-grid > .sample").first.evaluate("card => card.style.gridRowEnd") != "")
    boxes = [card.bounding_box() for card in page.locator(".samples-grid > .sample").all()]
    assert len(boxes) > 1
    for box in boxes:
        above = [other["y"] + other["height"] for other in boxes if other["x"] == box["x"] and other["y"] < box["y"]]
        assert not above or 9 <= box["y"] - max(above) <= 15
