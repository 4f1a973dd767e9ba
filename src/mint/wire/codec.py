"""Bytes ⇄ messages, in the encoding that headers have negotiated: JSON or protobuf.

Infinities and NaN are written to JSON as `Infinity` and `NaN`, which both sides read. A protobuf message never starts
with `{`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import StrEnum
from typing import Any, NoReturn, Protocol, Self, TypeVar, cast, get_args, get_origin

import pydantic_core
from pydantic import BaseModel, ValidationError

from mint.errors import InvalidRequestError, MintError
from mint.types import ForwardBackwardOutput, SampleResponse, invalid_request
from mint.types.value_classes import ArrayValue
from mint.wire import protobuf as proto_codec
from mint.wire.protobuf_fields import read_place
from mint.wire.requests import ForwardBackwardRequest


class Message(Protocol):
    """A request or a result: a pydantic model, or an `ArrayValue`."""

    @classmethod
    def model_validate_json(cls, body: bytes, /) -> Self: ...

    def model_dump_json(self, *, exclude_none: bool = False) -> str: ...


T = TypeVar("T", bound=Message)

log = logging.getLogger("mint.wire")

API_PREFIX = "/api/v1"
PREFER = "prefer"
WAIT = "wait"
APPLIED = "preference-applied"
"""Headers of RFC 7240: a client that prefers to wait gets the result instead of a promise, if it comes soon enough. A
header of the answer says so."""

MAX_NAMED = 20
MAX_NAME_CHARS = 100
_READ_BY_VALIDATORS = frozenset({"betas"})
"""Names that messages accept besides their fields."""
_SETTINGS = frozenset({"adam_params.", "lora_config.", "sampling_params."})
"""Parts in which an unknown field might change what is computed: it is ignored only if null, false, 0 or empty."""


class Encoding(StrEnum):
    """How a message is written; the value is its media type."""

    JSON = "application/json"
    PROTO = "application/x-protobuf"


MEDIA_TYPE = Encoding.JSON.value

_PROTO: dict[type[Message], tuple[Callable[[bytes], Message], Callable[[Any], bytes]]] = {
    ForwardBackwardRequest: (proto_codec.read_request, proto_codec.write_request),
    ForwardBackwardOutput: (proto_codec.read_output, proto_codec.write_output),
    SampleResponse: (proto_codec.read_sample, proto_codec.write_sample),
}
"""The messages that have a protobuf form: how each is read and written."""


def encode(message: Message, encoding: Encoding = Encoding.JSON) -> bytes:
    """A request or result; in JSON without the fields that are None."""
    if encoding is Encoding.PROTO:
        _, write = _PROTO.get(type(message)) or _no_proto_form(type(message))
        return write(message)
    return message.model_dump_json(exclude_none=True).encode()


def is_same(one: Message, other: Message) -> bool:
    """Whether two requests are equal, in whatever encoding they came."""
    encoding = Encoding.PROTO if type(one) in _PROTO else Encoding.JSON
    try:
        return type(one) is type(other) and encode(one, encoding) == encode(other, encoding)
    except InvalidRequestError:  # one holds a value that protobuf cannot carry, and will fail for it
        return one == other


def encode_result(result: Message) -> bytes:
    """A result as it is stored: large ones as protobuf, the others as JSON, which alone begins with `{`."""
    return encode(result, Encoding.PROTO if type(result) in _PROTO else Encoding.JSON)


def decode_result(kind: type[T], body: bytes) -> T:
    """A stored result of this kind."""
    return decode(kind, body, Encoding.JSON if body.startswith(b"{") else Encoding.PROTO)


def result_as_json(body: bytes, kind: type[Message]) -> bytes:
    """A stored result of this kind for a client that reads only JSON."""
    return body if body.startswith(b"{") else encode(decode(kind, body, Encoding.PROTO))


def encode_error(error: MintError) -> bytes:
    """The body of a refused request or of a failed future."""
    return pydantic_core.to_json(error.to_wire())


def decode(kind: type[T], body: bytes, encoding: Encoding = Encoding.JSON) -> T:
    """The message in `body`. Fields that this version does not know are ignored, and named in the log.

    Raises:
        InvalidRequestError: the body cannot be read, or is not of this kind; names the first wrong field.
    """
    if encoding is Encoding.PROTO:
        read, _ = _PROTO.get(kind) or _no_proto_form(kind)
        return cast("T", read(body))
    try:
        return kind.model_validate_json(body)
    except (ValidationError, InvalidRequestError) as error:
        known, unknown = _without_unknown(kind, body) if _may_be_unknown(error) else (body, [])
        if not unknown:
            raise _as_refusal(error, kind) from error
    try:
        message = kind.model_validate_json(known)
    except (ValidationError, InvalidRequestError) as error:
        raise _as_refusal(error, kind) from error
    log.warning("%s: unknown fields ignored: %s", kind.__name__, ", ".join(unknown))
    return message


def _may_be_unknown(error: ValidationError | InvalidRequestError) -> bool:
    """Whether the message might be right without its unknown fields. A check of mint's own may have hidden them."""
    if isinstance(error, InvalidRequestError) or error.error_count() > MAX_NAMED:
        return True
    found = {complaint["type"] for complaint in error.errors(include_url=False, include_input=False)}
    return not found.isdisjoint(("extra_forbidden", "value_error"))


