"""What is taken away is what the run folder holds, line for line."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator

import httpx
import pytest

from mint.dashboard import run_downloads
from mint.dashboard.response_encoding import json_bytes
from tests.dashboard.dashboard_harness import API, GROUPS, SAMPLES, append, metrics, rollout, showing, write_run

RUN = "math-1"
STEPS = 3


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    home = tmp_path_factory.mktemp("home")
    write_run(home / "runs" / RUN, STEPS)
    odd = write_run(home / "runs" / 'odd "name"\n', 1)
    append(odd, "metrics.jsonl", {"step": 2.0, "only/here": 1.5})
    with showing(home) as (_, found):
        yield found


def test_the_csv_has_a_line_for_each_step_and_a_column_for_each_metric(client: httpx.Client) -> None:
    answer = client.get(f"{API}/runs/{RUN}/metrics.csv")
    assert answer.headers["content-type"].startswith("text/csv")
    assert answer.headers["content-disposition"] == f'attachment; filename="{RUN}-metrics.csv"'
    rows = list(csv.DictReader(io.StringIO(answer.text)))
    assert [{name: float(value) for name, value in row.items()} for row in rows] == [
        metrics(step) for step in range(1, STEPS + 1)
    ]


def test_a_metric_that_a_step_lacks_is_empty_and_an_odd_name_harms_no_header(client: httpx.Client) -> None:
    answer = client.get(f"{API}/runs/{'odd%20%22name%22%0A'}/metrics.csv")
    assert answer.headers["content-disposition"] == 'attachment; filename="odd-name-metrics.csv"'
    rows = list(csv.DictReader(io.StringIO(answer.text)))
    assert [row["only/here"] for row in rows] == ["", "1.5"] and rows[1]["reward/mean"] == ""


def test_the_json_is_the_log(client: httpx.Client) -> None:
    assert client.get(f"{API}/runs/{RUN}/metrics.json").json() == [metrics(step) for step in range(1, STEPS + 1)]


def test_all_rollouts_leave_as_they_were_logged(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_downloads, "PAGE_ROWS", 4)  # several pages, none of them a whole step
    lines = client.get(f"{API}/runs/{RUN}/rollouts.jsonl").text.splitlines()
    expected = [(step, place) for step in range(1, STEPS + 1) for place in range(GROUPS * SAMPLES)]
    assert [json.loads(line) for line in lines] == [{"row": place, **rollout(step, place)} for step, place in expected]


@pytest.mark.parametrize("limit", [1, 4, 5, 99])
def test_a_query_bounds_what_leaves(client: httpx.Client, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_downloads, "PAGE_ROWS", 4)
    query = {"flag": "used", "sort": "-reward", "limit": str(limit)}
    rows = [json.loads(line) for line in client.get(f"{API}/runs/{RUN}/rollouts.jsonl", params=query).text.splitlines()]
    assert len(rows) == min(limit, STEPS * GROUPS * (SAMPLES - 1)) and all(row["used"] for row in rows)
    assert [row["reward"] for row in rows] == sorted((row["reward"] for row in rows), reverse=True)


def test_a_wrong_query_is_refused_before_anything_leaves(client: httpx.Client) -> None:
    answer = client.get(f"{API}/runs/{RUN}/rollouts.jsonl?flag=odd")
    assert answer.status_code == 400 and "is not a flag" in answer.json()["error"]


def test_what_no_browser_could_read_is_written_so_that_it_can() -> None:
    odd = {"text": "half \ud800 pair", "grad": float("nan"), "reward": [float("inf"), 1.0]}
    assert json.loads(json_bytes(odd)) == {"text": "half ? pair", "grad": None, "reward": [None, 1.0]}
    assert json.loads(json_bytes({"grad": float("-inf"), "text": "ß"})) == {"grad": None, "text": "ß"}


def test_asking_only_for_the_head_of_a_stream_opens_none(client: httpx.Client) -> None:
    for path in (f"runs/{RUN}/events", "runs/events", f"runs/{RUN}/rollouts.jsonl"):
        answer = client.head(f"{API}/{path}")
        assert answer.status_code == 200 and answer.content == b""
