"""The dashboard's routes: what they answer is what the run folders hold, and no web page of others gets any of it."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from typer.testing import CliRunner
from waiting import HANG_S, wait_until

import mint
from mint.cli.main import app
from mint.compose.page_commands import RunCommands
from mint.config import read_settings
from mint.dashboard.app import HEADERS, ROUTES
from mint.dashboard.finding_evidence import EVIDENCE
from mint.dashboard.jobs.bisect_jobs import BisectJobs
from mint.dashboard.run_folders import RunFolders
from mint.dashboard.run_readers import RunReaders
from mint.errors import InvalidRequestError, OverloadedError, RequestFailedError
from mint.rl.analysis.bisect import Regression
from mint.rl.analysis.diagnosis import CODES
from mint.runs.reader import RunReader
from mint.runs.rollout_query import FLAGS
from tests.dashboard.dashboard_harness import (
    API,
    GROUPS,
    HOSTILE,
    SAMPLES,
    add_step,
    append,
    evaluation,
    finding,
    rollout,
    showing,
    write_run,
)

RUN = "math-1"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    home = tmp_path_factory.mktemp("home")
    run = write_run(home / "runs" / RUN, 4)
    append(
        run,
        "evaluations.jsonl",
        evaluation(0, 0.2),
        evaluation(2, 0.6, temperature=0.0),
        evaluation(2, 0.5),
        evaluation(4, 0.4),
    )
    append(run, "checkpoints.jsonl", *({"step": step, "checkpoint": f"mint://m/weights/{step}"} for step in (2, 4)))
    append(run, "findings.jsonl", finding())
    append(run, "tokens.jsonl", {"step": 1, "id": 5, "text": "<|im_end|>", "special": True})
    with showing(home) as (_, found):
        yield found


def get(client: httpx.Client, path: str, **query: object) -> dict:
    answer = client.get(f"{API}/{path}", params={name: str(value) for name, value in query.items()})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_numbers_of_a_run_are_those_of_its_folder(client: httpx.Client) -> None:
    (summary,) = get(client, "runs")["runs"]
    assert (summary["name"], summary["state"], summary["step"], summary["reward"]) == (RUN, "finished", 4, 0.4)
    assert summary == get(client, f"runs/{RUN}")["summary"]
    assert get(client, f"runs/{RUN}")["config"]["base_model"] == "mint/tiny"
    columns = get(client, f"runs/{RUN}/columns", names="reward/mean,time/train_s", since=1)
    assert columns["columns"] == {"step": [2, 3, 4], "reward/mean": [0.2, 0.3, 0.4], "time/train_s": [0.5, 0.5, 0.5]}
    assert [row["mean"] for row in columns["evaluations"]] == [0.2, 0.6, 0.5, 0.4]
    assert not any("examples" in row for row in columns["evaluations"])
    assert columns["cursor"] == "4-4-1" and [row["code"] for row in columns["findings"]] == ["truncation"]


def test_rollouts_are_found_by_what_they_are(client: httpx.Client) -> None:
    page = get(client, f"runs/{RUN}/rollouts", step=2, sort="-reward", limit=2)
    assert page["total"] == GROUPS * SAMPLES and page["next_offset"] == 2 and page["is_complete"]
    assert [row["row"] for row in page["rows"]] == [1, 4]
    cut = get(client, f"runs/{RUN}/rollouts", flag="truncated", without="used", reward_max=9, first_step=3)
    assert cut["total"] == 0
    cut = get(client, f"runs/{RUN}/rollouts", flag="truncated", without="used", first_step=3)
    assert {(row["step"], row["row"]) for row in cut["rows"]} == {(step, row) for step in (3, 4) for row in (2, 5)}
    assert [row["text"] for row in get(client, f"runs/{RUN}/rollouts", text="answer 3 of step 4")["rows"]] == [
        "answer 3 of step 4"
    ]


def test_the_rollouts_of_a_finding_are_those_that_show_it(client: httpx.Client) -> None:
    (found,) = [one for one in get(client, f"runs/{RUN}/findings")["findings"] if one["code"] == "truncation"]
    assert found["query"] == {"flags": ["truncated"], "first_step": "1", "last_step": "2"}
    assert "rollouts/truncated_share" in found["plot"]
    by_code = get(client, f"runs/{RUN}/rollouts", finding="truncation")
    by_query = get(client, f"runs/{RUN}/rollouts", flag="truncated", first_step=1, last_step=2)
    assert by_code["rows"] == by_query["rows"] and by_code["total"] == 4


def test_the_page_of_a_step_without_rollouts_says_which_step_it_shows(client: httpx.Client) -> None:
    sentence = "Step 99 has no rollouts. The run has those from 1 to 4; this is step 4."
    assert sentence in client.get(f"/runs/{RUN}/rollouts?step=99").text
    for query in ("", "?step=2", "?group=99"):
        assert "; this is step" not in client.get(f"/runs/{RUN}/rollouts{query}").text


def test_a_run_without_steps_may_get_any_metric_yet(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "new", 0)
    with showing(tmp_path) as (_, client):
        assert get(client, "runs/new/columns", names="reward/meen")["columns"] == {"step": [], "reward/meen": []}


@pytest.mark.parametrize(
    ("described", "said"),
    [
        (
            {"task_spec": {"task": "math", "seed": 0, "options": {}}},
            "To continue this run: <code>mint train rl --run-dir",
        ),
        ({"data_source": {"recipe": "sft", "arguments": {}}}, "To continue this run: <code>mint train sft --run-dir"),
        ({"data_source": {"recipe": "odd"}}, "repeat its command with <code>--run-dir"),
        ({}, "repeat its command with <code>--run-dir"),
    ],
)
def test_the_checkpoints_name_the_command_that_continues_a_run(
    tmp_path: Path, described: dict[str, object], said: str
) -> None:
    run = write_run(tmp_path / "runs" / "own", 2)
    append(run, "checkpoints.jsonl", {"step": 2, "checkpoint": "mint://m/weights/2"})
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**config, **described}))
    with showing(tmp_path) as (_, client):
        assert said in client.get("/runs/own/checkpoints").text


def test_a_run_that_was_to_take_no_step_has_nothing_to_resume(tmp_path: Path) -> None:
    folders = {steps: write_run(tmp_path / "runs" / f"of-{steps}", 0, planned=steps) for steps in (1, 9)}
    config = json.loads((folders[1] / "config.json").read_text())
    (folders[1] / "config.json").write_text(json.dumps({**config, "steps": 0}))
    with showing(tmp_path, commands=RunCommands(read_settings(), tmp_path)) as (_, client):
        none, some = (client.get(f"/runs/of-{name}").text for name in (1, 9))
    assert ">0 / 0<" in none and 'id="resume-bar" hidden' in none
    assert ">0 / 9<" in some and 'id="resume-bar">' in some


def test_a_held_out_reward_of_before_training_says_so(tmp_path: Path) -> None:
    append(write_run(tmp_path / "runs" / "new", 2, planned=9), "evaluations.jsonl", evaluation(0, 0.2))
    with showing(tmp_path) as (_, client):
        for page in ("/", "/runs/new"):
            assert 'data-cell="interval">[0.100, 0.300] at step 0</span>' in client.get(page).text
        append(tmp_path / "runs" / "new", "evaluations.jsonl", evaluation(2, 0.4))
        assert 'data-cell="interval">[0.300, 0.500]</span>' in client.get("/runs/new").text


def test_a_group_comes_best_first_and_whole(client: httpx.Client) -> None:
    group = get(client, f"runs/{RUN}/steps/3/groups/0")
    assert [row["reward"] for row in group["rows"]] == [1.0, 0.0, None] and group["prompt"] == "What is 0 + 3?"
    best = group["rows"][0]
    assert {name: best[name] for name in rollout(3, 1)} == rollout(3, 1)
    assert group["pieces"].keys() == {str(token) for row in group["rows"] for token in row["tokens"]}
    assert group["pieces"][str(best["tokens"][0])] == {"text": "<|im_end|>", "special": True}
    whole = get(client, f"runs/{RUN}/rollouts/3/1")
    assert whole.pop("pieces").keys() == {str(token) for token in best["tokens"]}
    assert best == whole and best["flags"] == ["used"]
    groups = get(client, f"runs/{RUN}/steps/3/groups")["groups"]
    assert [(one["group"], one["rows"], one["rewards"]) for one in groups] == [
        (0, [0, 1, 2], [0.0, 1.0, None]),
        (1, [3, 4, 5], [0.0, 1.0, None]),
    ]
    assert groups[0]["error"] == "the grader failed"


def test_one_prompt_is_followed_through_training(client: httpx.Client) -> None:
    visits = get(client, f"runs/{RUN}/items/101")["visits"]
    assert [(visit["step"], visit["rows"]) for visit in visits] == [(1, [3, 4, 5]), (3, [3, 4, 5])]


def test_checkpoints_have_the_evaluation_of_their_step_and_the_best_is_marked(client: httpx.Client) -> None:
    found = get(client, f"runs/{RUN}/checkpoints")["checkpoints"]
    assert [(one["step"], one["heldout"]["mean"], one["is_best"]) for one in found] == [(4, 0.4, False), (2, 0.5, True)]
    assert found[1]["export"].startswith("mint export mint://m/weights/2 ")


def test_an_evaluation_shows_what_was_read(client: httpx.Client) -> None:
    assert get(client, f"runs/{RUN}/evaluations/1/examples")["rows"][0]["text"] == "2"


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [
        ("runs/none", 404, "is not a run here"),
        (f"runs/{RUN}/steps/99/groups", 404, "step = 99: has no rollouts. The run has those from 1 to 4"),
        (f"runs/{RUN}/columns?names=reward/mean,reward/meen", 400, "metric of this run. Did you mean reward/mean"),
        (f"runs/{RUN}/steps/1/groups/99", 404, "is not a group"),
        (f"runs/{RUN}/rollouts/1/99", 404, "is not a rollout"),
        (f"runs/{RUN}/rollouts?step=-1", 400, "step = -1: is below 0"),
        ("runs?limit=1.5", 400, "limit = 1.5: is not a whole number"),
        ("runs?limit=1000000000000000", 400, "has too many digits"),
        (f"runs/{RUN}/rollouts?reward_min=much", 400, "reward_min = much"),
        (f"runs/{RUN}/rollouts?flag=odd", 400, "is not a flag"),
        (f"runs/{RUN}/rollouts?sort=odd", 400, "is not an order"),
        (f"runs/{RUN}/rollouts?finding=odd", 400, "is not a finding"),
        (f"runs/{RUN}/events?since=1-2", 400, "since = 1-2"),
        ("nothing", 404, "is not a page"),
    ],
)
def test_what_cannot_be_answered_is_refused_in_a_sentence(
    client: httpx.Client, path: str, status: int, said: str
) -> None:
    answer = client.get(f"{API}/{path}")
    assert answer.status_code == status and said in answer.json()["error"]


TABS = ("rollouts", "diagnosis", "checkpoints")
PAGES = ["/", "/service", f"/runs/{RUN}", f"/compare?run={RUN}", *(f"/runs/{RUN}/{tab}" for tab in TABS)]


@pytest.mark.parametrize("path", PAGES)
def test_a_page_is_shown_and_asks_no_other_machine_for_anything(client: httpx.Client, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    assert re.findall(r"""(?:src|href|action)=["'](?!/|#|\?)[^"']*""", answer.text) == []
    assert not re.search(r"<script(?![^>]*src=)|<style|\sstyle=|\son\w+=", answer.text)


@pytest.mark.parametrize("path", [*PAGES, "/runs/none", "/compare", "/nothing", f"{API}/runs", "/favicon.ico"])
def test_every_answer_has_the_headers_that_keep_pages_apart(client: httpx.Client, path: str) -> None:
    answer = client.get(path)
    assert {name: answer.headers[name].split(", ")[0] for name in HEADERS} == HEADERS
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    assert "set-cookie" not in answer.headers


def test_what_a_model_wrote_is_never_part_of_a_page(client: httpx.Client) -> None:
    assert client.get(f"{API}/runs/{RUN}/rollouts/1/0").json()["text"] == HOSTILE
    for path in (f"/runs/{RUN}/rollouts?step=1&group=0&row=0", f"/runs/{RUN}"):
        assert "<script>alert" not in client.get(path).text


def test_a_browser_that_has_it_already_is_told_so(client: httpx.Client) -> None:
    for path in (f"{API}/runs/{RUN}/columns", "/assets/base.css", f"/runs/{RUN}/rollouts"):
        first = client.get(path)
        again = client.get(path, headers={"if-none-match": first.headers["etag"]})
        assert (first.status_code, again.status_code, again.content) == (200, 304, b"")
        assert first.headers["cache-control"] == "no-cache"


def test_a_page_names_all_its_modules_and_a_browser_keeps_them_until_they_change(client: httpx.Client) -> None:
    html = client.get(f"/runs/{RUN}").text
    preloaded = set(re.findall(r'modulepreload" href="([^"]+)"', html))
    [script] = re.findall(r'type="module" src="([^"]+)"', html)
    imported: set[str] = set()
    for address in (script, *preloaded):
        answer = client.get(address)
        assert "immutable" in answer.headers["cache-control"]
        imported |= {f"{address.rpartition('/')[0]}/{name}" for name in re.findall(r'from "\./([^"]+)"', answer.text)}
    assert preloaded == imported
    older = re.sub("/assets/[^/]+/", "/assets/0123456789abcdef/", script)
    assert client.get(older).headers["cache-control"] == "no-cache"


def test_assets_are_typed_and_nothing_else_of_the_machine_is_served(client: httpx.Client) -> None:
    assert client.get("/assets/base.css").headers["content-type"].startswith("text/css")
    assert client.get("/assets/common.js").headers["content-type"].startswith("text/javascript")
    assert client.get("/favicon.ico").headers["content-type"].startswith("image/svg")
    for path in ("/assets/none.css", "/assets/..%2Fapp.py", "/assets/%2e%2e/app.py", "/assets/%2Fetc%2Fpasswd"):
        assert client.get(path).status_code == 404


@pytest.mark.parametrize(
    "path", ["/", f"/runs/{RUN}/rollouts", f"{API}/runs", "/login", "/assets/base.css", "/v1/models"]
)
@pytest.mark.parametrize("headers", [{"host": "evil.org"}, {"origin": "http://evil.org"}, {"origin": "null"}], ids=str)
def test_a_foreign_page_gets_nothing(client: httpx.Client, path: str, headers: dict[str, str]) -> None:
    answer = client.get(path, headers=headers)
    assert answer.status_code == 403 and RUN not in answer.text


def test_a_foreign_page_starts_nothing(client: httpx.Client) -> None:
    answer = client.post(f"{API}/runs/{RUN}/bisect", json={}, headers={"sec-fetch-site": "cross-site"})
    assert answer.status_code == 403 and get(client, f"runs/{RUN}/bisect") == {"status": "none"}


def test_a_search_by_a_click_runs_no_code_that_a_run_folder_names(client: httpx.Client) -> None:
    assert client.post(f"{API}/runs/{RUN}/bisect", json={"metric": "odd"}).status_code == 400
    begun = client.post(f"{API}/runs/{RUN}/bisect", json={"metric": "heldout"})
    assert begun.status_code == 202
    state = await_search(client, RUN)
    assert state["status"] == "failed" and "mint bisect" in state["error"]["remedy"]


def test_there_is_no_service_beside_a_folder(client: httpx.Client) -> None:
    assert get(client, "service") == {"available": False}


def test_a_number_that_is_none_is_null(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "odd", 1)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2.0, "reward/mean": NaN, "optim/grad_norm": Infinity}\n')
    with showing(tmp_path) as (_, client):
        assert get(client, "runs/odd/columns", names="reward/mean")["columns"]["reward/mean"] == [0.1, None]
        assert json.loads(client.get(f"{API}/runs/odd/metrics.json").text)[1]["optim/grad_norm"] is None


