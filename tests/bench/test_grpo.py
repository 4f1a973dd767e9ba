"""The benchmark compares only equal work, and says by how much a peer takes longer; the contenders here are fakes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from fake_sides import MACHINE, SHAPE, fake, silent
from rich.console import Console

from benchmarks.compare.contenders import Contender, check_peers, make_worker, peer_workers
from benchmarks.compare.environments import PeerEnvironment, run
from benchmarks.compare.grpo import PEERS, WARM_UP_STEPS, make_spec
from benchmarks.compare.report import check_same_work, comparison_row, contender_row, print_table
from benchmarks.compare.shapes import GrpoShape
from benchmarks.compare.turns import Measured, take_turns
from mint.errors import InvalidRequestError, RequestFailedError


def measure(folder: Path, fault: str) -> list[Measured]:
    workers = [fake("mint", folder), fake("trl", folder, fault)]
    return take_turns(workers, warm_ups=WARM_UP_STEPS, repeats=3, say=silent)


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


def test_the_table_names_every_contender_and_the_ratio(tmp_path: Path) -> None:
    rows = [contender_row(side, SHAPE) for side in measure(tmp_path, "slow")]
    console = Console(width=120, record=True, file=(tmp_path / "out").open("w"))
    print_table([*rows, comparison_row(rows, MACHINE)], console)
    text = console.export_text()
    assert "mint" in text
    assert "trl" in text
    assert "2.00x" in text


def test_a_peer_that_failed_has_a_row_that_says_so(tmp_path: Path) -> None:
    workers = [fake("mint", tmp_path), fake("skyrl", tmp_path, "dies", may_fail=True)]
    sides = take_turns(workers, warm_ups=WARM_UP_STEPS, repeats=2, say=silent)
    check_same_work(sides, SHAPE)
    rows = [contender_row(side, SHAPE) for side in sides]
    assert rows[1].keys() == {"bench", "contender", "failure"}
    assert comparison_row(rows, MACHINE)["ratios"] == {}


@pytest.mark.parametrize("peers", [["verl"], ["trl", "trl"]])
def test_unknown_and_repeated_peers_are_refused(peers: list[str]) -> None:
    with pytest.raises(InvalidRequestError, match="peer"):
        check_peers(peers, PEERS)


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


def test_a_contender_gets_the_common_spec_and_its_own_settings(tmp_path: Path) -> None:
    spec = make_spec(SHAPE, base_model=tmp_path / "base", steps=1, threads=2)
    contender = Contender("a", "trl", {"overrides": {"learning_rate": 1}}, {"A_VARIABLE": "1"})
    worker = make_worker("a", contender, spec, tmp_path, {"trl": tmp_path / "python"})
    written = json.loads((tmp_path / "a.json").read_text())
    assert written == spec | {"work_dir": str(tmp_path / "a"), "overrides": {"learning_rate": 1}}
    assert {"OMP_NUM_THREADS=2", "A_VARIABLE=1", str(tmp_path / "python")} <= set(worker.command)
    own = make_worker("mint", Contender("mint_service"), spec, tmp_path)
    assert f"MINT_MODELS=bench/base={tmp_path / 'base'}" in own.command
    assert own.command[own.command.index("-m") + 1] == "benchmarks.peers.mint_service"


def test_a_gpu_is_hidden_unless_it_is_asked_for(tmp_path: Path) -> None:
    spec = make_spec(SHAPE, base_model=tmp_path / "base", steps=1, threads=1)
    peer = Contender("a", "trl", {"memory_limit_bytes": 2**30})
    for device, hidden in (("cpu", True), ("cuda", False)):
        worker = make_worker("a", peer, spec | {"device": device}, tmp_path, {"trl": tmp_path / "python"})
        assert ("CUDA_VISIBLE_DEVICES=" in worker.command) == hidden
        # A driver reserves more addresses than any limit would leave.
        assert ("memory_limit_bytes" in json.loads((tmp_path / "a.json").read_text())) == hidden


def test_a_given_interpreter_is_used_for_all_peers_and_nothing_is_installed(tmp_path: Path) -> None:
    spec = make_spec(SHAPE, base_model=tmp_path / "base", steps=1, threads=1)
    python = tmp_path / "python"
    workers = peer_workers(["trl", "skyrl"], PEERS, spec, tmp_path, tmp_path / "home", silent, python)
    assert all(str(python) in worker.command for worker in workers)
    assert not (tmp_path / "home").exists()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_mint_and_trl_do_the_same_step(tmp_path: Path) -> None:
    """Installs TRL from the package registry, then runs the real benchmark, briefly."""
    from benchmarks.compare.grpo import run_grpo_bench

    mint_row, trl_row, comparison = run_grpo_bench(
        peers=["trl"], shape=GrpoShape(), repeats=2, threads=1, home=tmp_path
    )
    assert mint_row["probe_logprob_before"] == pytest.approx(trl_row["probe_logprob_before"], abs=1e-2)
    assert mint_row["trained_parameters"] == trl_row["trained_parameters"]
    assert comparison["ratios"]["trl"] > 0
