"""Live: who watches learns of a step within two seconds, misses nothing, hears nothing twice, and holds nothing up."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from waiting import HANG_S, wait_until

from mint.dashboard import event_streams
from mint.dashboard.event_streams import EventCursor
from mint.dashboard.run_folders import RunFolders
from mint.dashboard.run_readers import RunReaders
from mint.runs.reader import RunReader
from tests.dashboard.dashboard_harness import API, add_step, append, evaluation, finding, metrics, showing, write_run
from tests.server.server_harness import running

RUN = "math-1"


class Stream:
    """An open stream, read event by event."""

    def __init__(self, response: httpx.Response) -> None:
        self._lines = response.iter_lines()
        self.cursor = ""

    def next(self) -> tuple[str, Any]:
        """Name and data of the next event; a comment is one named `:`."""
        name, data = "", None
        for line in self._lines:
            field, _, value = line.partition(": ")
            if line.startswith(": "):
                return ":", value
            if field == "id":
                self.cursor = value
            elif field == "event":
                name = value
            elif field == "data":
                data = json.loads(value)
            elif not line and name:
                return name, data
        return "end", None

    def until(self, wanted: str) -> Any:
        """The data of the next event of that name."""
        while (event := self.next())[0] != wanted:
            assert event[0] != "end"
        return event[1]


@contextmanager
def stream(client: httpx.Client, path: str, **headers: str) -> Iterator[Stream]:
    with client.stream("GET", f"{API}/{path}", headers=headers) as response:
        assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
        yield Stream(response)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "runs" / RUN, 3, planned=9)


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Returns once the watchers have looked at what is there now."""
    looks = [0]
    for kind in (event_streams.RunPoll, event_streams.ListPoll):

        def counted(self: Any, look: Any = kind.__call__) -> Any:
            found = look(self)
            looks[0] += 1
            return found

        monkeypatch.setattr(kind, "__call__", counted)

    def wait() -> None:
        before = looks[0]
        wait_until(lambda: looks[0] >= before + 2)  # one of them may have begun earlier

    return wait


def test_a_look_finds_what_is_new_and_there_are_two_within_two_seconds(run: Path) -> None:
    readers = RunReaders(RunFolders([run.parent.parent]))
    of_run, of_all = event_streams.RunPoll(RUN, RunReader(run), readers), event_streams.ListPoll(readers)
    assert of_run() == of_all() == []
    add_step(run, 4)
    assert [event.name for event in of_run()] == ["step", "summary"]
    assert [event.name for event in of_all()] == ["runs"]
    assert of_run() == of_all() == []
    assert max(event_streams.POLL_RUN_S, event_streams.POLL_LIST_S) < 1


def test_a_step_arrives_as_it_is_written(run: Path) -> None:
    with showing(run.parent.parent) as (_, client), stream(client, f"runs/{RUN}/events?since=3") as live:
        assert live.next()[0] == "summary"
        for step in (4, 5):
            add_step(run, step)
            assert live.until("step")["metrics"] == metrics(step)
            assert live.until("summary")["step"] == step
        append(run, "evaluations.jsonl", evaluation(5, 0.5))
        found = live.until("evaluation")
        assert found["mean"] == 0.5 and "examples" not in found
        append(run, "findings.jsonl", finding())
        assert live.until("finding")["code"] == "truncation" and live.cursor == "5-1-1"


def test_who_comes_back_gets_what_came_meanwhile_and_nothing_twice(run: Path) -> None:
    append(run, "evaluations.jsonl", evaluation(1, 0.1), evaluation(2, 0.2))
    append(run, "findings.jsonl", finding())
    with showing(run.parent.parent) as (_, client):
        with stream(client, f"runs/{RUN}/events?since=1-1-1") as live:
            events = [live.next() for _ in range(4)]
            assert [name for name, _ in events] == ["step", "step", "evaluation", "summary"]
            assert [data["metrics"]["step"] for _, data in events[:2]] == [2, 3] and events[2][1]["mean"] == 0.2
        place = live.cursor
        add_step(run, 4)
        # a browser says by itself where it was, whatever the address says
        with stream(client, f"runs/{RUN}/events?since=0", **{"last-event-id": place}) as live:
            assert live.next()[1]["metrics"]["step"] == 4
            assert live.next()[0] == "summary"


