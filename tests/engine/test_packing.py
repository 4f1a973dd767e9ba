"""Packing keeps every example whole, shares what is common, and hides everything else."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from engine_data import datum, random_data

from mint.engine.packing import MIN_SHARED, MicroBatch, attention_blocks, pack, pack_padded, padded_length
from mint.engine.protocol import TrainDatum


def _visible(batch: MicroBatch) -> list[set[int]]:
    """For each row, the rows that it may attend to."""
    visible: list[set[int]] = [set() for _ in batch.tokens]
    for block in batch.blocks:
        length = block.queries.shape[1]
        for row, cell in zip(block.rows, block.cells, strict=True):
            span, query = divmod(int(cell), length)
            assert block.queries[span, query] == row
            visible[row] = set(block.keys[span, : block.offset + query + 1].tolist())
    return visible


@pytest.mark.parametrize("shared", [0, 5, MIN_SHARED, 20])
@pytest.mark.parametrize("budget", [1, 60, 10_000])
def test_every_position_sees_exactly_its_own_past(shared: int, budget: int) -> None:
    data = [*random_data(3, count=8, shared=shared), datum([5, 6]), datum([5, 6]), datum(np.arange(2, 40))]
    seen = []
    for batch in pack(data, budget):
        visible, start = _visible(batch), 0
        for index in batch.datum_ids:
            seen.append(index)
            size = len(data[index].tokens)
            pairs = batch.pair_of_cell[start : start + size]
            rows = batch.pair_rows[pairs]
            start += size
            np.testing.assert_array_equal(batch.tokens[rows], data[index].tokens)
            np.testing.assert_array_equal(batch.positions[rows], np.arange(size))
            np.testing.assert_array_equal(batch.pair_targets[pairs], data[index].targets)
            for position, row in enumerate(rows):
                assert visible[row] == set(rows[: position + 1].tolist())
        assert start == len(batch.pair_of_cell)
    assert sorted(seen) == list(range(len(data)))


def test_a_group_computes_its_prompt_once() -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, 50, 12) for _ in range(3)]
    data = [datum(np.concatenate([prompt, rng.integers(50, 90, 5)])) for prompt in prompts for _ in range(4)]
    (batch,) = pack(data, 10_000)
    assert len(batch.tokens) == 3 * (12 + 4 * 4)


def test_groups_that_share_an_opening_keep_their_longer_prompts() -> None:
    rng = np.random.default_rng(0)
    opening = rng.integers(2, 50, MIN_SHARED)
    prompts = [np.concatenate([opening, rng.integers(2, 50, 20)]) for _ in range(2)]
    data = [datum(np.concatenate([prompt, rng.integers(50, 90, 5)])) for prompt in prompts for _ in range(4)]
    (batch,) = pack(data, 10_000)
    assert len(batch.tokens) == 2 * (len(prompts[0]) + 4 * 4)


def test_micro_batches_keep_to_the_budget_where_they_can() -> None:
    data = random_data(1, count=20)
    batches = pack(data, 64)
    assert len(batches) > 3
    assert all(len(batch.tokens) <= 64 or len(batch.datum_ids) == 1 for batch in batches)


def test_the_split_is_a_function_of_the_request_alone() -> None:
    data = random_data(1, count=20, shared=10)
    again = [TrainDatum(d.tokens.copy(), d.targets.copy(), d.weights.copy()) for d in data]
    assert [b.datum_ids for b in pack(data, 100)] == [b.datum_ids for b in pack(again, 100)]


def test_padding_is_little_and_shapes_are_few() -> None:
    lengths = range(1, 5000)
    assert all(length <= padded_length(length) <= max(8, 1.25 * length) for length in lengths if length > 32)
    assert len({padded_length(length) for length in lengths}) < 100
    assert attention_blocks([]) == []


@pytest.mark.parametrize("budget", [1, 40, 100, 10_000])
def test_padded_batches_hold_whole_examples_within_the_budget(budget: int) -> None:
    data = random_data(4, count=20, shared=12)
    batches = pack_padded(data, budget)
    assert sorted(index for batch in batches for index in batch.datum_ids) == list(range(20))
    for batch in batches:
        lengths = [len(data[index].tokens) for index in batch.datum_ids]
        assert len(lengths) == 1 or len(lengths) * max(lengths) <= budget
        assert batch.tokens.tolist() == [int(token) for index in batch.datum_ids for token in data[index].tokens]
        assert batch.positions.tolist() == [position for length in lengths for position in range(length)]
    assert len(batches) == {1: 20, 10_000: 1}.get(budget, len(batches))


def test_a_first_pass_imports_no_module_of_numpy() -> None:
    """It would fail in a process that has no file descriptor left."""
    program = "import mint.engine.torch_engine, sys; sys.exit('numpy.ma' not in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
