"""Many tenants are compared with one client that does the work of all; SkyRL tx's side counts all of its processes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.compare.contenders import ENVIRONMENTS, peer_environment
from benchmarks.compare.grpo import PEERS
from benchmarks.compare.shapes import GrpoShape
from benchmarks.compare.tenants import make_spec, print_table, run_tenants_bench, tenants_row
from benchmarks.compare.turns import ROOT, Worker


def round_of(who: str, seconds: dict[int, float], digest: str = "d") -> dict[str, Any]:
    wall_s = max(seconds.values())
    results = [
        {"tenant": number, "seconds": own_s, "digest": f"{digest}{number}", "sampled_tokens": 100}
        for number, own_s in seconds.items()
    ]
    return {"who": who, "wall_s": wall_s, "cpu_s": wall_s / 2, "tenants": results}


def rounds(last: str = "d") -> list[dict[str, Any]]:
    return [
        round_of("together", {0: 90.0, 1: 99.0}),
        round_of("together", {0: 8.0, 1: 10.0}),
        round_of("one", {0: 11.0}, digest="other work, "),
        round_of("together", {0: 12.0, 1: 10.0}),
        round_of("one", {0: 10.2}, digest="other work, "),
        round_of("alone-0", {0: 5.0}),
        round_of("alone-1", {1: 6.0}, digest=last),
    ]


def test_the_row_compares_like_with_like_and_leaves_the_warm_up_out() -> None:
    row = tenants_row(rounds())
    assert row["tenants"] == 2
    assert row["seconds_together"] == [10.0, 12.0]
    assert row["throughput_ratios"] == pytest.approx([1.1, 0.85])
    assert row["throughput_ratio"] == pytest.approx(0.975)
    assert row["slowest_over_fastest"] == pytest.approx((1.25 + 1.2) / 2)
    assert row["slowest_over_fastest_max"] == pytest.approx(1.25)
    assert row["sampled_tokens_per_second"] == pytest.approx(200 / 11)
    assert row["tenants_with_same_bits"] == 2


def test_a_tenant_whose_digest_differs_alone_is_named() -> None:
    row = tenants_row(rounds(last="something else "))
    assert row["tenants_with_other_bits"] == [1]
    assert row["tenants_with_same_bits"] == 1


def test_a_missing_digest_is_not_an_equal_one() -> None:
    found = rounds()
    for one in found:
        for result in one["tenants"]:
            result["digest"] = None
    assert tenants_row(found)["tenants_with_same_bits"] == 0


def test_every_tenant_has_prompts_of_its_own() -> None:
    spec = make_spec(GrpoShape(), tenants=3, steps=2)
    prompts = [tuple(prompt) for tenant in spec["prompts"] for step in tenant for prompt in step]
    assert [len(tenant) for tenant in spec["prompts"]] == [2, 2, 2]
    assert len(set(prompts)) == len(prompts) == 3 * 2 * 8


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_tenants_of_one_service_train_as_each_alone(tmp_path: Path) -> None:
    rows = run_tenants_bench(home=tmp_path, tenants=2, steps=1, repeats=1, transports=["embedded"])
    (row,) = rows
    assert (row["tenants"], row["tenants_with_same_bits"]) == (2, 2)
    assert row["sampled_tokens_per_second"] > 0
    assert row["peak_rss_mib"] > 100
    assert json.loads(json.dumps(rows)) == rows
    console = Console(width=120, record=True, file=(tmp_path / "out").open("w"))
    print_table(rows, console)
    assert "2 of 2" in console.export_text()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_tenants_with_keys_of_their_own_train_as_each_alone(tmp_path: Path) -> None:
    (row,) = run_tenants_bench(home=tmp_path, tenants=2, steps=1, repeats=1, transports=["http"])
    assert row["tenants_with_same_bits"] == 2


STARTS_A_SERVER = """
import json, subprocess, sys
server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdout=subprocess.DEVNULL)
print(json.dumps({"event": "ready", "server": server.pid}), flush=True)
sys.stdin.read() if sys.argv[1] == "forgets it" else server.wait()
"""


@pytest.mark.parametrize("how", ["forgets it", "hangs"])
def test_a_server_does_not_outlive_the_worker_that_started_it(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.compare.turns.END_S", 1.0)
    command = [sys.executable, "-c", STARTS_A_SERVER, how]
    with Worker("mint-http", command, log_path=tmp_path / "log", environment={}) as worker:
        status = Path(f"/proc/{worker.hear('ready', timeout_s=60)['server']}/stat")
        assert status.exists()
    deadline = time.monotonic() + 10
    while status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline, "the server is still there"
        time.sleep(0.02)


# --- SkyRL tx --------------------------------------------------------------------------------------------------------

BUSY = """
import time
while time.process_time() < 0.3:
    pass
print("done", flush=True)
input()
"""
NEST = """
import subprocess, sys
subprocess.run([sys.executable, *sys.argv[1:]])
"""
MEASURE = """
import json, re, subprocess, sys
from pathlib import Path
from benchmarks.peers.skyrl import Processes

before_s = Processes().cpu_s()
with subprocess.Popen([sys.executable, *sys.argv[1:]], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
    child.stdout.readline()
    cpu_s, rss_bytes = Processes().cpu_s() - before_s, Processes().peak_rss_bytes()
    child.stdin.write(b"\\n")
own_kib = int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
print(json.dumps([cpu_s, rss_bytes, own_kib * 1024]))
"""


def test_cpu_and_memory_of_children_and_grandchildren_are_counted() -> None:
    command = [sys.executable, "-c", MEASURE, "-c", NEST, "-c", BUSY]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    cpu_s, rss_bytes, own_bytes = json.loads(done.stdout)
    assert cpu_s >= 0.27  # the kernel rounds down to hundredths, for each process
    assert rss_bytes > own_bytes + 2 * 5_000_000


def test_skyrl_s_best_differs_from_its_documentation_s_in_settings_only() -> None:
    plain, best = PEERS["skyrl"], PEERS["skyrl-best"]
    assert plain.overrides["settings"]["backend"] == {}
    assert (plain.worker, plain.environment) == (best.worker, best.environment) == ("skyrl", "skyrl")
    assert "skyrl" in ENVIRONMENTS


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_mint_and_skyrl_do_the_same_step(tmp_path: Path) -> None:
    """Installs SkyRL tx from the package registry, then runs the real benchmark, briefly."""
    from benchmarks.compare.grpo import run_grpo_bench

    mint_row, skyrl_row, comparison = run_grpo_bench(
        peers=["skyrl-best"], shape=GrpoShape(), repeats=2, threads=1, home=tmp_path
    )
    assert "failure" not in skyrl_row, skyrl_row
    assert mint_row["probe_logprob_before"] == pytest.approx(skyrl_row["probe_logprob_before"], abs=1e-2)
    assert mint_row["trained_parameters"] == skyrl_row["trained_parameters"]
    assert comparison["ratios"]["skyrl-best"] > 0
    assert peer_environment("skyrl", tmp_path).is_complete
