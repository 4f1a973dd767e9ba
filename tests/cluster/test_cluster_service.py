"""A service whose engine is a cluster: the same results as one process, also if a rank is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from engine_data import LORA
from small_models import write_model
from waiting import wait_until

pytest.importorskip("ray", reason="pip install 'mint[cluster]'")

from clusters import cluster, grpo_step, open_model, torch_engine
from sdk_run import run

import mint
from mint.cluster import groups
from mint.cluster.engine import ClusterEngine
from mint.compose.embedded import open_embedded
from mint.engine.protocol import Engine, ModelsLostError
from mint.errors import InvalidRequestError, NotFoundError

pytestmark = pytest.mark.slow

STEPS = 6
NOTHING: Mapping[int, int] = {}


@pytest.fixture(scope="module")
def engine() -> Iterator[ClusterEngine]:
    engine = cluster(2)
    yield engine
    engine.close()


def program(
    data_dir: Path, folder: Path, engine: Engine, *, kill_at: int | None = None, resize: Mapping[int, int] = NOTHING
) -> list[object]:
    """A small run through the SDK: what it samples, its losses and its digests.

    A rank is killed in step `kill_at`; from a step of `resize` on, so many ranks train.
    """

    def disturb(step: int) -> None:
        if step == kill_at:
            assert isinstance(engine, ClusterEngine)
            os.kill(engine.processes[1], signal.SIGKILL)
        if step in resize:
            assert isinstance(engine, ClusterEngine)
            engine.resize(trainers=resize[step])

    with mint.ServiceClient(open_embedded=lambda: open_embedded(data_dir=data_dir, engine=engine)) as service:
        return run(service, str(folder), STEPS, disturb, copies=8)


def test_a_run_on_ranks_gives_the_bits_of_one_process(tmp_path: Path, folder: Path, engine: ClusterEngine) -> None:
    assert program(tmp_path / "two", folder, engine) == program(tmp_path / "one", folder, torch_engine())


def test_a_run_in_which_a_rank_is_killed_gives_the_same(tmp_path: Path, folder: Path, engine: ClusterEngine) -> None:
    lost = engine.cluster_state["lost"]
    disturbed = program(tmp_path / "killed", folder, engine, kill_at=3)
    assert engine.cluster_state["lost"] == lost + 1
    assert disturbed == program(tmp_path / "one", folder, torch_engine())


def test_a_run_in_which_the_number_of_ranks_changes_gives_the_same(
    tmp_path: Path, folder: Path, engine: ClusterEngine, caplog: pytest.LogCaptureFixture
) -> None:
    lost = engine.cluster_state["lost"]
    wanted = {1: 1, 3: 3, 4: 2}
    with caplog.at_level("WARNING"):
        found = program(tmp_path / "resized", folder, engine, resize=wanted)
    assert found == program(tmp_path / "one", folder, torch_engine())
    assert caplog.text.count("are wanted") == 3 and engine.cluster_state["lost"] == lost


def test_a_frozen_rank_is_noticed_and_the_ranks_start_again(
    folder: Path, engine: ClusterEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_model(engine, folder)
    first = grpo_step(engine, folder, 0)
    frozen = engine.processes[0]
    monkeypatch.setattr(engine._group, "_silence_s", 5.0)
    os.kill(frozen, signal.SIGSTOP)
    with pytest.raises(ModelsLostError, match="silent"):
        grpo_step(engine, folder, 1)
    assert not engine.has_model("m")
    wait_until(lambda: not Path(f"/proc/{frozen}").exists())
    open_model(engine, folder)
    assert grpo_step(engine, folder, 0) == first


def test_a_rank_that_is_stuck_while_another_waits_is_noticed_and_the_ranks_start_again(
    folder: Path, engine: ClusterEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loop_in_the_next_pass(_engine: Engine) -> None:
        from torch.distributed import distributed_c10d

        from mint.engine import training_pass

        def loop(*_arguments: object, **_named: object) -> None:
            while True:
                pass

        if distributed_c10d.get_rank() == 1:
            training_pass._run = loop  # ty: ignore[invalid-assignment]

    open_model(engine, folder)
    first = grpo_step(engine, folder, 0)
    engine._run(loop_in_the_next_pass)
    stuck = engine.processes[1]
    monkeypatch.setattr(engine._group, "_deadline_s", 5.0)
    with pytest.raises(ModelsLostError, match="rank 1 is stuck"):
        grpo_step(engine, folder, 1)
    wait_until(lambda: not Path(f"/proc/{stuck}").exists())
    open_model(engine, folder)
    assert grpo_step(engine, folder, 0) == first


def test_an_error_is_raised_as_by_one_process_and_the_ranks_live_on(folder: Path, engine: ClusterEngine) -> None:
    open_model(engine, folder)
    processes = engine.processes
    with pytest.raises(NotFoundError):
        engine.state_digest("other")
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        engine._run(lambda _engine: 1 // 0)
    assert engine.processes == processes and engine.state_digest("m")


def test_ranks_that_disagree_start_again(folder: Path, engine: ClusterEngine) -> None:
    open_model(engine, folder)
    grpo_step(engine, folder, 0)

    last = engine.processes[1]

    def fails_on_one(_engine: Engine) -> None:
        if os.getpid() == last:
            raise MemoryError("one rank alone")

    with pytest.raises(ModelsLostError, match="1 of 2 ranks"):
        engine._run(fails_on_one)
    assert not engine.has_model("m")


def test_a_rank_with_other_numbers_is_refused(folder: Path) -> None:
    engine = cluster(1, rank_dtype="bfloat16")
    with pytest.raises(InvalidRequestError, match="dtype"):
        open_model(engine, folder)
    engine.close()


def test_a_rank_whose_base_has_other_weights_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path, "tied")
    engine = cluster(1)
    engine.load_base("base", str(tmp_path))
    write_model(tmp_path, "tied", seed=1)  # ranks read it with the first model
    with pytest.raises(InvalidRequestError, match="base_fingerprint"):
        engine.create_model("m", "base", LORA)
    engine.close()


def test_who_lacks_the_token_cannot_use_the_ports_of_the_cluster(folder: Path, engine: ClusterEngine) -> None:
    open_model(engine, folder)
    address = groups.ray.get_runtime_context().gcs_address
    program = f"import ray; ray.init(address={address!r}, logging_level='ERROR'); print('in')"
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    for more, is_in in (({}, False), ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}, False)):
        done = subprocess.run(
            [sys.executable, "-c", program], env=own | more, capture_output=True, text=True, timeout=120, check=False
        )
        assert ("in" in done.stdout) == is_in and done.returncode != 0


def test_a_program_that_ends_leaves_no_folder_and_no_process(tmp_path: Path) -> None:
    program = (
        "import mint\n"
        "with mint.ServiceClient() as service:\n"
        "    print(service.create_lora_training_client('mint/tiny', rank=4).model_id)\n"
    )
    with tempfile.TemporaryDirectory() as folder:  # Ray's sockets need a short path
        own = {"TMPDIR": folder, "MINT_HOME": str(tmp_path), "MINT_CLUSTER": "local", "MINT_TRAINERS": "2"}
        subprocess.run([sys.executable, "-c", program], env=os.environ | own, timeout=300, check=True)
        assert [left.name for left in Path(folder).iterdir() if left.name.startswith("mint-")] == []
        assert not any(folder in words for words in command_lines())


def command_lines() -> list[str]:
    """Those of all processes of this machine."""
    lines = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            lines.append((process / "cmdline").read_text())
    return lines