def test_runs_are_found_in_folders_of_every_kind_and_names_never_clash(tmp_path: Path) -> None:
    write_run(tmp_path / "home" / "runs" / "a", 1)
    write_run(tmp_path / "home" / "b", 1)
    write_run(tmp_path / "more" / "a", 1)
    write_run(tmp_path / "single", 1)
    write_run(tmp_path / "home" / "runs" / "events", 1)
    (tmp_path / "home" / "runs" / "no-run").mkdir()
    folders = RunFolders([tmp_path / "home", tmp_path / "more", tmp_path / "single", tmp_path / "missing"])
    found = folders.find()
    assert {"a", "b", "single"} < found.keys() and found["a"] == tmp_path / "home" / "runs" / "a"
    assert sorted(name.partition("~")[0] for name in found) == ["a", "a", "b", "events", "single"]
    assert "events" not in found and folders.find() == found
    write_run(tmp_path / "home" / "runs" / "c", 1)
    assert folders.find().keys() - found.keys() == {"c"}
    shutil.rmtree(tmp_path / "home" / "runs" / "c")
    assert folders.find() == found


def test_a_run_whose_config_comes_late_is_found_then(tmp_path: Path) -> None:
    late = tmp_path / "runs" / "late"
    late.mkdir(parents=True)
    old = time.time() - 3600
    os.utime(tmp_path / "runs", (old, old))
    folders = RunFolders([tmp_path])
    assert folders.find() == {}
    (late / "config.json").write_text("{}")
    assert folders.find() == {"late": late}


