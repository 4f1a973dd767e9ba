"""Where the tokens of a datum come from: spans that name sampled sequences. Knows no datum and no loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from mint.errors import InvalidRequestError
from mint.types.value_classes import Params


class _Span(Params):
    """`length` consecutive tokens that begin at `offset` of a part of the sequence `sequence_id`."""

    sequence_id: str = Field(min_length=1)
    offset: int = Field(default=0, ge=0)
    length: int = Field(ge=0)


class PromptProvenanceSpan(_Span):
    """Tokens of the prompt from which `sequence_id` was sampled; `offset` counts from the first."""

    type: Literal["prompt"] = "prompt"


class SampledProvenanceSpan(_Span):
    """Tokens that were sampled in the sequence `sequence_id`; `offset` counts from its first sampled token."""

    type: Literal["sampled"] = "sampled"


ProvenanceSpan = Annotated[PromptProvenanceSpan | SampledProvenanceSpan, Field(discriminator="type")]
ProvenanceSpans = Sequence[PromptProvenanceSpan | SampledProvenanceSpan]
"""Spans that cover a field of a datum from its first position to its last, in order."""


def check_cover(spans: ProvenanceSpans, length: int, field: str) -> None:
    """Refuses spans that do not cover exactly `length` positions.

    Raises:
        InvalidRequestError: names `field` and both lengths, or the entry that is no span.
    """
    covered = 0
    for index, span in enumerate(spans):
        if not isinstance(span, PromptProvenanceSpan | SampledProvenanceSpan):
            remedy = "Pass PromptProvenanceSpan and SampledProvenanceSpan"
            raise InvalidRequestError("is not a span", field=f"{field}[{index}]", value=span, remedy=remedy)
        covered += span.length
    if covered != length:
        raise InvalidRequestError(
            f"cover {covered} positions, and there are {length}",
            field=field,
            value=f"{len(spans)} spans",
            remedy="Pass spans whose lengths add up to the number of tokens",
        )