def _as_refusal(error: ValidationError | InvalidRequestError, kind: type[Message]) -> InvalidRequestError:
    return invalid_request(error, kind.__name__) if isinstance(error, ValidationError) else error


def _no_proto_form(kind: type[Message]) -> NoReturn:
    raise InvalidRequestError(
        f"{kind.__name__} has no protobuf form",
        field="content-type",
        value=Encoding.PROTO.value,
        remedy="Send application/json",
    )


def _without_unknown(kind: type[Message], body: bytes) -> tuple[bytes, list[str]]:
    """The body without the fields that `kind`, and the messages in it, do not know; and the first few of those."""
    try:
        content = pydantic_core.from_json(body)
    except ValueError:
        return body, []
    unknown: dict[str, None] = {}
    known = _prune(kind, content, "", unknown)
    return pydantic_core.to_json(known, inf_nan_mode="constants"), list(unknown)[:MAX_NAMED]


def _prune(annotation: Any, value: Any, where: str, unknown: dict[str, None]) -> Any:
    message = _message_in(annotation)
    if message is None:
        return value
    if isinstance(value, list):
        inner = next(iter(get_args(annotation)), None)
        return value if inner is None else [_prune(annotation, item, where, unknown) for item in value]
    if not isinstance(value, dict):
        return value
    kept: dict[str, Any] = {}
    for key, part in value.items():
        field = message.model_fields.get(key)
        if field is not None:
            kept[key] = _prune(field.annotation, part, f"{where}{key}.", unknown)
        elif key in _READ_BY_VALIDATORS or (
            where in _SETTINGS and part
        ):  # a setting that does something is not ignored: the message refuses it
            kept[key] = part
        else:
            unknown[f"{where}{key}"[:MAX_NAME_CHARS]] = None
    return kept


def _message_in(annotation: Any) -> type[BaseModel] | None:
    """The message in an annotation such as `X | None` or `list[X]`; none for `dict[str, X]`."""
    if isinstance(annotation, type) and issubclass(annotation, ArrayValue):
        return annotation.json_form
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) is dict:
        return None
    return next((found for part in get_args(annotation) if (found := _message_in(part)) is not None), None)


def decode_error(body: bytes) -> dict[str, Any] | None:
    """The error in `body` as `to_wire` wrote it, or None where it holds no error."""
    if not body.startswith(b"{"):
        return None
    try:
        content = pydantic_core.from_json(body)
    except ValueError:
        return None
    return content if isinstance(content, dict) and "error" in content else None


def read_identity(body: bytes, name: str, number: str, encoding: Encoding = Encoding.JSON) -> tuple[str, int] | None:
    """The string field `name` and the integer field `number` of an otherwise invalid body.

    A request whose place in the order can be read has taken that place, even if the rest of it is wrong.
    """
    if encoding is Encoding.PROTO:
        # the one request with a protobuf form belongs to a model, and has its place in fields 1 and 2
        return read_place(body) if name == "model_id" else None
    try:
        content = pydantic_core.from_json(body)
    except ValueError:
        return None
    if not isinstance(content, dict):
        return None
    target_id, place = content.get(name), content.get(number)
    if not isinstance(target_id, str) or not isinstance(place, int) or isinstance(place, bool):
        return None
    return target_id, place
