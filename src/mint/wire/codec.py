"""Bytes ⇄ messages, in the encoding that headers have negotiated: JSON or protobuf.

Infinities and NaN are written to JSON as `Infinity` and `NaN`, which both sides read. Knows no HTTP and no routes.
"""

from __future__ import annotations

import logging
from enum import StrEnum
from typing import Any, TypeVar

import pydantic_core
from pydantic import BaseModel, ValidationError

from mint.errors import InvalidRequestError, MintError
from mint.types import invalid_request

T = TypeVar("T", bound=BaseModel)

log = logging.getLogger("mint.wire")

API_PREFIX = "/api/v1"


class Encoding(StrEnum):
    """How a message is written; the value is its media type."""

    JSON = "application/json"
    PROTO = "application/x-protobuf"


MEDIA_TYPE = Encoding.JSON.value


def encode(message: BaseModel, encoding: Encoding = Encoding.JSON) -> bytes:
    """A request or result; in JSON without the fields that are None."""
    if encoding is Encoding.PROTO:
        raise InvalidRequestError(
            "cannot be written as protobuf", field="message", value=type(message).__name__, remedy="Use JSON"
        )
    return message.model_dump_json(exclude_none=True).encode()


def encode_result(result: BaseModel) -> bytes:
    """A result as it is stored: the large ones as protobuf, the others as JSON; `{` begins JSON only."""
    return encode(result)


def result_as_json(body: bytes, kind: type[BaseModel]) -> bytes:
    """A stored result of this kind for a client that reads JSON alone."""
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
        raise InvalidRequestError(
            "has no protobuf form", field="content-type", value=encoding.value, remedy="Send application/json"
        )
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        unknown = _unknown_fields(error)
        if not unknown:
            raise invalid_request(error, kind.__name__) from error
    try:
        message = kind.model_validate_json(body, extra="ignore")
    except ValidationError as error:
        raise invalid_request(error, kind.__name__) from error
    log.warning("%s: unknown fields ignored: %s", kind.__name__, ", ".join(unknown))
    return message


def _unknown_fields(error: ValidationError) -> list[str]:
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    return sorted({".".join(map(str, item["loc"])) for item in problems if item["type"] == "extra_forbidden"})


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
    """The string field `name` and the whole number `number` of a body that may be wrong everywhere else.

    A request whose place in the order can be read has used that place up, however wrong the rest of it is.
    """
    if encoding is Encoding.PROTO:
        return None
    try:
        content = pydantic_core.from_json(body)
    except ValueError:
        return None
    if not isinstance(content, dict):
        return None
    owner, place = content.get(name), content.get(number)
    if not isinstance(owner, str) or not isinstance(place, int) or isinstance(place, bool):
        return None
    return owner, place