def test_of_hundreds_of_runs_only_those_that_changed_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, now, summary = [], [0.0], RunReader.summary
    monkeypatch.setattr("mint.dashboard.run_readers.time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(RunReader, "summary", lambda reader: read.append(reader.folder.name) or summary(reader))
    for number in range(200):
        write_run(tmp_path / "runs" / f"run-{number}", 1)
    readers = RunReaders(RunFolders([tmp_path]))
    for now[0] in (0.0, 1.0, 3600.0):
        assert len(readers.summaries()) == len(read) == 200
    add_step(tmp_path / "runs" / "run-7", 2)
    assert readers.summaries()["run-7"].step == 2
    assert read[200:] == ["run-7"]


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("config.json", "{"),
        ("config.json", "[3]"),
        ("metrics.jsonl", '{"reward/mean": 1}\n'),
        ("evaluations.jsonl", '{"step": "two", "when": "after"}\n'),
    ],
)
def test_a_damaged_run_hides_no_other_and_its_pages_name_the_file(tmp_path: Path, file: str, text: str) -> None:
    write_run(tmp_path / "runs" / "good", 1)
    damaged = write_run(tmp_path / "runs" / "bad", 1)
    (damaged / file).write_text(text)
    with showing(tmp_path) as (_, client):
        states = {run["name"]: run["state"] for run in get(client, "runs")["runs"]}
        assert states == {"good": "finished", "bad": "unreadable"}
        assert "unreadable" in client.get("/").text
        for page in ("", "/rollouts", "/diagnosis", "/checkpoints"):
            answer = client.get(f"/runs/bad{page}")
            assert answer.status_code == 400 and f"{damaged / file}" in answer.text, page
        assert client.get(f"{API}/runs/bad").status_code == 400
        for path in ("columns", "findings", "checkpoints", "metrics.csv", "steps"):
            assert client.get(f"{API}/runs/bad/{path}").status_code in (200, 400), path


