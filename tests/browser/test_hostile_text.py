"""What a policy writes is shown as it is, by name where it cannot be seen, and never obeyed: on every page."""

from __future__ import annotations

import re
from typing import Any

import pytest
from waiting import wait_until

from tests.browser.browser_harness import RUN_PAGES, Tab, is_too_wide, path_of, texts
from tests.browser.hostile_run import DIRECTIONS, LINES, LONG, MARKUP, NAMES_SEEN, SAID, SURROGATE, TERMINAL

pytestmark = pytest.mark.slow

RUN = "hostile <b> & co"
STEP = 7
ACTS_ON_TEXT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that change how others are shown, and none of which may be in a page."""


@pytest.fixture
def samples(tab: Tab) -> Any:
    """The page of the group of attacks, best first."""
    page = tab.open(path_of(RUN, f"/rollouts?step={STEP}&group=0"))
    assert page.locator(".sample").count() == len(SAID)
    return page


def card_of(page: Any, text: str) -> Any:
    return page.locator(f".sample[data-row='{SAID.index(text)}']")


@pytest.mark.parametrize("path", RUN_PAGES)
def test_nothing_that_a_run_holds_becomes_markup_or_script(tab: Tab, path: str) -> None:
    page = tab.open(path_of(RUN, path))
    for tag in ("main script", "main img", "main iframe", "main object", "main link", "main style", "svg[onload]"):
        assert page.locator(tag).count() == 0, tag
    assert page.locator("main").count() == 1
    assert "HACKED = 1" in page.locator("body").inner_text() or path in ("/checkpoints", "/rollouts")
    tab.check()


def test_markup_is_readable_as_it_was_written(samples: Any) -> None:
    assert MARKUP in "".join(card_of(samples, MARKUP).locator(".tokens").all_inner_texts())
    assert "{{ 7 * 7 }}{% raw %}${7 * 7}" in samples.locator(".samples").inner_text()
    samples.locator(".sample details summary").first.click()
    samples.wait_for_timeout(50)
    assert samples.locator(".samples img, .samples script").count() == 0


@pytest.mark.parametrize("text", NAMES_SEEN, ids=["terminal", "directions"])
def test_characters_that_act_unseen_are_shown_by_name(samples: Any, text: str) -> None:
    shown = set(texts(samples, f".sample[data-row='{SAID.index(text)}'] .tokens .unseen"))
    assert shown >= set(NAMES_SEEN[text])
    seen = "".join(card_of(samples, text).locator(".tokens").all_inner_texts())
    assert "end" in seen or "שלום" in seen


@pytest.mark.parametrize("path", RUN_PAGES)
def test_no_character_that_turns_or_hides_others_is_in_the_page_as_itself(tab: Tab, path: str) -> None:
    page = tab.open(path_of(RUN, path))
    found = ACTS_ON_TEXT.findall(page.locator("body").inner_text())
    assert found == [], [hex(ord(one)) for one in found]


def test_text_that_runs_to_the_left_does_not_turn_what_stands_beside_it(samples: Any) -> None:
    card = card_of(samples, DIRECTIONS)
    order = card.locator(".sample-head > *").evaluate_all("all => all.map((one) => one.getBoundingClientRect().left)")
    assert order == sorted(order)
    isolating = card.locator(".tokens").first.evaluate("one => getComputedStyle(one).unicodeBidi")
    assert isolating in ("isolate", "isolate-override", "plaintext", "embed")


def test_what_is_very_long_comes_in_parts_and_stays_in_its_card(samples: Any) -> None:
    assert not is_too_wide(samples)
    assert len("".join(card_of(samples, LONG).locator(".tokens").all_inner_texts())) == len(LONG)
    widths = samples.locator(".sample").evaluate_all("all => all.map((one) => one.getBoundingClientRect().right)")
    assert max(widths) <= 1440
    heights = samples.locator(".sample").evaluate_all("all => all.map((one) => one.getBoundingClientRect().height)")
    assert max(heights) < 2_000  # of 3,000 lines, which scroll in their card
    text = card_of(samples, LINES).locator(".tokens").first.inner_text()
    assert "line 2999" in text.replace("⏎", "")


def test_half_a_pair_of_surrogates_breaks_no_page(tab: Tab) -> None:
    page = tab.open(path_of(RUN))
    page.locator(".settings summary").click()
    assert "alone" in page.locator(".settings").inner_text()
    wait_until(lambda: page.locator("[data-chart=reward] canvas").count())
    tab.open(path_of(RUN, f"/rollouts?step={STEP}&group=0&row={SAID.index(SURROGATE)}"))
    assert "alone" in card_of(tab.page, SURROGATE).inner_text()


def test_hostile_text_can_be_searched_for_and_marked(tab: Tab) -> None:
    page = tab.open(path_of(RUN, "/rollouts"))
    page.keyboard.press("/")
    page.keyboard.type("<script>HACKED")
    page.keyboard.press("Enter")
    wait_until(lambda: page.locator("#entries mark").count())
    assert texts(page, "#entries mark")[0] == "<script>HACKED"
    assert TERMINAL[:1] not in page.locator("#entries").inner_text()
