"""The three large messages as protobuf, and back: `forward_backward` requests and results, and samples.

Input may be hostile: a body that is cut, contradicts itself or claims more than it holds raises an
`InvalidRequestError` that names the field. Knows only the layout; the service checks whether a request makes sense.

Letters in the comments: D datums · K alternatives per position.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any, NoReturn

from google.protobuf.message import DecodeError, EncodeError, Message

from mint.errors import InvalidRequestError
from mint.types import (
    Datum,
    DType,
    EncodedTextChunk,
    ForwardBackwardOutput,
    ModelInput,
    PromptAltTokens,
    PromptProvenanceSpan,
    ProvenanceSpans,
    SampledProvenanceSpan,
    SampledSequence,
    SampleResponse,
    StopReason,
    TensorData,
    TopkLogprobs,
)
from mint.types.arrays import np
from mint.wire import tinker_public_pb2 as pb
from mint.wire.protobuf_fields import MAX_PARTS, check_parts
from mint.wire.requests import ForwardBackwardInput, ForwardBackwardRequest

_MAX_DIMENSIONS = 8
_MAX_EMPTY_DATUMS = 65_536
_NUMPY = {
    pb.DTYPE_FLOAT32: np.dtype("<f4"),
    pb.DTYPE_INT64: np.dtype("<i8"),
    pb.DTYPE_INT32: np.dtype("<i4"),
}
_INT32 = _NUMPY[pb.DTYPE_INT32]
_NUMBER_BYTES = {pb.DTYPE_FLOAT32: 4, pb.DTYPE_INT64: 8, pb.DTYPE_INT32: 4, pb.DTYPE_BFLOAT16: 2}
_WRITTEN: Mapping[DType, tuple[Any, np.dtype]] = {
    "float32": (pb.DTYPE_FLOAT32, np.dtype("<f4")),
    "int64": (pb.DTYPE_INT64, np.dtype("<i8")),
}
_STOP_REASONS: Mapping[int, StopReason] = {pb.STOP_REASON_STOP: "stop", pb.STOP_REASON_LENGTH: "length"}

_NUMBERS_AT_ONCE = 4096
"""A message gets no more datums once the tensors of those that it has hold so many numbers."""


# --- forward_backward requests -----------------------------------------------------------------------------------


def read_request(body: bytes) -> ForwardBackwardRequest:
    """The `forward_backward` request in `body`.

    Raises:
        InvalidRequestError: as the module says; `data[3].loss_fn_inputs.weights` is how fields are named.
    """
    message = _parse(pb.ForwardBackwardRequest(), body, repeated=3)
    config: dict[str, float | str] = dict(sorted(message.loss_fn_config.items()))
    for key, value in sorted(message.loss_fn_config_v2.items(), key=itemgetter(0)):
        config[key] = value.text if value.HasField("text") else value.number
    data = []
    for index, datum in enumerate(message.data):
        data.append(_read_datum(datum, f"data[{index}]"))
    content = ForwardBackwardInput(data=data, loss_fn=message.loss_fn, loss_fn_config=config or None)
    return ForwardBackwardRequest(
        model_id=message.model_id,
        seq_id=message.seq_id,
        forward_backward_input=content,
        forward_only=message.forward_only,
    )


def write_request(request: ForwardBackwardRequest) -> bytes:
    """`read_request` gives the request back; equal requests give equal bytes.

    Messages that are joined as bytes are one message with the fields of all. So a few datums at a time are a message
    of their own: for a message with very many of them, most of the time would go into the growth of its buffer.
    A message for each datum would free many blocks of memory, and at every 10,000th protobuf calls `malloc_trim`,
    after which the system must commit the free memory of the process anew.
    """
    content = request.forward_backward_input
    try:
        head = pb.ForwardBackwardRequest(model_id=request.model_id, seq_id=request.seq_id)
        tail = pb.ForwardBackwardRequest(loss_fn=content.loss_fn, forward_only=request.forward_only)
    except ValueError as error:  # a number beyond the field's 32 bits, or text that is not Unicode
        remedy = "Give numbers of 32 bits, and text without lone surrogates"
        raise InvalidRequestError(
            str(error), field="ForwardBackwardRequest", value=request.seq_id, remedy=remedy
        ) from error
    for key, value in (content.loss_fn_config or {}).items():
        if isinstance(value, str):
            tail.loss_fn_config_v2[key].text = value
        else:
            tail.loss_fn_config[key] = tail.loss_fn_config_v2[key].number = value
    parts = [_serialise(head)]
    part = pb.ForwardBackwardRequest()
    numbers = 0
    for index, datum in enumerate(content.data):
        if numbers >= _NUMBERS_AT_ONCE:
            parts.append(_serialise(part))
            part = pb.ForwardBackwardRequest()
            numbers = 0
        written = part.data.add()
        for chunk in datum.model_input.chunks:
            ids = chunk.ids if chunk.ids.dtype == np.int32 else _int32(chunk.ids, f"data[{index}].model_input")
            written.model_input.add().encoded_text.tokens = ids.astype("<i4", copy=False).tobytes()
        inputs = written.loss_fn_inputs
        for key, tensor in datum.loss_fn_inputs.items():
            _write_tensor(inputs[key], tensor, f"data[{index}].loss_fn_inputs.{key}")
            numbers += len(tensor.values)
        _write_spans(written.model_input_spans, datum.model_input_spans or ())
        _write_spans(written.loss_fn_input_spans, datum.loss_fn_input_spans or ())
    return b"".join([*parts, _serialise(part), _serialise(tail)])


def _read_datum(datum: pb.Datum, where: str) -> Datum:
    chunks = []
    for index, chunk in enumerate(datum.model_input):
        place = f"{where}.model_input[{index}]"
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            _refuse(place, kind or "nothing", "is not text", "The base models of this server read token ids alone")
        chunks.append(EncodedTextChunk(_numbers(chunk.encoded_text.tokens, pb.DTYPE_INT32, place)))
    tensors = datum.loss_fn_inputs
    inputs = {}
    for key in tensors:
        inputs[key] = _read_tensor(tensors[key], f"{where}.loss_fn_inputs.{key}")
    spans = datum.model_input_spans, datum.loss_fn_input_spans
    if not any(spans):
        return Datum(ModelInput(chunks), inputs)
    try:
        return Datum(ModelInput(chunks), inputs, *(_read_spans(part) for part in spans))
    except InvalidRequestError as error:
        error.field = f"{where}.{(error.field or '').removeprefix('Datum.')}"
        raise


def _read_spans(spans: Iterable[pb.ProvenanceSpan]) -> ProvenanceSpans:
    read = []
    for span in spans:
        of_prompt = span.WhichOneof("span") == "prompt_tokens"
        part = span.prompt_tokens if of_prompt else span.sampled_tokens
        kind = PromptProvenanceSpan if of_prompt else SampledProvenanceSpan
        read.append(kind(sequence_id=part.sequence_id, offset=part.offset, length=part.length))
    return read


def _write_spans(written: Any, spans: ProvenanceSpans) -> None:
    for span in spans:
        message = written.add()
        part = message.prompt_tokens if isinstance(span, PromptProvenanceSpan) else message.sampled_tokens
        part.sequence_id, part.offset, part.length = span.sequence_id, span.offset, span.length


# --- forward_backward results ------------------------------------------------------------------------------------


def read_output(body: bytes) -> ForwardBackwardOutput:
    """The `forward_backward` result in `body`.

    Raises:
        InvalidRequestError: as the module says.
    """
    message = _parse(pb.ForwardBackwardOutput(), body, repeated=2)
    rows: list[dict[str, TensorData]] = []
    for index, record in enumerate(message.loss_fn_outputs):
        rows += _read_record(record, f"loss_fn_outputs[{index}]")
    return ForwardBackwardOutput(
        loss_fn_output_type=message.loss_fn_output_type.rpartition(":")[2] or "ArrayRecord",
        loss_fn_outputs=rows,
        metrics=dict(sorted(message.metrics.items())),  # a map comes in any order
        warnings=list(message.warnings),
    )


def write_output(output: ForwardBackwardOutput) -> bytes:
    """`read_output` gives the result back; datums of one kind and trailing shape share a record."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type=output.loss_fn_output_type, warnings=output.warnings)
    for key, value in output.metrics.items():
        message.metrics[key] = value
    for kind, group in groupby(output.loss_fn_outputs, key=_record_kind):
        rows = list(group)
        record = message.loss_fn_outputs.add(type_tag=output.loss_fn_output_type, num_datums=len(rows))
        for name, dtype, trailing_shape in kind:
            code, written = _WRITTEN[dtype]
            parts = []
            offsets = [0]
            for row in rows:
                part = row[name].values.astype(written, copy=False).tobytes()
                parts.append(part)
                offsets.append(offsets[-1] + len(part))
            field = record.fields[name]
            field.dtype = code
            field.data = b"".join(parts)
            field.offsets = struct.pack(f"<{len(offsets)}q", *offsets)
            field.trailing_shape.extend(trailing_shape)
    return _serialise(message)


