"""One session with a server, on one event-loop thread of its own.

The same requests go to a socket, or into the service in this process. Repeats what may
be repeated (every request carries its place, so the server knows a copy), and turns error bodies back into errors.
Knows no model and no sampler.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import itertools
import os
import sys
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

import httpx
from pydantic import BaseModel

import mint.wire as wire
from mint.client.polling import Pauses, WaitingRoom, log
from mint.client.responses import LostError, error_of, is_error, is_not_yet, json_of
from mint.client.transport import InProcess, Reply
from mint.config import EMBEDDED_URL
from mint.errors import ConnectionLostError, InvalidRequestError, MintError, SessionEndedError
from mint.types import CreateSessionResponse, ForwardBackwardOutput, SampleResponse, UntypedPromise
from mint.version import VERSION
from mint.wire.requests import (
    CancelFutureRequest,
    CreateSessionRequest,
    ForwardBackwardRequest,
    RetrieveFutureRequest,
    SampleRequest,
    SessionRequest,
)

R = TypeVar("R")
M = TypeVar("M", bound=wire.Message)
Outcome = Literal["success", "errored", "interrupted"]

CONNECT_PATIENCE_S = 15.0
SUBMIT_PATIENCE_S = 300.0
RETRIEVE_PATIENCE_S = 3600.0
"""How long a server that does not answer is tried again: at first, to hand something in, to fetch what was accepted."""

HEARTBEAT_S = 10.0
CLOSE_S = 3.0
TIMEOUT = httpx.Timeout(60.0, connect=5.0)
SHORTEST_POLL_S = 0.3
TRANSIENT = frozenset({408, 429, 502, 503, 504})
GONE, UNSUPPORTED_MEDIA_TYPE = 410, 415
PROTO_RESULTS = (ForwardBackwardOutput, SampleResponse)
BOTH = f"{wire.Encoding.PROTO.value}, {wire.Encoding.JSON.value}"


class EmbeddedServer(Protocol):
    """The service in this process: an ASGI application, and how to let go of it."""

    app: Any

    def release(self) -> None:
        """Nobody here needs it any more."""
        ...


@dataclass(frozen=True)
class Address:
    """Which server, and what it is shown; `base_url` None means the service in this process."""

    base_url: str | None
    api_key: str | None = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.base_url is not None and not self.base_url.startswith(("http://", "https://")):
            raise InvalidRequestError(
                "is no address of a server",
                field="base_url",
                value=self.base_url,
                remedy="Write http://HOST:PORT or https://HOST, with a path prefix where the server has one",
            )

    @property
    def url(self) -> str:
        """What the routes are below; ends with a slash."""
        return (self.base_url or EMBEDDED_URL).rstrip("/") + wire.API_PREFIX + "/"

    def all_headers(self) -> dict[str, str]:
        """Those of every request."""
        key = {"x-api-key": self.api_key} if self.api_key is not None else {}
        ours = {"content-type": wire.MEDIA_TYPE, "user-agent": f"mint/{VERSION}", "x-sdk-version": VERSION}
        return {**ours, **key, **self.headers}


@dataclass(frozen=True)
class Outgoing:
    """A request, and its bytes."""

    message: BaseModel
    encoding: wire.Encoding
    body: bytes


class Session:
    """A lazy connection: nothing happens until the first use."""

    def __init__(
        self,
        address: Address,
        *,
        request: CreateSessionRequest | None = None,
        open_embedded: Callable[[], EmbeddedServer] | None = None,
        joined: str | None = None,
    ) -> None:
        """Opens a session of its own with `request`, or joins the one with the id `joined` that another process keeps.

        `open_embedded` opens the service in this process, for an address without a URL.
        """
        self.address = address
        self._request = request or CreateSessionRequest()
        self._open_embedded = open_embedded
        self._joined = joined
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = os.getpid()
        self._closed = False
        self._session_id: str | None = None
        self._in_process: InProcess | None = None
        self._speaks_proto = True
        self._waiting = WaitingRoom()
        self._farewells: set[asyncio.Task[None]] = set()
        self.model_numbers = itertools.count()
        self.sampler_numbers = itertools.count()

    # --- life ----------------------------------------------------------------------------------------------------

    @property
    def session_id(self) -> str:
        """The session's id; opens the session if need be."""
        with self._lock:
            if self._closed:
                raise _ended(self._session_id)
            if self._loop is None:
                self._open()
            self._require_own_process()
            return self._session_id or ""

    @property
    def is_embedded(self) -> bool:
        """Whether the service runs in this process."""
        return self.address.base_url is None

    def _open(self) -> None:
        embedded = self._open_embedded() if self._open_embedded is not None and self.is_embedded else None
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, name="mint-client", daemon=True)
        thread.start()
        self._loop, self._thread, self._embedded, self._pid = loop, thread, embedded, os.getpid()
        try:
            asyncio.run_coroutine_threadsafe(self._connect(), loop).result()
        except BaseException:
            self._stop()
            raise
        _open_sessions.add(self)

    async def _connect(self) -> None:
        transport = None
        if self._embedded is not None:
            transport = httpx.ASGITransport(self._embedded.app)
            self._in_process = InProcess(self._embedded.app, self.address.url, self.address.all_headers())
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
        loopback = httpx.URL(self.address.url).host in ("127.0.0.1", "localhost", "::1", "mint.embedded")
        self._http = httpx.AsyncClient(
            base_url=self.address.url,
            headers=self.address.all_headers(),
            transport=transport,
            timeout=TIMEOUT,
            limits=limits,
            trust_env=not loopback,  # a proxy of the environment is for other machines
        )
        if self._joined is not None:
            self._session_id = self._joined
            return
        response = await self._exchange(
            "POST",
            "create_session",
            self.prepare(self._request),
            patience_s=CONNECT_PATIENCE_S,
            timeout_s=CONNECT_PATIENCE_S,
        )
        opened = wire.decode(CreateSessionResponse, response.content)
        self._session_id = opened.session_id
        for message in (opened.info_message, opened.warning_message, opened.error_message):
            if message is not None:
                log.warning("the server says: %s", message)
        self._heart = asyncio.create_task(self._beat())

    def close(self, outcome: Outcome = "success", detail: str | None = None) -> None:
        """Ends the session; futures that are still open fail with `SessionEndedError`. Again is fine.

        Takes a few seconds at most where the server does not answer: it ends the session itself when nobody is there.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._loop is None or self._pid != os.getpid():
                return
        _open_sessions.discard(self)
        asyncio.run_coroutine_threadsafe(self._disconnect(outcome, detail), self._loop).result()
        self._stop()

    async def _disconnect(self, outcome: Outcome, detail: str | None) -> None:
        if self._joined is None:
            self._heart.cancel()
            reason = {"reason": {"type": outcome}, "detail": detail}
            try:
                async with asyncio.timeout(CLOSE_S):
                    await self._http.post(f"sessions/{self._session_id}/finish", json=reason)
            except (httpx.TransportError, TimeoutError) as error:
                log.debug("the session could not be closed on the server: %s", error)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=CLOSE_S)
            await asyncio.sleep(0)  # whoever waits for them is told
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._http.aclose()
        except TimeoutError:
            log.debug("the connections could not be closed in time")

    def _stop(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLOSE_S)
            if not self._thread.is_alive():
                self._loop.close()
            self._loop = None
        if self._embedded is not None:
            self._embedded.release()

    async def _beat(self) -> None:
        body = wire.encode(SessionRequest(session_id=self._session_id or ""))
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            try:
                response = await self._http.post("session_heartbeat", content=body, timeout=HEARTBEAT_S)
            except httpx.TransportError as error:
                log.debug("heartbeat not delivered: %s", error)
            else:
                if response.status_code == GONE:
                    log.warning("session %s is over, says the server", self._session_id)
                    return

    def _require_own_process(self) -> None:
        if self._pid != os.getpid():
            raise SessionEndedError(
                "belongs to the process that this one was forked from",
                field="session_id",
                value=self._session_id,
                remedy="Make the ServiceClient after the fork, or hand over a SamplingClient by pickle",
            )

    # --- calls ---------------------------------------------------------------------------------------------------

    def run(self, work: Coroutine[Any, Any, R], *, may_cancel: bool = False) -> concurrent.futures.Future[R]:
        """Runs a coroutine on the session's thread; the result is waited for from any other.

        Cancelling the future stops the work only where it `may_cancel`: a request that has taken its place in the order
        of a model must be sent, or those after it would wait for it.
        """
        with self._lock:
            if not self._closed and self._loop is not None and self._pid == os.getpid():
                return asyncio.run_coroutine_threadsafe(self._until_closed(work, may_cancel), self._loop)
        work.close()
        self._require_own_process()
        failed: concurrent.futures.Future[R] = concurrent.futures.Future()
        failed.set_exception(_ended(self._session_id))
        return failed

    async def _until_closed(self, work: Coroutine[Any, Any, R], may_cancel: bool) -> R:
        try:
            if may_cancel:
                return await work
            task = asyncio.ensure_future(work)
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # somebody has looked
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if self._closed:
                raise _ended(self._session_id) from None
            raise

    async def get(self, path: str, kind: type[M]) -> M:
        """The answer of a GET route."""
        return _read(await self._exchange("GET", path, None), kind)

    async def post(self, path: str, message: BaseModel, kind: type[M]) -> M:
        """The answer of a POST route that answers at once."""
        return _read(await self._exchange("POST", path, self.prepare(message)), kind)

    async def call(
        self, method: str, path: str, message: BaseModel | None, *, timeout_s: float | None = None
    ) -> tuple[bytes, Mapping[str, str]]:
        """Body and headers (lower case) of what any other route answers."""
        outgoing = None if message is None else self.prepare(message)
        response = await self._exchange(method, path, outgoing, timeout_s=timeout_s)
        return response.content, response.headers

    async def transfer(self, work: Callable[[httpx.AsyncClient], Awaitable[R]]) -> R:
        """Does what is more than one answer, such as a file, over this session's connections."""
        return await work(self._http)

    def prepare(self, message: BaseModel) -> Outgoing:
        """The message in the encoding that suits it: passes, which hold tensors, as protobuf."""
        if self._speaks_proto and isinstance(message, ForwardBackwardRequest):
            try:
                return Outgoing(message, wire.Encoding.PROTO, wire.encode(message, wire.Encoding.PROTO))
            except InvalidRequestError as error:
                # a value that only JSON can carry: the server answers it in its turn
                log.debug("sent as JSON: %s", error)
        return Outgoing(message, wire.Encoding.JSON, wire.encode(message))

    async def submit(self, path: str, outgoing: Outgoing, kind: type[M]) -> M:
        """Hands a request in and waits for its result; a sample request that the server has lost goes in again."""
        while True:
            try:
                response = await self._exchange("POST", path, outgoing, accept=_accepted(kind), waits=True)
            except asyncio.CancelledError:
                if isinstance(outgoing.message, SampleRequest):  # it may be under way: its id is made of these
                    self._send_cancel(f"{outgoing.message.sampling_session_id}:{outgoing.message.seq_id}")
                raise
            if response.headers.get(wire.APPLIED) == wire.WAIT:
                return _read(response, kind)
            request_id = _read(response, UntypedPromise).request_id
            self._waiting.enter(request_id)
            try:
                return await self._retrieve(request_id, kind)
            except LostError:
                if kind is not SampleResponse:
                    raise
                log.info("request %s was lost by the server and is sent again", request_id)
            except asyncio.CancelledError:
                self._send_cancel(request_id)
                raise
            finally:
                self._waiting.leave(request_id)

    async def _retrieve(self, request_id: str, kind: type[M]) -> M:
        message = RetrieveFutureRequest(request_id=request_id)
        outgoing = Outgoing(message, wire.Encoding.JSON, wire.encode(message))
        while True:
            asked_at = time.monotonic()
            response = await self._exchange(
                "POST", "retrieve_future", outgoing, patience_s=RETRIEVE_PATIENCE_S, accept=_accepted(kind), polls=True
            )
            if not is_not_yet(response.status_code, response.content):
                return _read(response, kind)
            self._waiting.not_yet(request_id, json_of(response.content))
            # a server that does not hold the question would be asked in a loop
            await asyncio.sleep(max(0.0, SHORTEST_POLL_S - (time.monotonic() - asked_at)))

    def _send_cancel(self, request_id: str) -> None:
        if self._closed:
            return
        task = asyncio.create_task(self._cancel(request_id))
        self._farewells.add(task)
        task.add_done_callback(self._farewells.discard)

    async def _cancel(self, request_id: str) -> None:
        try:
            body = wire.encode(CancelFutureRequest(request_id=request_id))
            await self._http.post("cancel_future", content=body, timeout=HEARTBEAT_S)
        except httpx.TransportError as error:
            log.debug("the server was not told that %s is not needed: %s", request_id, error)

    async def _exchange(
        self,
        method: str,
        path: str,
        outgoing: Outgoing | None,
        *,
        patience_s: float | None = None,
        accept: str = wire.MEDIA_TYPE,
        polls: bool = False,
        waits: bool = False,
        timeout_s: float | None = None,
    ) -> Reply:
        """A good answer, or, where one `polls`, "ask again". Waits and repeats while the server cannot be reached.

        Who `waits` would rather have the result than a promise, from servers that know how.
        """
        pauses = Pauses()
        give_up_at = time.monotonic() + (SUBMIT_PATIENCE_S if patience_s is None else patience_s)
        timeout = TIMEOUT if timeout_s is None else httpx.Timeout(timeout_s, connect=TIMEOUT.connect)
        while True:
            problem: MintError
            retry_after = None
            headers = {"accept": accept}
            if waits:
                headers[wire.PREFER] = wire.WAIT
            if outgoing is not None:
                headers["content-type"] = outgoing.encoding.value
            content = None if outgoing is None else outgoing.body
            try:
                if self._in_process is not None:
                    response = await self._in_process.request(method, path, content=content, headers=headers)
                else:
                    found = await self._http.request(method, path, content=content, headers=headers, timeout=timeout)
                    response = Reply(found.status_code, found.headers, found.content, str(found.request.url))
            except httpx.TransportError as error:
                problem = _lost(self.address, error)
                if waits and not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
                    # it may have been accepted, and is as safe as what was promised
                    give_up_at = max(give_up_at, time.monotonic() + RETRIEVE_PATIENCE_S)
            else:
                if polls and is_not_yet(response.status_code, response.content):
                    return response
                if outgoing is not None and _reads_no_proto(response, outgoing):
                    self._speaks_proto = False
                    outgoing = self.prepare(outgoing.message)
                    continue
                if response.status_code not in TRANSIENT:
                    self._waiting.answered()
                    return _good(response)
                problem = error_of(response.status_code, response.content, response.url)
                retry_after = response.headers.get("retry-after")
            pause_s = pauses.next_s(retry_after)
            if time.monotonic() + pause_s > give_up_at:
                raise problem
            self._waiting.unreachable(problem.message, pause_s)
            await asyncio.sleep(pause_s)


