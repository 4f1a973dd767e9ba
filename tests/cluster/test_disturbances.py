"""Replicas, ranks, nodes and the server are killed and frozen in GRPO runs with streams open: no run differs.

Once each by default. `MINT_TEST_DISTURBANCES=10` does it ten times each, at other moments; with `-s` the times are
printed, and `MINT_TEST_REPORT=FILE` appends each case as a line of JSON.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import wait_until

pytest.importorskip("ray", reason="pip install 'mint[cluster]'")

from disturbed_runs import Campaign, Disturbance, Seen, as_json, grpo, report
from open_streams import OpenStreams, Piece
from ray_nodes import ray_nodes
from served_cluster import Server, serving, workers_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]

TIMES = int(os.environ.get("MINT_TEST_DISTURBANCES", "1"))
SEED = int(os.environ.get("MINT_TEST_SEED", "0"))
HOW = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}
PAUSE_S = 12.0
"""How long a frozen server stays frozen, before it goes on or is replaced."""

Expected = tuple[Seen, dict[int, list[Piece]]]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    """The undisturbed run, and undisturbed streams by seed, of a server without a cluster."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with serving(folder / "data", None, os.environ) as server:
        streams = OpenStreams(server.url, 0)
        seen = grpo(server.url, folder / "run")
        streams.finish()
    assert len({row["optim/grad_norm"] for row in seen.metrics}) > 5 and seen.digest is not None
    return seen, dict(streams.ended)


def disturb(server: Server, folder: Path, expected: Expected, disturbances: Iterator[Disturbance]) -> None:
    """A run for each disturbance; all must be the undisturbed one."""
    campaign = Campaign(server, folder, *expected)
    campaign.warm_up()
    rng = random.Random(SEED)
    for number, disturbance in enumerate(disturbances):
        case = campaign.run(disturbance, number, rng)
        line = as_json(case)
        print(line, flush=True)
        if "MINT_TEST_REPORT" in os.environ:
            with Path(os.environ["MINT_TEST_REPORT"]).open("a") as file:
                file.write(f"{line}\n")
    print(report(campaign.cases), flush=True)
    assert [case.wrong for case in campaign.cases if case.wrong] == [], server.log[-4000:]


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}/cmdline").exists() or not Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.mark.parametrize("how", list(HOW))
@pytest.mark.parametrize("what", ["replica", "rank"])
def test_a_killed_or_frozen_replica_or_rank_changes_no_run_and_no_stream(
    tmp_path: Path, expected: Expected, what: str, how: str
) -> None:
    with serving(tmp_path / "data", None, os.environ, "--cluster=local", "--trainers=2", "--samplers=2") as server:
        rng = random.Random(f"{what} {how} {SEED}")

        def disturbance() -> Disturbance:
            victims: list[int] = []

            def strike() -> str:
                state = server.cluster()
                assert state is not None
                if what == "rank":
                    victims.append(rng.choice(state["ranks"]))
                else:
                    victims.append(max(state["replicas"], key=lambda own: own["sequences"])["process"])
                os.kill(victims[0], HOW[how])
                return str(victims[0])

            def is_whole() -> bool:
                state = server.cluster()
                if state is None:
                    return False
                own = state["ranks"] if what == "rank" else [replica["process"] for replica in state["replicas"]]
                return len(own) == 2 and victims[0] not in own and is_gone(victims[0])

            return Disturbance(what, how, strike, is_whole)

        disturb(server, tmp_path, expected, (disturbance() for _ in range(TIMES)))


@pytest.mark.parametrize("how", list(HOW))
def test_a_killed_or_frozen_node_of_a_ray_cluster_changes_no_run_and_no_stream(
    tmp_path: Path, expected: Expected, how: str
) -> None:
    """The node that has one of two ranks and a replica; another one joins some seconds later."""
    with ray_nodes(2, 2) as nodes:
        options = (f"--cluster={nodes.address}", "--trainers=2", "--samplers=2")
        with serving(tmp_path / "data", None, nodes.environment, *options) as server:

            def disturbances() -> Iterator[Disturbance]:
                for _ in range(TIMES):
                    node = len(nodes) - 1
                    yield Disturbance("node", how, lambda node=node: strike(node), lambda: is_whole())

            def strike(node: int) -> str:
                victims = nodes.processes(node)
                for pid in victims:
                    os.kill(pid, HOW[how])
                lost.append(victims)
                time.sleep(2.0)
                nodes.add(2)
                return str(victims[0])

            def is_whole() -> bool:
                state = server.cluster()
                if state is None:
                    return False
                own = [*state["ranks"], *(replica["process"] for replica in state["replicas"])]
                return bool(state["ranks"]) and bool(state["replicas"]) and not set(own) & set(lost[-1])

            lost: list[list[int]] = []
            disturb(server, tmp_path, expected, disturbances())


@pytest.mark.parametrize("how", list(HOW))
def test_a_killed_or_frozen_server_changes_no_run_and_no_stream(tmp_path: Path, expected: Expected, how: str) -> None:
    """A killed one is started again on its data. A frozen one goes on after a while; every second one is replaced."""
    with serving(tmp_path / "data", None, os.environ, "--cluster=local", "--trainers=2", "--samplers=2") as server:
        left: list[int] = []

        def strike(number: int) -> str:
            left[:] = workers_of(server)
            pid = server.process.pid
            os.kill(pid, HOW[how])
            if how == "freeze":
                time.sleep(PAUSE_S)
            if how == "freeze" and number % 2 == 0:
                os.kill(pid, signal.SIGCONT)
                left.clear()
            else:
                server.kill()
                server.start()
            return str(pid)

        def is_whole() -> bool:
            state = server.cluster()
            return (
                state is not None
                and len(state["ranks"]) == 2
                and len(state["replicas"]) == 2
                and all(is_gone(pid) for pid in left)
            )

        cases = (Disturbance("server", how, lambda number=number: strike(number), is_whole) for number in range(TIMES))
        disturb(server, tmp_path, expected, cases)
        wait_until(lambda: all(is_gone(pid) for pid in left))
