"""The page of checkpoints in a browser: what a run saved, and its models at work: side by side, and in a chat."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from waiting import wait_until

from tests.browser.browser_harness import Tab, lines, path_of, texts

pytestmark = pytest.mark.slow

SAMPLING_S = 60.0
"""The first question loads the model."""

WATCH_GROWTH = """selector => {
  window.lengths = [];
  new MutationObserver(() => {
    const length = document.querySelector(selector)?.textContent.length ?? 0;
    if (length && length !== window.lengths.at(-1)) window.lengths.push(length);
  }).observe(document.body, { subtree: true, childList: true, characterData: true });
}"""


def test_every_checkpoint_stands_there_with_its_evaluation_and_commands(tab: Tab, home: Path) -> None:
    folder = home / "runs" / "tools"
    evaluations = {row["step"]: row for row in lines(folder, "evaluations.jsonl") if row["temperature"] == 1.0}
    page = tab.open(path_of("tools", "/checkpoints"))
    for kept in lines(folder, "checkpoints.jsonl"):
        row = page.locator(f"#kept tr[data-path='{kept['checkpoint']}']")
        assert row.locator("th").inner_text().split()[0] == str(kept["step"])
        evaluation = evaluations[kept["step"]]
        assert float(row.locator("[data-cell=mean]").inner_text()) == pytest.approx(evaluation["mean"], abs=6e-4)
        assert f"n {evaluation['n']}" in row.inner_text()
        row.locator("summary").click()
        assert f"mint export {kept['checkpoint']}" in row.inner_text()
    best = lines(folder, "evaluations.jsonl")[-1]["checkpoint"]
    assert page.locator(f"#kept tr[data-path='{best}'] .tag--good").count() == 1


def test_a_chat_answers_token_by_token_what_the_checkpoint_says(tab: Tab, home: Path) -> None:
    checkpoint = lines(home / "runs" / "tools", "checkpoints.jsonl")[-1]["checkpoint"]
    page = tab.open(path_of("tools", "/checkpoints"))
    page.locator(f"#kept [data-chat='{checkpoint}']").click()
    page.locator("#chat-temperature").fill("0")
    page.evaluate(WATCH_GROWTH, ".chat-message--assistant .chat-text")
    page.locator("#chat-input").fill("What is 34 + 58?")
    page.locator("#chat-input").press("Enter")
    state = page.locator(".chat-message--assistant header .num")
    wait_until(lambda: "·" in state.inner_text())
    question = {"messages": [{"role": "user", "content": "What is 34 + 58?"}], "temperature": 0, "max_tokens": 256}
    wanted = asked(tab, "chat/completions", {**question, "model": checkpoint})[0]["message"]
    calls = [call["function"] for call in wanted.get("tool_calls") or []]
    said = (wanted["content"] or "") + "".join(f"\n→ {call['name']}({call['arguments']})" for call in calls)
    assert page.locator(".chat-message--assistant .chat-text").inner_text().strip() == said.strip()
    growth = page.evaluate("window.lengths")
    assert growth == sorted(growth)
    assert len(growth) > 1 or calls  # a call to a tool comes whole


def test_two_checkpoints_answer_the_same_prompt_side_by_side(tab: Tab, home: Path) -> None:
    kept = [row["checkpoint"] for row in lines(home / "runs" / "math", "checkpoints.jsonl")]
    page = tab.open(path_of("math", "/checkpoints"))
    for side, checkpoint in zip(("left", "right"), ("mint/tiny", kept[-1]), strict=True):
        page.locator(f".side[data-side={side}] select").select_option(checkpoint)
    page.locator("#compare [name=prompt]").fill("Q: What is 34 + 58?\nA:")
    for name, value in {"samples": "2", "temperature": "2", "seed": "3"}.items():
        page.locator(f"#compare [name={name}]").fill(value)
    page.locator("#compare-go").click()
    wait_until(lambda: page.locator(".answer .small").count() == 4 and all(texts(page, ".answer .small")))
    config = json.loads((home / "runs" / "math" / "config.json").read_text())
    for side, model in zip(("left", "right"), ("mint/tiny", kept[-1]), strict=True):
        question = {"prompt": "Q: What is 34 + 58?\nA:", "n": 2, "seed": 3, "model": model}
        choices = asked(tab, "completions", {**question, "temperature": 2, "max_tokens": config["max_tokens"]})
        shown = page.locator(f".side[data-side={side}] .answer-text").all_inner_texts()
        assert [text.strip() for text in shown] == [choice["text"].strip() for choice in choices]


def test_a_checkpoint_that_is_not_here_is_named_and_breaks_nothing(tab: Tab) -> None:
    page = tab.open(path_of("hostile <b> & co", "/checkpoints"))
    page.locator("#kept tr[data-path*=HACKED] [data-chat]").click()
    page.locator("#chat-input").fill("<script>HACKED = 1</script>")
    page.locator("#chat-input").press("Enter")
    wait_until(lambda: page.locator(".chat-error").count())
    assert "HACKED = 1" in page.locator(".chat-message--user").inner_text()
    tab.faults[:] = [fault for fault in tab.faults if "404" not in fault and "400" not in fault]  # chromium's own words


def asked(tab: Tab, path: str, question: dict[str, Any]) -> list[dict[str, Any]]:
    """The same question, asked without the page."""
    answer = httpx.post(f"{tab.address}/v1/{path}", json=question, timeout=SAMPLING_S)
    return answer.raise_for_status().json()["choices"]
