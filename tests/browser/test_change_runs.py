"""What a person changes on the pages by clicks, and what then lies in the run folders: title, tags, note, archive; a
run deleted and brought back; a run stopped and resumed; a checkpoint evaluated.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import HANG_S, wait_until

from tests.browser.browser_harness import Tab, lines, path_of, started, texts

pytestmark = pytest.mark.slow

WAIT_MS = 1000 * HANG_S
RUN = "math"


@pytest.fixture
def own_home(home: Path, tmp_path: Path) -> Path:
    """A data folder with a copy of one real run, and its checkpoints."""
    shutil.copytree(
        home, tmp_path / "home", ignore=lambda _, names: {"hostile <b> & co", "stuck", "tools"} & set(names)
    )
    return tmp_path / "home"


@pytest.fixture
def own_tab(chromium: Any, own_home: Path) -> Iterator[Tab]:
    """A watched tab of a dashboard whose pages may start runs."""
    with started("dashboard", "--data-dir", str(own_home), "--port", "0", "--start-runs", home=own_home) as (
        address,
        _,
    ):
        context = chromium.new_context(viewport={"width": 1440, "height": 900})
        tab = Tab(context, address)
        yield tab
        tab.check()
        context.close()


def save_labels(page: Any) -> None:
    page.locator("#labels-form button.button--main").click()
    page.locator("#labels-state", has_text="saved").wait_for(timeout=WAIT_MS)


def test_a_run_gets_title_tags_and_note_and_the_list_shows_and_finds_them(own_tab: Tab, own_home: Path) -> None:
    page = own_tab.open(path_of(RUN))
    page.locator("#labels summary").click()
    page.locator("[name=title]").fill("The good <b>one</b>")
    page.locator("[name=tags]").fill("baseline, paper")
    page.locator("[name=note]").fill("seed 3\nkeep")
    save_labels(page)
    assert "The good <b>one</b>" in page.locator("#labels summary").inner_text()
    labels = json.loads((own_home / "runs" / RUN / "labels.json").read_text())
    assert labels["title"] == "The good <b>one</b>" and labels["tags"] == ["baseline", "paper"]
    assert labels["note"] == "seed 3\nkeep"

    page = own_tab.open("/?q=paper")
    row = page.locator(f"tr[data-run={RUN}]")
    assert "The good <b>one</b>" in row.inner_text() and texts(row, ".runs-labels .tag") == ["baseline", "paper"]
    page = own_tab.open(path_of(RUN))
    page.locator("#labels summary").click()
    assert page.locator("[name=note]").input_value() == "seed 3\nkeep"


def test_an_archived_run_is_in_the_archive_alone_until_it_is_taken_out(own_tab: Tab) -> None:
    def listed(path: str) -> int:
        return own_tab.open(path).locator(f"tr[data-run={RUN}]").count()

    def set_archived(archived: bool) -> None:
        page = own_tab.open(path_of(RUN))
        page.locator("#labels summary").click()
        page.locator("[name=is_archived]").set_checked(archived)
        save_labels(page)

    set_archived(True)
    assert (listed("/"), listed("/?state=archived")) == (0, 1)
    set_archived(False)
    assert (listed("/"), listed("/?state=archived")) == (1, 0)


def test_a_deleted_run_is_gone_and_undo_brings_all_of_it_back(own_tab: Tab, own_home: Path) -> None:
    folder = own_home / "runs" / RUN
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    page = own_tab.open(path_of(RUN))
    page.locator("#labels summary").click()
    page.locator("#delete-run").click()
    page.wait_for_url("**/?deleted=**")
    own_tab.settled()
    assert not folder.exists() and page.locator(f"tr[data-run={RUN}]").count() == 0
    page.locator("#undo button").first.click()
    page.locator(f"tr[data-run={RUN}]").wait_for(timeout=WAIT_MS)
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before


def test_a_run_is_started_stopped_and_resumed_and_its_checkpoint_evaluated(own_tab: Tab, own_home: Path) -> None:
    page = own_tab.open("/")
    page.locator("#start summary").click()
    form = page.locator("#start-form")
    for name, value in {"steps": 400, "batch_size": 2, "group_size": 2}.items():
        form.locator(f"[name={name}]").fill(str(value))
    form.locator("[name=more]").fill("heldout_size=4\nsave_every=1")
    form.locator("button").click()
    page.locator("#rows [data-cell=state]", has_text="running").wait_for(timeout=WAIT_MS)
    (folder,) = [path for path in (own_home / "runs").iterdir() if path.name.startswith("math-")]

    page = own_tab.open(path_of(folder.name))
    wait_until(lambda: len(lines(folder, "metrics.jsonl")) > 0)
    page.locator("#stop-run").click()
    page.locator(".headline [data-cell=state]", has_text="stopped").wait_for(timeout=WAIT_MS)
    stopped_at = len(lines(folder, "metrics.jsonl"))
    assert 0 < stopped_at < 400

    page.locator("#resume-run").click()
    page.locator(".headline [data-cell=state]", has_text="running").wait_for(timeout=WAIT_MS)
    wait_until(lambda: len(lines(folder, "metrics.jsonl")) > stopped_at)
    page.locator("#stop-run").click()
    page.locator(".headline [data-cell=state]", has_text="stopped").wait_for(timeout=WAIT_MS)
    assert [row["step"] for row in lines(folder, "metrics.jsonl")] == list(
        range(1, len(lines(folder, "metrics.jsonl")) + 1)
    )

    page = own_tab.open(path_of(folder.name, "/checkpoints"))
    page.locator("[data-evaluate]").first.click()
    reading = page.locator("[data-cell=reading]", has_text="n 4").first
    reading.wait_for(timeout=WAIT_MS)
    assert reading.inner_text().startswith("greedy: ")
