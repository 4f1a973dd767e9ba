"""The benchmark gives turns, compares only equal work, and says what failed; the contenders here are fakes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from mint.bench.grpo import check_peers, make_spec, take_turns
from mint.bench.peers import PeerEnvironment, run
from mint.bench.report import Measured, check_same_work, comparison_row, contender_row, print_table
from mint.bench.shapes import GrpoShape
from mint.bench.turns import Worker
from mint.errors import InvalidRequestError, RequestFailedError

SHAPE = GrpoShape()
MACHINE = {"cpu": "a processor", "cores": 2, "python": "3", "load_before": 0.0, "load_after": 0.0}


def fake(name: str, folder: Path, fault: str = "") -> Worker:
    path = folder / f"{name}.json"
    path.write_text(json.dumps(make_spec(SHAPE, base_model=folder, steps=5, threads=1)))
    script = Path(__file__).parent / "fake_peer.py"
    return Worker(
        name, [sys.executable, str(script), str(path), fault], log_path=folder / f"{name}.log", environment={}
    )


def measure(folder: Path, fault: str) -> list[Measured]:
    workers = [fake("mint", folder), fake("trl", folder, fault)]
    return take_turns(workers, repeats=3, say=lambda text: None)


def test_a_peer_that_takes_twice_the_time_has_ratio_two(tmp_path: Path) -> None:
    sides = measure(tmp_path, "slow")
    check_same_work(sides, SHAPE)
    rows = [contender_row(side, SHAPE) for side in sides]
    comparison = comparison_row(rows, MACHINE)
    assert [row["steps"] for row in rows] == [3, 3]
    assert rows[0]["sampled_tokens_per_second"] == 2048
    assert comparison["ratios"] == {"trl": 2.0}
    assert comparison["turn_ratios"] == {"trl": [2.0, 2.0, 2.0]}
    assert json.loads(json.dumps([*rows, comparison])) == [*rows, comparison]


@pytest.mark.parametrize("fault", ["stops early", "other base", "no training"])
def test_unequal_work_is_never_compared(tmp_path: Path, fault: str) -> None:
    sides = measure(tmp_path, fault)
    with pytest.raises(RequestFailedError, match="trl"):
        check_same_work(sides, SHAPE)


def test_a_dying_worker_is_reported_with_its_log(tmp_path: Path) -> None:
    with pytest.raises(RequestFailedError, match=r"(?s)trl worker ended with exit code 1.*out of memory, say"):
        measure(tmp_path, "dies")


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


def test_the_table_names_every_contender_and_the_ratio(tmp_path: Path) -> None:
    rows = [contender_row(side, SHAPE) for side in measure(tmp_path, "slow")]
    console = Console(width=120, record=True, file=(tmp_path / "out").open("w"))
    print_table([*rows, comparison_row(rows, MACHINE)], console)
    text = console.export_text()
    assert "mint" in text
    assert "trl" in text
    assert "2.00x" in text


@pytest.mark.parametrize("peers", [["verl"], ["trl", "trl"]])
def test_unknown_and_repeated_peers_are_refused(peers: list[str]) -> None:
    with pytest.raises(InvalidRequestError, match="peer"):
        check_peers(peers)


def test_a_failing_installation_names_the_command() -> None:
    with pytest.raises(RequestFailedError, match=r"(?s)`.*-c raise SystemExit\('no such package'\)`.*no such package"):
        run([sys.executable, "-c", "raise SystemExit('no such package')"])


def test_an_environment_is_reused_only_with_the_same_requirements(tmp_path: Path) -> None:
    environment = PeerEnvironment(folder=tmp_path, torch_version="2.13.0", requirements=("trl==1.16.*",))
    assert not environment.is_complete
    environment.python.parent.mkdir()
    environment.python.touch()
    (tmp_path / "installed.json").write_text(json.dumps(environment.wanted))
    assert environment.is_complete
    assert environment.ensure(say=pytest.fail) == environment.python
    assert not PeerEnvironment(folder=tmp_path, torch_version="2.14.0", requirements=("trl==1.16.*",)).is_complete


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_mint_and_trl_do_the_same_step(tmp_path: Path) -> None:
    """Installs TRL from the package registry, then runs the real benchmark, briefly."""
    from mint.bench.grpo import run_grpo_bench

    mint_row, trl_row, comparison = run_grpo_bench(peers=["trl"], repeats=2, threads=1, home=tmp_path)
    assert mint_row["probe_logprob_before"] == pytest.approx(trl_row["probe_logprob_before"], abs=1e-2)
    assert mint_row["trained_parameters"] == trl_row["trained_parameters"]
    assert comparison["ratios"]["trl"] > 0
