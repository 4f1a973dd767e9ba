"""What is sent in a few vectors arrives as it was, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
from engine_data import random_data

from mint.cluster.packed_values import PackedArrays, PackedData, PackedResult
from mint.engine.protocol import MicroBatching, PassResult, TrainDatum


def _sent(value: Any) -> Any:
    """As after a pickle, which calls what `__reduce__` names."""
    rebuild, arguments = value.__reduce__()
    packed = (PackedArrays, PackedData, PackedResult)
    return rebuild(*(_sent(own) if isinstance(own, packed) else own for own in arguments))


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


def test_arrays_of_any_shape_and_of_several_dtypes_arrive() -> None:
    rng = np.random.default_rng(0)
    shapes: list[tuple[int, ...]] = [(3,), (0,), (2, 5), (1,), ()]
    alike = [np.asarray(rng.normal(size=shape), np.float32) for shape in shapes]
    mixed = [np.arange(3), np.ones(2, np.float32)]
    for arrays in (alike, mixed, [], [np.arange(12).reshape(3, 4)[:, ::2]]):
        found = _sent(PackedArrays(arrays))
        assert len(found) == len(arrays) and all(map(_same, found, arrays))


def test_arrays_that_arrive_can_be_written_where_the_vector_cannot() -> None:
    rebuild, (vector, shapes) = PackedArrays([np.arange(3.0), np.arange(2.0)]).__reduce__()
    vector.flags.writeable = False
    assert all(array.flags.writeable for array in rebuild(vector, shapes))


def test_examples_arrive_with_their_own_inputs() -> None:
    several = TrainDatum(np.arange(4), np.arange(8).reshape(4, 2), np.ones((4, 2), np.float32))
    for data in ([*random_data(1, policy=True), several, *random_data(2)], [], [several]):
        found = _sent(PackedData(data))
        assert len(found) == len(data)
        for own, expected in zip(found, data, strict=True):
            assert all(_same(getattr(own, name), getattr(expected, name)) for name in ("tokens", "targets", "weights"))
            assert list(own.inputs) == list(expected.inputs)
            assert all(_same(own.inputs[name], expected.inputs[name]) for name in expected.inputs)


def test_a_result_arrives_whole() -> None:
    rng = np.random.default_rng(0)
    logprobs, entropies = ([rng.normal(size=size).astype(np.float32) for size in (4, 0, 7)] for _ in range(2))
    result = PassResult(logprobs, {"loss:sum": 1.5}, entropies, MicroBatching(64, None))
    found = _sent(PackedResult(result))
    assert found.metrics == result.metrics and found.micro_batching == result.micro_batching
    assert all(map(_same, found.logprobs, logprobs)) and all(map(_same, found.entropies, entropies))