def test_without_a_place_only_what_is_new_comes(run: Path) -> None:
    append(run, "findings.jsonl", finding())
    with showing(run.parent.parent) as (_, client), stream(client, f"runs/{RUN}/events") as live:
        assert live.next()[0] == "summary"
        add_step(run, 4)
        name, data = live.next()
        assert name == "step" and data["metrics"]["step"] == 4


def test_a_log_that_was_cut_back_is_said_to_be(run: Path, looked: Callable[[], None]) -> None:
    with showing(run.parent.parent) as (_, client), stream(client, f"runs/{RUN}/events?since=3") as live:
        live.until("summary")
        looked()
        (run / "metrics.jsonl").write_text(json.dumps(metrics(1)) + "\n")
        assert live.until("reset") == {} and live.cursor == "1-0-0"
        add_step(run, 2)
        assert live.until("step")["metrics"]["step"] == 2
        with stream(client, f"runs/{RUN}/events?since=9") as late:
            assert late.next()[0] == "reset"


def test_a_new_run_and_a_step_of_an_old_one_show_in_the_list(run: Path, looked: Callable[[], None]) -> None:
    with showing(run.parent.parent) as (_, client), stream(client, "runs/events") as live:
        looked()
        write_run(run.parent / "math-2", 1)
        seen = live.until("runs")["revision"]
        assert {one["name"] for one in client.get(f"{API}/runs").json()["runs"]} == {RUN, "math-2"}
        add_step(run, 4)
        assert live.until("runs")["revision"] > seen
        wait_until(lambda: {one["name"]: one["step"] for one in client.get(f"{API}/runs").json()["runs"]}[RUN] == 4)


def test_all_who_watch_a_run_share_one_watcher_which_ends_with_the_last(run: Path) -> None:
    with showing(run.parent.parent) as (server, client):
        streams = server.dashboard.streams
        with stream(client, f"runs/{RUN}/events?since=3") as first:
            first.until("summary")
            with stream(client, f"runs/{RUN}/events?since=3") as second:
                second.until("summary")
                assert streams.watched == 1
                add_step(run, 4)
                assert first.until("step") == second.until("step")
            assert streams.watched == 1
        wait_until(lambda: streams.watched == 0)


def test_a_run_that_is_taken_away_ends_its_streams(run: Path, looked: Callable[[], None]) -> None:
    with showing(run.parent.parent) as (_, client), stream(client, f"runs/{RUN}/events") as live:
        live.until("summary")
        looked()
        run.rename(run.parent.parent / "gone")
        assert live.next()[0] in ("end", "reset")


def test_a_silent_stream_says_that_it_is_there(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_streams, "HEARTBEAT_S", 0.1)
    with showing(run.parent.parent) as (_, client), stream(client, f"runs/{RUN}/events") as live:
        live.until("summary")
        assert live.next()[0] == ":"


def test_who_takes_nothing_is_let_go_and_holds_nobody_up(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_streams, "QUEUE_EVENTS", 3)
    listener = event_streams.Listener()
    event = event_streams.StreamEvent("step", b"{}", EventCursor(1, 0, 0))
    for _ in range(9):
        listener.put(event)
    waiting = [listener.queue.get_nowait() for _ in range(listener.queue.qsize())]
    assert waiting[0] is None and len(waiting) <= 3


def test_there_are_no_more_streams_than_the_server_can_hold(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_streams, "MAX_LISTENERS", 1)
    with showing(run.parent.parent) as (_, client), stream(client, f"runs/{RUN}/events") as live:
        live.until("summary")
        assert client.get(f"{API}/runs/events").status_code == 429


def test_open_streams_do_not_hold_up_the_end_of_a_server(run: Path) -> None:
    ended: list[tuple[str, Any]] = []

    def watch(url: str, started: threading.Event) -> None:
        with httpx.Client(base_url=url, timeout=2 * HANG_S) as client, stream(client, f"runs/{RUN}/events") as live:
            live.until("summary")
            started.set()
            ended.append(live.next())

    with running(run.parent.parent, stop_within_s=3600) as server:
        started = threading.Event()
        thread = threading.Thread(target=watch, args=(server.url, started))
        thread.start()
        assert started.wait(HANG_S)
    thread.join()
    assert ended == [("end", None)]


def test_the_end_of_a_log_is_a_place_in_it(run: Path) -> None:
    append(run, "evaluations.jsonl", evaluation(1, 0.1))
    assert str(event_streams.cursor_of(RunReader(run))) == "3-1-0"
