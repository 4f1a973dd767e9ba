"""A run from the first click to the reading of its checkpoint, without a terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from waiting import HANG_S

from tests.browser.browser_harness import Tab, path_of, started

pytestmark = pytest.mark.slow

WAIT_MS = 1000 * HANG_S
SMALL = {"steps": 2, "batch_size": 2, "group_size": 2}
MORE = "heldout_size=4\nsave_every=1"


def test_a_run_is_started_and_its_checkpoint_evaluated_by_clicks(chromium: Any, tmp_path: Path) -> None:
    with started("dashboard", "--data-dir", str(tmp_path), "--port", "0", "--start-runs", home=tmp_path) as (
        address,
        _,
    ):
        context = chromium.new_context(viewport={"width": 1440, "height": 900})
        tab = Tab(context, address)
        page = tab.open("/")
        page.locator("#start summary").click()
        form = page.locator("#start-form")
        for name, value in SMALL.items():
            form.locator(f"[name={name}]").fill(str(value))
        form.locator("[name=more]").fill(MORE)
        form.locator("button").click()
        page.locator("#rows [data-cell=state]", has_text="finished").wait_for(timeout=WAIT_MS)
        page.locator("#start-state", has_text="done: mint train rl").wait_for(timeout=WAIT_MS)
        (folder,) = (tmp_path / "runs").iterdir()
        config = json.loads((folder / "config.json").read_text())
        assert {name: config[name] for name in SMALL} == SMALL

        page = tab.open(path_of(folder.name, "/checkpoints"))
        page.locator("[data-evaluate]").first.click()
        reading = page.locator("[data-cell=reading]", has_text="n 4").first
        reading.wait_for(timeout=WAIT_MS)
        assert reading.inner_text().startswith("greedy: ")
        tab.check()
        context.close()


def test_what_a_page_may_not_start_is_refused_in_a_sentence(chromium: Any, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "foreign"
    folder.mkdir(parents=True)
    spec = {"task": "evil.py:Evil", "seed": 0, "options": {}}
    process = {"pid": 1, "host": "elsewhere", "began_at": 1.0, "ended_at": 2.0, "outcome": "stopped", "error": None}
    (folder / "config.json").write_text(json.dumps({"task": "Evil", "steps": 3, "seed": 0, "task_spec": spec}))
    (folder / "process.json").write_text(json.dumps(process))
    with started("dashboard", "--data-dir", str(tmp_path), "--port", "0", "--start-runs", home=tmp_path) as (
        address,
        _,
    ):
        context = chromium.new_context()
        tab = Tab(context, address)
        page = tab.open(path_of("foreign"))
        page.locator("#resume-run").click()
        page.locator("#resume-state", has_text="is not a task that these pages may run").wait_for(timeout=WAIT_MS)
        assert "Run it yourself: mint train rl" in page.locator("#resume-state").inner_text()
        assert [fault for fault in tab.faults if "400" not in fault] == []
        context.close()
