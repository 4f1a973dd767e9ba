"""Spans of provenance go through both encodings unchanged, and spans that do not fit are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from mint import wire
from mint.errors import InvalidRequestError
from mint.types import Datum, ModelInput, PromptProvenanceSpan, SampledProvenanceSpan
from mint.wire import tinker_public_pb2 as pb
from mint.wire.requests import ForwardBackwardInput, ForwardBackwardRequest

OF_INPUT = [PromptProvenanceSpan(sequence_id="s-0", length=2), SampledProvenanceSpan(sequence_id="s-0", length=1)]
OF_TARGETS = [
    PromptProvenanceSpan(sequence_id="s-0", offset=1, length=1),
    SampledProvenanceSpan(sequence_id="s-0", length=2),
]


def datum() -> Datum:
    inputs = {"target_tokens": [2, 3, 4], "logprobs": [0.0, -1.0, -2.0], "advantages": [0.0, 1.0, 1.0]}
    return Datum(ModelInput.from_ints([1, 2, 3]), inputs)


def request(*data: Datum) -> ForwardBackwardRequest:
    content = ForwardBackwardInput(data=list(data), loss_fn="stable_reinforce")
    return ForwardBackwardRequest(model_id="m", seq_id=1, forward_backward_input=content)


@pytest.mark.parametrize("encoding", list(wire.Encoding))
def test_spans_survive_the_wire(encoding: wire.Encoding) -> None:
    sent = request(datum().with_provenance(OF_INPUT, OF_TARGETS), datum())
    read = wire.decode(ForwardBackwardRequest, wire.encode(sent, encoding), encoding)
    first, second = read.forward_backward_input.data
    assert (first.model_input_spans, first.loss_fn_input_spans) == (OF_INPUT, OF_TARGETS)
    assert (second.model_input_spans, second.loss_fn_input_spans) == (None, None)
    assert read == sent


def test_a_datum_with_spans_is_another_datum() -> None:
    plain = datum()
    assert plain.with_provenance(OF_INPUT, OF_TARGETS) != plain
    assert plain.model_input_spans is None


def test_a_copy_of_a_datum_keeps_its_spans() -> None:
    copy = (
        datum()
        .with_provenance(OF_INPUT, OF_TARGETS)
        .model_copy(update={"model_input": ModelInput.from_ints([7, 8, 9])})
    )
    assert copy.model_input_spans == OF_INPUT


@pytest.mark.parametrize(
    ("of_input", "of_targets", "parts"),
    [
        (OF_INPUT[:1], OF_TARGETS, ["model_input_spans", "cover 2 positions", "there are 3"]),
        (OF_INPUT, OF_TARGETS * 2, ["loss_fn_input_spans", "cover 6 positions"]),
        ([3], OF_TARGETS, ["model_input_spans[0]", "is not a span"]),
    ],
)
def test_spans_that_do_not_fit_are_refused_by_name(of_input: Any, of_targets: Any, parts: list[str]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        datum().with_provenance(of_input, of_targets)
    assert all(part in str(caught.value) for part in parts)


@pytest.mark.parametrize("wrong", [{"length": -1}, {"length": 2, "offset": -1}, {"length": 2, "sequence_id": ""}])
def test_a_span_of_impossible_numbers_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        SampledProvenanceSpan(**{"sequence_id": "s-0", **wrong})


def test_one_list_of_spans_without_the_other_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"loss_fn_input_spans.*missing"):
        Datum(ModelInput.from_ints([1, 2, 3]), {"target_tokens": [2, 3, 4]}, OF_INPUT)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda span: span.sampled_tokens.CopyFrom(pb.SampledProvenanceSpan(sequence_id="s", length=-5)), "length"),
        (lambda span: span.sampled_tokens.CopyFrom(pb.SampledProvenanceSpan(length=1)), "sequence_id"),
        (lambda span: span.ClearField("sampled_tokens"), "sequence_id"),
        (lambda span: span.sampled_tokens.CopyFrom(pb.SampledProvenanceSpan(sequence_id="s", length=2**40)), "cover"),
    ],
)
def test_hostile_spans_in_a_body_are_refused(change: Any, part: str) -> None:
    message = pb.ForwardBackwardRequest()
    message.ParseFromString(wire.encode(request(datum().with_provenance(OF_INPUT, OF_TARGETS)), wire.Encoding.PROTO))
    change(message.data[0].model_input_spans[1])
    with pytest.raises(InvalidRequestError) as caught:
        wire.decode(ForwardBackwardRequest, message.SerializeToString(), wire.Encoding.PROTO)
    assert "data[0]." in str(caught.value) and part in str(caught.value)
