"""What a policy writes is shown as it is, by name where it cannot be seen, and never obeyed: on every page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from waiting import wait_until

from mint import ServiceClient
from tests.browser.browser_harness import RUN_PAGES, Tab, is_too_wide, lines, path_of, started, texts
from tests.browser.hostile_run import DIRECTIONS, LINES, LONG, MARKUP, NAMES_SEEN, SAID, SURROGATE, TERMINAL
from tests.server.server_harness import make_key

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


def no_markup(page: Any) -> bool:
    """Whether nothing of the markup has become an element."""
    tags = ("main script", "main img", "main iframe", "main object", "main link", "main style", "svg[onload]")
    return all(page.locator(tag).count() == 0 for tag in tags) and page.locator("main").count() == 1


@pytest.mark.parametrize("path", RUN_PAGES)
def test_nothing_that_a_run_holds_becomes_markup_or_script(tab: Tab, path: str) -> None:
    page = tab.open(path_of(RUN, path))
    assert no_markup(page)
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
    page.locator(".settings summary").first.click()
    assert "alone" in page.locator(".settings").first.inner_text()
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


def test_what_a_model_answers_is_text_in_the_chat_and_side_by_side(tab: Tab, home: Path) -> None:
    model = lines(home / "runs" / RUN, "checkpoints.jsonl")[-1]["checkpoint"]
    page = tab.open(path_of(RUN, "/checkpoints"))
    page.locator("#chat-model").select_option(model)
    page.locator("#chat-temperature").fill("0")
    page.locator("#chat-input").fill("Hello")
    page.locator("#chat-input").press("Enter")
    wait_until(lambda: "ended" in page.locator(".chat-message--assistant header").inner_text())
    assert page.locator(".chat-message--assistant .chat-text").inner_text() == MARKUP
    for side in ("left", "right"):
        page.locator(f".side[data-side={side}] select").select_option(model)
    question = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    for name, value in {"prompt": question, "samples": "1", "temperature": "0"}.items():
        page.locator(f"#compare [name={name}]").fill(value)
    page.locator("#compare-go").click()
    wait_until(lambda: page.locator(".answer .small").count() == 2 and all(texts(page, ".answer .small")))
    for shown in page.locator(".answer-text").all_inner_texts():
        assert MARKUP.startswith(shown) and "<script>" in shown
    assert no_markup(page)


def test_hostile_names_and_findings_are_text_wherever_they_are_listed(tab: Tab) -> None:
    page = tab.open("/")
    assert RUN in page.locator("main").inner_text()
    assert no_markup(page)
    page = tab.open(f"/compare?run={quote(RUN)}&run=tools")
    assert RUN in page.locator("main").inner_text()
    assert no_markup(page)
    page = tab.open(path_of(RUN, "/diagnosis"))
    assert page.locator("main").inner_text().count(MARKUP) >= 2  # a finding's evidence and its remedy
    assert no_markup(page)


def test_the_name_of_an_owner_is_text_on_the_page_of_the_service(
    chromium: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    data_dir = tmp_path_factory.mktemp("owners")
    operator, hostile = make_key(data_dir, "ann"), make_key(data_dir, MARKUP)
    arguments = ("serve", "--data-dir", str(data_dir), "--port", "0", "--api-keys", "--operator", "ann")
    context = chromium.new_context()
    with started(*arguments, home=data_dir) as (address, _):
        tab = Tab(context, address)
        with ServiceClient(base_url=address, api_key=hostile) as client:
            client.create_lora_training_client(base_model="mint/tiny", rank=1)
            page = tab.open("/login?next=/service")
            page.fill("#key", operator)
            page.press("#key", "Enter")
            page.wait_for_url("**/service")
            wait_until(lambda: MARKUP in page.locator("#tenants").inner_text())
            tab.settled()
            assert no_markup(page)
            tab.check()
    context.close()
