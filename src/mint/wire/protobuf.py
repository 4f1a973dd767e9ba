"""The three large messages as protobuf, and back: `forward_backward` requests and results, and samples.

Everything that arrives is taken for hostile: whatever is cut, contradicts itself or claims more than it holds is an
`InvalidRequestError` that names the field. Knows the layout alone; whether a request makes sense for a model is checked
by the service. Letters in the comments: D datums · K alternatives per position.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, NoReturn

import numpy as np
from google.protobuf.message import DecodeError, EncodeError, Message
from pydantic import ValidationError

from mint.errors import InvalidRequestError
from mint.types import (
    LOSS_WEIGHTS,
    Datum,
    DType,
    EncodedTextChunk,
    ForwardBackwardOutput,
    ModelInput,
    PromptAltTokens,
    SampledSequence,
    SampleResponse,
    TensorData,
    input_dtype,
    invalid_request,
    of_checked,
)
from mint.wire import tinker_public_pb2 as pb
from mint.wire.protobuf_fields import check_parts
from mint.wire.requests import ForwardBackwardInput, ForwardBackwardRequest

_EMPTY_CELL = (0, -99999.0)
_MAX_DIMENSIONS = 8
_MAX_EMPTY_DATUMS = 65_536
_NUMPY = {
    pb.DTYPE_FLOAT32: np.dtype("<f4"),
    pb.DTYPE_INT64: np.dtype("<i8"),
    pb.DTYPE_INT32: np.dtype("<i4"),
    pb.DTYPE_BFLOAT16: np.dtype("<u2"),  # the upper half of a float32
}
_WRITTEN: Mapping[DType, tuple[Any, np.dtype]] = {
    "float32": (pb.DTYPE_FLOAT32, np.dtype("<f4")),
    "int64": (pb.DTYPE_INT64, np.dtype("<i8")),
}
_STOP_REASONS = {pb.STOP_REASON_STOP: "stop", pb.STOP_REASON_LENGTH: "length"}


# --- forward_backward requests -----------------------------------------------------------------------------------


def read_request(body: bytes) -> ForwardBackwardRequest:
    """The `forward_backward` request in `body`.

    Raises:
        InvalidRequestError: as the module says; `data[3].loss_fn_inputs.weights` is how fields are named.
    """
    check_parts(body, "ForwardBackwardRequest", repeated=3)
    message = _parse(pb.ForwardBackwardRequest(), body)
    config: dict[str, float | str] = dict(sorted(message.loss_fn_config.items()))
    for key, value in sorted(message.loss_fn_config_v2.items(), key=itemgetter(0)):
        config[key] = value.text if value.HasField("text") else value.number
    content = ForwardBackwardInput.model_construct(
        data=[_read_datum(datum, f"data[{index}]") for index, datum in enumerate(message.data)],
        loss_fn=message.loss_fn,
        loss_fn_config=config or None,
    )
    return ForwardBackwardRequest.model_construct(
        model_id=message.model_id,
        seq_id=message.seq_id,
        forward_backward_input=content,
        forward_only=message.forward_only,
        type="forward_backward",
    )


def write_request(request: ForwardBackwardRequest) -> bytes:
    """`read_request` gives the request back; equal requests give equal bytes."""
    content = request.forward_backward_input
    try:
        message = pb.ForwardBackwardRequest(
            model_id=request.model_id,
            seq_id=request.seq_id,
            loss_fn=content.loss_fn,
            forward_only=request.forward_only,
        )
    except ValueError as error:  # a number beyond the field's 32 bits, or text that is not Unicode
        raise InvalidRequestError(str(error), field="ForwardBackwardRequest", value=request.seq_id) from error
    for key, value in (content.loss_fn_config or {}).items():
        if isinstance(value, str):
            message.loss_fn_config_v2[key].text = value
        else:
            message.loss_fn_config[key] = message.loss_fn_config_v2[key].number = value
    for index, datum in enumerate(content.data):
        written = message.data.add()
        for chunk in datum.model_input.chunks:
            if not isinstance(chunk, EncodedTextChunk):
                _refuse(
                    f"data[{index}].model_input", type(chunk).__name__, "is not text", "Pass EncodedTextChunk alone"
                )
            tokens = _array(chunk.tokens, np.dtype("<i4"), f"data[{index}].model_input")
            written.model_input.add().encoded_text.tokens = tokens.tobytes()
        for key, tensor in datum.loss_fn_inputs.items():
            _write_tensor(written.loss_fn_inputs[key], tensor, f"data[{index}].loss_fn_inputs.{key}")
    return _serialise(message)


def _read_datum(datum: pb.Datum, where: str) -> Datum:
    chunks = [_read_chunk(chunk, f"{where}.model_input[{index}]") for index, chunk in enumerate(datum.model_input)]
    inputs = {key: _read_tensor(value, f"{where}.loss_fn_inputs.{key}") for key, value in datum.loss_fn_inputs.items()}
    if all(tensor.dtype == input_dtype(key) for key, tensor in inputs.items()) and LOSS_WEIGHTS not in inputs:
        return of_checked(Datum, model_input=of_checked(ModelInput, chunks=chunks), loss_fn_inputs=inputs)
    try:
        return Datum.model_validate(
            {"model_input": ModelInput.model_construct(chunks=chunks), "loss_fn_inputs": inputs}
        )
    except ValidationError as error:
        raise invalid_request(error, where) from error


def _read_chunk(chunk: pb.Chunk, where: str) -> EncodedTextChunk:
    kind = chunk.WhichOneof("chunk")
    if kind != "encoded_text":
        _refuse(where, kind or "nothing", "is not text", "The base models of this server read token ids alone")
    tokens = _numbers(chunk.encoded_text.tokens, pb.DTYPE_INT32, where)
    return of_checked(EncodedTextChunk, tokens=tokens.tolist(), type="encoded_text")


# --- forward_backward results ------------------------------------------------------------------------------------


def read_output(body: bytes) -> ForwardBackwardOutput:
    """The `forward_backward` result in `body`.

    Raises:
        InvalidRequestError: as the module says.
    """
    check_parts(body, "ForwardBackwardOutput", repeated=2)
    message = _parse(pb.ForwardBackwardOutput(), body)
    rows: list[dict[str, TensorData]] = []
    for index, record in enumerate(message.loss_fn_outputs):
        rows += _read_record(record, f"loss_fn_outputs[{index}]")
    return ForwardBackwardOutput.model_construct(
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
            parts = [_array(row[name].data, written, f"loss_fn_outputs.{name}").tobytes() for row in rows]
            offsets = np.cumsum([0, *(len(part) for part in parts)], dtype="<i8").tobytes()
            field = record.fields[name]
            field.data, field.offsets, field.dtype = b"".join(parts), offsets, code
            field.trailing_shape.extend(trailing_shape)
    return _serialise(message)


def _record_kind(row: Mapping[str, TensorData]) -> tuple[tuple[str, DType, tuple[int, ...]], ...]:
    return tuple(sorted((name, tensor.dtype, tuple((tensor.shape or [0])[1:])) for name, tensor in row.items()))


def _read_record(record: pb.ArrayRecord, where: str) -> list[dict[str, TensorData]]:
    count = record.num_datums
    if not record.fields:
        if not 0 <= count <= _MAX_EMPTY_DATUMS:
            _refuse(f"{where}.num_datums", count, "counts datums without any field", "Leave such records out")
        return [{} for _ in range(count)]
    columns = {
        name: _read_column(field, f"{where}.fields.{name}")
        for name, field in sorted(record.fields.items(), key=itemgetter(0))
    }
    count = count or len(next(iter(columns.values())))
    for name, column in columns.items():
        if len(column) != count:
            _refuse(f"{where}.fields.{name}.offsets", len(column), f"does not fit {count} datums", "Pass one per datum")
    return [{name: column[index] for name, column in columns.items()} for index in range(count)]


def _read_column(field: pb.BatchedTensor, where: str) -> list[TensorData]:
    """The D tensors of a field."""
    numbers = _numbers(field.data, field.dtype, where)
    width = _NUMPY[field.dtype].itemsize
    offsets_D1 = _numbers(field.offsets, pb.DTYPE_INT64, f"{where}.offsets")
    trailing = _shape(field.trailing_shape, f"{where}.trailing_shape")
    row = math.prod(trailing)
    ascending = len(offsets_D1) > 0 and bool((offsets_D1[:-1] <= offsets_D1[1:]).all())
    if not ascending or offsets_D1[0] < 0 or offsets_D1[-1] > len(field.data):
        shown = f"{len(offsets_D1)} offsets into {len(field.data)} bytes"
        _refuse(f"{where}.offsets", shown, "do not cut the data in order", "Pass num_datums + 1 ascending offsets")
    sizes_D = np.diff(offsets_D1)
    whole = (sizes_D == 0) if row * width > len(field.data) or row == 0 else (sizes_D % (row * width) == 0)
    if offsets_D1[0] % width or not whole.all():
        _refuse(f"{where}.offsets", f"rows of {row}", "cut the data inside a row", "Correct offsets or trailing_shape")
    dtype: DType = "float32" if numbers.dtype.kind == "f" else "int64"
    column = []
    for start, end in zip((offsets_D1[:-1] // width).tolist(), (offsets_D1[1:] // width).tolist(), strict=True):
        shape = [(end - start) // row if row else 0, *trailing]
        column.append(
            of_checked(
                TensorData,
                data=numbers[start:end].tolist(),
                dtype=dtype,
                shape=shape,
                sparse_crow_indices=None,
                sparse_col_indices=None,
            )
        )
    return column


# --- samples -----------------------------------------------------------------------------------------------------


def read_sample(body: bytes) -> SampleResponse:
    """The samples in `body`.

    Raises:
        InvalidRequestError: as the module says.
    """
    check_parts(body, "SampleResponse", repeated=1)
    message = _parse(pb.SampleResponse(), body)
    prompt_logprobs = None
    if message.HasField("prompt_logprobs"):
        values = _numbers(message.prompt_logprobs, pb.DTYPE_FLOAT32, "prompt_logprobs").tolist()
        prompt_logprobs = [None if math.isnan(value) else value for value in values]
    topk, target, alternatives = None, None, None
    if message.HasField("topk_prompt_logprobs"):
        rows = _read_topk(message.topk_prompt_logprobs, "topk_prompt_logprobs")
        topk = [row or None for row in rows]
    if message.HasField("target_prompt_logprobs"):
        target = _read_tensor(message.target_prompt_logprobs, "target_prompt_logprobs")
    if message.HasField("prompt_alt_tokens"):
        alternatives = PromptAltTokens.model_construct(
            tokens=_read_tensor(message.prompt_alt_tokens.tokens, "prompt_alt_tokens.tokens"),
            logprobs=_read_tensor(message.prompt_alt_tokens.logprobs, "prompt_alt_tokens.logprobs"),
        )
    return SampleResponse.model_construct(
        sequences=[_read_sequence(part, f"sequences[{index}]") for index, part in enumerate(message.sequences)],
        prompt_logprobs=prompt_logprobs,
        topk_prompt_logprobs=topk,
        target_prompt_logprobs=target,
        prompt_alt_tokens=alternatives,
    )


def write_sample(response: SampleResponse) -> bytes:
    """`read_sample` gives the samples back."""
    message = pb.SampleResponse()
    for index, sequence in enumerate(response.sequences):
        where = f"sequences[{index}]"
        reason = pb.STOP_REASON_STOP if sequence.stop_reason == "stop" else pb.STOP_REASON_LENGTH
        tokens = _array(sequence.tokens, np.dtype("<i4"), f"{where}.tokens").tobytes()
        logprobs = _array(sequence.logprobs, np.dtype("<f4"), f"{where}.logprobs").tobytes()
        written = message.sequences.add(stop_reason=reason, tokens=tokens, logprobs=logprobs)
        if sequence.topk_logprobs is not None:
            written.topk_sampled_logprobs.CopyFrom(_write_topk(sequence.topk_logprobs))
    if response.prompt_logprobs is not None:
        values = [math.nan if value is None else value for value in response.prompt_logprobs]
        message.prompt_logprobs = _array(values, np.dtype("<f4"), "prompt_logprobs").tobytes()
    if response.topk_prompt_logprobs is not None:
        message.topk_prompt_logprobs.CopyFrom(_write_topk(response.topk_prompt_logprobs))
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
    tokens = _numbers(sequence.tokens, pb.DTYPE_INT32, f"{where}.tokens").tolist()
    logprobs = _numbers(sequence.logprobs, pb.DTYPE_FLOAT32, f"{where}.logprobs").tolist()
    if len(tokens) != len(logprobs):
        _refuse(f"{where}.logprobs", len(logprobs), f"does not fit {len(tokens)} tokens", "Pass one per token")
    topk = None
    if sequence.HasField("topk_sampled_logprobs"):
        topk = _read_topk(sequence.topk_sampled_logprobs, f"{where}.topk_sampled_logprobs")
    return of_checked(
        SampledSequence,
        tokens=tokens,
        logprobs=logprobs,
        stop_reason=_STOP_REASONS[sequence.stop_reason],
        topk_logprobs=topk,
    )


def _read_topk(message: pb.TopkLogprobs, where: str) -> list[list[tuple[int, float]]]:
    ids = _numbers(message.token_ids, pb.DTYPE_INT32, f"{where}.token_ids")
    logprobs = _numbers(message.logprobs, pb.DTYPE_FLOAT32, f"{where}.logprobs")
    length, k = message.length, message.k
    if not len(ids) == len(logprobs) == length * k or (k == 0 and length > 0):
        shown = f"{len(ids)} ids and {len(logprobs)} logprobs"
        _refuse(where, shown, f"do not fill {length} rows of {k}", "Pass length * k of both")
    pairs = zip(ids.reshape(-1, k or 1).tolist(), logprobs.reshape(-1, k or 1).tolist(), strict=True)
    return [[cell for cell in zip(*row, strict=True) if cell != _EMPTY_CELL] for row in pairs]


def _write_topk(rows: Sequence[Sequence[tuple[int, float]] | None]) -> pb.TopkLogprobs:
    k = max((len(row or ()) for row in rows), default=0) or 1
    cells = [cell for row in rows for cell in [*(row or ()), *([_EMPTY_CELL] * (k - len(row or ())))]]
    ids = _array([token for token, _ in cells], np.dtype("<i4"), "topk_logprobs.token_ids")
    logprobs = _array([logprob for _, logprob in cells], np.dtype("<f4"), "topk_logprobs.logprobs")
    return pb.TopkLogprobs(token_ids=ids.tobytes(), logprobs=logprobs.tobytes(), k=k, length=len(rows))


# --- tensors and bytes -------------------------------------------------------------------------------------------


def _read_tensor(tensor: pb.Tensor, where: str) -> TensorData:
    layout = tensor.WhichOneof("layout")
    shape = _shape(tensor.shape, f"{where}.shape")
    crow = col = None
    if layout == "sparse_csr":
        values = _numbers(tensor.sparse_csr.values, tensor.dtype, f"{where}.values")
        crow = _numbers(tensor.sparse_csr.crow_indices, pb.DTYPE_INT64, f"{where}.crow_indices").tolist()
        col = _numbers(tensor.sparse_csr.col_indices, pb.DTYPE_INT64, f"{where}.col_indices").tolist()
        if len(shape) != 2 or len(crow) != shape[0] + 1 or len(col) != len(values):
            shown = f"shape {shape}, {len(crow)} row offsets, {len(col)} columns, {len(values)} values"
            _refuse(where, shown, "is not a sparse matrix", "Pass 2 sizes, rows + 1 offsets and a column per value")
    else:
        values = _numbers(tensor.dense, tensor.dtype, where)
        if shape and math.prod(shape) != len(values):
            _refuse(f"{where}.shape", shape, f"does not fit {len(values)} numbers", "Pass the tensor's own shape")
    return of_checked(
        TensorData,
        data=values.tolist(),
        dtype="float32" if values.dtype.kind == "f" else "int64",
        shape=shape or None,
        sparse_crow_indices=crow,
        sparse_col_indices=col,
    )


def _write_tensor(message: pb.Tensor, tensor: TensorData, where: str) -> None:
    message.dtype, dtype = _WRITTEN[tensor.dtype]
    values = _array(tensor.data, dtype, where).tobytes()
    if tensor.sparse_crow_indices is None or tensor.sparse_col_indices is None:
        message.dense = values
    else:
        message.sparse_csr.values = values
        message.sparse_csr.crow_indices = _array(tensor.sparse_crow_indices, np.dtype("<i8"), where).tobytes()
        message.sparse_csr.col_indices = _array(tensor.sparse_col_indices, np.dtype("<i8"), where).tobytes()
    try:
        message.shape.extend(tensor.shape or ())
    except ValueError as error:
        raise InvalidRequestError(str(error), field=f"{where}.shape", value=tensor.shape) from error


def _numbers(raw: bytes, dtype: Any, where: str) -> np.ndarray:
    """int64, int32 or float32 numbers; bfloat16 becomes float32, of the same value."""
    if dtype not in _NUMPY:
        _refuse(f"{where}.dtype", dtype, "is not a dtype", "Pass 1 float32, 2 int64, 3 int32 or 4 bfloat16")
    if len(raw) % _NUMPY[dtype].itemsize:
        wanted = f"is not a multiple of {_NUMPY[dtype].itemsize} bytes"
        _refuse(where, f"{len(raw)} bytes", wanted, "Pass whole little-endian numbers")
    numbers = np.frombuffer(raw, _NUMPY[dtype])
    return (numbers.astype("<u4") << 16).view("<f4") if dtype == pb.DTYPE_BFLOAT16 else numbers


def _array(values: Sequence[float], dtype: np.dtype, where: str) -> np.ndarray:
    try:
        found = np.asarray(values)
        if dtype.kind == "i" and found.size and found.dtype.kind not in "iu":
            raise InvalidRequestError(
                "holds what is no whole number", field=where, value=values, remedy="Pass integers"
            )
        if dtype.kind == "i" and found.size:
            info = np.iinfo(dtype)
            if found.min() < info.min or found.max() > info.max:
                raise OverflowError(f"does not fit {info.bits} bits")
        with np.errstate(over="ignore"):  # what is beyond float32 is infinite there
            return found.astype(dtype)
    except (OverflowError, TypeError) as error:
        raise InvalidRequestError(str(error), field=where, value=values, remedy="Pass smaller numbers") from error


def _shape(sizes: Sequence[int], where: str) -> list[int]:
    if len(sizes) > _MAX_DIMENSIONS:
        _refuse(where, f"{len(sizes)} dimensions", "are too many", f"Pass at most {_MAX_DIMENSIONS}")
    shape = list(sizes)
    if any(not 0 <= size < 2**31 for size in shape):
        _refuse(where, shape, "is not a shape", "Pass sizes from 0 to 2**31 - 1")
    return shape


def _parse(message: Any, body: bytes) -> Any:
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        name = message.DESCRIPTOR.name
        raise InvalidRequestError(
            "is cut or damaged", field=name, value=f"{len(body)} bytes", remedy="Send a whole protobuf message"
        ) from error
    return message


def _serialise(message: Message) -> bytes:
    try:
        return message.SerializeToString(deterministic=True)
    except EncodeError as error:
        raise InvalidRequestError(str(error), field=type(message).__name__, value="(too large)") from error


def _refuse(where: str, value: object, message: str, remedy: str) -> NoReturn:
    raise InvalidRequestError(message, field=where, value=value, remedy=remedy)