def test_the_pages_of_a_failed_run_say_that_it_failed(tmp_path: Path) -> None:
    process = {"pid": 1, "host": "here", "began_at": 1.0, "ended_at": 2.0, "outcome": "failed"}
    folder = write_run(tmp_path / "runs" / "failed", 1, planned=4)
    (folder / "process.json").write_text(json.dumps({**process, "error": "OSError: disk is full"}))
    with showing(tmp_path) as (_, client):
        for page in ("diagnosis", "checkpoints"):
            said = client.get(f"/runs/failed/{page}").text
            assert "It failed after step 1: OSError: disk is full" in said and "Nothing was saved yet" not in said, page


def test_further_folders_come_on_the_command_line_and_must_be_there(tmp_path: Path) -> None:
    write_run(tmp_path / "elsewhere" / "b", 1)
    with showing(tmp_path / "home", tmp_path / "elsewhere" / "b") as (server, client):
        assert [run["name"] for run in get(client, "runs")["runs"]] == ["b"]
        assert str(tmp_path / "elsewhere") in server.line
    refused = CliRunner().invoke(app, ["dashboard", str(tmp_path / "missing")])
    assert refused.exit_code == 1 and "is not a folder" in refused.output


def test_beyond_this_machine_it_does_not_start_without_keys(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="no key"), showing(tmp_path, host="0.0.0.0"):
        pass