def _record_kind(row: Mapping[str, TensorData]) -> tuple[tuple[str, DType, tuple[int, ...]], ...]:
    kind = []
    for name in sorted(row):
        tensor = row[name]
        kind.append((name, tensor.dtype, tuple((tensor.shape or [0])[1:])))
    return tuple(kind)


def _read_record(record: pb.ArrayRecord, where: str) -> list[dict[str, TensorData]]:
    count = record.num_datums
    if not record.fields:
        if not 0 <= count <= _MAX_EMPTY_DATUMS:
            _refuse(f"{where}.num_datums", count, "counts datums without any field", "Leave such records out")
        return [{} for _ in range(count)]
    columns = {}
    for name in sorted(record.fields):
        columns[name] = _read_column(record.fields[name], f"{where}.fields.{name}")
    count = count or len(next(iter(columns.values())))
    for name, column in columns.items():
        if len(column) != count:
            _refuse(f"{where}.fields.{name}.offsets", len(column), f"does not fit {count} datums", "Pass one per datum")
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _read_column(field: pb.BatchedTensor, where: str) -> list[TensorData]:
    """The D tensors of a field."""
    numbers = _numbers(field.data, field.dtype, where)
    width = _NUMBER_BYTES[field.dtype]
    offsets_D1: list[int] = _numbers(field.offsets, pb.DTYPE_INT64, f"{where}.offsets").tolist()
    trailing = field.trailing_shape[:]
    _require_shape(trailing, f"{where}.trailing_shape")
    row = math.prod(trailing)
    ascending = len(offsets_D1) > 0 and all(start <= end for start, end in pairwise(offsets_D1))
    if not ascending or offsets_D1[0] < 0 or offsets_D1[-1] > len(field.data):
        shown = f"{len(offsets_D1)} offsets into {len(field.data)} bytes"
        _refuse(f"{where}.offsets", shown, "do not cut the data in order", "Pass num_datums + 1 ascending offsets")
    whole = all(end == start or (row and (end - start) % (row * width) == 0) for start, end in pairwise(offsets_D1))
    if offsets_D1[0] % width or not whole:
        _refuse(f"{where}.offsets", f"rows of {row}", "cut the data inside a row", "Correct offsets or trailing_shape")
    dtype: DType = "float32" if numbers.dtype.kind == "f" else "int64"
    tensors = []
    for start, end in pairwise(offset // width for offset in offsets_D1):
        tensors.append(TensorData(numbers[start:end], dtype, ((end - start) // row if row else 0, *trailing)))
    return tensors


# --- samples -----------------------------------------------------------------------------------------------------


def read_sample(body: bytes) -> SampleResponse:
    """The samples in `body`.

    Raises:
        InvalidRequestError: as the module says.
    """
    message = _parse(pb.SampleResponse(), body, repeated=1)
    prompt_logprobs = topk = target = alternatives = None
    if message.HasField("prompt_logprobs"):
        prompt_logprobs = _numbers(message.prompt_logprobs, pb.DTYPE_FLOAT32, "prompt_logprobs")
    if message.HasField("topk_prompt_logprobs"):
        topk = _read_topk(message.topk_prompt_logprobs, "topk_prompt_logprobs")
    if message.HasField("target_prompt_logprobs"):
        target = _read_tensor(message.target_prompt_logprobs, "target_prompt_logprobs")
    if message.HasField("prompt_alt_tokens"):
        alternatives = PromptAltTokens(
            tokens=_read_tensor(message.prompt_alt_tokens.tokens, "prompt_alt_tokens.tokens"),
            logprobs=_read_tensor(message.prompt_alt_tokens.logprobs, "prompt_alt_tokens.logprobs"),
        )
    return SampleResponse(
        [_read_sequence(part, f"sequences[{index}]") for index, part in enumerate(message.sequences)],
        prompt_logprobs=prompt_logprobs,
        topk_prompt_logprobs=topk,
        target_prompt_logprobs=target,
        prompt_alt_tokens=alternatives,
        prompt_cache_hit_tokens=message.prompt_cache_hit_tokens,
    )


def write_sample(response: SampleResponse) -> bytes:
    """`read_sample` gives the samples back."""
    message = pb.SampleResponse(prompt_cache_hit_tokens=response.prompt_cache_hit_tokens)
    for sequence in response.sequences:
        reason = pb.STOP_REASON_STOP if sequence.stop_reason == "stop" else pb.STOP_REASON_LENGTH
        tokens, logprobs = sequence.tokens_np.astype("<i4", copy=False), sequence.logprobs_np.astype("<f4", copy=False)
        written = message.sequences.add(stop_reason=reason, tokens=tokens.tobytes(), logprobs=logprobs.tobytes())
        if sequence.topk_logprobs_np is not None:
            written.topk_sampled_logprobs.CopyFrom(_write_topk(sequence.topk_logprobs_np))
        if sequence.processed_logprobs_np is not None:
            written.processed_logprobs = sequence.processed_logprobs_np.astype("<f4", copy=False).tobytes()
    if response.prompt_logprobs_np is not None:
        message.prompt_logprobs = response.prompt_logprobs_np.astype("<f4", copy=False).tobytes()
    if response.topk_prompt_logprobs_np is not None:
        message.topk_prompt_logprobs.CopyFrom(_write_topk(response.topk_prompt_logprobs_np))
    if response.target_prompt_logprobs is not None:
        _write_tensor(message.target_prompt_logprobs, response.target_prompt_logprobs, "target_prompt_logprobs")
    if response.prompt_alt_tokens is not None:
        written_alternatives = message.prompt_alt_tokens
        _write_tensor(written_alternatives.tokens, response.prompt_alt_tokens.tokens, "prompt_alt_tokens.tokens")
        _write_tensor(written_alternatives.logprobs, response.prompt_alt_tokens.logprobs, "prompt_alt_tokens.logprobs")
    return _serialise(message)


def _read_sequence(sequence: pb.SampledSequence, where: str) -> SampledSequence:
    if sequence.stop_reason not in _STOP_REASONS:
        _refuse(f"{where}.stop_reason", sequence.stop_reason, "is not a reason", "Pass 0 (stop) or 1 (length)")
    tokens = _numbers(sequence.tokens, pb.DTYPE_INT32, f"{where}.tokens")
    logprobs = _numbers(sequence.logprobs, pb.DTYPE_FLOAT32, f"{where}.logprobs")
    processed = None
    if sequence.HasField("processed_logprobs"):
        processed = _numbers(sequence.processed_logprobs, pb.DTYPE_FLOAT32, f"{where}.processed_logprobs")
    for name, array in (("logprobs", logprobs), ("processed_logprobs", processed)):
        if array is not None and len(tokens) != len(array):
            _refuse(f"{where}.{name}", len(array), f"does not fit {len(tokens)} tokens", "Pass one per token")
    topk = None
    if sequence.HasField("topk_sampled_logprobs"):
        topk = _read_topk(sequence.topk_sampled_logprobs, f"{where}.topk_sampled_logprobs")
    return SampledSequence(tokens, logprobs, _STOP_REASONS[sequence.stop_reason], topk, processed_logprobs=processed)


def _read_topk(message: pb.TopkLogprobs, where: str) -> TopkLogprobs:
    ids = _numbers(message.token_ids, pb.DTYPE_INT32, f"{where}.token_ids")
    logprobs = _numbers(message.logprobs, pb.DTYPE_FLOAT32, f"{where}.logprobs")
    length = message.length
    k = message.k
    if not len(ids) == len(logprobs) == length * k or (k == 0 and length > 0):
        shown = f"{len(ids)} ids and {len(logprobs)} logprobs"
        _refuse(where, shown, f"do not fill {length} rows of {k}", "Pass length * k of both")
    return TopkLogprobs(ids.reshape(length, k), logprobs.reshape(length, k))


def _write_topk(table: TopkLogprobs) -> pb.TopkLogprobs:
    length, k = table.token_ids.shape
    ids = table.token_ids.astype("<i4", copy=False)
    logprobs = table.logprobs.astype("<f4", copy=False)
    return pb.TopkLogprobs(token_ids=ids.tobytes(), logprobs=logprobs.tobytes(), k=k, length=length)


# --- tensors and bytes -------------------------------------------------------------------------------------------


def _read_tensor(tensor: pb.Tensor, where: str) -> TensorData:
    layout = tensor.WhichOneof("layout")
    shape = tensor.shape[:]
    _require_shape(shape, f"{where}.shape")
    crow = col = None
    if layout == "sparse_csr":
        values = _numbers(tensor.sparse_csr.values, tensor.dtype, f"{where}.values")
        crow = _numbers(tensor.sparse_csr.crow_indices, pb.DTYPE_INT64, f"{where}.crow_indices")
        col = _numbers(tensor.sparse_csr.col_indices, pb.DTYPE_INT64, f"{where}.col_indices")
        if len(shape) != 2 or len(crow) != shape[0] + 1 or len(col) != len(values):
            shown = f"shape {shape}, {len(crow)} row offsets, {len(col)} columns, {len(values)} values"
            _refuse(where, shown, "is not a sparse matrix", "Pass 2 sizes, rows + 1 offsets and a column per value")
    else:
        values = _numbers(tensor.dense, tensor.dtype, where)
        if shape and math.prod(shape) != len(values):
            _refuse(f"{where}.shape", shape, f"does not fit {len(values)} numbers", "Pass the tensor's own shape")
    return TensorData(values, "float32" if values.dtype.kind == "f" else "int64", shape or None, crow, col)


def _write_tensor(message: pb.Tensor, tensor: TensorData, where: str) -> None:
    message.dtype, dtype = _WRITTEN[tensor.dtype]
    values = tensor.values.astype(dtype, copy=False).tobytes()
    indices = tensor.crow_and_columns
    if indices is None:
        message.dense = values
    else:
        message.sparse_csr.values = values
        message.sparse_csr.crow_indices, message.sparse_csr.col_indices = (
            array.astype("<i8", copy=False).tobytes() for array in indices
        )
    try:
        message.shape.extend(tensor.shape or ())
    except ValueError as error:
        remedy = "Give whole numbers below 2**63"
        raise InvalidRequestError(str(error), field=f"{where}.shape", value=tensor.shape, remedy=remedy) from error


def _numbers(raw: bytes, dtype: Any, where: str) -> np.ndarray:
    """int64, int32 or float32 numbers; bfloat16 becomes float32, of the same value."""
    width = _NUMBER_BYTES.get(dtype)
    if width is None:
        _refuse(f"{where}.dtype", dtype, "is not a dtype", "Pass 1 float32, 2 int64, 3 int32 or 4 bfloat16")
    if len(raw) % width:
        wanted = f"is not a multiple of {width} bytes"
        _refuse(where, f"{len(raw)} bytes", wanted, "Pass whole little-endian numbers")
    if dtype == pb.DTYPE_BFLOAT16:
        return np.frombuffer(_widened(raw), _NUMPY[pb.DTYPE_FLOAT32])
    return np.frombuffer(raw, _NUMPY[dtype])


def _widened(raw: bytes) -> bytes:
    """bfloat16 numbers as float32: they are its upper halves."""
    wide = bytearray(2 * len(raw))
    wide[2::4], wide[3::4] = raw[0::2], raw[1::2]
    return bytes(wide)


def _int32(ids: np.ndarray, where: str) -> np.ndarray:
    if ids.size and (ids.min() < -(2**31) or ids.max() >= 2**31):
        _refuse(where, ids.tolist(), "does not fit 32 bits", "Pass smaller numbers")
    return ids.astype(_INT32)


def _require_shape(shape: Sequence[int], where: str) -> None:
    if len(shape) > _MAX_DIMENSIONS:
        _refuse(where, f"{len(shape)} dimensions", "are too many", f"Pass at most {_MAX_DIMENSIONS}")
    if shape and (min(shape) < 0 or max(shape) >= 2**31):
        _refuse(where, shape, "is not a shape", "Pass sizes from 0 to 2**31 - 1")


def _parse(message: Any, body: bytes, *, repeated: int) -> Any:
    """`message`, filled from a body of not too many parts; `repeated` is the field whose own parts count too."""
    name = message.DESCRIPTOR.name
    if len(body) >= 2 * MAX_PARTS:  # no part is shorter than two bytes
        check_parts(body, name, repeated=repeated)
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise InvalidRequestError(
            "is cut or damaged", field=name, value=f"{len(body)} bytes", remedy="Send a whole protobuf message"
        ) from error
    return message


def _serialise(message: Message) -> bytes:
    try:
        return message.SerializeToString(deterministic=True)
    except EncodeError as error:
        remedy = "Send fewer data at once: a message has less than 2 GiB"
        raise InvalidRequestError(
            str(error), field=type(message).__name__, value="(too large)", remedy=remedy
        ) from error


def _refuse(where: str, value: object, message: str, remedy: str) -> NoReturn:
    raise InvalidRequestError(message, field=where, value=value, remedy=remedy)
