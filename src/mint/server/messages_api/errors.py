"""Errors in Anthropic's shape."""

from __future__ import annotations

from starlette.responses import Response

from mint.errors import MintError
from mint.server.messages_api.schemas import ErrorCode, MessageError, MessageErrorDetails
from mint.server.openai.delivery import respond_error

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
"""By status."""

_NO_THREADS = ErrorCode(error_code="thread_unsupported_request", unsupported=["thread"])


def refuse(error: MintError) -> Response:
    """An error as a response."""
    return respond_error(error, describe_error(error))


def describe_error(error: MintError) -> MessageError:
    """An error as a message."""
    kind = "api_error" if error.status >= 500 else _TYPES.get(error.status, "invalid_request_error")
    # Anthropic's client then sends the whole conversation instead
    details = _NO_THREADS if error.field == "thread" else None
    return MessageError(error=MessageErrorDetails(type=kind, message=str(error), details=details))
