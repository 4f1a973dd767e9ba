"""Reads the error in a server's answer, or that there is no result yet. Pure.

Reads mint's own error bodies. For those of other servers of this protocol, the status decides the class.
"""

from __future__ import annotations

import json
from typing import Any

import mint.wire as wire
from mint.errors import (
    AuthenticationError,
    ConflictError,
    InvalidRequestError,
    MintError,
    NotFoundError,
    OverloadedError,
    RequestFailedError,
    SessionEndedError,
    from_wire,
)

TRY_AGAIN = 408
LONGEST_ERROR_BYTES = 65_536
"""A longer answer with a good status is a result, and is not searched for an error."""

_KINDS: dict[int, type[MintError]] = {
    400: InvalidRequestError,
    401: AuthenticationError,
    403: AuthenticationError,
    404: NotFoundError,
    409: ConflictError,
    410: SessionEndedError,
    413: InvalidRequestError,
    422: InvalidRequestError,
    429: OverloadedError,
}


class LostError(SessionEndedError):
    """The server no longer has the request; a sample request may be sent again."""


def is_not_yet(status: int, body: bytes) -> bool:
    """Whether the result is not ready; some servers say so with status 200."""
    return status == TRY_AGAIN or (status == 200 and body[:1] == b"{" and b'"try_again"' in body[:200])


def json_of(body: bytes) -> dict[str, Any]:
    """The JSON object in the body; empty where it is none."""
    try:
        content = json.loads(body)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def is_error(status: int, body: bytes) -> bool:
    """Whether the answer holds an error; that of an accepted request that failed has status 200."""
    if status >= 300:
        return True
    content = wire.decode_error(body) if len(body) <= LONGEST_ERROR_BYTES else None
    return content is not None and isinstance(content["error"], str) and ("category" in content or "code" in content)


def _as_in_python(value: Any) -> Any:
    return value.replace("tinker://", "mint://") if isinstance(value, str) else value


def error_of(status: int, body: bytes, url: str) -> MintError:
    """The error with the class that the server named, or else the class of the status. Its paths of checkpoints are
    `mint://…`, as everywhere in Python."""
    content = wire.decode_error(body)
    if content is not None and "code" in content:
        return from_wire({name: _as_in_python(value) for name, value in content.items()})
    text = str(content["error"]) if content is not None else body[:200].decode(errors="replace")
    if status == 200:
        kind: type[MintError] = RequestFailedError
        if content is not None and content.get("category") == "user":
            kind = InvalidRequestError
        return kind(text)
    if 300 <= status < 400:
        return InvalidRequestError(f"{url} answered {status}: it has moved", remedy="Correct MINT_BASE_URL")
    return _KINDS.get(status, RequestFailedError)(f"{url} answered {status}: {text}")
