"""Every error that mint raises, as one tree.

    MintError                       everything below
    ├── InvalidRequestError         a field of the request is wrong: names field, value, remedy        user,   400
    │   ├── UnknownBaseModelError   the base model is not registered: lists what is, and how to add    user,   400
    │   ├── PromptTooLongError      prompt (+ max_tokens) does not fit the context                     user,   400
    │   ├── BodyTooLargeError       the body is larger than this server takes                          user,   413
    │   └── UnsupportedBodyError    the body is packed in a way that this server does not read         user,   415
    ├── NotFoundError               no such model, checkpoint, sampler or future (of yours)            user,   404
    ├── SessionEndedError           asked of a session that has ended                                  user,   404
    ├── ConflictError               the name or the sequence number is already taken by another body   user,   400
    ├── AuthenticationError         no key, or not a valid one                                         user,   401
    │   └── ForeignPageError        a web page of another address called a server that asks no key     user,   403
    ├── OverloadedError             queue full: try again later                                        server, 429
    ├── RequestFailedError          an accepted request could not be carried out                       server, 500
    │   ├── StepRefusedError        the optimizer step was refused: a gradient before it failed        user,   400
    │   ├── RequestCancelledError   the client called its request off                                  user,   400
    │   ├── CheckpointError         a checkpoint or snapshot is damaged or does not fit                server, 500
    │   ├── RecoveryDivergedError   a replay after a crash gave other bits than were acknowledged      server, 500
    │   └── JournalError            the journal cannot be written or read: disk full, locked, too new  server, 503
    ├── ConnectionLostError         the server cannot be reached                                       server, 503
    ├── ResultTimeoutError          `.result(timeout=…)` ran out; the request itself goes on           user,   408
    └── MissingExtraError           an optional part of mint is not installed: names the extra         user,   501

`APIStatusError` stands between `MintError` and all that a server answers (everything above but the last three), and
`BillingError` below it for scripts that name it. The other names that scripts for other SDKs of this protocol catch are
the same classes: `TinkerError`, `APIError` are `MintError`, `APIConnectionError` is `ConnectionLostError`,
`APITimeoutError` is `ResultTimeoutError`, `BadRequestError`, `UnprocessableEntityError` and
`APIResponseValidationError` are `InvalidRequestError`, `PermissionDeniedError` is `AuthenticationError`,
`RateLimitError` is `OverloadedError`, `InternalServerError` is `RequestFailedError`.

An error crosses the wire as `to_wire()` and is raised again on the client as the same class by `from_wire()`.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import Any, ClassVar, Literal

Category = Literal["user", "server", "unknown"]


class MintError(Exception):
    """The root. `category` says whose fault it is, `status` which HTTP status answers a refused request."""

    category: ClassVar[Category] = "unknown"
    status: ClassVar[int] = 500

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        value: object = None,
        remedy: str | None = None,
        request_id: str | None = None,
    ) -> None:
        """`message` says what is wrong; `field`, `value` and `remedy` are appended where given."""
        self.message = message
        self.field = field
        self.value = value if value is None else _short(value)
        self.remedy = remedy
        self.request_id = request_id
        super().__init__(str(self))

    def __str__(self) -> str:
        text = f"{self.field} = {self.value}: {self.message}" if self.field is not None else self.message
        return text if self.remedy is None else f"{text}. {self.remedy}"

    @property
    def status_code(self) -> int:
        """`status`, by the name that other SDKs have for it."""
        return self.status

    def to_wire(self) -> dict[str, Any]:
        """The JSON body of a failed future or of a refused request."""
        parts = {"field": self.field, "value": self.value, "remedy": self.remedy, "request_id": self.request_id}
        kept = {key: part for key, part in parts.items() if part is not None}
        return {
            "error": str(self),
            "category": self.category,
            "code": type(self).__name__,
            "message": self.message,
            **kept,
        }


class APIStatusError(MintError):
    """What a server answers, or the client in its place: not a lost connection, and not a time-out."""


class BillingError(APIStatusError):
    """Nothing here asks for money, or raises this."""

    category = "user"
    status = 402


class InvalidRequestError(APIStatusError, ValueError):
    """A field of a request has a value that mint cannot honour."""

    category = "user"
    status = 400


class UnknownBaseModelError(InvalidRequestError):
    """The base model's name is not registered and is no folder with weights."""