def _accepted(kind: type[wire.Message]) -> str:
    return BOTH if kind in PROTO_RESULTS else wire.Encoding.JSON.value


def _lost(address: Address, error: httpx.TransportError) -> ConnectionLostError:
    return ConnectionLostError(
        f"{address.base_url or 'the service in this process'} cannot be reached: {type(error).__name__}: {error}",
        remedy="Is the server running? Check MINT_BASE_URL",
    )


def _reads_no_proto(response: Reply, outgoing: Outgoing) -> bool:
    """Whether this is the answer of a server that is older than protobuf here."""
    if outgoing.encoding is not wire.Encoding.PROTO:
        return False
    if response.status_code == 400:
        return b"protobuf" in response.content[:2000].lower()
    return response.status_code == UNSUPPORTED_MEDIA_TYPE


def _good(response: Reply) -> Reply:
    if response.status_code == GONE:
        raise LostError("the server does not have it any more")
    if is_error(response.status_code, response.content):
        raise error_of(response.status_code, response.content, response.url)
    return response


def _read(response: Reply, kind: type[M]) -> M:
    media_type = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    encoding = wire.Encoding.PROTO if media_type == wire.Encoding.PROTO.value else wire.Encoding.JSON
    return wire.decode(kind, response.content, encoding)


def _ended(session_id: str | None) -> SessionEndedError:
    return SessionEndedError(
        "has ended, and its models and futures with it",
        field="session_id",
        value=session_id or "(never opened)",
        remedy="Make a new ServiceClient, and load a named checkpoint with create_training_client_from_state",
    )


_open_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    ended_by = getattr(sys, "last_type", None)  # the exception that nobody caught, if one ends the program
    outcome: Outcome = "success"
    if ended_by is not None:
        outcome = "interrupted" if issubclass(ended_by, KeyboardInterrupt) else "errored"
    for session in list(_open_sessions):
        session.close(outcome)
