"""The gradient of a request: right, the same for every division of its micro-batches, and the older sum on request."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from engine_data import ADAM, CROSS_ENTROPY, LORA, flat, random_data, take_gradient, train

from mint.engine.packing import pack
from mint.engine.protocol import MicroBatching, TrainDatum, resolve_loss
from mint.engine.reductions.gradient_sum import partial_sums, whole_sum
from mint.engine.torch_engine import TorchEngine

ROWS = 40
RUNNING = MicroBatching(ROWS, recompute=None, order="running")
TREE = MicroBatching(ROWS, recompute=None)


def _leaves(count: int, size: int = 200) -> np.ndarray:
    """float32 [count, size] of magnitudes from 1e-6 to 1e3, of both signs."""
    rng = np.random.default_rng(count)
    return (rng.normal(size=(count, size)) * 10.0 ** rng.uniform(-6, 3, (count, size))).astype(np.float32)


def _divided(leaves: np.ndarray, cuts: Sequence[int]) -> np.ndarray:
    """The sum, where a range of leaves between two cuts is added up by itself."""
    shared = torch.empty(leaves.shape[1])  # as in a pass: each leaf overwrites the one before
    sums: dict[range, torch.Tensor] = {}
    calls: list[int] = []

    def leaf(index: int) -> torch.Tensor:
        calls.append(index)
        return shared.copy_(torch.from_numpy(leaves[index]))

    for start, stop in pairwise(cuts):
        sums |= partial_sums(len(leaves), range(start, stop), leaf)
    assert calls == list(range(len(leaves)))
    return whole_sum(len(leaves), sums).numpy()


def _tree(leaves: np.ndarray) -> np.ndarray:
    """The tree by levels: neighbours are added in pairs, and an odd one at the end moves up as it is."""
    level = list(leaves)
    while len(level) > 1:
        pairs = [level[place] + level[place + 1] for place in range(0, len(level) - 1, 2)]
        level = pairs + level[len(level) - len(level) % 2 :]
    return level[0]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 9, 20, 33, 64])
def test_the_sum_is_that_of_float64_and_of_a_tree_by_levels(count: int) -> None:
    leaves = _leaves(count)
    found = _divided(leaves, [0, count])
    assert found.tobytes() == _tree(leaves).tobytes()
    exact = leaves.astype(np.float64)
    # Higham, Accuracy and Stability of Numerical Algorithms, 4.2: pairwise sums are off by log2(n) roundings at most.
    bound = np.ceil(np.log2(max(count, 2))) * 2.0**-24 * np.abs(exact).sum(0) * 1.001
    assert (np.abs(found - exact.sum(0)) <= bound).all()


@pytest.mark.parametrize("ranges", [1, 2, 3, 4, 8])
def test_every_division_into_ranges_gives_the_same_bits(ranges: int) -> None:
    rng = np.random.default_rng(ranges)
    for count in [*range(1, 24), 64, 100]:
        leaves = _leaves(count)
        expected = _divided(leaves, [0, count]).tobytes()
        for _ in range(5):  # ranges may be empty
            cuts = [0, *sorted(rng.integers(0, count + 1, ranges - 1).tolist()), count]
            assert _divided(leaves, cuts).tobytes() == expected, (count, cuts)


def test_the_order_matters_for_these_numbers() -> None:
    leaves = _leaves(20)
    running = np.zeros_like(leaves[0])
    for leaf in leaves:
        running = running + leaf
    assert running.tobytes() != _divided(leaves, [0, 20]).tobytes()


@pytest.fixture
def model(engine: TorchEngine) -> TorchEngine:
    engine.create_model("m", "base", LORA)
    train(engine, "m")
    return engine


def _gradients(model: TorchEngine, data: list[TrainDatum]) -> np.ndarray:
    """float32 [M, P]: the gradient of each micro-batch, by passes over its examples alone."""
    found = []
    for batch in pack(data, ROWS):
        model.forward_backward("m", [data[index] for index in batch.datum_ids], CROSS_ENTROPY, micro_batching=TREE)
        found.append(flat(take_gradient(model, "m")))
    return np.array(found)


def test_a_pass_adds_its_micro_batches_in_the_tree(model: TorchEngine) -> None:
    data = random_data(5, count=24, shared=8)
    leaves = _gradients(model, data)
    assert len(leaves) > 8
    for cuts in ([0, len(leaves)], [0, 3, 4, len(leaves)]):
        model.forward_backward("m", data, CROSS_ENTROPY, micro_batching=TREE)
        assert (_divided(leaves, cuts) == flat(take_gradient(model, "m"))).all()


def test_passes_are_added_one_after_the_other(model: TorchEngine) -> None:
    first, second = random_data(5, count=12), random_data(6, count=16)
    for data in (first, second):
        model.forward_backward("m", data, CROSS_ENTROPY, micro_batching=TREE)
    expected = _tree(_gradients_of(model, first)) + _tree(_gradients_of(model, second))
    for data in (first, second):
        model.forward_backward("m", data, CROSS_ENTROPY, micro_batching=TREE)
    assert (flat(take_gradient(model, "m")) == expected).all()


def _gradients_of(model: TorchEngine, data: list[TrainDatum]) -> np.ndarray:
    model.clear_gradient("m")
    return _gradients(model, data)


def test_the_older_sum_adds_one_micro_batch_after_the_other(model: TorchEngine) -> None:
    data = random_data(5, count=24, shared=8)
    leaves = _gradients(model, data)
    running = np.zeros_like(leaves[0])
    for leaf in leaves:
        running = running + leaf
    result = model.forward_backward("m", data, CROSS_ENTROPY, micro_batching=RUNNING)
    older = flat(take_gradient(model, "m"))
    assert (older == running).all() and result.micro_batching == RUNNING
    assert model.forward_backward("m", data, CROSS_ENTROPY, micro_batching=TREE).micro_batching == TREE
    tree = flat(take_gradient(model, "m"))
    assert (tree != older).any()
    assert np.abs(tree - older).max() <= 1e-5 * np.abs(older).max()


def test_the_sum_of_now_and_the_older_one_lead_to_states_within_1e_5(model: TorchEngine) -> None:
    start = model.read_state("m")
    weights = []
    for order in (RUNNING, TREE):
        model.write_state("m", start)
        for step in range(5):
            data = random_data(step, count=24, policy=True)
            model.forward_backward("m", data, resolve_loss("importance_sampling"), micro_batching=order)
            model.optim_step("m", ADAM)
        weights.append(flat(model.read_state("m").weights))
    assert np.abs(weights[0] - weights[1]).max() <= 1e-5
