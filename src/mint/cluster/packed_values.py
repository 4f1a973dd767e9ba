"""Examples and results of passes, sent as a few vectors: to pickle their many small arrays takes much longer.

A packed value arrives as the value itself, whose arrays are then parts of the vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mint.engine.protocol import PassResult, TrainDatum


@dataclass(frozen=True)
class PackedArrays:
    """Arrays that arrive as a list of arrays."""

    arrays: Sequence[np.ndarray]

    def __reduce__(self) -> tuple[Any, ...]:
        if len({array.dtype for array in self.arrays}) != 1:
            return list, (list(self.arrays),)
        vector = np.concatenate([array.reshape(-1) for array in self.arrays])
        return _split, (vector, [array.shape for array in self.arrays])


@dataclass(frozen=True)
class PackedData:
    """Examples that arrive as a list of examples."""

    data: Sequence[TrainDatum]

    def __reduce__(self) -> tuple[Any, ...]:
        data = self.data
        parts = [[own.tokens for own in data], [own.targets for own in data], [own.weights for own in data]]
        inputs = [array for own in data for array in own.inputs.values()]
        return _data, (*map(PackedArrays, parts), [tuple(own.inputs) for own in data], PackedArrays(inputs))


@dataclass(frozen=True)
class PackedResult:
    """The result of a pass, which arrives as it is."""

    result: PassResult

    def __reduce__(self) -> tuple[Any, ...]:
        rest = replace(self.result, logprobs=[], entropies=[])
        return _result, (rest, PackedArrays(self.result.logprobs), PackedArrays(self.result.entropies))


def _split(vector: np.ndarray, shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    if not vector.flags.writeable:  # it lies in the memory that all processes share
        vector = vector.copy()
    arrays = []
    start = 0
    for shape in shapes:
        size = shape[0] if len(shape) == 1 else int(np.prod(shape))
        part = vector[start : start + size]
        arrays.append(part if len(shape) == 1 else part.reshape(shape))
        start += size
    return arrays


def _data(
    tokens: list[np.ndarray],
    targets: list[np.ndarray],
    weights: list[np.ndarray],
    names: list[tuple[str, ...]],
    inputs: list[np.ndarray],
) -> list[TrainDatum]:
    values = iter(inputs)
    return [
        TrainDatum(own_tokens, own_targets, own_weights, {name: next(values) for name in own_names})
        for own_tokens, own_targets, own_weights, own_names in zip(tokens, targets, weights, names, strict=True)
    ]


def _result(rest: PassResult, logprobs: list[np.ndarray], entropies: list[np.ndarray]) -> PassResult:
    return replace(rest, logprobs=logprobs, entropies=entropies)
