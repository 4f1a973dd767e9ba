"""One session with a server, on one event-loop thread of its own.

The same requests go to a socket, or into the service in this process: only httpx's transport differs. Repeats what may
be repeated (every request carries its place, so the server knows a copy), and turns error bodies back into errors.
Knows no model and no sampler.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import itertools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

import httpx
from pydantic import BaseModel

import mint.wire as wire
from mint.config import EMBEDDED_URL
from mint.errors import (
    AuthenticationError,
    ConnectionLostError,
    MintError,
    NotFoundError,
    OverloadedError,
    RequestFailedError,
    SessionEndedError,
    from_wire,
)
from mint.types import CreateSessionResponse, UntypedPromise
from mint.wire.requests import CreateSessionRequest, RetrieveFutureRequest, SessionRequest

log = logging.getLogger("mint.client")

R = TypeVar("R")
M = TypeVar("M", bound=BaseModel)

CONNECT_PATIENCE_S = 15.0
SUBMIT_PATIENCE_S = 300.0
RETRIEVE_PATIENCE_S = 3600.0
"""How long a server that does not answer is tried again: at first, to hand something in, to fetch what was accepted."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
HEARTBEAT_S = 10.0
TIMEOUT = httpx.Timeout(60.0, connect=5.0)
TRANSIENT = frozenset({429, 502, 503, 504})
TRY_AGAIN, GONE = 408, 410


class EmbeddedServer(Protocol):
    """The service in this process: an ASGI application, and how to let go of it."""

    app: Any

    def release(self) -> None:
        """Nobody here needs it any more."""
        ...


