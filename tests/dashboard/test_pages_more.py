"""The pages of diagnosis, checkpoints and service: what the server writes, and what a browser makes of a real run."""

from __future__ import annotations

import json
import os
import shlex
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner
from waiting import HANG_S, wait_until

from mint.cli.main import app
from mint.dashboard import diagnosis_cache
from mint.dashboard.finding_evidence import CHECKED, EVIDENCE, evidence_of
from mint.dashboard.run_folders import RunFolders
from mint.dashboard.run_readers import RunReaders
from mint.rl.analysis.diagnosis import CODES
from mint.rl.analysis.run_analysis import diagnose_run
from mint.rl.finding import Finding
from mint.runs.rollout_index import FLAGS
from mint.runs.rollout_query import SORTS, RolloutQuery
from mint.server.http.access_log import AccessRecord
from mint.server.ops.metrics import Metrics
from tests.browser.browser_harness import CHROMIUM, Tab, lines, started
from tests.dashboard.dashboard_harness import API, add_step, append, evaluation, finding, showing, write_run
from tests.dashboard.test_pages_run import Page, page

STEPS = 4
BESIDE_THE_RULES = {"heldout_overlap", "template_rewrites_history", "tracker_failed", "unused_settings"}
HOSTILE = '<img src=x onerror="alert(1)">'
SHELL = "mint://m/weights/4'; rm -rf ~ #"
SLOW_NETWORK = {"offline": False, "latency": 0, "downloadThroughput": 200, "uploadThroughput": -1}
"""Bytes a second, as chromium's tools for developers take them."""

LEDGER = {"generated": 100.0, "graded": 90.0, "informative": 60.0, "trained": 50.0, "gradient": 25.0}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    home = tmp_path_factory.mktemp("home")
    faulty = write_run(home / "runs" / "faulty", STEPS)
    counted = {f"ledger/{stage}": count for stage, count in LEDGER.items()}
    append(faulty, "metrics.jsonl", {"step": STEPS + 1.0, "reward/mean": 0.0, **counted})
    append(
        faulty,
        "findings.jsonl",
        finding("truncation", 2),
        {**finding("tracker_failed", 3), "evidence": HOSTILE, "numbers": {}},
        {**finding(HOSTILE, 0), "severity": "info"},
    )
    append(faulty, "checkpoints.jsonl", *({"step": step, "checkpoint": f"mint://m/weights/{step}"} for step in (1, 2)))
    append(faulty, "checkpoints.jsonl", {"step": 4, "checkpoint": SHELL})
    append(faulty, "evaluations.jsonl", evaluation(2, 0.5), evaluation(4, 0.75))
    write_run(home / "runs" / "healthy", 1)
    write_run(home / "runs" / "begun", 0, planned=3)
    with showing(home) as (_, client):
        yield client


# --- evidence --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", sorted({*CODES, *BESIDE_THE_RULES}))
def test_every_finding_has_a_meaning_metrics_and_rollouts_that_can_be_asked_for(code: str) -> None:
    known = EVIDENCE[code]
    assert known.means and known.plot
    query = RolloutQuery(**known.samples(9))
    assert query.flags <= FLAGS.keys() and query.sort in SORTS
    if known.steps:
        assert (query.first_step, query.last_step) == (max(1, 10 - known.steps), 9)


def test_what_a_page_says_is_checked_is_all_that_a_step_is_asked() -> None:
    checked = {code for codes in CHECKED.values() for code in codes}
    assert checked - CODES.keys() == set(), "these are in CHECKED (dashboard/finding_evidence.py), and no step has them"
    assert CODES.keys() - checked == set(), "these have no row in CHECKED (dashboard/finding_evidence.py)"


def test_the_rollouts_of_a_finding_are_those_of_the_steps_before_it() -> None:
    shown = evidence_of(finding("truncation", 7))
    assert shown["query"] == {"flags": ["truncated"], "first_step": "3", "last_step": "7"}
    assert shown["address"] == "flag=truncated&first_step=3&last_step=7"
    assert evidence_of(finding("truncation", 0))["query"] == {"flags": ["truncated"]}
    assert not evidence_of(finding("tracker_failed", 7))["has_samples"]


# --- diagnosis -------------------------------------------------------------------------------------------------------


def test_a_finding_is_on_the_page_before_any_script_has_run(client: httpx.Client) -> None:
    found = page(client, "/runs/faulty/diagnosis")
    [(_, text)] = found.find("article", id="truncation")
    assert "warning" in text and "step 2" in text and "33%" in text and "More" in text
    links = [attributes["href"] for attributes, said in found.find("a") if said == "Show these samples"]
    assert "/runs/faulty/rollouts?flag=truncated&first_step=1&last_step=2" in links