def test_every_finding_has_something_to_look_at() -> None:
    assert EVIDENCE.keys() >= CODES.keys()
    for evidence in EVIDENCE.values():
        assert evidence.plot and evidence.query.get("flags", frozenset()) <= FLAGS.keys()


def test_metrics_that_findings_plot_are_written_by_runs() -> None:
    source = Path(mint.__file__).parent
    files = [path for path in source.rglob("*.py") if "dashboard" not in path.parts]
    written = "".join(path.read_text() for path in files)
    plotted = {name.rpartition("/")[2] for evidence in EVIDENCE.values() for name in evidence.plot}
    assert [name for name in plotted if name not in written] == []


def test_no_route_is_there_twice_and_all_but_the_door_ask_who_comes() -> None:
    rows = [(row.method, row.path) for row in ROUTES]
    assert len(rows) == len(set(rows))
    assets = {"/assets/{file}", "/assets/{version}/{file}", "/favicon.ico"}
    assert {row.path for row in ROUTES if row.is_open} == {"/login", "/logout", *assets}
    changes = {f"{API}/runs/{{run}}/{what}" for what in ("bisect", "labels", "stop", "resume", "evaluate", "delete")}
    restore = f"{API}/deleted/{{entry}}/restore"
    assert {row.path for row in ROUTES if row.method == "POST"} == {
        "/login",
        "/logout",
        restore,
        f"{API}/launches",
        *changes,
    }


