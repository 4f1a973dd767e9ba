"""Errors in OpenAI's shape."""

from __future__ import annotations

from starlette.responses import Response

from mint.errors import AuthenticationError, MintError, NotFoundError, OverloadedError, PromptTooLongError
from mint.server.openai.delivery import respond_error
from mint.server.openai.schemas import ErrorBody, ErrorDetails


def refuse(error: MintError) -> Response:
    """An error as a response."""
    return respond_error(error, describe_error(error))


def describe_error(error: MintError) -> ErrorBody:
    """An error as a message; clients tell errors apart by `code`."""
    kind, code = "invalid_request_error", None
    if error.status >= 500:
        kind = "server_error"
    elif isinstance(error, OverloadedError):
        kind, code = "rate_limit_error", "rate_limit_exceeded"
    elif isinstance(error, AuthenticationError):
        kind, code = "authentication_error", "invalid_api_key"
    elif isinstance(error, PromptTooLongError):
        code = "context_length_exceeded"
    elif isinstance(error, NotFoundError) and error.field == "model":
        code = "model_not_found"
    param = None if error.field is None else _param(error.field)
    return ErrorBody(error=ErrorDetails(message=str(error), type=kind, param=param, code=code))


def _param(field: str) -> str:
    """The field's name as the client sent it: pydantic's errors begin with the name of the message."""
    first, _, rest = field.partition(".")
    return rest if rest and first.endswith("Request") else field
