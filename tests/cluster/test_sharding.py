"""Ranks that divide the layers of the base: less memory for each, and the bits of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed.distributed_c10d as dist
from engine_data import ADAM, random_data
from rank_work import engine_with, train_on_ranks, train_steps
from small_models import write_model

from mint.cluster.collectives.parallelism import Parallelism
from mint.cluster.collectives.sharding import ShardedLayers
from mint.cluster.sums import Ranks
from mint.engine import training_pass
from mint.engine.cpu.panels import PanelMatrix, SmallPanelMatrix
from mint.engine.model.weights import layer_matrices
from mint.engine.protocol import resolve_loss
from mint.engine.reductions.division import ALONE
from mint.engine.torch_engine import TorchEngine

OnRanks = Callable[..., list[Any]]


def sharded_steps(folder: Path, dtype: str, native: Path | None = None) -> tuple[Any, ...]:
    digests, results, _ = train_on_ranks(folder, dtype=dtype, parallelism=Parallelism(shards=True), native=native)
    return digests, [own.metrics for own in results], [[each.tobytes() for each in own.logprobs] for own in results]


def layers_of(engine: TorchEngine) -> tuple[int, int]:
    """The bytes that this rank has of the layers between two passes, and those of all their matrices."""
    decoder: Any = engine._bases["base"]._trained
    matrices = [matrix for layer in decoder.weights.layers for matrix in layer_matrices(layer)]
    present = sum(matrix.memory.nbytes for matrix in matrices)
    source = decoder.layer_source
    own = source.own_bytes if isinstance(source, ShardedLayers) else 0
    return present + own, sum(matrix.size_bytes for matrix in matrices)


def memory_of_a_rank(folder: Path) -> tuple[int, int]:
    engine = engine_with(Ranks(Parallelism(shards=True)), folder)
    train_steps(engine)
    return layers_of(engine)


def step_after_a_failure(folder: Path, rank: int, error: Exception) -> tuple[str, str]:
    """What happens in a pass in which the first micro-batch of one rank raises an error, and the digest of a step
    after it."""
    engine = engine_with(Ranks(Parallelism(shards=True)), folder)
    data, loss = random_data(3, count=24, shared=8, policy=True), resolve_loss("importance_sampling")
    plain, calls = training_pass._run, 0

    def fails(*arguments: Any, **named: Any) -> None:
        nonlocal calls
        calls += 1
        if dist.get_rank() == rank and calls == 1:
            raise error
        plain(*arguments, **named)

    outcome = "done"
    with patch.object(training_pass, "_run", fails):
        try:
            engine.forward_backward("m", data, loss)
        except RuntimeError as raised:
            outcome = type(raised).__name__
    engine.clear_gradient("m")
    engine.forward_backward("m", data, loss)
    engine.optim_step("m", ADAM)
    return outcome, engine.state_digest("m")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixture")
    write_model(path, "tied", family="qwen3_moe")
    return path


@pytest.mark.parametrize(
    ("world", "dtype", "family"),
    [
        (2, "float32", "dense"),
        (3, "bfloat16", "mixture"),
        pytest.param(2, "bfloat16", "dense", marks=pytest.mark.slow),
        pytest.param(3, "float32", "mixture", marks=pytest.mark.slow),
    ],
)
def test_steps_with_a_divided_base_end_with_the_state_of_one_process(
    on_ranks: OnRanks, folder: Path, mixture: Path, world: int, dtype: str, family: str
) -> None:
    model = folder if family == "dense" else mixture
    digests, results, _ = train_steps(engine_with(ALONE, model, dtype=dtype))
    logprobs = [[each.tobytes() for each in own.logprobs] for own in results]
    for found in on_ranks(world, sharded_steps, model, dtype):
        assert found == (digests, [own.metrics for own in results], logprobs)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_the_kernels_in_c_read_gathered_matrices(on_ranks: OnRanks, tmp_path: Path, family: str, dtype: str) -> None:
    widths = {} if family == "qwen3" else {"moe_intermediate_size": 32}
    model, kernels = tmp_path / "model", tmp_path / "kernels"
    write_model(model, "tied", family=family, head_dim=32, **widths)
    engine = engine_with(ALONE, model, dtype=dtype, native=kernels)
    decoder: Any = engine._bases["base"]._trained
    assert {type(own) for own in layer_matrices(decoder.weights.layers[0])} & {PanelMatrix, SmallPanelMatrix}
    digests, *_ = train_steps(engine)
    for found, *_ in on_ranks(2, sharded_steps, model, dtype, kernels):
        assert found == digests


@pytest.mark.parametrize("world", [2, 3])
def test_each_rank_keeps_its_part_of_the_layers(on_ranks: OnRanks, folder: Path, world: int) -> None:
    for own, whole in on_ranks(world, memory_of_a_rank, folder):
        assert whole / world <= own < whole / world * 1.01


@pytest.mark.parametrize(
    ("error", "outcomes"),
    [
        (RuntimeError("broken"), ["RuntimeError", "PeerFailedError"]),
        (MemoryError("can't allocate memory"), ["done", "done"]),
    ],
)
def test_a_rank_that_fails_does_not_keep_the_others_waiting(
    on_ranks: OnRanks, folder: Path, error: Exception, outcomes: list[str]
) -> None:
    engine = engine_with(ALONE, folder)
    engine.forward_backward("m", random_data(3, count=24, shared=8, policy=True), resolve_loss("importance_sampling"))
    engine.optim_step("m", ADAM)
    found = on_ranks(2, step_after_a_failure, folder, 0, error)
    assert found == [(outcome, engine.state_digest("m")) for outcome in outcomes]
