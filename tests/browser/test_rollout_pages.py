"""The page of rollouts in a browser, over a real run with tools: its numbers are those of `rollouts.jsonl`."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from tests.browser.browser_harness import Tab, lines, location, number, path_of, texts

pytestmark = pytest.mark.slow

STEP = 2


@pytest.fixture(scope="module")
def groups(home: Path) -> dict[int, list[dict[str, Any]]]:
    """The rows of one step by group, each with its place in the step."""
    found: dict[int, list[dict[str, Any]]] = defaultdict(list)
    own = [row for row in lines(home / "runs" / "tools", "rollouts.jsonl") if row["step"] == STEP]
    for place, row in enumerate(own):
        found[row["group"]].append({**row, "row": place})
    return found


def test_every_group_has_the_rewards_advantages_parts_and_lengths_of_its_rows(
    tab: Tab, groups: dict[int, list[dict[str, Any]]]
) -> None:
    page = tab.open(path_of("tools", f"/rollouts?step={STEP}&group=0"))
    assert page.locator("#entries .entry").count() == len(groups) == 4
    for group, rows in groups.items():
        page.locator("#entries .entry").nth(group).click()
        wait_until(lambda group=group: f"group {group}" in page.locator("#stage-head h2").inner_text())
        while page.locator(".sample-count").count():
            page.locator(".sample-count").first.click()
        cards = {int(card.get_attribute("data-row")): card for card in page.locator(".sample").all()}
        rewards = [number(text) for text in texts(page, ".sample-reward")]
        assert rewards == sorted(rewards, reverse=True)
        assert cards.keys() == {row["row"] for row in rows}
        for row in rows:
            assert_card_shows(cards[row["row"]], row)
        shown = page.locator(".prompt").first.inner_text().replace("⏎", "").split()
        assert " ".join(shown).removeprefix("… ") in " ".join(rows[0]["prompt"].split())


def assert_card_shows(card: Any, row: dict[str, Any]) -> None:
    assert number(card.locator(".sample-reward").inner_text()) == pytest.approx(row["reward"], abs=6e-4)
    assert number(card.locator(".sample-head .sign").inner_text()) == pytest.approx(row["advantage"], abs=6e-4)
    end = card.locator(".sample-end").inner_text()
    assert f"{len(row['tokens'])} tok · {row['stop_reason']}" in end
    assert ("1 call" in end) == (row["tool_calls"] == 1)
    names = card.locator(".parts dt").all_inner_texts()
    values = [number(text) for text in card.locator(".parts dd.num").all_inner_texts()]
    assert dict(zip(names, values, strict=True)) == pytest.approx(row["parts"], abs=6e-4)
    assert card.locator(".tok").count() == len(row["tokens"])


def test_a_step_without_rollouts_is_said_until_another_is_chosen(tab: Tab) -> None:
    page = tab.open(path_of("tools", "/rollouts?step=999&group=0"))
    said = page.locator("#step-missing")
    assert said.inner_text().startswith("Step 999 has no rollouts. The run has those from 1 to ")
    page.locator("#step-before").click()
    wait_until(lambda: not said.is_visible())
    page.locator("#step-number").fill("999")
    page.locator("#step-number").press("Enter")
    wait_until(said.is_visible)


def test_each_token_says_its_logprob_advantage_and_entropy(tab: Tab, groups: dict[int, list[dict[str, Any]]]) -> None:
    rows = next(rows for rows in groups.values() if any("token_advantages" in row for row in rows))
    row = max(rows, key=lambda row: "token_advantages" in row and len(set(row["token_advantages"])))
    assert len(set(row["token_advantages"])) > 1  # the KL penalty moves each token's by itself
    page = tab.open(path_of("tools", f"/rollouts?step={STEP}&group={row['group']}&row={row['row']}"))
    tokens = page.locator(f".sample[data-row='{row['row']}'] .tok")
    for place in (0, 1, len(row["tokens"]) // 2, len(row["tokens"]) - 1):
        tokens.nth(place).hover()
        info = page.locator("#token-info").inner_text().split("\n")
        shown = dict(zip(info[::2], info[1::2], strict=True))
        assert shown["token"] == f"{place + 1} of {len(row['tokens'])}"
        assert shown["id"] == str(row["tokens"][place])
        assert number(shown["logprob"]) == pytest.approx(row["logprobs"][place], abs=6e-5)
        assert number(shown["advantage"]) == pytest.approx(row["token_advantages"][place], abs=6e-4)
        assert number(shown["entropy"].removesuffix("nat")) == pytest.approx(row["entropies"][place], abs=6e-4)


def test_what_was_said_and_called_stands_in_the_order_of_the_trace(
    tab: Tab, groups: dict[int, list[dict[str, Any]]]
) -> None:
    row = next(row for rows in groups.values() for row in rows if row["tool_calls"])
    page = tab.open(path_of("tools", f"/rollouts?step={STEP}&group={row['group']}&row={row['row']}"))
    card = page.locator(f".sample[data-row='{row['row']}']")
    spoken = [entry for entry in row["trace"] if entry["turn"] > 0]
    assert [text.split()[0] for text in card.locator(".event").all_inner_texts()] == [one["role"] for one in spoken]
    turns = card.locator(".event .tokens").all()
    assert [turn.locator(".tok").count() for turn in turns] == row["turn_lengths"]
    assert len(set(row["turn_lengths"])) == 2  # so that turns in another order would be seen
    for shown, entry in zip(card.locator(".event").all(), spoken, strict=True):
        if entry["role"] == "tool":
            words = shown.inner_text()
            assert entry["name"] in words
            assert str(entry["content"]) in words
            assert all(str(value) in words for value in entry["arguments"].values())


def test_filters_find_the_rows_that_the_folder_has(tab: Tab, home: Path) -> None:
    every = lines(home / "runs" / "tools", "rollouts.jsonl")
    page = tab.open(path_of("tools", "/rollouts?reward_max=0&flag=tool_calls&sort=-length"))
    wanted = [row for row in every if row["reward"] <= 0 and row["tool_calls"]]
    assert texts(page, "#list-title") == [f"{len(wanted)} found"]
    lengths = [int(text.split()[0]) for text in texts(page, "#entries .entry-head .small.num")]
    assert lengths == sorted((len(row["tokens"]) for row in wanted), reverse=True)[:50]
    page.goto(tab.address + path_of("tools", "/rollouts?text=calculator&first_step=3&last_step=4"))
    tab.settled()
    named = [row for row in every if 3 <= row["step"] <= 4 and "calculator" in row["prompt"] + row["text"]]
    assert texts(page, "#list-title") == [f"{len(named)} found"]


def test_keys_walk_samples_groups_and_steps_and_the_address_follows(tab: Tab) -> None:
    page = tab.open(path_of("tools", "/rollouts?step=2&group=0"))
    page.keyboard.press("j")
    page.keyboard.press("j")
    second = page.locator(".sample").nth(1).get_attribute("data-row")
    wait_until(lambda: f"row={second}" in location(page))
    page.keyboard.press("k")
    wait_until(lambda: f"row={second}" not in location(page))
    page.keyboard.press("]")
    wait_until(lambda: "Step 3" in page.locator("#stage-head h2").inner_text())
    page.keyboard.press("[")
    wait_until(lambda: "Step 2" in page.locator("#stage-head h2").inner_text())
    page.keyboard.press("J")
    wait_until(lambda: "group=1" in location(page))
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.name") == "text"
    page.keyboard.press("Escape")
    page.keyboard.press("?")
    assert page.locator("#help").is_visible()
    keys = dict(zip(texts(page, "#help dt"), texts(page, "#help dd"), strict=True))
    assert {"j", "k", "[", "]", "/", "?"} <= keys.keys()
    page.keyboard.press("Escape")
    assert page.locator("#help").is_hidden()


def test_a_reload_shows_the_same_and_back_the_one_before(tab: Tab) -> None:
    page = tab.open(path_of("tools", "/rollouts?step=2&group=0"))
    page.locator("#entries .entry").nth(2).click()
    wait_until(lambda: "group 2" in page.locator("#stage-head h2").inner_text())
    page.keyboard.press("2")
    page.keyboard.press("j")
    before = page.locator(".stage").inner_text()
    address = location(page)
    page.reload()
    tab.settled()
    assert location(page) == address
    assert page.locator(".stage").inner_text() == before
    assert page.locator("#colours [aria-pressed=true]").inner_text() == "logprob"
    page.go_back()
    wait_until(lambda: "group 0" in page.locator("#stage-head h2").inner_text())


def test_one_prompt_is_followed_through_the_steps_in_which_it_was_asked(tab: Tab, home: Path) -> None:
    rows = lines(home / "runs" / "tools", "rollouts.jsonl")
    steps: dict[int, set[int]] = defaultdict(set)
    for row in rows:
        steps[row["item"]].add(row["step"])
    item = max(steps, key=lambda one: len(steps[one]))
    assert len(steps[item]) >= 2
    first = next(row for row in rows if row["item"] == item)
    page = tab.open(path_of("tools", f"/rollouts?step={first['step']}&group={first['group']}"))
    page.keyboard.press("t")
    wait_until(lambda: page.locator(".visit").count() == len(steps[item]))
    for column in page.locator(".column").all():
        step = int(column.locator(".column-title a").inner_text().split()[1])
        wanted = sorted((row["reward"] for row in rows if (row["item"], row["step"]) == (item, step)), reverse=True)
        while column.locator(".sample-count").count():
            column.locator(".sample-count").first.click()
        shown = [number(text) for text in column.locator(".sample-reward").all_inner_texts()]
        assert shown == pytest.approx(wanted, abs=6e-4)