def test_the_link_of_a_finding_asks_for_the_very_rollouts_of_its_query(client: httpx.Client) -> None:
    [shown] = [
        one for one in client.get(f"{API}/runs/faulty/findings").json()["findings"] if one["code"] == "truncation"
    ]
    by_link = client.get(f"{API}/runs/faulty/rollouts?{shown['address']}").json()
    by_code = client.get(f"{API}/runs/faulty/rollouts", params={"finding": "truncation"}).json()
    assert by_link == by_code and by_link["total"] == 4
    assert all("truncated" in row["flags"] and row["step"] <= 2 for row in by_link["rows"])


def test_the_words_of_a_finding_are_text(client: httpx.Client) -> None:
    html = client.get("/runs/faulty/diagnosis").text
    assert "<img" not in html
    assert Page(html).find("article", id=HOSTILE)


def test_the_ledger_is_the_sum_over_the_steps(client: httpx.Client) -> None:
    bars = page(client, "/runs/faulty/diagnosis").find("progress")
    assert [float(attributes["value"]) for attributes, _ in bars] == list(LEDGER.values())
    assert {attributes["max"] for attributes, _ in bars} == {"100.0"}


def test_a_run_without_findings_says_what_was_checked(client: httpx.Client) -> None:
    found = page(client, "/runs/begun/diagnosis")
    assert any(text.startswith("No findings in 0 steps") for _, text in found.find("div", id="verdict"))
    assert {text for _, text in found.find("dt", **{"class": "mono"})} == CODES.keys()


def test_a_finding_that_became_more_severe_is_shown_once(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "one", 3, planned=9)
    append(run, "findings.jsonl", finding("truncation", 1), {**finding("truncation", 3), "severity": "error"})
    with showing(tmp_path) as (_, client):
        cards = page(client, "/runs/one/diagnosis").find("article")
    assert [(attributes["id"], attributes["data-seen"]) for attributes, _ in cards] == [("truncation", "error 3")]


def test_nobody_waits_for_the_diagnosis_of_a_long_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_asked = threading.Event()

    def diagnose_when_asked(folder: Path) -> list[Finding]:
        assert is_asked.wait(HANG_S)
        return diagnose_run(folder)

    monkeypatch.setattr(diagnosis_cache, "WAIT_S", 0.0)
    monkeypatch.setattr(diagnosis_cache, "diagnose_run", diagnose_when_asked)
    run = write_run(tmp_path / "runs" / "long", 30)
    append(run, "findings.jsonl", finding("tracker_failed", 1))
    diagnoses = diagnosis_cache.DiagnosisCache(RunReaders(RunFolders([tmp_path])))
    found, is_whole = diagnoses.of("long")
    assert [row["code"] for row in found] == ["tracker_failed"] and not is_whole
    is_asked.set()
    wait_until(lambda: diagnoses.of("long")[1])
    codes = {row["code"] for row in diagnoses.of("long")[0]}
    assert codes == {row["code"] for row in diagnoses.known("long")} == {one.code for one in diagnose_run(run)}
    assert {"tracker_failed", "no_heldout"} <= codes


# --- checkpoints -----------------------------------------------------------------------------------------------------


def test_checkpoints_are_listed_with_their_evaluation_and_the_best_one(client: httpx.Client) -> None:
    found = page(client, "/runs/faulty/checkpoints")
    rows = {attributes["data-step"]: text for attributes, text in found.find("tr") if "data-step" in attributes}
    assert "not evaluated" in rows["1"]
    assert "0.500 [0.400, 0.600]" in rows["2"] and "best" not in rows["2"]
    assert "0.750 [0.650, 0.850]" in rows["4"] and "best" in rows["4"]


def test_commands_to_copy_cannot_run_what_a_log_has_put_into_a_name(client: httpx.Client) -> None:
    found = page(client, "/runs/faulty/checkpoints")
    commands = [attributes["data-copy"] for attributes, _ in found.find("button") if "data-copy" in attributes]
    exports = [
        shlex.split(command) for command in commands if "rm -rf" in command and command.startswith("mint export")
    ]
    assert [(words[2], words[4]) for words in exports] == [(SHELL, "peft"), (SHELL, "hf"), (SHELL, "gguf-ready")]
    [train] = [shlex.split(command) for command in commands if "rm -rf" in command and command.startswith("mint train")]
    assert train[-1] == f"init_from={SHELL}"


def test_a_single_evaluation_makes_no_checkpoint_the_best(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "one", 2)
    append(run, "checkpoints.jsonl", *({"step": step, "checkpoint": f"mint://m/weights/{step}"} for step in (1, 2)))
    append(run, "evaluations.jsonl", evaluation(2, 0.1))
    with showing(tmp_path) as (_, client):
        found = client.get(f"{API}/runs/one/checkpoints").json()["checkpoints"]
    assert [one["is_best"] for one in found] == [False, False]


