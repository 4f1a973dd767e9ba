"""Ranks that keep a part of a large LoRA each: the states, results and digests of one process."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from engine_data import ADAM, job, random_data
from rank_work import ROWS, engine_with, train_steps
from small_models import write_model

from mint.cluster.collectives.parallelism import ALIKE, Parallelism
from mint.cluster.collectives.progress import Progress
from mint.cluster.collectives.state_ranks import StateRanks
from mint.cluster.sums import Ranks
from mint.engine import state_digest
from mint.engine.protocol import MicroBatching, ModelState, resolve_loss
from mint.engine.reductions import state_division
from mint.engine.reductions.division import ALONE, Peers
from mint.engine.reductions.gradient_norm import square_sums
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


def kept(engine: TorchEngine) -> tuple[list[int], int]:
    """The numbers of weights, gradient and moments that memory has here, and those of the whole LoRA."""
    model = engine._models["m"]
    vectors = model.weights, model.gradient, model.adam.exp_avg, model.adam.exp_avg_sq
    return [vector.untyped_storage().nbytes() // 4 for vector in vectors], model.layout.size


def divided(folder: Path, parallelism: Parallelism = ALIKE, **options: Any) -> TorchEngine:
    with patch.object(state_division, "DIVIDED_FROM", 1):
        return engine_with(Ranks(parallelism), folder, **options)


def steps_and_more(engine: TorchEngine) -> tuple[Any, ...]:
    """Some steps. Then the state is written into a new model, and some more."""
    first = train_steps(engine)
    with patch.object(state_division, "DIVIDED_FROM", 1):
        engine.create_model("m", "base", engine._models["m"].layout.spec)
    second = train_steps(engine, 3, first[2])
    weights = {name: array.tobytes() for name, array in engine.read_weights("m").items()}
    return values(*first), values(*second), weights


def divided_steps(folder: Path, parallelism: Parallelism, options: dict[str, Any]) -> tuple[Any, ...]:
    with small_blocks():
        engine = divided(folder, parallelism, **options)
        found = steps_and_more(engine)
        return kept(engine), found


def steps_of_one(folder: Path, **options: Any) -> tuple[Any, ...]:
    with small_blocks():
        return steps_and_more(engine_with(ALONE, folder, **options))


@pytest.mark.parametrize("world", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_with_parts_of_a_lora_end_with_the_states_of_one_process(
    on_ranks: OnRanks, folder: Path, world: int
) -> None:
    found = on_ranks(world, divided_steps, folder, ALIKE, {})
    assert [own for _, own in found] == [steps_of_one(folder)] * world
    size = found[0][0][1]
    for parts in zip(*(own for (own, _), _ in found), strict=True):  # of each vector
        assert sum(parts) == size and max(parts) < size / world + 2 * BLOCK


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "parallelism"),
    [
        (2, Parallelism(shards=True)),
        (3, Parallelism(experts=True)),
        (2, Parallelism(tensor_parallel=2)),
        (4, Parallelism(tensor_parallel=2)),
    ],
)
def test_the_same_where_ranks_also_divide_the_base(
    on_ranks: OnRanks, tmp_path: Path, native_folder: Path, world: int, parallelism: Parallelism
) -> None:
    write_model(tmp_path, "tied", family="qwen3_moe" if parallelism.experts else "qwen3")
    options = {"native": native_folder, "dtype": "bfloat16", **parallelism.engine_settings}
    found = on_ranks(world, divided_steps, tmp_path, parallelism, options)
    assert [own for _, own in found] == [steps_of_one(tmp_path, **options)] * world


def ordinary_steps(folder: Path) -> tuple[Any, ...]:
    """Steps of a LoRA that is divided, and of one that is not."""
    ordinary = Parallelism(reductions="ordinary")
    with small_blocks():
        return train_steps(divided(folder, ordinary))[0], train_steps(engine_with(Ranks(ordinary), folder))[0]


def test_with_ordinary_reductions_a_divided_lora_has_the_bits_of_a_whole_one(on_ranks: OnRanks, folder: Path) -> None:
    for parts, whole in on_ranks(2, ordinary_steps, folder):
        assert parts == whole


def mixed_passes(engine: TorchEngine) -> tuple[Any, ...]:
    """Passes with and without a gradient, two before each step, which clips; some are summed as older versions did."""
    adam = replace(ADAM, grad_clip_norm=1e-3)
    loss = resolve_loss("importance_sampling")
    found: list[Any] = []
    for orders in (["tree", "tree"], ["running", "running"], ["running", "tree"]):
        for place, order in enumerate(orders):
            data = random_data(place, count=12, shared=8, policy=True)
            batching = MicroBatching(ROWS, recompute=False, order=order)
            passed = engine.forward_backward("m", data, loss, micro_batching=batching)
            found.append([row.tobytes() for row in passed.logprobs])
            found.append(engine.forward("m", data, loss).metrics)
        found += [engine.optim_step("m", adam), engine.state_digest("m")]
    engine.forward_backward("m", random_data(5, policy=True), loss)
    engine.clear_gradient("m")
    found += [engine.optim_step("m", adam), engine.state_digest("m")]
    engine.publish("m", "published")
    (sampled,) = engine.sample([job([3, 4, 5], weights_id="published", num_samples=2)])
    found.append([list(sequence.tokens) for sequence in sampled.samples])
    return tuple(found)


def mixed_passes_on_ranks(folder: Path) -> tuple[Any, ...]:
    with small_blocks():
        return mixed_passes(divided(folder))


def test_gradients_add_up_over_passes_and_are_clipped_as_in_one_process(on_ranks: OnRanks, folder: Path) -> None:
    with small_blocks():
        expected = mixed_passes(engine_with(ALONE, folder))
    assert on_ranks(2, mixed_passes_on_ranks, folder) == [expected] * 2


def square_sums_of(numbers: np.ndarray, bounds: list[tuple[int, int]]) -> list[float]:
    division = StateRanks(bounds, dist.get_rank(), dist.get_world_size(), Progress())
    return division.square_sums(torch.from_numpy(numbers)[division.own]).tolist()


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("size", [1, 1000, 65_536, 65_537, 1_000_003])
def test_norms_are_made_of_the_blocks_of_one_process_where_parts_end_elsewhere(
    on_ranks: OnRanks, world: int, size: int
) -> None:
    rng = np.random.default_rng(size)
    numbers = rng.normal(size=size).astype(np.float32)
    edges = sorted({0, size, *rng.integers(0, size, 40).tolist()})
    expected = square_sums(torch.from_numpy(numbers)).tolist()
    assert on_ranks(world, square_sums_of, numbers, list(pairwise(edges))) == [expected] * world


def set_gradient(engine: TorchEngine, number: float, place: int) -> None:
    """Replaces a number of the gradient, on the rank that keeps it."""
    model = engine._models["m"]
    own = range(model.layout.size) if model._division is None else range(model.layout.size)[model._division.own]
    if place % model.layout.size in own:
        model.gradient[place % model.layout.size - own.start] = number


def step_with_a_value(peers: Peers, folder: Path, number: float, place: int) -> tuple[Any, ...]:
    """A step in which one number of the gradient is replaced, and the digest after it and one more."""
    with patch.object(state_division, "DIVIDED_FROM", 1), small_blocks():
        engine = engine_with(peers, folder)
        metrics = []
        for step in range(2):
            data, loss = random_data(step, count=24, shared=8, policy=True), resolve_loss("importance_sampling")
            engine.forward_backward("m", data, loss)
            if step == 0:
                set_gradient(engine, number, place)
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


def kept_by_default(folder: Path) -> tuple[list[int], int]:
    return kept(engine_with(Ranks(ALIKE), folder))


def test_a_small_lora_is_whole_on_every_rank(on_ranks: OnRanks, folder: Path) -> None:
    for parts, size in on_ranks(2, kept_by_default, folder):
        assert parts == [size] * 4


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
