"""Ranks that keep a part of the moments of a large LoRA each: the states and digests of one process."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from engine_data import ADAM, random_data
from rank_work import engine_with, train_steps

from mint.cluster.collectives import parallelism as collectives
from mint.cluster.collectives.parallelism import ALIKE, Parallelism
from mint.cluster.sums import Ranks
from mint.engine import state_digest
from mint.engine.protocol import ModelState, resolve_loss
from mint.engine.reductions.division import ALONE, Peers
from mint.engine.torch_engine import TorchEngine

OnRanks = Callable[..., list[Any]]
BLOCK = 96
"""So that arrays of a small LoRA have several blocks, and the last one of an array is shorter."""


def small_blocks() -> Any:
    return patch.multiple(state_digest, BLOCK=BLOCK)


def values(digests: list[str], results: list[Any], state: ModelState) -> tuple[Any, ...]:
    arrays = state.weights, state.exp_avg or {}, state.exp_avg_sq or {}
    found = [{name: array.tobytes() for name, array in part.items()} for part in arrays]
    return digests, [own.metrics for own in results], state.step, found


def kept(engine: TorchEngine) -> tuple[int, int]:
    """How many numbers of each moment are here, and how many weights there are."""
    model = engine._models["m"]
    return model.adam.exp_avg.numel(), model.weights.flat.numel()


def divided(folder: Path, parallelism: Parallelism = ALIKE, **options: Any) -> TorchEngine:
    with patch.object(collectives, "DIVIDED_FROM", 1):
        return engine_with(Ranks(parallelism), folder, **options)


def divided_steps(folder: Path, parallelism: Parallelism, options: dict[str, Any]) -> tuple[Any, ...]:
    """Some steps; then the state is written into a new model, and some more."""
    with small_blocks():
        engine = divided(folder, parallelism, **options)
        first = train_steps(engine)
        with patch.object(collectives, "DIVIDED_FROM", 1):
            engine.create_model("m", "base", engine._models["m"].weights.spec)
        second = train_steps(engine, 3, first[2])
        weights = {name: array.tobytes() for name, array in engine.read_weights("m").items()}
        return kept(engine), values(*first), values(*second), weights


def steps_of_one(folder: Path, **options: Any) -> tuple[Any, ...]:
    with small_blocks():
        engine = engine_with(ALONE, folder, **options)
        first = train_steps(engine)
        second = train_steps(engine, 3, first[2])
        return values(*first), values(*second), values(*second)[3][0]


@pytest.mark.parametrize("world", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_with_parts_of_the_moments_end_with_the_states_of_one_process(
    on_ranks: OnRanks, folder: Path, world: int
) -> None:
    found = on_ranks(world, divided_steps, folder, ALIKE, {})
    assert [own[1:] for own in found] == [steps_of_one(folder)] * world
    size = found[0][0][1]
    parts = [part for (part, _), *_ in found]
    assert sum(parts) == size and max(parts) < size / world + 2 * BLOCK


@pytest.mark.slow
@pytest.mark.parametrize("parallelism", [Parallelism(shards=True), Parallelism(tensor_parallel=2)])
def test_the_same_where_ranks_also_divide_the_base(on_ranks: OnRanks, folder: Path, parallelism: Parallelism) -> None:
    options = parallelism.engine_settings
    found = on_ranks(2, divided_steps, folder, parallelism, options)
    assert [own[1:] for own in found] == [steps_of_one(folder, **options)] * 2


def step_with_a_value(peers: Peers, folder: Path, number: float, place: int) -> tuple[Any, ...]:
    """A step in which one number of the gradient is replaced, and the digest after it and one more."""
    with patch.object(collectives, "DIVIDED_FROM", 1), small_blocks():
        engine = engine_with(peers, folder)
        metrics = []
        for step in range(2):
            data, loss = random_data(step, count=24, shared=8, policy=True), resolve_loss("importance_sampling")
            engine.forward_backward("m", data, loss)
            if step == 0:
                engine._models["m"].gradient[place] = number
            metrics.append(engine.optim_step("m", ADAM))
        return metrics, engine.state_digest("m")


def step_with_a_value_on_ranks(folder: Path, number: float, place: int) -> tuple[Any, ...]:
    return step_with_a_value(Ranks(ALIKE), folder, number, place)


@pytest.mark.parametrize("number", [math.inf, 1e30])  # of a gradient; and of a square, where the norm is finite
@pytest.mark.parametrize("place", [0, -1])  # in the part of the first rank, and of the last one
def test_a_step_that_is_not_finite_on_one_rank_is_skipped_by_all(
    on_ranks: OnRanks, folder: Path, number: float, place: int
) -> None:
    expected = step_with_a_value(ALONE, folder, number, place)
    assert [own["skipped_nonfinite"] for own in expected[0]] == [1.0, 0.0]
    assert on_ranks(2, step_with_a_value_on_ranks, folder, number, place) == [expected] * 2


def kept_by_default(folder: Path) -> tuple[int, int]:
    return kept(engine_with(Ranks(ALIKE), folder))


def test_small_moments_are_whole_on_every_rank(on_ranks: OnRanks, folder: Path) -> None:
    for part, size in on_ranks(2, kept_by_default, folder):
        assert part == size


def digests_of(engine: TorchEngine) -> tuple[str, str]:
    return engine.state_digest("m"), engine.state_digest("m", like="0" * 32)


def digests_on_ranks(folder: Path, state: ModelState) -> tuple[str, str]:
    with small_blocks():
        engine = divided(folder)
        engine.write_state("m", state)
        return digests_of(engine)


def test_digests_of_both_forms_are_those_of_one_process(on_ranks: OnRanks, folder: Path) -> None:
    with small_blocks():
        engine = engine_with(ALONE, folder)
        train_steps(engine)
        rng = np.random.default_rng(1)
        state = engine.read_state("m")
        moments = [
            {name: rng.random(array.shape, np.float32) for name, array in state.weights.items()} for _ in range(2)
        ]
        state = ModelState(state.weights, 7, *moments)
        engine.write_state("m", state)
        expected = digests_of(engine)
    assert on_ranks(3, digests_on_ranks, folder, state) == [expected] * 3
