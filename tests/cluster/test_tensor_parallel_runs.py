"""Runs on ranks that compute each layer together: the digests of one process, also if a rank is killed or their number
changes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_models import write_model

pytest.importorskip("ray", reason="pip install 'mint[cluster]'")

from clusters import cluster, grpo_step, open_model, torch_engine
from sdk_run import run

import mint
from mint.cluster.collectives.parallelism import Parallelism
from mint.cluster.engine import ClusterEngine
from mint.compose.embedded import open_embedded
from mint.engine.protocol import Engine
from mint.errors import InvalidRequestError

STEPS = 5
SILENCE_S = 5.0
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
SHAPES = {
    "qwen3": HEADS,
    "qwen3_moe": {**HEADS, "num_experts": 8},
    "qwen3_5_moe_text": {**HEADS, "linear_num_key_heads": 4},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {family: tmp_path_factory.mktemp(family) for family in SHAPES}
    for family, folder in folders.items():
        write_model(folder, "tied", family=family, **SHAPES[family])
    return folders


@pytest.fixture
def engine() -> Iterator[ClusterEngine]:
    engine = cluster(2, parallelism=Parallelism(tensor_parallel=2))
    yield engine
    engine.close()


def program(
    data_dir: Path, folder: Path, engine: Engine, *, at: int | None = None, how: signal.Signals = signal.SIGKILL
) -> list[object]:
    """A small run through the SDK: what it samples, its losses and its digests. A rank gets a signal in step `at`."""

    def disturb(step: int) -> None:
        if at is not None and step == at - 1:
            assert isinstance(engine, ClusterEngine) and engine._group is not None
            engine._group._silence_s = SILENCE_S
        if step == at:
            assert isinstance(engine, ClusterEngine)
            os.kill(engine.processes[1], how)

    with mint.ServiceClient(open_embedded=lambda: open_embedded(data_dir=data_dir, engine=engine)) as service:
        return run(service, str(folder), STEPS, disturb, copies=8)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("family", list(SHAPES))
def test_a_run_in_which_a_rank_is_killed_or_frozen_is_that_of_one_process(
    tmp_path: Path, folders: dict[str, Path], engine: ClusterEngine, family: str, how: signal.Signals
) -> None:
    disturbed = program(tmp_path / "disturbed", folders[family], engine, at=3, how=how)
    assert engine.cluster_state["lost"] == 1
    assert disturbed == program(tmp_path / "one", folders[family], torch_engine(chunked=True))


@pytest.mark.slow
def test_50_steps_of_grpo_end_with_one_digest(folders: dict[str, Path]) -> None:
    expected = dict[tuple[str, str], list[str]]()
    for dtype in ("float32", "bfloat16"):
        one = torch_engine(dtype=dtype, chunked=True)
        for family, folder in folders.items():
            open_model(one, folder)
            expected[dtype, family] = [grpo_step(one, folder, step) for step in range(50)]
            assert len(set(expected[dtype, family])) == 50
        for trainers, tensor_parallel in ((1, 1), (2, 2), (4, 4), (4, 2)):
            ranks = cluster(trainers, dtype=dtype, parallelism=Parallelism(tensor_parallel=tensor_parallel))
            for family, folder in folders.items():
                open_model(ranks, folder)
                assert [grpo_step(ranks, folder, step) for step in range(50)] == expected[dtype, family]
            ranks.close()


def test_ranks_that_compute_layers_together_come_in_multiples(engine: ClusterEngine) -> None:
    with pytest.raises(InvalidRequestError, match=r"trainers = 3: .*multiple of the 2"):
        cluster(3, parallelism=Parallelism(tensor_parallel=2))
    with pytest.raises(InvalidRequestError, match="multiple"):
        engine.resize(trainers=3)
    engine.resize(trainers=4)
    assert engine.cluster_state["tensor_parallel"] == 2
