"""Lists come in pages however long they are: runs, checkpoints, and the steps of a chart."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from waiting import wait_until

from mint.dashboard import run_list
from mint.dashboard.deleted_runs import DeletedRuns
from mint.dashboard.run_folders import RunFolders
from mint.dashboard.run_list import SORT_BY, RunList, RunQuery, select_runs
from mint.dashboard.run_readers import RunReaders
from mint.runs.reader import RunReader, RunSummary
from tests.dashboard.dashboard_harness import API, append, evaluation, showing, write_run
from tests.generated_runs import write_long, write_many

RUNS = 130
STEPS = 3_001


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    home = tmp_path_factory.mktemp("home")
    write_many(home / "runs", RUNS)
    write_long(home / "runs" / "long", steps=STEPS, checkpoint_every=60, eval_every=300)
    with showing(home) as (_, client):
        wait_until(lambda: client.get(f"{API}/runs").json()["is_whole"])
        yield client


def listed(client: httpx.Client, **query: Any) -> dict[str, Any]:
    answer = client.get(f"{API}/runs", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_every_run_is_on_one_page_and_the_newest_are_on_the_first(client: httpx.Client) -> None:
    pages = [listed(client, q="run-", offset=offset, limit=50) for offset in (0, 50, 100, 150)]
    names = [run["name"] for page in pages for run in page["runs"]]
    assert names == [f"run-{place:05d}" for place in reversed(range(RUNS))]
    assert [len(page["runs"]) for page in pages] == [50, 50, 30, 0]
    assert all((page["found"], page["total"]) == (RUNS, RUNS + 1) for page in pages)


def test_each_run_of_a_page_comes_with_the_curve_of_its_reward(client: httpx.Client) -> None:
    page = listed(client, q="run-00007")
    rewards = client.get(f"{API}/runs/run-00007/columns", params={"names": "reward/mean"}).json()["columns"]
    assert page["curves"] == {"run-00007": pytest.approx(rewards["reward/mean"])}
    [curve] = listed(client, q="long")["curves"].values()
    whole = client.get(f"{API}/runs/long/columns", params={"names": "reward/mean"}).json()["columns"]["reward/mean"]
    assert len(curve) == 64
    assert sum(curve) / 64 == pytest.approx(sum(whole) / len(whole), abs=0.02)


def test_words_and_state_narrow_the_list(client: httpx.Client) -> None:
    math = listed(client, q="RUN-001 math", limit=200)["runs"]
    assert [run["name"] for run in math] == [
        f"run-{place:05d}" for place in reversed(range(100, RUNS)) if not place % 4
    ]
    assert listed(client, state="failed")["found"] == 0
    assert listed(client, q="nothing like it")["runs"] == []


def test_a_list_is_sorted_by_every_column_in_both_directions() -> None:
    runs = [_summary(name, reward) for name, reward in (("b", 0.5), ("c", None), ("a", 0.25), ("d", -1.0))]
    for column, value in SORT_BY.items():
        up, down = (select_runs(runs, RunQuery(sort=f"{sign}{column}")) for sign in ("", "-"))
        known = [value(run) for run in up if value(run) is not None]
        assert known == sorted(known) and len(up) == len(down) == len(runs)
        assert [value(run) for run in down if value(run) is not None] == known[::-1]
    assert [run.name for run in select_runs(runs, RunQuery(sort="reward"))] == ["d", "a", "b", "c"]
    assert [run.name for run in select_runs(runs, RunQuery(sort="-reward"))] == ["b", "a", "d", "c"]


def _summary(name: str, reward: float | None) -> RunSummary:
    return RunSummary(
        name, f"/{name}", "finished", "math", "mint/tiny", 1, 2, reward, reward, None, None, None, {}, 1.0, 2.0, None
    )


def test_an_unknown_order_is_refused(client: httpx.Client) -> None:
    answer = client.get(f"{API}/runs", params={"sort": "colour"})
    assert answer.status_code == 400 and "is not a column" in answer.json()["error"]


def test_a_page_of_runs_has_rows_and_links_to_the_pages_beside_it(client: httpx.Client) -> None:
    html = client.get("/?q=run-&offset=50").text
    assert html.count('<tr data-run="run-') == 50
    assert 'href="?q=run-&amp;offset=0"' in html and 'href="?q=run-&amp;offset=100"' in html


def test_a_list_that_takes_long_is_answered_with_what_is_known(tmp_path: Path) -> None:
    class SlowReaders:
        """A list of which one run is known, and whose others never come."""

        revision = 0

        def __init__(self) -> None:
            self.go_on = threading.Event()

        def summaries(self) -> dict[str, RunSummary]:
            self.go_on.wait()
            return {}

        def known(self) -> list[RunSummary]:
            return [_summary("a", 1.0)]

        def curve(self, folder: Path) -> list[float]:
            return []

        def count(self) -> int:
            return 10_000

    readers = SlowReaders()
    page = RunList(readers).page(RunQuery())  # ty: ignore[invalid-argument-type]
    readers.go_on.set()
    assert ([run.name for run in page.runs], page.found, page.total, page.is_whole) == (["a"], 1, 10_000, False)


def test_a_list_that_was_read_once_is_whole_while_it_is_looked_at_again(tmp_path: Path) -> None:
    readers = RunReaders(RunFolders([tmp_path]))
    write_run(tmp_path / "runs" / "a", 1)
    runs = RunList(readers)
    wait_until(lambda: runs.page(RunQuery()).is_whole)
    with readers._pass:  # as a pass does that takes long
        page = runs.page(RunQuery())
    assert page.is_whole and [run.name for run in page.runs] == ["a"]


def test_of_many_runs_a_deleted_one_is_gone_at_once_and_back_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_list, "MANY_RUNS", 1)
    readers = RunReaders(RunFolders([tmp_path]))
    for name in ("a", "b", "c"):
        write_run(tmp_path / "runs" / name, 1)
    runs, deleted = RunList(readers), DeletedRuns([tmp_path], readers)
    wait_until(lambda: runs.page(RunQuery()).is_whole)

    def names() -> set[str]:
        return {run.name for run in runs.page(RunQuery()).runs}

    with readers._pass:  # as a pass does that takes long
        entry = deleted.delete("b")
        assert names() == {"a", "c"}
        deleted.restore(entry)
        assert names() == {"a", "b", "c"}


def test_checkpoints_come_newest_first_in_pages_with_the_best_on_each(client: httpx.Client) -> None:
    def checkpoints(offset: int) -> dict[str, Any]:
        return client.get(f"{API}/runs/long/checkpoints", params={"offset": offset}).json()

    saved = list(range(60, STEPS + 1, 60))
    pages = [checkpoints(offset) for offset in (0, 20, 40)]
    assert [one["step"] for page in pages for one in page["checkpoints"]] == saved[::-1]
    assert {(page["total"], page["best"]["step"], page["best"]["is_best"]) for page in pages} == {(50, 1500, True)}
    html = client.get("/runs/long/checkpoints?offset=20").text
    assert html.count("<tr data-step=") == 1 + 20 - 1  # the best one is of this page, and first
    assert html.index('<tr data-step="1500"') < html.index('<tr data-step="1800"') < html.index('<tr data-step="1740"')
    assert "21–40 of 50" in html


def test_of_many_steps_a_chart_gets_every_nth_and_the_last(client: httpx.Client) -> None:
    def steps(**query: Any) -> list[int]:
        return client.get(f"{API}/runs/long/columns", params=query).json()["columns"]["step"]

    assert steps(points=STEPS) == steps() == list(range(1, STEPS + 1))
    few = steps(points=300)
    assert len(few) <= 301 and few[0] == 1 and few[-1] == STEPS
    assert {after - before for before, after in pairwise(few[:-1])} == {11}
    assert steps(points=300, since=1000, until=1200) == list(range(1001, 1201))


def test_thinned_columns_are_rows_of_the_log(tmp_path: Path) -> None:
    reader = RunReader(write_long(tmp_path / "long", steps=500, checkpoint_every=100, eval_every=100))
    whole, few = reader.columns(), reader.columns(most=50)
    places = [whole["step"].index(step) for step in few["step"]]
    assert few.keys() == whole.keys() and len(places) <= 51
    assert all(values == [whole[name][place] for place in places] for name, values in few.items())


def test_an_evaluation_of_a_step_is_that_of_its_checkpoint_on_any_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "a", 3)
    append(run, "checkpoints.jsonl", *({"step": step, "checkpoint": f"mint://m/weights/{step}"} for step in (1, 2, 3)))
    append(run, "evaluations.jsonl", evaluation(1, 0.3), evaluation(2, 0.9), evaluation(3, 0.6))
    with showing(tmp_path) as (_, client):
        found = client.get(f"{API}/runs/a/checkpoints?limit=1&offset=2").json()
    assert [(one["step"], one["heldout"]["mean"]) for one in found["checkpoints"]] == [(1, 0.3)]
    assert (found["best"]["step"], found["best"]["heldout"]["mean"]) == (2, 0.9)
