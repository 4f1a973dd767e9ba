"""Large batches as several requests, and their results as one. Pure.

A chunk's size is a function of the data alone, so that the same call is always split in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence

from mint.client.metric_reduction import reduce_metrics
from mint.errors import InvalidRequestError
from mint.types import Datum, ForwardBackwardOutput

MAX_DATUMS = 1024
MAX_NUMBERS = 1_000_000
"""The most datums of one request, and the most numbers in their tensors (about 20 MB of JSON)."""


def split(data: Sequence[Datum]) -> list[list[Datum]]:
    """The data in order, in chunks; one (empty) chunk for no data, so that the server refuses it.

    Raises:
        InvalidRequestError: names the first item that is not a `Datum`.
    """
    chunks: list[list[Datum]] = [[]]
    numbers = 0
    for index, datum in enumerate(data):
        if not isinstance(datum, Datum):
            raise InvalidRequestError(
                "is not a Datum",
                field=f"data[{index}]",
                value=datum,
                remedy="Pass types.Datum(model_input=…, loss_fn_inputs=…)",
            )
        size = datum.model_input.length
        for tensor in datum.loss_fn_inputs.values():
            size += len(tensor.values)
        if chunks[-1] and (len(chunks[-1]) >= MAX_DATUMS or numbers + size > MAX_NUMBERS):
            chunks.append([])
            numbers = 0
        chunks[-1].append(datum)
        numbers += size
    return chunks


def merge(outputs: Sequence[ForwardBackwardOutput]) -> ForwardBackwardOutput:
    """One output for all chunks: datums in order, metrics reduced as their suffix says, warnings of each."""
    datums = [len(output.loss_fn_outputs) for output in outputs]
    return ForwardBackwardOutput(
        loss_fn_output_type=outputs[0].loss_fn_output_type,
        loss_fn_outputs=[row for output in outputs for row in output.loss_fn_outputs],
        metrics=reduce_metrics([output.metrics for output in outputs], datums),
        warnings=list(dict.fromkeys(warning for output in outputs for warning in output.warnings)),
    )