class Session:
    """A lazy connection: nothing happens until the first use."""

    def __init__(
        self,
        *,
        base_url: str | None,
        api_key: str | None,
        user_metadata: dict[str, Any] | None,
        open_embedded: Callable[[], EmbeddedServer],
    ) -> None:
        """`base_url` None means the service in this process, which `open_embedded` opens."""
        self._base_url = base_url
        self._api_key = api_key
        self._user_metadata = user_metadata
        self._open_embedded = open_embedded
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._session_id: str | None = None
        self.model_numbers = itertools.count()
        self.sampler_numbers = itertools.count()

    # --- life ----------------------------------------------------------------------------------------------------

    @property
    def session_id(self) -> str:
        """The session's id; opens the session if need be."""
        with self._lock:
            if self._closed:
                raise _ended(self._session_id)
            if self._session_id is None:
                self._open()
            return self._session_id or ""

    def _open(self) -> None:
        embedded = self._open_embedded() if self._base_url is None else None
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
        headers = {"content-type": wire.MEDIA_TYPE, "x-api-key": self._api_key or ""}
        transport = httpx.ASGITransport(self._embedded.app) if self._embedded is not None else None
        url = (self._base_url or EMBEDDED_URL).rstrip("/") + wire.API_PREFIX + "/"
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
        self._http = httpx.AsyncClient(
            base_url=url, headers=headers, transport=transport, timeout=TIMEOUT, limits=limits
        )
        request = CreateSessionRequest(user_metadata=self._user_metadata)
        body = await self._exchange("POST", "create_session", wire.encode(request), patience_s=CONNECT_PATIENCE_S)
        self._session_id = wire.decode(CreateSessionResponse, body).session_id
        self._heart = asyncio.create_task(self._beat())

    def close(self) -> None:
        """Ends the session; futures that are still open fail with `SessionEndedError`. Again is fine."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._loop is None or self._pid != os.getpid():
                return
        _open_sessions.discard(self)
        asyncio.run_coroutine_threadsafe(self._disconnect(), self._loop).result()
        self._stop()

    async def _disconnect(self) -> None:
        self._heart.cancel()
        try:
            await self._http.post(f"sessions/{self._session_id}/finish", content=b"{}", timeout=5.0)
        except httpx.TransportError as error:
            log.debug("the session could not be closed on the server: %s", error)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._http.aclose()

    def _stop(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._loop = None
        if self._embedded is not None:
            self._embedded.release()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            try:
                body = wire.encode(SessionRequest(session_id=self._session_id or ""))
                await self._http.post("session_heartbeat", content=body, timeout=HEARTBEAT_S)
            except httpx.TransportError as error:
                log.debug("heartbeat not delivered: %s", error)

    # --- calls ---------------------------------------------------------------------------------------------------

    def run(self, work: Coroutine[Any, Any, R]) -> concurrent.futures.Future[R]:
        """Runs a coroutine on the session's thread; the result is waited for from any other."""
        with self._lock:
            if not self._closed and self._loop is not None:
                return asyncio.run_coroutine_threadsafe(self._until_closed(work), self._loop)
        work.close()
        failed: concurrent.futures.Future[R] = concurrent.futures.Future()
        failed.set_exception(_ended(self._session_id))
        return failed

    async def _until_closed(self, work: Coroutine[Any, Any, R]) -> R:
        try:
            return await work
        except asyncio.CancelledError:
            raise _ended(self._session_id) from None

    async def get(self, path: str, kind: type[M]) -> M:
        """The answer of a GET route."""
        return wire.decode(kind, await self._exchange("GET", path, None))

    async def post(self, path: str, message: BaseModel, kind: type[M]) -> M:
        """The answer of a POST route that answers at once."""
        return wire.decode(kind, await self._exchange("POST", path, wire.encode(message)))

    async def submit(self, path: str, body: bytes, kind: type[M]) -> M:
        """Hands a request in and waits for its result; a sample request that the server has lost goes in again."""
        while True:
            promise = wire.decode(UntypedPromise, await self._exchange("POST", path, body))
            try:
                return await self._retrieve(promise.request_id, kind)
            except _LostError:
                log.info("request %s was lost by the server and is sent again", promise.request_id)

    async def _retrieve(self, request_id: str, kind: type[M]) -> M:
        body = wire.encode(RetrieveFutureRequest(request_id=request_id))
        while True:
            answer = await self._exchange("POST", "retrieve_future", body, patience_s=RETRIEVE_PATIENCE_S)
            if answer is not None:
                return wire.decode(kind, answer)

    async def _exchange(
        self, method: str, path: str, body: bytes | None, *, patience_s: float = SUBMIT_PATIENCE_S
    ) -> Any:
        """The body of a good answer; None for "ask again". Waits and repeats while the server cannot be reached."""
        give_up_at = time.monotonic() + patience_s
        for pause_s in _pauses():
            problem: MintError
            try:
                response = await self._http.request(method, path, content=body)
            except httpx.TransportError as error:
                problem = ConnectionLostError(
                    f"{self._base_url} cannot be reached: {type(error).__name__}: {error}",
                    remedy="Is the server running? Check MINT_BASE_URL",
                )
            else:
                if response.status_code == TRY_AGAIN:
                    return None
                if response.status_code not in TRANSIENT:
                    return _good_body(response)
                problem = _error_of(response)
            if time.monotonic() + pause_s > give_up_at:
                raise problem
            log.warning("%s; trying again in %g s", problem.message, pause_s)
            await asyncio.sleep(pause_s)
        raise AssertionError("the pauses never end")


class _LostError(RequestFailedError):
    """The server does not know the request any more, and says that it may be sent again."""


def _pauses() -> Any:
    pause_s = FIRST_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _good_body(response: httpx.Response) -> bytes:
    if response.status_code == GONE:
        raise _LostError("the server has lost the request")
    # a failed future is answered with 200 too, and its body begins like this
    if response.status_code >= 400 or response.content.startswith(b'{"error"'):
        raise _error_of(response)
    return response.content


def _error_of(response: httpx.Response) -> MintError:
    body = wire.decode_error(response.content)
    if body is not None and "code" in body:
        return from_wire(body)
    text = str(body["error"]) if body is not None else response.text[:200]
    kinds = {401: AuthenticationError, 404: NotFoundError, 429: OverloadedError}
    kind = kinds.get(response.status_code, RequestFailedError)
    return kind(f"{response.request.url} answered {response.status_code}: {text}")


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
    for session in list(_open_sessions):
        session.close()
