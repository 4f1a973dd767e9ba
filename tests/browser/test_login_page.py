"""`mint serve` with keys, in a browser: nothing is seen before a key is shown, and nothing after signing out."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.browser.browser_harness import Tab, location, path_of, started
from tests.server.server_harness import make_key

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def locked(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """A server that asks for keys, over a folder with a real run: its address and its operator's key."""
    data_dir = tmp_path_factory.mktemp("locked")
    shutil.copytree(home / "runs" / "tools", data_dir / "runs" / "tools")
    key = make_key(data_dir, "ann")
    with started("serve", "--data-dir", str(data_dir), "--port", "0", "--api-keys", home=data_dir) as (address, _):
        yield address, key


@pytest.fixture
def outside(chromium: Any, locked: tuple[str, str]) -> Iterator[Tab]:
    """A tab that has not signed in."""
    context = chromium.new_context()
    yield Tab(context, locked[0])
    context.close()


def sign_in(tab: Tab, key: str) -> None:
    tab.page.fill("#key", key)
    tab.page.press("#key", "Enter")
    tab.page.wait_for_load_state("load")


def test_a_key_opens_the_page_that_was_asked_for_and_signing_out_closes_it(
    outside: Tab, locked: tuple[str, str]
) -> None:
    place = path_of("tools", "/rollouts?step=2&group=1")
    page = outside.open(place)
    assert "/login?" in location(page)
    assert "tools" not in page.locator("main").inner_text()
    sign_in(outside, locked[1])
    outside.settled()
    assert location(page) == locked[0] + place
    assert 1 <= page.locator(".sample").count() <= 4  # equal ones stand behind one card
    [cookie] = page.context.cookies()
    assert cookie["httpOnly"] and cookie["sameSite"] == "Strict" and locked[1] not in cookie["value"]
    assert locked[1] not in page.evaluate("JSON.stringify([localStorage, sessionStorage, document.cookie])")
    outside.check()
    page.get_by_role("button", name="Sign out").click()
    page.wait_for_url("**/login*")
    page.goto(locked[0] + place)
    assert "/login?" in location(page)


def test_a_wrong_key_is_named_and_opens_nothing(outside: Tab, locked: tuple[str, str]) -> None:
    page = outside.open("/login")
    sign_in(outside, "tml-<script>HACKED = 1</script>")
    assert "not known" in page.locator("#login-problem").inner_text()
    assert page.locator("#key").input_value() == ""
    page.goto(locked[0] + "/")
    assert "/login" in location(page)
    assert page.context.cookies() == []
    assert outside.page.evaluate("typeof HACKED") == "undefined"
    assert outside.strangers == []


def test_pages_of_runs_and_of_the_service_work_behind_the_login(outside: Tab, locked: tuple[str, str]) -> None:
    page = outside.open("/login")
    sign_in(outside, locked[1])
    for path in ("/", path_of("tools"), "/service"):
        outside.open(path)
        page.wait_for_selector("#live[data-state=live]", state="attached")  # hidden where nothing runs
        assert page.locator("#notice").is_hidden()
    now = httpx.get(f"{locked[0]}/dashboard/v1/service", headers={"x-api-key": locked[1]}, timeout=30).json()
    assert page.locator("[data-cell=models]").inner_text() == ", ".join(now["base_models"])
    assert page.locator("[data-cell=state]").inner_text() == "running"
    assert page.locator("[data-cell=open]").inner_text() == str(now["futures"]["open"])
    resident = float(page.locator("[data-cell=resident]").inner_text().split()[0])
    unit = {"MiB": 2**20, "GiB": 2**30}[page.locator("[data-cell=resident]").inner_text().split()[1]]
    assert resident * unit == pytest.approx(now["memory"]["resident_bytes"], rel=0.2)
    outside.check()
