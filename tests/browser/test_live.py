"""A run that goes on is followed: each step is in every open page within two seconds of its line in `metrics.jsonl`."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from mint.recipes.math import DEMO, MathAdapter
from mint.rl import run_grpo
from tests.browser.browser_harness import Tab, lines, path_of, started, until

pytestmark = pytest.mark.slow

STEPS = 8
PROMISE_S = 2.0

NOTE = """selector => {
  window.seen = [];
  const note = () => {
    const number = parseInt((document.querySelector(selector)?.textContent ?? "").replace(/^\\D+/, ""), 10);
    if (number > (window.seen.at(-1)?.[0] ?? 0)) window.seen.push([number, Date.now() / 1000]);
  };
  note();
  new MutationObserver(note).observe(document.body, { subtree: true, childList: true, characterData: true });
}"""
"""Writes down when a step was first seen in the page."""

PLACES = {
    "/": "tr[data-run=live] [data-cell=step]",
    path_of("live"): ".headline [data-cell=step]",
    path_of("live", "/rollouts?follow=1"): "#stage-head h2",
}


def run_live(folder: Path, go: threading.Event) -> None:
    """A run that takes its first step when somebody looks."""

    class Waiting(MathAdapter):
        def make_prompt(self, sample: Any, tokenizer: Any) -> list[int]:
            assert go.wait(60)
            return super().make_prompt(sample, tokenizer)

    settings = {"steps": STEPS, "group_size": 8, "batch_size": 8, "eval_every": 4, "run_dir": folder}
    run_grpo(Waiting(heldout_size=16), DEMO.model_copy(update=settings))


def test_each_step_is_on_every_page_within_two_seconds(chromium: Any, home: Path, tmp_path: Path) -> None:
    data_dir, go = tmp_path / "home", threading.Event()
    folder = data_dir / "runs" / "live"
    (data_dir / "runs").mkdir(parents=True)
    run = threading.Thread(target=run_live, args=(folder, go))
    with started("dashboard", "--data-dir", str(data_dir), "--port", "0", home=data_dir) as (address, _):
        run.start()
        try:
            context = chromium.new_context()
            tabs = {path: Tab(context, address) for path in PLACES}
            until((folder / "config.json").exists, 60)
            tabs["/"].open("/")
            tabs["/"].page.wait_for_selector("tr[data-run=live]", timeout=5_000)  # it appears by itself
            for path, tab in tabs.items():
                tab.page.goto(address + path)
                tab.page.wait_for_selector("#live[data-state=live]")
                tab.page.evaluate(NOTE, PLACES[path])
            go.set()
        finally:
            go.set()
            run.join(120)
        for path, tab in tabs.items():
            until(lambda tab=tab: tab.page.evaluate("window.seen.at(-1)?.[0]") == STEPS, 2 * PROMISE_S)
            assert_in_time(folder, tab.page.evaluate("window.seen"), path)
            tab.check()
        page = tabs[path_of("live")].page
        last = lines(folder, "metrics.jsonl")[-1]
        assert page.locator(".headline [data-cell=reward]").inner_text() == f"{last['reward/mean'] + 1e-9:.3f}"
        until(lambda: page.locator(".headline [data-cell=state]").inner_text() == "finished")
        context.close()


def assert_in_time(folder: Path, seen: list[tuple[int, float]], path: str) -> None:
    """That each step, or a later one, was in the page within the promised time of being logged."""
    late = {}
    for row in lines(folder, "metrics.jsonl"):
        at = min(second for number, second in seen if number >= row["step"])
        late[int(row["step"])] = round(at - row["time/unix_s"], 3)
    print(path, late)
    assert len(late) == STEPS
    assert max(late.values()) < PROMISE_S, (path, late)
