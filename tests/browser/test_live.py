"""A run that goes on is followed: each step is in every open page before the next one is taken."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from mint.recipes.math import DEMO, MathAdapter
from mint.rl import run_grpo
from tests.browser.browser_harness import Tab, lines, path_of, started

pytestmark = pytest.mark.slow

STEPS = 8

NOTE = """selector => {
  window.seen = [];
  const note = () => {
    const number = parseInt((document.querySelector(selector)?.textContent ?? "").replace(/^\\D+/, ""), 10);
    if (number > (window.seen.at(-1) ?? 0)) window.seen.push(number);
  };
  note();
  new MutationObserver(note).observe(document.body, { subtree: true, childList: true, characterData: true });
}"""
"""Writes down which steps were seen in the page."""

PLACES = {
    "/": "tr[data-run=live] [data-cell=step]",
    path_of("live"): ".headline [data-cell=step]",
    path_of("live", "/rollouts?follow=1"): "#stage-head h2",
}


class Shown:
    """The last step that every page shows; None until all are open."""

    step: int | None = None


def run_live(folder: Path, shown: Shown) -> None:
    """A run that takes its first step when somebody looks, and each other one once the one before is seen."""

    class Waiting(MathAdapter):
        def make_prompt(self, item: Any, tokenizer: Any) -> list[int]:
            wait_until(lambda: shown.step is not None)
            return super().make_prompt(item, tokenizer)

        def compute_reward(self, response: Any, item: Any) -> Any:
            written = len(lines(folder, "metrics.jsonl"))
            wait_until(lambda: (shown.step or 0) >= written)
            return super().compute_reward(response, item)

    settings = {"steps": STEPS, "group_size": 8, "batch_size": 8, "eval_every": 4, "run_dir": folder}
    run_grpo(Waiting(heldout_size=16), DEMO.changed(**settings))


def test_each_step_is_on_every_page_before_the_next(chromium: Any, home: Path, tmp_path: Path) -> None:
    data_dir, shown = tmp_path / "home", Shown()
    folder = data_dir / "runs" / "live"
    (data_dir / "runs").mkdir(parents=True)
    run = threading.Thread(target=run_live, args=(folder, shown))
    with started("dashboard", "--data-dir", str(data_dir), "--port", "0", home=data_dir) as (address, _):
        run.start()
        try:
            context = chromium.new_context()
            tabs = {path: Tab(context, address) for path in PLACES}
            wait_until((folder / "config.json").exists)
            tabs["/"].open("/")
            tabs["/"].page.wait_for_selector("tr[data-run=live]")  # it appears by itself
            for path, tab in tabs.items():
                tab.page.goto(address + path)
                tab.page.wait_for_selector("#live[data-state=live]")
                tab.page.evaluate(NOTE, PLACES[path])
            while (shown.step or 0) < STEPS and run.is_alive():
                shown.step = min(tab.page.evaluate("window.seen.at(-1) ?? 0") for tab in tabs.values())
        finally:
            shown.step = STEPS
            run.join()
        for tab in tabs.values():
            wait_until(lambda tab=tab: tab.page.evaluate("window.seen.at(-1)") == STEPS)
            assert tab.page.evaluate("window.seen") == list(range(1, STEPS + 1))
            tab.check()
        page = tabs[path_of("live")].page
        last = lines(folder, "metrics.jsonl")[-1]
        assert page.locator(".headline [data-cell=reward]").inner_text() == f"{last['reward/mean'] + 1e-9:.3f}"
        wait_until(lambda: page.locator(".headline [data-cell=state]").inner_text() == "finished")
        context.close()