def test_a_run_that_has_saved_nothing_says_so(client: httpx.Client) -> None:
    html = client.get("/runs/healthy/checkpoints").text
    assert "Nothing was saved yet" in html and "A search needs two checkpoints" in html


# --- service ---------------------------------------------------------------------------------------------------------


def test_a_folder_says_how_to_get_a_service(client: httpx.Client) -> None:
    html = client.get("/service").text
    assert "mint serve" in html and "/assets/service.js" not in html


def test_requests_are_counted_by_route_and_by_whether_they_were_refused() -> None:
    metrics = Metrics()
    for status in (200, 200, 404):
        metrics.observe(AccessRecord(request_id="r", method="GET", route="/v1/models", status=status))
    assert metrics.requests() == [{"method": "GET", "route": "/v1/models", "answered": 2, "refused": 1}]


# --- in a browser, on a run that was made here ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A data folder with a run that has three checkpoints, its base model among them, and one that was deleted."""
    folder = tmp_path_factory.mktemp("more-home")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("MINT_HOME", str(folder))
        environment.setenv("MINT_THREADS", "1")
        words = [
            "task=math",
            "steps=3",
            "save_every=1",
            "group_size=4",
            "batch_size=2",
            "max_tokens=3",
            "heldout_size=8",
        ]
        trained = CliRunner().invoke(app, ["train", "rl", *words, "--run-dir", str(folder / "runs" / "math")])
        assert trained.exit_code == 0, trained.output
        append(folder / "runs" / "math", "checkpoints.jsonl", {"step": 2, "checkpoint": f"{_saved(folder)[0]}-gone"})
        yield folder


def _saved(home: Path) -> list[str]:
    return [row["checkpoint"] for row in lines(home / "runs" / "math", "checkpoints.jsonl")]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("there is no chromium here")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module", params=["dashboard", "serve"])
def address(request: pytest.FixtureRequest, home: Path) -> Iterator[str]:
    with started(request.param, "--data-dir", str(home), "--port", "0", home=home) as (address, _):
        yield address


@pytest.fixture
def tab(chromium: Any, address: str) -> Iterator[Tab]:
    context = chromium.new_context(viewport={"width": 1200, "height": 900})
    context.set_default_timeout(30_000)
    tab = Tab(context, address)
    yield tab
    tab.check()
    context.close()


@pytest.mark.slow
def test_a_finding_is_shown_with_its_charts_and_the_samples_that_its_link_leads_to(tab: Tab, home: Path) -> None:
    page = tab.open("/runs/math/diagnosis")
    card = page.locator("#truncation")
    card.scroll_into_view_if_needed()
    page.wait_for_selector("#truncation .uplot canvas")
    assert card.locator(".chart").count() == 2
    [seen] = [row["step"] for row in lines(home / "runs" / "math", "findings.jsonl") if row["code"] == "truncation"]
    cut = [row for row in lines(home / "runs" / "math", "rollouts.jsonl") if row["truncated"] and row["step"] <= seen]
    page.wait_for_selector("#truncation .shown")
    link = card.locator(".finding-link a")
    assert cut and (str(len(cut)) in link.inner_text() or len(cut) <= 3)
    address = link.get_attribute("href").partition("?")[2]
    found = httpx.get(f"{tab.address}{API}/runs/math/rollouts?{address}").json()
    assert found["total"] == len(cut)
    first = card.locator(".shown").first
    first.click()
    page.wait_for_selector(".sample")
    assert "/rollouts?step=" in page.url


@pytest.mark.slow
def test_what_is_found_while_the_page_is_open_appears_by_itself(chromium: Any, tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "live", 2, planned=9)
    began = {"pid": os.getpid(), "host": socket.gethostname(), "began_at": time.time(), "ended_at": None}
    (run / "process.json").write_text(json.dumps({**began, "outcome": None, "error": None}))
    with showing(tmp_path) as (server, _):
        context = chromium.new_context()
        tab = Tab(context, server.url)
        shown = tab.open("/runs/live/diagnosis")
        assert "in 2 steps so far" in shown.locator("#verdict").inner_text()
        add_step(run, 3)
        append(run, "findings.jsonl", {**finding("truncation", 3), "evidence": HOSTILE})
        shown.wait_for_selector("#truncation .shown")
        assert HOSTILE in shown.locator("#truncation").inner_text()
        assert shown.locator("#verdict").inner_text().startswith("1 finding")
        tab.check()
        context.close()