class PromptTooLongError(InvalidRequestError):
    """The prompt, or the prompt with `max_tokens`, is longer than the model's context."""


class BodyTooLargeError(InvalidRequestError):
    """The body is larger than this server takes, as sent or once unpacked."""

    status = 413


class UnsupportedBodyError(InvalidRequestError):
    """The body's `Content-Encoding` is none that this server reads."""

    status = 415


class NotFoundError(APIStatusError, LookupError):
    """No such object, or not yours: the two are not told apart."""

    category = "user"
    status = 404


class SessionEndedError(APIStatusError):
    """The session was closed or has expired; its futures and models are gone."""

    category = "user"
    status = 404


class ConflictError(APIStatusError):
    """The same name or sequence number was used before for something else."""

    category = "user"
    status = 400


class AuthenticationError(APIStatusError):
    """No API key, or not a valid one."""

    category = "user"
    status = 401


class ForeignPageError(AuthenticationError):
    """A server without keys was called from a web page that is not its own, or under a name that is not its own."""

    status = 403


class OverloadedError(APIStatusError):
    """A queue is full; the same request may be sent again later."""

    category = "server"
    status = 429


class RequestFailedError(APIStatusError):
    """A request that was accepted could not be carried out."""

    category = "server"
    status = 500


class StepRefusedError(RequestFailedError):
    """`optim_step` was refused because a `forward_backward` before it failed; the gradient was cleared."""

    category = "user"
    status = 400


class RequestCancelledError(RequestFailedError):
    """The client called its request off before there was a result."""

    category = "user"
    status = 400


class CheckpointError(RequestFailedError):
    """A checkpoint or snapshot is damaged, incomplete, or belongs to another shape of model."""


class RecoveryDivergedError(RequestFailedError):
    """Replaying the journal gave another state than the one that had been acknowledged."""


class JournalError(RequestFailedError):
    """The journal cannot be written or read; nothing was accepted."""

    status = 503


class ConnectionLostError(MintError, ConnectionError):
    """The server cannot be reached."""

    category = "server"
    status = 503


class ResultTimeoutError(MintError, TimeoutError):
    """Waiting ran out; the request itself goes on and may be waited for again."""

    category = "user"
    status = 408


class MissingExtraError(MintError, ImportError):
    """An optional dependency is not installed."""

    category = "user"
    status = 501


TinkerError = APIError = MintError
APIConnectionError = ConnectionLostError
APITimeoutError = ResultTimeoutError
BadRequestError = UnprocessableEntityError = APIResponseValidationError = InvalidRequestError
PermissionDeniedError = AuthenticationError
RateLimitError = OverloadedError
InternalServerError = RequestFailedError


def from_wire(body: dict[str, Any]) -> MintError:
    """The error that `to_wire` wrote; unknown codes (newer servers) become `RequestFailedError`."""
    known = {cls.__name__: cls for cls in _subclasses(MintError)}
    cls = known.get(body.get("code", ""), RequestFailedError)
    error = cls(
        body.get("message") or body.get("error") or "the server gave no reason",
        field=body.get("field"),
        remedy=body.get("remedy"),
        request_id=body.get("request_id"),
    )
    error.value = body.get("value")
    error.args = (str(error),)
    return error


def _subclasses(cls: type[MintError]) -> list[type[MintError]]:
    return [cls, *(found for child in cls.__subclasses__() for found in _subclasses(child))]


def _short(value: object) -> str:
    text = str(value) if isinstance(value, str | PurePath) else repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
