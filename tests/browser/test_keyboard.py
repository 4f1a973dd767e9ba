"""Every page without a mouse: Tab reaches every control and shows where it is, Escape closes, and what was deleted is
brought back by the next key.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from waiting import HANG_S, wait_until

from tests.browser.browser_harness import RUN_PAGES, Tab, path_of, started

pytestmark = pytest.mark.slow

CONTROLS = """
[...document.querySelectorAll("a[href], button, input, select, textarea, summary, [tabindex='0']")].filter((one) =>
  one.checkVisibility({ visibilityProperty: true }) && !one.disabled && one.tabIndex >= 0 && !one.matches(".skip"))
"""
MARK = f"{CONTROLS}.forEach((one, place) => one.setAttribute('data-control', place))"
UNMARKED = f"{CONTROLS}.filter((one) => one.hasAttribute('data-control') && !one.hasAttribute('data-met'))" + (
    ".map((one) => one.outerHTML.slice(0, 120))"
)
MEET = """
() => {
  const one = document.activeElement;
  if (!one || one === document.body) return null;
  one.setAttribute("data-met", "");
  const { outlineStyle, outlineWidth, boxShadow, borderColor } = getComputedStyle(one);
  const box = one.getBoundingClientRect();
  const isShown = outlineStyle !== "none" && parseFloat(outlineWidth) > 0 || one.matches(".finding");
  const isInSight = box.bottom > 0 && box.top < innerHeight;
  return { html: one.outerHTML.slice(0, 120), isShown, isInSight };
}
"""
MOST_KEYS = 400


@pytest.mark.parametrize("path", ["/", *(path_of("tools", page) for page in RUN_PAGES), "/compare?run=tools&run=math"])
def test_tab_reaches_every_control_and_shows_where_it_is(tab: Tab, path: str) -> None:
    page = tab.open(path)
    page.evaluate(MARK)
    for _ in range(MOST_KEYS):
        page.keyboard.press("Tab")
        met = page.evaluate(MEET)
        if met is None:
            break
        assert met["isShown"], f"the focus does not show on {met['html']}"
        assert met["isInSight"], f"out of sight: {met['html']}"
    assert page.evaluate(UNMARKED) == []


def test_a_stranger_skips_to_the_content_and_closes_the_help(tab: Tab) -> None:
    page = tab.open(path_of("tools"))
    page.keyboard.press("Tab")
    assert "Skip" in page.evaluate("document.activeElement.textContent")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.keyboard.press("?")
    assert page.locator("#help").is_visible()
    page.keyboard.press("Escape")
    assert not page.locator("#help").is_visible()


def test_a_run_is_deleted_and_brought_back_by_keys(chromium: Any, home: Path, tmp_path: Path) -> None:
    shutil.copytree(home / "runs" / "math", tmp_path / "runs" / "math")
    with started("dashboard", "--data-dir", str(tmp_path), "--port", "0", home=tmp_path) as (address, _):
        context = chromium.new_context()
        tab = Tab(context, address)
        page = tab.open(path_of("math"))
        page.locator("#labels summary").focus()
        page.keyboard.press("Enter")
        page.locator("#delete-run").focus()
        page.keyboard.press("Enter")
        page.wait_for_url("**/?deleted=**")
        tab.settled()
        assert not (tmp_path / "runs" / "math").exists()
        assert page.evaluate("document.activeElement.textContent") == "Undo"
        page.keyboard.press("Enter")
        page.locator("tr[data-run=math]").wait_for(timeout=1000 * HANG_S)
        wait_until(lambda: (tmp_path / "runs" / "math").exists())
        tab.check()
        context.close()