@pytest.mark.slow
def test_two_checkpoints_answer_side_by_side_what_the_api_answers(tab: Tab, home: Path) -> None:
    page = tab.open("/runs/math/checkpoints")
    page.fill("#compare textarea", "Q: What is 7 + 8?\nA:")
    page.fill("#compare [name=temperature]", "1")
    page.fill("#compare [name=seed]", "7")
    page.locator(".side[data-side=right] select").select_option(_saved(home)[2])
    page.click("#compare-go")
    page.wait_for_selector(".side[data-side=right] .answer-tag")
    for side, model in (("left", "mint/tiny"), ("right", _saved(home)[2])):
        asked = {
            "model": model,
            "prompt": "Q: What is 7 + 8?\nA:",
            "max_tokens": 3,
            "n": 2,
            "seed": 7,
            "temperature": 1,
        }
        choices = httpx.post(f"{tab.address}/v1/completions", json=asked, timeout=60).json()["choices"]
        shown = page.locator(f".side[data-side={side}] [data-answer]").all_text_contents()
        assert shown == [choice["text"] for choice in choices]


@pytest.mark.slow
def test_a_chat_appears_as_it_comes_and_is_remembered_until_it_is_cleared(tab: Tab, home: Path) -> None:
    page = tab.open("/runs/math/checkpoints")
    page.click(f"[data-chat='{_saved(home)[0]}']")
    page.fill("#chat-tokens", "12")
    for said in ("Hello", "And you?"):
        page.fill("#chat-input", said)
        page.press("#chat-input", "Enter")
        page.wait_for_selector("#chat-send:visible")
    assert page.locator(".chat-message--user .chat-text").all_text_contents() == ["Hello", "And you?"]
    replies = page.locator(".chat-message--assistant .chat-text").all_text_contents()
    assert len(replies) == 2 and all(replies)
    sent = [request for request in tab.asked if request.endswith("/v1/chat/completions")]
    assert len(sent) == 2
    page.click("#chat-clear")
    assert page.locator(".chat-message").count() == 0


@pytest.mark.slow
def test_an_answer_can_be_stopped(tab: Tab) -> None:
    page = tab.open("/runs/math/checkpoints")
    page.locator("#chat-model").select_option("mint/tiny")
    page.fill("#chat-temperature", "0")
    page.fill("#chat-input", "Hello")
    network = page.context.new_cdp_session(page)
    network.send("Network.enable")
    network.send("Network.emulateNetworkConditions", SLOW_NETWORK)  # the 18 tokens of this answer take 20 s
    page.press("#chat-input", "Enter")
    wait_until(lambda: len(page.locator(".chat-message--assistant .chat-text").text_content()) > 2)
    page.press("#chat-input", "Escape")
    page.wait_for_selector("#chat-send:visible")
    assert "stopped" in page.locator(".chat-message--assistant header").inner_text()


@pytest.mark.slow
def test_a_checkpoint_that_is_gone_is_named_with_what_to_do(tab: Tab, home: Path) -> None:
    page = tab.open("/runs/math/checkpoints")
    gone = _saved(home)[3]
    page.click(f"[data-chat='{gone}']")
    page.keyboard.type("Hello")
    page.keyboard.press("Enter")
    page.wait_for_selector(".chat-error")
    said = page.locator(".chat-error").inner_text()
    assert gone in said and "deleted" in said and "mint serve" in said
    assert page.input_value("#chat-input") == "Hello"
    tab.faults.clear()  # the browser's own note of the answer 404


@pytest.mark.slow
def test_a_search_for_a_fall_says_its_verdict_and_what_it_has_read(tab: Tab) -> None:
    page = tab.open("/runs/math/checkpoints")
    page.click("#bisect-go")
    page.wait_for_selector("#bisect-result table")
    state = httpx.get(f"{tab.address}{API}/runs/math/bisect").json()
    assert state["status"] == "done"
    assert page.locator("#bisect-result tbody tr").count() == len(state["result"]["estimates"])
    label = {"found": "found", "uncertain": "uncertain", "none": "no fall"}[state["result"]["verdict"]]
    assert page.locator("#bisect-result .tag").inner_text().endswith(label)
    assert "mint://" not in page.locator("#bisect-result").inner_text()


@pytest.mark.slow
def test_the_service_page_counts_what_is_asked(tab: Tab) -> None:
    page = tab.open("/service")
    if httpx.get(f"{tab.address}{API}/service").json() == {"available": False}:
        assert "No service runs here" in page.locator("main").inner_text()
        return
    asked = {"model": "mint/tiny", "prompt": "Q:", "max_tokens": 4}
    assert httpx.post(f"{tab.address}/v1/completions", json=asked, timeout=60).status_code == 200
    page.wait_for_selector("#routes :text('POST /v1/completions')")
    assert page.locator("[data-cell=state]").inner_text().endswith("running")
    page.wait_for_selector("[data-figure=resident] .spark polyline")
