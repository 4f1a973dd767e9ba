"""Ordinary reductions: the bits of a fixed number of ranks, near those of one process, and `get_info` says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rank_work import engine_with, train_on_ranks, train_steps
from small_models import write_model

from mint.cluster.collectives.parallelism import Parallelism
from mint.engine.protocol import ModelState, PassResult
from mint.engine.reductions.division import ALONE
from mint.errors import InvalidRequestError, RecoveryDivergedError
from mint.server.store.rows import ModelRow
from mint.server.worker.base_numbers import require_same_numbers

OnRanks = Callable[..., list[Any]]
NEAR = 1e-5


@pytest.fixture(scope="module")
def models(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    mixture = tmp_path_factory.mktemp("mixture")
    write_model(mixture, "tied", family="qwen3_moe")
    return {"dense": folder, "mixture": mixture}


def _ordinary(folder: Path, tensor_parallel: int | None, dtype: str = "float32") -> Any:
    parallelism = Parallelism(tensor_parallel=tensor_parallel, reductions="ordinary")
    return train_on_ranks(folder, parallelism=parallelism, dtype=dtype, **parallelism.engine_settings)


def _require_near(results: list[PassResult], state: ModelState, expected: list[PassResult], other: ModelState) -> None:
    for own, its in zip(results, expected, strict=True):
        for mine, theirs in zip(own.logprobs, its.logprobs, strict=True):
            np.testing.assert_allclose(mine, theirs, atol=NEAR)
    assert state.exp_avg is not None and other.exp_avg is not None
    largest = max(np.abs(value).max() for value in other.exp_avg.values())
    for name, value in other.exp_avg.items():
        np.testing.assert_allclose(state.exp_avg[name], value, atol=NEAR * largest)


@pytest.mark.parametrize(("world", "tensor_parallel", "family"), [
    (3, None, "dense"),
    (2, 2, "dense"),
    pytest.param(2, None, "dense", marks=pytest.mark.slow),
    pytest.param(4, None, "mixture", marks=pytest.mark.slow),
    pytest.param(4, 2, "dense", marks=pytest.mark.slow),
    pytest.param(2, 2, "mixture", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_fixed_number_of_ranks_has_one_digest_near_that_of_one_process(
    on_ranks: OnRanks, models: dict[str, Path], world: int, tensor_parallel: int | None, family: str
) -> None:
    first = on_ranks(world, _ordinary, models[family], tensor_parallel)
    again = on_ranks(world, _ordinary, models[family], tensor_parallel)
    digests, results, state = first[0]
    assert all(own[0] == digests for own in (*first, *again)) and len(set(digests)) == len(digests)
    _, *expected = train_steps(engine_with(ALONE, models[family]))
    _require_near(results, state, *expected)


def test_the_bits_are_not_those_of_another_number_of_ranks(on_ranks: OnRanks, models: dict[str, Path]) -> None:
    digests = {world: on_ranks(world, _ordinary, models["dense"], None, "bfloat16")[0][0] for world in (2, 3)}
    assert digests[2] != digests[3]


def test_one_rank_computes_each_layer_in_one_piece_for_each_process() -> None:
    assert Parallelism(tensor_parallel=4).engine_settings == {"chunked": True}
    ordinary = [Parallelism(tensor_parallel=size, reductions="ordinary").engine_settings for size in (1, 4)]
    assert ordinary == [{"chunked": False, "most_chunks": 1}, {"chunked": True, "most_chunks": 4}]


def test_what_is_promised_is_said_and_a_model_does_not_go_on_with_another_number_of_ranks() -> None:
    exact, ordinary = Parallelism(), Parallelism(reductions="ordinary")
    assert exact.promise(3) == {"reductions": "exact", "same_digest_on": "any number of ranks"}
    assert ordinary.promise(3) == {"reductions": "ordinary", "same_digest_on": "3 ranks"}
    for recorded, now, goes_on in (
        (ordinary.promise(3), ordinary.promise(3), True),
        (ordinary.promise(3), ordinary.promise(2), False),
        (ordinary.promise(3), exact.promise(3), False),
        (exact.promise(3), exact.promise(2), True),
        (exact.promise(3), {}, True),  # one process
        ({}, ordinary.promise(1), False),
    ):
        row = ModelRow("s:m", "s", effective={"dtype": "float32", **recorded})
        if goes_on:
            require_same_numbers(row, {"dtype": "float32", **now})
        else:
            with pytest.raises(RecoveryDivergedError, match="MINT_REDUCTIONS"):
                require_same_numbers(row, {"dtype": "float32", **now})


def test_the_base_says_what_holds_and_another_number_of_ranks_is_refused(folder: Path) -> None:
    pytest.importorskip("ray", reason="pip install 'mint[cluster]'")
    from clusters import cluster  # deferred: ray

    engine = cluster(2, parallelism=Parallelism(reductions="ordinary"))
    info = engine.load_base("base", str(folder))
    assert info.settings["reductions"] == "ordinary" and info.settings["same_digest_on"] == "2 ranks"
    engine.resize(trainers=2)
    with pytest.raises(InvalidRequestError, match=r"trainers = 3: .*ordinary"):
        engine.resize(trainers=3)
    assert engine.cluster_state["reductions"] == "ordinary"