# --- what needs more than files ------------------------------------------------------------------------------------


def await_search(client: httpx.Client, run: str) -> dict:
    wait_until(lambda: get(client, f"runs/{run}/bisect")["status"] != "running")
    return get(client, f"runs/{run}/bisect")


def test_the_fall_of_a_metric_is_found_from_evaluations_that_the_run_has(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "fallen", 3)
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**config, "task_spec": {"task": "math", "seed": 0, "options": {}}}))
    means = {1: 0.8, 2: 0.8, 3: 0.2}
    rows = [evaluation(step, mean, temperature=degree) for step, mean in means.items() for degree in (0.0, 1.0)]
    append(run, "evaluations.jsonl", *rows)
    append(run, "checkpoints.jsonl", *({"step": step, "checkpoint": f"mint://m/weights/{step}"} for step in means))
    with showing(tmp_path) as (_, client):
        assert client.post(f"{API}/runs/fallen/bisect", json={"metric": "heldout"}).status_code == 202
        state = await_search(client, "fallen")
    assert state["status"] == "done" and state["evaluated"] == [], state
    found = state["result"]
    assert (found["verdict"], found["good"], found["bad"]) == ("found", "mint://m/weights/2", "mint://m/weights/3")


@pytest.mark.parametrize(
    "spec", [{"task": "odd.py:Task", "options": {}}, {"task": "code", "options": {"unsafe_sandbox": True}}], ids=str
)
def test_a_click_neither_runs_a_folders_own_code_nor_leaves_the_sandbox(tmp_path: Path, spec: dict) -> None:
    run = write_run(tmp_path / "runs" / "odd", 1)
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**config, "task_spec": {"seed": 0, **spec}}))
    (tmp_path / "odd.py").write_text("raise SystemExit('it ran')")
    with showing(tmp_path) as (_, client):
        client.post(f"{API}/runs/odd/bisect", json={}).raise_for_status()
        state = await_search(client, "odd")
    assert state["status"] == "failed" and "code of its own" in state["error"]["error"]


def test_searches_go_one_by_one_and_name_what_they_evaluate(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a", 1)
    go_on = threading.Event()

    def search(folder: Path, metric: str, visitor: object, tell: Callable[[str], None]) -> Regression:
        tell("mint://m/weights/1")
        assert go_on.wait(HANG_S)
        raise RequestFailedError(f"{metric} in {folder.name} cannot be read")

    searches = BisectJobs(RunReaders(RunFolders([tmp_path])), search)
    assert searches.state("a") == {"status": "none"}
    assert searches.begin("a", "success", None)["status"] == "running"
    with pytest.raises(OverloadedError, match="another search is running"):
        searches.begin("a", "heldout", None)
    wait_until(lambda: searches.state("a")["evaluated"])
    go_on.set()
    wait_until(lambda: searches.state("a")["status"] != "running")
    state = searches.state("a")
    assert state["status"] == "failed" and state["error"]["message"] == "success in a cannot be read"
    assert searches.begin("a", "heldout", None)["metric"] == "heldout"


def test_the_engine_is_loaded_by_the_first_chat_and_not_before(tmp_path: Path) -> None:
    with showing(tmp_path / "home") as (_, client):
        client.get("/").raise_for_status()
        assert not (tmp_path / "home").exists()
        unknown = client.post("/v1/completions", json={"model": "mint://none/weights/x", "prompt": "a"})
        assert unknown.status_code == 404 and "is not a model here" in unknown.text
        body = {"model": "mint/tiny", "prompt": "1 + 1", "max_tokens": 3, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = [line for line in answer.iter_lines() if line]
        assert len(lines) > 1 and lines[-1] == "data: [DONE]"
        foreign = client.post("/v1/completions", json=body, headers={"sec-fetch-site": "cross-site"})
        assert foreign.status_code == 403
