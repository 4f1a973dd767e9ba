"""Every error that mint raises, as one tree.

    MintError                       the root
    ├── APIStatusError              answers of a server (or of the client in its place)
    │   ├── InvalidRequestError         a field has a value that cannot be used; names field, value, remedy user   400
    │   │   ├── UnknownBaseModelError   the base model is not registered; lists the registered ones         user   400
    │   │   ├── PromptTooLongError      the prompt (+ max_tokens) does not fit the context                  user   400
    │   │   ├── BodyTooLargeError       the body is larger than the server accepts                          user   413
    │   │   └── UnsupportedBodyError    the server cannot read the body's encoding                          user   415
    │   ├── NotFoundError               no such model, checkpoint, sampler or future of this owner          user   404
    │   ├── SessionEndedError           the session has ended                                               user   404
    │   ├── ConflictError               the name or sequence number is taken by another request             user   400
    │   ├── AuthenticationError         no API key, or an invalid one                                       user   401
    │   │   ├── OperatorOnlyError       the key is valid, but not one of the server's operators             user   403
    │   │   └── ForeignPageError        a web page of another origin called a server without keys           user   403
    │   ├── QuotaExceededError          a quota of the owner is used up, and waiting does not help          user   403
    │   ├── OverloadedError             a queue is full; try again later                                    server 429
    │   ├── RequestFailedError          an accepted request failed                                          server 500
    │   │   ├── StepRefusedError        optim_step changed nothing: the gradient is incomplete, or not finite user   400
    │   │   ├── RequestCancelledError   the client cancelled its request                                    user   400
    │   │   ├── CheckpointError         a checkpoint or snapshot is damaged or does not fit                 server 400
    │   │   ├── RecoveryDivergedError   a replay after a crash gave other bits than before                  server 500
    │   │   ├── DamagedDataError        stored bytes are not those that were written                        server 500
    │   │   ├── OutOfMemoryError        memory does not suffice for one request                             server 500
    │   │   └── JournalError            the journal cannot be written or read                               server 503
    │   └── BillingError                never raised here; for scripts that catch it                        user   402
    ├── ConnectionLostError         the server cannot be reached                                            server 503
    ├── ResultTimeoutError          `.result(timeout=…)` ran out; the request itself continues              user   408
    └── MissingExtraError           an optional part of mint is not installed; names the extra              user   400

The columns are `category` (whose fault it is) and `status` (HTTP). Scripts for other SDKs of this protocol catch the
same classes under other names: `TinkerError` and `APIError` are `MintError`, `APIConnectionError` is
`ConnectionLostError`, `APITimeoutError` is `ResultTimeoutError`, `BadRequestError`, `UnprocessableEntityError` and
`APIResponseValidationError` are `InvalidRequestError`, `PermissionDeniedError` is `AuthenticationError`,
`RateLimitError` is `OverloadedError`, `InternalServerError` is `RequestFailedError`.

`to_wire()` writes an error as JSON; on the client `from_wire()` makes the same class of it.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import Any, ClassVar, Literal

Category = Literal["user", "server", "unknown"]


class MintError(Exception):
    """The root. `category` says whose fault it is; `status` is the HTTP status of the answer."""

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
        """`message` says what is wrong. `str()` adds `field`, `value` and `remedy` if given."""
        self.message = message
        self.field = field
        self.value = value if value is None else _short(value)
        self.remedy = remedy
        self.request_id = request_id
        super().__init__(str(self))

    def __str__(self) -> str:
        return self.reason if self.remedy is None else f"{self.reason}. {self.remedy}"

    @property
    def reason(self) -> str:
        """The message with the field and its value, without the remedy."""
        if self.field is None:
            return self.message
        # one that is missing, or contradicts another, may have no value to show
        named = self.field if self.value is None else f"{self.field} = {self.value}"
        return f"{named}: {self.message}"

    @property
    def status_code(self) -> int:
        """`status`, under the name that other SDKs use."""
        return self.status

    def to_wire(self) -> dict[str, Any]:
        """The JSON body of a failed future or a refused request."""
        parts = {"field": self.field, "value": self.value, "remedy": self.remedy, "request_id": self.request_id}
        given = {key: part for key, part in parts.items() if part is not None}
        return {
            "error": str(self),
            "category": self.category,
            "code": type(self).__name__,
            "message": self.message,
            **given,
        }


class APIStatusError(MintError):
    """An answer of a server, or of the client in its place; not a lost connection and not a timeout."""


class BillingError(APIStatusError):
    """Never raised here; other SDKs of this protocol have it."""

    category = "user"
    status = 402


class InvalidRequestError(APIStatusError, ValueError):
    """A field has a value that cannot be used."""

    category = "user"
    status = 400


class UnknownBaseModelError(InvalidRequestError):
    """The name of the base model is neither registered nor a folder with weights."""


class PromptTooLongError(InvalidRequestError):
    """The prompt, or the prompt with `max_tokens`, is longer than the model's context."""


