"""What holds on every page, for a real run and for one that is nothing but attacks: no error, no foreign request, a
strict policy that nothing breaks, light and dark, and no scrolling sideways on a telephone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from waiting import wait_until

from tests.browser.browser_harness import RUN_PAGES, Tab, is_too_wide, path_of

pytestmark = pytest.mark.slow

HOSTILE_NAME = "hostile <b> & co"
PAGES = [
    "/",
    "/service",
    "/login",
    "/compare?run=tools&run=math",
    *(path_of("tools", page) for page in RUN_PAGES),
    path_of("stuck", "/diagnosis"),
    path_of("tools", "/rollouts?text=calculator&flag=tool_calls"),
]
HOSTILE_PAGES = [path_of(HOSTILE_NAME, page) for page in RUN_PAGES]
SIZES = {"large": (1440, 900), "telephone": (390, 844), "small telephone": (380, 700)}


@pytest.fixture(params=SIZES, ids=lambda name: name.replace(" ", "-"))
def sized_tab(request: pytest.FixtureRequest, chromium: Any, address: str) -> Iterator[Tab]:
    """A watched tab of each size; the smaller ones are dark."""
    width, height = SIZES[request.param]
    scheme = "light" if request.param == "large" else "dark"
    context = chromium.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    tab = Tab(context, address)
    yield tab
    tab.check()
    context.close()


def test_no_page_has_errors_asks_others_or_scrolls_sideways(sized_tab: Tab) -> None:
    for path in (*PAGES, *HOSTILE_PAGES):
        page = sized_tab.open(path)
        sized_tab.check()
        assert not is_too_wide(page), path
        assert page.locator("#notice").is_hidden(), path
        assert page.locator("main").inner_text().strip(), path


@pytest.mark.parametrize("path", [*PAGES, *HOSTILE_PAGES])
def test_a_page_asks_for_its_first_data_while_its_script_loads_and_asks_for_nothing_twice(tab: Tab, path: str) -> None:
    page = tab.open(path)
    wanted = page.evaluate("JSON.parse(document.querySelector('script[data-wanted]')?.dataset.wanted ?? '[]')")
    assert page.evaluate("window.asked.size") == 0, "the script asks at other addresses"
    asked = [url.removeprefix(tab.address) for url in tab.asked if "/dashboard/v1/" in url]
    assert set(wanted) <= set(asked) and len(asked) == len(set(asked))
    if not path.startswith(("/service", "/login")) and "checkpoints" not in path:
        assert wanted


def test_the_watch_sees_what_it_is_there_for(chromium: Any, address: str) -> None:
    context = chromium.new_context()
    tab = Tab(context, address)
    page = tab.open("/")
    tab.check()
    page.evaluate("document.body.append(Object.assign(document.createElement('img'), {src: 'http://203.0.113.1/x'}))")
    page.evaluate("document.body.append(Object.assign(document.createElement('script'), {text: 'window.HACKED = 1'}))")
    page.evaluate("document.body.setAttribute('style', 'color: red')")
    wait_until(lambda: len(page.evaluate("window.violations")) == 3)
    assert page.evaluate("typeof HACKED") == "undefined"
    assert len(tab.faults) == 3
    page.evaluate("setTimeout(() => alert('hello'), 0)")
    wait_until(lambda: page.evaluate("1") and tab.dialogs)
    with pytest.raises(AssertionError):
        tab.check()
    context.close()


def test_a_theme_is_chosen_once_and_kept(tab: Tab) -> None:
    def ground() -> int:
        color = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        return sum(int(part) for part in color.removeprefix("rgb(").removesuffix(")").split(","))

    page = tab.open("/")
    assert ground() > 600  # auto, and the system is light
    page.locator("#theme-button").click()
    page.locator("#theme-button").click()
    assert page.locator("html").get_attribute("data-theme") == "dark"
    assert ground() < 150
    page = tab.open(path_of("tools"))
    assert ground() < 150
    page.emulate_media(color_scheme="dark")
    page.locator("#theme-button").click()
    assert page.locator("html").get_attribute("data-theme") is None
    assert ground() < 150


def test_rows_are_walked_by_keys_and_the_help_says_which(tab: Tab) -> None:
    page = tab.open("/")
    page.keyboard.press("j")
    page.keyboard.press("j")
    rows = page.locator("#rows tr")
    assert "is-current" in rows.nth(1).get_attribute("class")
    page.keyboard.press("k")
    assert "is-current" in rows.nth(0).get_attribute("class")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "filter"
    page.keyboard.press("Escape")
    page.keyboard.press("?")
    assert page.locator("#help").is_visible()
    page.keyboard.press("Escape")
    page.locator("#help").wait_for(state="hidden")
    page.keyboard.press("Enter")
    page.wait_for_url("**/runs/**")
    tab.settled()


CONTROLS = """
[...document.querySelectorAll("a[href], button, input, select, textarea, summary, [tabindex='0']")].filter((element) =>
  element.checkVisibility({ visibilityProperty: true }) && !element.disabled && element.tabIndex >= 0)
"""


@pytest.mark.parametrize("path", PAGES)
def test_every_control_can_be_reached_by_keyboard_and_shows_where_one_is(tab: Tab, path: str) -> None:
    page = tab.open(path)
    page.evaluate("window.reached = new Set(); addEventListener('focusin', (event) => reached.add(event.target))")
    for _ in range(page.evaluate(f"{CONTROLS}.length") + 5):
        page.keyboard.press("Tab")
        style = page.evaluate(
            "(({outlineStyle, outlineWidth, boxShadow}) => [outlineStyle, outlineWidth, boxShadow])"
            "(getComputedStyle(document.activeElement))"
        )
        where = page.evaluate("document.activeElement.outerHTML.slice(0, 100)")
        assert style[0] != "none" or style[2] != "none" or where.startswith("<body"), where
    missed = f"{CONTROLS}.filter((element) => !reached.has(element)).map((element) => element.outerHTML.slice(0, 100))"
    assert page.evaluate(missed) == []
    assert page.evaluate("reached.size") > 3


@pytest.mark.parametrize("path", ["/", "/dashboard/v1/runs", path_of("tools"), "/v1/models"])
def test_pages_of_other_addresses_are_not_answered(address: str, path: str) -> None:
    own = address.removeprefix("http://")
    assert httpx.get(address + path, timeout=60).status_code == 200
    for headers in (
        {"host": "evil.example"},
        {"host": own, "origin": "http://evil.example"},
        {"host": own, "origin": "null", "sec-fetch-site": "cross-site"},
    ):
        assert httpx.get(address + path, headers=headers, timeout=60).status_code in (400, 403), headers


def test_a_page_of_another_address_reads_nothing_here(chromium: Any, address: str) -> None:
    context = chromium.new_context()
    page = context.new_page()
    foreign = address.replace("127.0.0.1", "localhost")  # the same machine, another origin
    page.goto(foreign + "/login")
    read = page.evaluate(
        "url => fetch(url).then((answer) => answer.text(), (error) => `refused: ${error}`)",
        f"{address}/dashboard/v1/runs",
    )
    assert read.startswith("refused")
    context.close()
