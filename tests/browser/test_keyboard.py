"""The pages without a mouse: a skip link, help that Escape closes, and a deleted run that the next key brings back."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from waiting import HANG_S, wait_until

from tests.browser.browser_harness import Tab, path_of, started

pytestmark = pytest.mark.slow


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