class BodyTooLargeError(InvalidRequestError):
    """The body is larger than this server accepts, compressed or decompressed."""

    status = 413


class UnsupportedBodyError(InvalidRequestError):
    """This server cannot read the body's `Content-Encoding`."""

    status = 415


class NotFoundError(APIStatusError, LookupError):
    """No such object, or it belongs to another owner; the answer does not tell which."""

    category = "user"
    status = 404


class SessionEndedError(APIStatusError):
    """The session was closed or has expired; its futures and models are gone."""

    category = "user"
    status = 404


class ConflictError(APIStatusError):
    """The name or sequence number was used before, with another body."""

    category = "user"
    status = 400


class AuthenticationError(APIStatusError):
    """No API key, or an invalid one."""

    category = "user"
    status = 401


class OperatorOnlyError(AuthenticationError):
    """The key is valid, but its owner is no operator of the server."""

    status = 403


class ForeignPageError(AuthenticationError):
    """A web page of another origin, or a request with another host name, called a server without keys."""

    status = 403


class QuotaExceededError(APIStatusError):
    """A quota of the owner is used up until the owner frees something or the operator raises it.

    The status is not one that clients retry, because waiting does not help.
    """

    category = "user"
    status = 403


class OverloadedError(APIStatusError):
    """A queue is full; send the same request again later."""

    category = "server"
    status = 429

    def __init__(self, message: str, *, retry_after_s: float = 1.0, **details: Any) -> None:
        """As `MintError`; the response asks the client to come back after `retry_after_s` seconds."""
        super().__init__(message, **details)
        self.retry_after_s = retry_after_s


class RequestFailedError(APIStatusError):
    """An accepted request failed."""

    category = "server"
    status = 500


class StepRefusedError(RequestFailedError):
    """`optim_step` changed nothing and the gradient was cleared: a `forward_backward` before it failed, or this was the
    third step in a row that would not have been finite."""

    category = "user"
    status = 400


class RequestCancelledError(RequestFailedError):
    """The client cancelled its request before there was a result."""

    category = "user"
    status = 400


class CheckpointError(RequestFailedError):
    """A checkpoint or snapshot is damaged, incomplete, of a model with other shapes, or of a base with other weights.

    To send the request again does not help, so the status is not one that clients retry.
    """

    status = 400


class RecoveryDivergedError(RequestFailedError):
    """Replaying the journal gave another state than the acknowledged one."""


class DamagedDataError(RequestFailedError):
    """Bytes in the journal are not those that were written; the message names them.

    To send the request again does not help, so the status is not one that clients retry.
    """

    status = 400


class OutOfMemoryError(RequestFailedError):
    """Memory does not suffice for one request, even in its smallest parts; nothing has changed."""


class JournalError(RequestFailedError):
    """The journal cannot be written or read (disk full, locked, newer format); nothing was accepted."""

    status = 503


class ConnectionLostError(MintError, ConnectionError):
    """The server cannot be reached."""

    category = "server"
    status = 503


class ResultTimeoutError(MintError, TimeoutError):
    """The timeout of a wait ran out; the request continues and can be waited for again."""

    category = "user"
    status = 408


class MissingExtraError(MintError, ImportError):
    """An optional dependency is not installed: here, or where the server runs the model.

    A client need not send such a request again, so the status is none of 5xx.
    """

    category = "user"
    status = 400


TinkerError = APIError = MintError
APIConnectionError = ConnectionLostError
APITimeoutError = ResultTimeoutError
BadRequestError = UnprocessableEntityError = APIResponseValidationError = InvalidRequestError
PermissionDeniedError = AuthenticationError
RateLimitError = OverloadedError
InternalServerError = RequestFailedError


def from_wire(body: dict[str, Any]) -> MintError:
    """The error that `to_wire` wrote; a code unknown to this version becomes `RequestFailedError`."""
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
