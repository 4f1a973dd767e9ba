"""Protobuf: the numbers of the public protocol, exact round trips, and nothing hostile gets through."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_examples import OUTPUT, SAMPLE, SDK_REQUEST, floats

from mint import wire
from mint.errors import InvalidRequestError
from mint.types import (
    Datum,
    EncodedTextChunk,
    ForwardBackwardOutput,
    ModelInput,
    SampledSequence,
    SampleResponse,
    TensorData,
)
from mint.wire import tinker_public_pb2 as pb
from mint.wire.codec import Encoding
from mint.wire.requests import ForwardBackwardInput, ForwardBackwardRequest, OptimStepRequest

PROTO = Path(pb.__file__).with_name("tinker_public.proto")
KINDS = [ForwardBackwardRequest, ForwardBackwardOutput, SampleResponse]


def fails(kind: type, body: bytes) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        wire.decode(kind, body, Encoding.PROTO)
    return caught.value


def test_the_generated_code_says_what_the_proto_file_says() -> None:
    text = re.sub(r"//.*", "", PROTO.read_text())
    written: dict[str, dict[int, str]] = {}
    for kind, name, body in re.findall(r"(message|enum) (\w+) \{((?:[^{}]|\{[^{}]*\})*)\}", text):
        fields = re.findall(r"(?:(?:repeated|optional) )?(?:[\w<>, ]+ )?(\w+) = (\d+);", body)
        written[f"{kind} {name}"] = {int(number): field for field, number in fields}
    messages = {f"message {name}": item.fields for name, item in pb.DESCRIPTOR.message_types_by_name.items()}
    enums = {f"enum {name}": item.values for name, item in pb.DESCRIPTOR.enum_types_by_name.items()}
    assert written == {
        name: {part.number: part.name for part in parts} for name, parts in {**messages, **enums}.items()
    }


def test_a_request_of_the_public_sdk_is_read_and_written_byte_for_byte() -> None:
    request = wire.decode(ForwardBackwardRequest, SDK_REQUEST, Encoding.PROTO)
    assert (request.model_id, request.seq_id, request.forward_only) == ("sess:train:0", 3, False)
    content = request.forward_backward_input
    assert (content.loss_fn, content.loss_fn_config) == ("ppo", {"clip_low_threshold": 0.5})
    first, second = content.data
    assert first.model_input.to_ints() == [1, 2, 3]
    assert first.loss_fn_inputs["target_tokens"] == TensorData(data=[2, 3, 4], dtype="int64", shape=[3])
    assert first.loss_fn_inputs["weights"] == floats(0.0, 1.0, -0.5)
    assert second.loss_fn_inputs["target_tokens"].tolist() == [[7, 0, 0], [0, 0, 8]]
    assert second.loss_fn_inputs["weights"].tolist() == [[0.25, 0, 0], [0, 0, 0.75]]
    assert wire.encode(request, Encoding.PROTO) == SDK_REQUEST


def test_a_request_of_many_datums_has_the_bytes_of_one_message() -> None:
    """Also one that is written in several messages, whose bytes are joined."""
    targets = np.arange(700)
    data = [
        Datum(
            ModelInput([EncodedTextChunk(targets[: 1 + index].astype(np.int32))]),
            {"target_tokens": TensorData.from_numpy(targets[: 1 + index]), "weights": TensorData([0.5], "float32")},
        )
        for index in range(0, 700, 30)
    ]
    content = ForwardBackwardInput(data=data, loss_fn="cross_entropy", loss_fn_config=None)
    request = ForwardBackwardRequest(model_id="m", seq_id=1, forward_backward_input=content)
    body = wire.encode(request, Encoding.PROTO)
    whole = pb.ForwardBackwardRequest.FromString(body)
    assert [len(datum.model_input[0].encoded_text.tokens) // 4 for datum in whole.data] == list(range(1, 701, 30))
    assert whole.SerializeToString(deterministic=True) == body
    assert wire.decode(ForwardBackwardRequest, body, Encoding.PROTO) == request


@pytest.mark.parametrize("message", [OUTPUT, SAMPLE], ids=["output", "sample"])
def test_a_result_with_every_field_survives_protobuf_and_becomes_the_same_json(
    message: ForwardBackwardOutput | SampleResponse,
) -> None:
    stored = wire.encode_result(message)
    assert not stored.startswith(b"{")
    assert wire.decode(type(message), stored, Encoding.PROTO) == message
    assert json.loads(wire.result_as_json(stored, type(message))) == json.loads(wire.encode(message))
    old = wire.encode(message)
    assert wire.result_as_json(old, type(message)) == old


def test_datums_of_unlike_shapes_become_records_that_join_in_order() -> None:
    written = pb.ForwardBackwardOutput.FromString(wire.encode(OUTPUT, Encoding.PROTO))
    assert [record.num_datums for record in written.loss_fn_outputs] == [2, 1, 1]
    field = written.loss_fn_outputs[0].fields["logprobs"]
    assert np.frombuffer(field.offsets, "<i8").tolist() == [0, 8, 12]
    assert list(written.loss_fn_outputs[1].fields["logprobs"].trailing_shape) == [2]


@pytest.mark.parametrize("count", [-1, 2**31])
def test_a_count_that_protobuf_cannot_hold_is_refused_in_json_too(count: int) -> None:
    body = json.dumps({"sequences": [], "prompt_cache_hit_tokens": count}).encode()
    with pytest.raises(InvalidRequestError, match="prompt_cache_hit_tokens"):
        wire.decode(SampleResponse, body)


def test_a_message_without_a_protobuf_form_is_refused() -> None:
    error = fails(OptimStepRequest, b"")
    assert error.field == "content-type" and "JSON" not in str(error.value) and "application/json" in str(error)


# --- what senders may leave open ---------------------------------------------------------------------------------


def request_of(datum: pb.Datum | None = None, **fields: object) -> bytes:
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy", **fields)
    if datum is not None:
        message.data.append(datum)
    return message.SerializeToString()


def datum_of(tensor: pb.Tensor, key: str = "weights") -> pb.Datum:
    datum = pb.Datum(model_input=[pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=b"\1\0\0\0"))])
    datum.loss_fn_inputs[key].CopyFrom(tensor)
    return datum


def test_settings_are_read_from_either_field_and_the_newer_one_wins() -> None:
    old = wire.decode(ForwardBackwardRequest, request_of(loss_fn_config={"beta": 0.5}), Encoding.PROTO)
    assert old.forward_backward_input.loss_fn_config == {"beta": 0.5}
    newer = {"beta": pb.LossConfigValue(number=0.25), "loss_id": pb.LossConfigValue(text="mine")}
    both = request_of(loss_fn_config={"beta": 0.5}, loss_fn_config_v2=newer)
    config = wire.decode(ForwardBackwardRequest, both, Encoding.PROTO).forward_backward_input.loss_fn_config
    assert config == {"beta": 0.25, "loss_id": "mine"}


@pytest.mark.parametrize(
    ("dtype", "raw", "data"),
    [
        (pb.DTYPE_FLOAT32, np.asarray([1.5, -2.0], "<f4").tobytes(), [1.5, -2.0]),
        (pb.DTYPE_BFLOAT16, b"\xc0\x3f\x00\xc0", [1.5, -2.0]),
        (pb.DTYPE_INT32, np.asarray([3, -4], "<i4").tobytes(), [3.0, -4.0]),
        (pb.DTYPE_INT64, np.asarray([3, -4], "<i8").tobytes(), [3.0, -4.0]),
    ],
)
def test_every_dtype_is_read_as_what_the_input_needs(dtype: int, raw: bytes, data: list[float]) -> None:
    body = request_of(datum_of(pb.Tensor(dense=raw, dtype=dtype, shape=[2])))
    (datum,) = wire.decode(ForwardBackwardRequest, body, Encoding.PROTO).forward_backward_input.data
    assert datum.loss_fn_inputs["weights"].tolist() == data
    assert datum.loss_fn_inputs["weights"].dtype == "float32"


def test_fields_of_newer_senders_are_ignored() -> None:
    unknown = b"\xfa\x3e\x03abc"  # field 1007, bytes
    assert wire.decode(ForwardBackwardRequest, SDK_REQUEST + unknown, Encoding.PROTO).seq_id == 3


# --- what is wrong is named --------------------------------------------------------------------------------------


FLOATS = {"dense": b"\0" * 8, "dtype": pb.DTYPE_FLOAT32}
CSR = {"values": b"\0" * 4, "crow_indices": b"\0" * 16, "col_indices": b"\0" * 8}


def record(**fields: object) -> bytes:
    tensor = {"data": b"\0" * 8, "offsets": np.asarray([0, 4, 8], "<i8").tobytes(), "dtype": 1, **fields}
    output = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    output.loss_fn_outputs.add(num_datums=2).fields["logprobs"].CopyFrom(pb.BatchedTensor(**tensor))
    return output.SerializeToString()


def offsets(*values: int) -> bytes:
    return record(offsets=np.asarray(values, "<i8").tobytes())


def topk(**fields: object) -> bytes:
    return pb.SampleResponse(topk_prompt_logprobs=pb.TopkLogprobs(**fields)).SerializeToString()


def sequence(**fields: object) -> bytes:
    return pb.SampleResponse(sequences=[pb.SampledSequence(**fields)]).SerializeToString()


def tensor(**fields: object) -> bytes:
    return request_of(datum_of(pb.Tensor(**fields)))


HOSTILE = {
    "cut": (ForwardBackwardRequest, SDK_REQUEST[:-3], "ForwardBackwardRequest"),
    "not protobuf": (ForwardBackwardRequest, b'{"model_id": "m"}', "ForwardBackwardRequest"),
    "text that is not Unicode": (ForwardBackwardRequest, b"\x0a\x01\xff", "ForwardBackwardRequest"),
    "tokens cut": (
        ForwardBackwardRequest,
        request_of(pb.Datum(model_input=[pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=b"\1\0\0"))])),
        "data[0].model_input[0]",
    ),
    "image": (
        ForwardBackwardRequest,
        request_of(pb.Datum(model_input=[pb.Chunk(image=pb.ImageChunk(data=b"x", format="png"))])),
        "data[0].model_input[0]",
    ),
    "empty chunk": (ForwardBackwardRequest, request_of(pb.Datum(model_input=[pb.Chunk()])), "data[0].model_input[0]"),
    "no dtype": (ForwardBackwardRequest, tensor(dense=b"\0" * 8), "data[0].loss_fn_inputs.weights.dtype"),
    "dtype of the future": (
        ForwardBackwardRequest,
        tensor(dense=b"\0" * 8, dtype=9),
        "data[0].loss_fn_inputs.weights.dtype",
    ),
    "numbers cut": (ForwardBackwardRequest, tensor(dense=b"\0" * 7, dtype=1), "data[0].loss_fn_inputs.weights"),
    "shape too small": (ForwardBackwardRequest, tensor(**FLOATS, shape=[1]), "data[0].loss_fn_inputs.weights.shape"),
    "shape too large": (
        ForwardBackwardRequest,
        tensor(**FLOATS, shape=[2**30, 2**30, 2**30]),
        "data[0].loss_fn_inputs.weights.shape",
    ),
    "shape below 0": (ForwardBackwardRequest, tensor(**FLOATS, shape=[-2, -1]), "data[0].loss_fn_inputs.weights.shape"),
    "many dimensions": (
        ForwardBackwardRequest,
        tensor(**FLOATS, shape=[1] * 99),
        "data[0].loss_fn_inputs.weights.shape",
    ),
    "fractions as tokens": (
        ForwardBackwardRequest,
        request_of(datum_of(pb.Tensor(**FLOATS), "target_tokens")),
        "loss_fn_inputs.target_tokens",
    ),
    "sparse without a shape": (
        ForwardBackwardRequest,
        tensor(sparse_csr=pb.SparseCsr(**CSR), dtype=1),
        "data[0].loss_fn_inputs.weights",
    ),
    "sparse rows beyond its offsets": (
        ForwardBackwardRequest,
        tensor(sparse_csr=pb.SparseCsr(**CSR), dtype=1, shape=[2**30, 4]),
        "data[0].loss_fn_inputs.weights",
    ),
    "sparse columns cut": (
        ForwardBackwardRequest,
        tensor(sparse_csr=pb.SparseCsr(**{**CSR, "col_indices": b"\0" * 7}), dtype=1, shape=[1, 4]),
        "data[0].loss_fn_inputs.weights.col_indices",
    ),
    "offsets cut": (ForwardBackwardOutput, record(offsets=b"\0" * 23), "loss_fn_outputs[0].fields.logprobs.offsets"),
    "offsets descend": (ForwardBackwardOutput, offsets(0, 8, 4), "loss_fn_outputs[0].fields.logprobs.offsets"),
    "offsets overflow": (
        ForwardBackwardOutput,
        offsets(0, 2**63 - 1, -(2**63)),
        "loss_fn_outputs[0].fields.logprobs.offsets",
    ),
    "offsets below 0": (ForwardBackwardOutput, offsets(-8, 0, 8), "loss_fn_outputs[0].fields.logprobs.offsets"),
    "offsets beyond the data": (ForwardBackwardOutput, offsets(0, 4, 12), "loss_fn_outputs[0].fields.logprobs.offsets"),
    "offsets inside a number": (ForwardBackwardOutput, offsets(0, 3, 8), "loss_fn_outputs[0].fields.logprobs.offsets"),
    "all offsets inside a number": (
        ForwardBackwardOutput,
        offsets(1, 5, 5),
        "loss_fn_outputs[0].fields.logprobs.offsets",
    ),
    "no offsets": (ForwardBackwardOutput, offsets(), "loss_fn_outputs[0].fields.logprobs.offsets"),
    "too few offsets": (ForwardBackwardOutput, offsets(0, 8), "loss_fn_outputs[0].fields.logprobs.offsets"),
    "rows of another size": (
        ForwardBackwardOutput,
        record(trailing_shape=[3]),
        "loss_fn_outputs[0].fields.logprobs.offsets",
    ),
    "rows of absurd size": (
        ForwardBackwardOutput,
        record(trailing_shape=[2**31 - 1] * 8),
        "loss_fn_outputs[0].fields.logprobs.offsets",
    ),
    "rows of no size": (
        ForwardBackwardOutput,
        record(trailing_shape=[0]),
        "loss_fn_outputs[0].fields.logprobs.offsets",
    ),
    "datums out of nothing": (
        ForwardBackwardOutput,
        pb.ForwardBackwardOutput(loss_fn_outputs=[pb.ArrayRecord(num_datums=2**62)]).SerializeToString(),
        "loss_fn_outputs[0].num_datums",
    ),
    "logprobs cut": (SampleResponse, pb.SampleResponse(prompt_logprobs=b"\0").SerializeToString(), "prompt_logprobs"),
    "rows out of nothing": (SampleResponse, topk(length=2**32 - 1), "topk_prompt_logprobs"),
    "cells out of nothing": (SampleResponse, topk(length=2**32 - 1, k=2**32 - 1), "topk_prompt_logprobs"),
    "cells without logprobs": (SampleResponse, topk(length=1, k=1, token_ids=b"\0" * 4), "topk_prompt_logprobs"),
    "fewer logprobs than tokens": (SampleResponse, sequence(tokens=b"\0" * 8), "sequences[0].logprobs"),
    "a reason of the future": (SampleResponse, sequence(stop_reason=7), "sequences[0].stop_reason"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_wrong_message_is_refused_by_the_name_of_its_field(name: str) -> None:
    kind, body, field = HOSTILE[name]
    assert fails(kind, body).field == field


def test_a_body_of_absurdly_many_parts_is_refused_before_it_is_parsed() -> None:
    assert "parts" in fails(ForwardBackwardRequest, b"\x1a\x00" * 600_000).message
    chunks = b"\x0a\x00" * 600_000
    assert "parts" in fails(ForwardBackwardRequest, b"\x1a" + _varint(len(chunks)) + chunks).message


def _varint(number: int) -> bytes:
    parts = []
    while number >= 0x80:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*parts, number])


def test_the_place_of_a_request_is_read_although_the_rest_is_damaged() -> None:
    for size in range(20, len(SDK_REQUEST)):
        assert wire.read_identity(SDK_REQUEST[:size], "model_id", "seq_id", Encoding.PROTO) == ("sess:train:0", 3)
    assert wire.read_identity(SDK_REQUEST[:14], "model_id", "seq_id", Encoding.PROTO) == ("sess:train:0", 0)
    assert wire.read_identity(b"\x0a\xff", "model_id", "seq_id", Encoding.PROTO) is None
    assert wire.read_identity(SDK_REQUEST, "session_id", "model_seq_id", Encoding.PROTO) is None


# --- properties --------------------------------------------------------------------------------------------------


float32 = st.floats(width=32, allow_nan=False)
token = st.integers(0, 2**31 - 1)


@st.composite
def requests(draw: st.DrawFn) -> ForwardBackwardRequest:
    def one() -> Datum:
        length = draw(st.integers(0, 4))
        chunk = st.lists(token, max_size=4).map(lambda tokens: EncodedTextChunk(tokens=tokens))
        inputs = {
            "target_tokens": TensorData(data=[draw(token) for _ in range(length)], dtype="int64", shape=[length]),
            draw(st.text(min_size=1, max_size=5)): TensorData(
                data=[draw(float32) for _ in range(length)], dtype="float32"
            ),
        }
        return Datum(model_input=ModelInput(chunks=draw(st.lists(chunk, max_size=3))), loss_fn_inputs=inputs)

    settings_of_loss = st.dictionaries(
        st.text(max_size=5), st.floats(allow_nan=False) | st.text(max_size=5), max_size=3
    )
    content = ForwardBackwardInput(
        data=[one() for _ in range(draw(st.integers(0, 3)))],
        loss_fn=draw(st.text(max_size=5)),
        loss_fn_config=draw(settings_of_loss) or None,
    )
    model_id, seq_id = draw(st.text(max_size=9)), draw(st.integers(-(2**31), 2**31 - 1))
    forward_only = draw(st.booleans())
    return ForwardBackwardRequest(
        model_id=model_id, seq_id=seq_id, forward_backward_input=content, forward_only=forward_only
    )


@st.composite
def outputs(draw: st.DrawFn) -> ForwardBackwardOutput:
    def one() -> TensorData:
        rows, columns = draw(st.integers(0, 3)), draw(st.sampled_from([(), (2,), (2, 3)]))
        data = [draw(float32) for _ in range(rows * int(np.prod(columns)))]
        return TensorData(data=data, dtype="float32", shape=[rows, *columns])

    names = draw(st.lists(st.text(max_size=4), max_size=2, unique=True))
    return ForwardBackwardOutput(
        loss_fn_outputs=[{name: one() for name in names} for _ in range(draw(st.integers(0, 4)))],
        metrics=draw(st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False), max_size=3)),
        warnings=draw(st.lists(st.text(max_size=5), max_size=2)),
    )


@st.composite
def samples(draw: st.DrawFn) -> SampleResponse:
    def one() -> SampledSequence:
        tokens = draw(st.lists(token, max_size=4))
        rows = st.lists(st.tuples(token, float32.filter(lambda value: value > -9e4)), min_size=2, max_size=2)
        topk = draw(st.none() | st.lists(rows, min_size=len(tokens), max_size=len(tokens)))
        logprobs = [draw(float32) for _ in tokens]
        stop_reason = draw(st.sampled_from(["stop", "length"]))
        return SampledSequence(tokens=tokens, logprobs=logprobs, stop_reason=stop_reason, topk_logprobs=topk)

    prompt_logprobs = draw(st.none() | st.lists(st.none() | float32, max_size=4))
    return SampleResponse(sequences=[one() for _ in range(draw(st.integers(0, 3)))], prompt_logprobs=prompt_logprobs)


@settings(max_examples=60, deadline=None)
@given(requests() | outputs() | samples())
def test_what_is_written_is_read_again(
    message: ForwardBackwardRequest | ForwardBackwardOutput | SampleResponse,
) -> None:
    body = wire.encode(message, Encoding.PROTO)
    again = wire.decode(type(message), body, Encoding.PROTO)
    assert again == message
    assert wire.encode(again, Encoding.PROTO) == body


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_no_body_whatever_raises_anything_but_an_invalid_request(data: st.DataObject) -> None:
    seeds = [SDK_REQUEST, wire.encode_result(OUTPUT), wire.encode_result(SAMPLE)]
    body = bytearray(data.draw(st.sampled_from(seeds) | st.binary(max_size=60)))
    for _ in range(data.draw(st.integers(0, 4))):
        start = data.draw(st.integers(0, len(body)))
        end = min(len(body), start + data.draw(st.integers(0, 4)))
        body[start:end] = data.draw(st.binary(max_size=6))
    for kind in KINDS:
        try:
            wire.decode(kind, bytes(body), Encoding.PROTO)
        except InvalidRequestError as error:
            assert error.field
    wire.read_identity(bytes(body), "model_id", "seq_id", Encoding.PROTO)
