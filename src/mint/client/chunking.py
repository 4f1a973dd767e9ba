"""Large batches as several requests, and their answers as one. Pure.

A chunk's size is a function of the data alone, so that the same call is always split the same way.
"""

from __future__ import annotations

from collections.abc import Sequence

from mint.types import Datum, ForwardBackwardOutput

MAX_DATUMS = 1024
MAX_NUMBERS = 1_000_000
"""A request holds at most this many datums, and numbers in their tensors: some 20 MB of JSON."""


def split(data: Sequence[Datum]) -> list[list[Datum]]:
    """The data in order, in chunks; one (empty) chunk for no data, so that the server says what is wrong with it."""
    chunks: list[list[Datum]] = [[]]
    numbers = 0
    for datum in data:
        size = datum.model_input.length + sum(len(tensor.values) for tensor in datum.loss_fn_inputs.values())
        if chunks[-1] and (len(chunks[-1]) >= MAX_DATUMS or numbers + size > MAX_NUMBERS):
            chunks.append([])
            numbers = 0
        chunks[-1].append(datum)
        numbers += size
    return chunks


def merge(outputs: Sequence[ForwardBackwardOutput]) -> ForwardBackwardOutput:
    """One output for all chunks: datums in order, metrics reduced as their suffix says, warnings of each."""
    if len(outputs) == 1:
        return outputs[0]
    sizes = [len(output.loss_fn_outputs) for output in outputs]
    shared = [key for key in outputs[0].metrics if all(key in output.metrics for output in outputs)]
    return ForwardBackwardOutput(
        loss_fn_output_type=outputs[0].loss_fn_output_type,
        loss_fn_outputs=[row for output in outputs for row in output.loss_fn_outputs],
        metrics={key: _reduce(key, [output.metrics[key] for output in outputs], sizes) for key in shared},
        warnings=list(dict.fromkeys(warning for output in outputs for warning in output.warnings)),
    )


def _reduce(key: str, values: Sequence[float], sizes: Sequence[int]) -> float:
    match key.rpartition(":")[2]:
        case "sum":
            return sum(values)
        case "min":
            return min(values)
        case "max":
            return max(values)
        case _:
            return sum(value * size for value, size in zip(values, sizes, strict=True)) / max(1, sum(sizes))
