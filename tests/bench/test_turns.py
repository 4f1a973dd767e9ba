"""Workers compute only in their turn and never outlive the benchmark; what goes wrong with one is said with its log."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from fake_sides import fake, silent

from benchmarks.compare.turns import Worker, take_turns
from mint.errors import RequestFailedError


def test_a_dying_worker_is_reported_with_its_log(tmp_path: Path) -> None:
    workers = [fake("mint", tmp_path), fake("trl", tmp_path, "dies")]
    with pytest.raises(RequestFailedError, match=r"(?s)trl worker ended with exit code 1.*out of memory, say"):
        take_turns(workers, warm_ups=1, repeats=1, say=silent)


def test_the_others_go_on_without_a_worker_that_may_fail(tmp_path: Path) -> None:
    workers = [fake("mint", tmp_path), fake("trl", tmp_path, "dies", may_fail=True)]
    mint, trl = take_turns(workers, warm_ups=1, repeats=2, say=silent)
    assert (len(mint.steps), mint.failure) == (2, "")
    assert len(trl.steps) == 0
    assert "out of memory, say" in trl.failure


def test_every_second_round_goes_in_the_opposite_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    ask = Worker.ask

    def note(worker: Worker, command: str, *, answer: str, timeout_s: float) -> dict[str, object]:
        asked.append(f"{worker.name} {command}")
        return ask(worker, command, answer=answer, timeout_s=timeout_s)

    monkeypatch.setattr(Worker, "ask", note)
    take_turns([fake("a", tmp_path), fake("b", tmp_path)], warm_ups=0, repeats=3, say=silent)
    assert asked == ["a step", "b step", "b step", "a step", "a step", "b step", "a finish", "b finish"]


def test_workers_do_not_outlive_the_benchmark(tmp_path: Path) -> None:
    with fake("trl", tmp_path) as worker:
        worker.hear("ready", timeout_s=30)
    assert worker.process.returncode is not None


def test_a_silent_worker_is_given_up_after_its_timeout(tmp_path: Path) -> None:
    sleeper = Worker(
        "trl", [sys.executable, "-c", "input()"], log_path=tmp_path / "log", environment={"A_VARIABLE": "1"}
    )
    with sleeper, pytest.raises(RequestFailedError, match=r"no answer within 0\.1 s"):
        sleeper.hear("ready", timeout_s=0.1)


def test_worker_environments_add_and_remove_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINT_BASE_URL", "http://elsewhere")
    code = "import json, os; print(json.dumps({'event': 'ready', **os.environ}), flush=True)"
    worker = Worker(
        "mint",
        [sys.executable, "-c", code],
        log_path=tmp_path / "log",
        environment={"MINT_THREADS": "1"},
        without=("MINT_BASE_URL",),
    )
    with worker:
        seen = worker.hear("ready", timeout_s=30)
    assert seen["MINT_THREADS"] == "1"
    assert "MINT_BASE_URL" not in seen
