"""Title, tags, note and archive of a run; its end, and its deletion and return: by request, and for `mint runs`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from mint.cli.main import app
from mint.dashboard.deleted_runs import DELETED, KEPT_S
from mint.runs.interrupt import forget_stop_request, is_stop_requested
from mint.runs.labels import MOST_TAGS, RunLabels, read_labels, write_labels
from tests.dashboard.dashboard_harness import API, HOSTILE, showing, write_run
from tests.generated_runs import write_states

LABELS = {"title": "The good one", "tags": ["baseline", "paper"], "note": "seed 3\nwith KL", "is_archived": False}


def names(client: httpx.Client, **query: Any) -> list[str]:
    return [run["name"] for run in client.get(f"{API}/runs", params=query).json()["runs"]]


def test_labels_are_in_the_run_folder_in_the_list_and_in_the_terminal(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "runs" / "a", 2)
    with showing(tmp_path) as (_, client):
        answer = client.post(f"{API}/runs/a/labels", json=LABELS)
        assert answer.status_code == 200 and answer.json()["summary"]["title"] == "The good one"
        assert json.loads((folder / "labels.json").read_text()) == LABELS
        assert names(client, q="paper GOOD") == ["a"] and names(client, q="other") == []
        assert client.post(f"{API}/runs/a/labels", json={"note": ""}).status_code == 200
        assert "The good one" in client.get("/").text and "baseline" in client.get("/runs/a").text
    assert read_labels(folder) == RunLabels("The good one", ("baseline", "paper"), "", False)
    shown = CliRunner().invoke(app, ["runs", "show", str(folder)], env={"COLUMNS": "200"})
    assert shown.exit_code == 0 and "The good one" in shown.output and "baseline, paper" in shown.output


def test_an_archived_run_is_only_in_the_archive(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a", 1)
    write_run(tmp_path / "runs" / "b", 1)
    with showing(tmp_path) as (_, client):
        client.post(f"{API}/runs/a/labels", json={"is_archived": True}).raise_for_status()
        assert names(client) == ["b"] and names(client, state="archived") == ["a"]
        client.post(f"{API}/runs/a/labels", json={"is_archived": False}).raise_for_status()
        assert sorted(names(client)) == ["a", "b"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"colour": "red"}, "is not a label"),
        ({"title": 3}, "title = 3"),
        ({"title": "x" * 201}, "at most 200 characters"),
        ({"tags": "a, b"}, "is not a list of tags. Give a list of at most 20 texts"),
        ({"tags": ["a"] * (MOST_TAGS + 1)}, "is not a list of tags"),
        ({"is_archived": "yes"}, "is neither true nor false"),
        ([1], "is not an object"),
    ],
)
def test_wrong_labels_are_refused_and_change_nothing(tmp_path: Path, body: Any, said: str) -> None:
    folder = write_run(tmp_path / "runs" / "a", 1)
    write_labels(folder, RunLabels("kept"))
    with showing(tmp_path) as (_, client):
        answer = client.post(f"{API}/runs/a/labels", json=body)
    assert answer.status_code == 400 and said in f"{answer.json()['error']} {answer.json()['remedy']}"
    assert read_labels(folder) == RunLabels("kept")


def test_hostile_labels_are_text(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a", 1)
    with showing(tmp_path) as (_, client):
        labels = {"title": HOSTILE, "tags": [HOSTILE], "note": HOSTILE}
        client.post(f"{API}/runs/a/labels", json=labels).raise_for_status()
        for path in ("/", "/runs/a"):
            assert "<script>alert" not in client.get(path).text


def test_a_deleted_run_is_gone_and_comes_back_as_it_was(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "runs" / "a", 3)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with showing(tmp_path) as (_, client):
        entry = client.post(f"{API}/runs/a/delete").raise_for_status().json()["entry"]
        assert names(client) == [] and client.get("/runs/a").status_code == 404 and not folder.exists()
        assert client.post(f"{API}/deleted/{entry}/restore").json() == {"run": "a"}
        assert names(client) == ["a"]
        assert client.post(f"{API}/deleted/{entry}/restore").status_code == 404
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_run_comes_back_only_to_a_free_name(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a", 3)
    with showing(tmp_path) as (_, client):
        entry = client.post(f"{API}/runs/a/delete").json()["entry"]
        write_run(tmp_path / "runs" / "a", 1)
        answer = client.post(f"{API}/deleted/{entry}/restore")
        assert answer.status_code == 400 and "another run" in answer.json()["error"]
        assert client.get(f"{API}/runs/a").json()["summary"]["step"] == 1


def test_a_running_run_is_not_deleted(tmp_path: Path) -> None:
    write_states(tmp_path / "runs")
    with showing(tmp_path) as (_, client):
        answer = client.post(f"{API}/runs/waiting/delete")
    assert answer.status_code == 400 and "is running" in answer.json()["error"]
    assert (tmp_path / "runs" / "waiting" / "config.json").is_file()


def test_a_running_run_is_asked_to_stop_and_others_are_not(tmp_path: Path) -> None:
    write_states(tmp_path / "runs")
    waiting = tmp_path / "runs" / "waiting"
    with showing(tmp_path) as (_, client):
        page = client.get("/runs/waiting").text
        assert 'id="stop-run"' in page and "asked to stop" not in page
        notice = client.post(f"{API}/runs/waiting/stop").raise_for_status().json()["summary"]["notice"]
        assert is_stop_requested(waiting) and "asked to stop" in notice and notice in client.get("/runs/waiting").text
        answer = client.post(f"{API}/runs/failed-at-once/stop")
        assert answer.status_code == 400 and "is not running" in answer.json()["error"]
    forget_stop_request(waiting)
    stopped = CliRunner().invoke(app, ["runs", "stop", str(waiting)])
    assert stopped.exit_code == 0 and is_stop_requested(waiting)
    refused = CliRunner().invoke(app, ["runs", "stop", str(tmp_path / "runs" / "failed-at-once")])
    assert refused.exit_code != 0 and "is failed" in refused.output


@pytest.mark.parametrize("entry", ["..", "1-..", "1-%2e%2e%2fa", "a", "99-nothing", "1-a%2Fb"])
def test_no_entry_leads_out_of_the_deleted_runs(tmp_path: Path, entry: str) -> None:
    write_run(tmp_path / "runs" / "a", 1)
    with showing(tmp_path) as (_, client):
        assert client.post(f"{API}/deleted/{entry}/restore").status_code in (404, 405)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["a"]


def test_what_was_deleted_long_ago_goes_with_the_next_deletion(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a", 1)
    place = tmp_path / "runs" / DELETED
    old, young = (place / f"{int(time.time() - age)}-x" for age in (KEPT_S + 60, KEPT_S - 60))
    write_run(old, 1)
    write_run(young, 1)
    with showing(tmp_path) as (_, client):
        client.post(f"{API}/runs/a/delete").raise_for_status()
    assert not old.exists() and young.exists()


@pytest.mark.parametrize("path", ["runs/a/labels", "runs/a/delete", "deleted/1-a/restore"])
def test_pages_of_others_change_nothing(tmp_path: Path, path: str) -> None:
    write_run(tmp_path / "runs" / "a", 1)
    with showing(tmp_path) as (_, client):
        for headers in ({"origin": "http://evil.example"}, {"sec-fetch-site": "cross-site"}, {"origin": "null"}):
            assert client.post(f"{API}/{path}", json={"title": "x"}, headers=headers).status_code == 403
        assert names(client) == ["a"] and client.get(f"{API}/runs/a").json()["summary"]["title"] == ""
