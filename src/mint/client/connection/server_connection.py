"""Requests to one server: encoded, sent again while it cannot be reached, and long-polled for their results.

A request may be sent twice: it carries its place in the order, so the server recognises a copy.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from pydantic import BaseModel
from pydantic_core import PydanticSerializationError

import mint.wire as wire
from mint.client.connection.backoff import Backoff
from mint.client.connection.endpoint import Endpoint
from mint.client.connection.request_checks import unwritable
from mint.client.connection.server_errors import LONGEST_ERROR_BYTES, LostError, error_of, is_error, is_not_yet, json_of
from mint.client.connection.transport import TIMEOUT_S, Request, Response, Transport, TransportError
from mint.client.connection.wait_log import WaitLog, log
from mint.errors import InvalidRequestError, MintError
from mint.types import ForwardBackwardOutput, SampleResponse, UntypedPromise
from mint.wire.requests import CancelFutureRequest, ForwardBackwardRequest, RetrieveFutureRequest, SampleRequest

M = TypeVar("M", bound=wire.Message)

SUBMIT_PATIENCE_S = 300.0
RETRIEVE_PATIENCE_S = 3600.0
"""How long requests are sent again to a server that does not answer: to submit one, to fetch the result of one."""

NOTIFY_TIMEOUT_S = 10.0
SHORTEST_POLL_S = 0.3
TRANSIENT = frozenset({408, 429, 502, 503, 504})
NOT_FOUND = 404
GONE = 410
UNSUPPORTED_MEDIA_TYPE = 415
PROTO_OR_JSON = f"{wire.Encoding.PROTO.value}, {wire.Encoding.JSON.value}"
ACCEPTED: Mapping[type[wire.Message], str] = {
    ForwardBackwardOutput: PROTO_OR_JSON,
    SampleResponse: PROTO_OR_JSON,
}
"""The media types in which a result may come; others come as JSON."""

LARGE_BYTES = 1 << 20
"""A larger answer is decoded on a thread, because the event loop has heartbeats and other requests to send."""


@dataclass(frozen=True)
class EncodedRequest:
    """A request, and its bytes."""

    message: BaseModel
    encoding: wire.Encoding
    body: bytes


class ServerConnection:
    """One transport, and what was learned about the server at its other end."""

    def __init__(self, endpoint: Endpoint, transport: Transport) -> None:
        self.is_closing = False
        """Set when the session ends: then the server is not told which results are no longer wanted."""
        self._headers = endpoint.headers
        self._transport = transport
        self._reads_proto = True
        self._wait_log = WaitLog()
        self._cancellations: set[asyncio.Task[None]] = set()

    # --- requests that are answered at once ----------------------------------------------------------------------

    async def get(self, path: str, kind: type[M]) -> M:
        """The answer of a GET route."""
        return await _read(await self.call("GET", path), kind)

    async def post(self, path: str, message: BaseModel, kind: type[M]) -> M:
        """The answer of a POST route that answers at once."""
        return await _read(await self.call("POST", path, message), kind)

    async def call(
        self,
        method: str,
        path: str,
        message: BaseModel | None = None,
        *,
        patience_s: float | None = None,
        connect_patience_s: float | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> Response:
        """The good answer of any route. Raises the error in a bad one. See `_exchange` for the times."""
        encoded = None if message is None else self.encode(message)
        return await self._exchange(
            method, path, encoded, patience_s=patience_s, connect_patience_s=connect_patience_s, timeout_s=timeout_s
        )

    async def notify(self, path: str, message: BaseModel) -> Response | None:
        """Sends a message once. None where no answer came: the server can do without the message."""
        headers = {**self._headers, "accept": wire.MEDIA_TYPE}
        try:
            return await self.send(Request("POST", path, headers, wire.encode(message), NOTIFY_TIMEOUT_S))
        except TransportError as error:
            log.debug("%s was not delivered: %s", path, error)
            return None

    async def send(self, request: Request) -> Response:
        """Sends a request as it is, once; for files."""
        return await self._transport.send(request)

    @property
    def headers(self) -> dict[str, str]:
        """The headers of every request."""
        return dict(self._headers)

    async def close(self) -> None:
        """Closes the connections."""
        await self._transport.close()

    # --- requests with a result ----------------------------------------------------------------------------------

    def encode(self, message: BaseModel) -> EncodedRequest:
        """The message in the encoding that suits it: passes, which hold tensors, as protobuf.

        Raises:
            InvalidRequestError: it holds a value that cannot be sent, such as half of a surrogate pair.
        """
        try:
            if self._reads_proto and isinstance(message, ForwardBackwardRequest):
                try:
                    return EncodedRequest(message, wire.Encoding.PROTO, wire.encode(message, wire.Encoding.PROTO))
                except InvalidRequestError as error:
                    # A value that only JSON can carry: the server refuses it in its turn.
                    log.debug("sent as JSON: %s", error)
            return EncodedRequest(message, wire.Encoding.JSON, wire.encode(message))
        except (PydanticSerializationError, UnicodeError) as error:
            raise unwritable(message, error) from error

    async def submit(self, path: str, encoded: EncodedRequest, kind: type[M]) -> M:
        """Submits a request and waits for its result. A sample request that the server has lost is submitted again.

        Where the waiter is cancelled, the server is told that the result is not wanted.
        """
        accept = ACCEPTED.get(kind, wire.MEDIA_TYPE)
        while True:
            try:
                response = await self._exchange("POST", path, encoded, accept=accept, prefers_result=True)
            except asyncio.CancelledError:
                if isinstance(encoded.message, SampleRequest):  # it may be under way; these two make its id
                    self._cancel(f"{encoded.message.sampling_session_id}:{encoded.message.seq_id}")
                raise
            if response.headers.get(wire.APPLIED) == wire.WAIT:
                return await _read(response, kind)
            request_id = (await _read(response, UntypedPromise)).request_id
            self._wait_log.start(request_id)
            try:
                return await self._retrieve(request_id, kind)
            except LostError:
                if kind is not SampleResponse:
                    raise
                log.info("request %s was lost by the server and is sent again", request_id)
            except asyncio.CancelledError:
                self._cancel(request_id)
                raise
            finally:
                self._wait_log.stop(request_id)

    async def _retrieve(self, request_id: str, kind: type[M]) -> M:
        encoded = self.encode(RetrieveFutureRequest(request_id=request_id))
        while True:
            asked_at = time.monotonic()
            response = await self._exchange(
                "POST",
                "retrieve_future",
                encoded,
                patience_s=RETRIEVE_PATIENCE_S,
                accept=ACCEPTED.get(kind, wire.MEDIA_TYPE),
                takes_not_yet=True,
            )
            if not is_not_yet(response.status_code, response.content):
                return await _read(response, kind)
            self._wait_log.try_again(request_id, json_of(response.content))
            # A server that does not hold the poll would be asked in a loop.
            await asyncio.sleep(max(0.0, SHORTEST_POLL_S - (time.monotonic() - asked_at)))

    def _cancel(self, request_id: str) -> None:
        if self.is_closing:
            return
        task = asyncio.create_task(self._send_cancel(request_id))
        self._cancellations.add(task)  # a task without a reference may be collected before it has run
        task.add_done_callback(self._cancellations.discard)

    async def _send_cancel(self, request_id: str) -> None:
        await self.notify("cancel_future", CancelFutureRequest(request_id=request_id))

    # --- sending again -------------------------------------------------------------------------------------------

    async def _exchange(
        self,
        method: str,
        path: str,
        encoded: EncodedRequest | None,
        *,
        patience_s: float | None = None,
        connect_patience_s: float | None = None,
        accept: str = wire.MEDIA_TYPE,
        timeout_s: float = TIMEOUT_S,
        prefers_result: bool = False,
        takes_not_yet: bool = False,
    ) -> Response:
        """A good answer; sends again for `patience_s` (None: `SUBMIT_PATIENCE_S`) while the server cannot be reached.

        With `connect_patience_s` it gives up after that time already if none of its connections was taken.
        `prefers_result` asks for the result instead of a promise, from servers that can wait. `takes_not_yet` takes
        "not yet" for a good answer. A deletion that is sent again finds nothing if its answer was lost: that is good.
        """
        may_be_done = False
        backoff: Backoff | None = None
        began = time.monotonic()
        give_up_at = began + (SUBMIT_PATIENCE_S if patience_s is None else patience_s)
        connect_by = give_up_at if connect_patience_s is None else began + connect_patience_s
        headers = {**self._headers, "accept": accept}
        if prefers_result:
            headers[wire.PREFER] = wire.WAIT
        while True:
            problem: MintError
            retry_after = None
            content = b""
            if encoded is not None:
                headers["content-type"] = encoded.encoding.value
                content = encoded.body
            try:
                response = await self._transport.send(Request(method, path, headers, content, timeout_s))
            except TransportError as error:
                problem = error
                if error.may_have_arrived:
                    connect_by = give_up_at
                    may_be_done = True
                if prefers_result and error.may_have_arrived:
                    # It may have been accepted: then it is as durable as a promise.
                    give_up_at = max(give_up_at, time.monotonic() + RETRIEVE_PATIENCE_S)
            else:
                connect_by = give_up_at
                # Nearly every answer is a good one; only the others are worth a closer look.
                if response.status_code < 300 and b'"error"' not in response.content[:LONGEST_ERROR_BYTES]:
                    if self._wait_log.has_logged:
                        self._wait_log.answered()
                    return response
                if takes_not_yet and is_not_yet(response.status_code, response.content):
                    return response
                if method == "DELETE" and may_be_done and response.status_code == NOT_FOUND:
                    return response
                if encoded is not None and _refuses_proto(response, encoded):
                    self._reads_proto = False
                    encoded = self.encode(encoded.message)
                    continue
                if response.status_code not in TRANSIENT:
                    self._wait_log.answered()
                    return _good(response)
                problem = error_of(response.status_code, response.content, response.url)
                retry_after = response.headers.get("retry-after")
                may_be_done = may_be_done or response.status_code >= 500
            backoff = backoff or Backoff()
            pause_s = backoff.next_s(retry_after)
            if time.monotonic() + pause_s > min(connect_by, give_up_at):
                raise problem
            self._wait_log.unreachable(problem.message, pause_s)
            await asyncio.sleep(pause_s)


def _refuses_proto(response: Response, encoded: EncodedRequest) -> bool:
    """Whether this is the answer of a server that is older than protobuf here."""
    if encoded.encoding is not wire.Encoding.PROTO:
        return False
    if response.status_code == 400:
        return b"protobuf" in response.content[:2000].lower()
    return response.status_code == UNSUPPORTED_MEDIA_TYPE


def _good(response: Response) -> Response:
    if not is_error(response.status_code, response.content):
        return response
    error = error_of(response.status_code, response.content, response.url)
    if response.status_code == GONE:  # whatever class the server names: `submit` may send the request again
        raise LostError(
            error.message,
            field=error.field,
            value=error.value,
            remedy=error.remedy or "Send the request again",
            request_id=error.request_id,
        )
    raise error


async def _read(response: Response, kind: type[M]) -> M:
    media_type = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    encoding = wire.Encoding.PROTO if media_type == wire.Encoding.PROTO.value else wire.Encoding.JSON
    if len(response.content) > LARGE_BYTES:
        return await asyncio.to_thread(lambda: wire.decode(kind, response.content, encoding))
    return wire.decode(kind, response.content, encoding)
