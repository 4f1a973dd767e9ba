"""One session with a server, on one event-loop thread of its own: opening, heartbeats, closing."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import itertools
import os
import sys
import threading
import uuid
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

import mint.wire as wire
from mint.client.connection.endpoint import Endpoint
from mint.client.connection.request_checks import checked
from mint.client.connection.server_connection import GONE, SUBMIT_PATIENCE_S, ServerConnection
from mint.client.connection.transport import TIMEOUT_S, InProcessTransport, Transport
from mint.client.connection.wait_log import log
from mint.errors import SessionEndedError
from mint.types import CreateSessionResponse
from mint.types.records import SessionOutcome
from mint.wire.requests import CreateSessionRequest, FinishReason, FinishSessionRequest, SessionRequest

R = TypeVar("R")

CONNECT_PATIENCE_S = 15.0
"""While nobody takes a connection. Much shorter than for other requests: a wrong address should be reported soon."""

OPEN_PATIENCE_S = SUBMIT_PATIENCE_S
"""Once somebody takes connections: a server that is paused, restarted or busy is waited for, as by other requests."""

HEARTBEAT_S = 10.0
CLOSE_S = 3.0


class EmbeddedServer(Protocol):
    """The service in this process."""

    app: Any
    """Its ASGI application."""

    def release(self) -> None:
        """Called by each user when it no longer needs the service."""
        ...


class Session:
    """A session with a server. `open` starts its thread and its connection; nothing happens before.

    After `open`, the clients of a session send their requests through `server`, in coroutines that `run` runs.
    """

    server: ServerConnection

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        request: CreateSessionRequest | None = None,
        open_embedded: Callable[[], EmbeddedServer] | None = None,
        joined: str | None = None,
    ) -> None:
        """Opens a session of its own with `request`, or joins the one with the id `joined` that another process keeps.

        `open_embedded` opens the service in this process, for an address without a URL.
        """
        self.endpoint = endpoint
        # with a key, so that a request that is sent again opens no second session
        self._request = (request or CreateSessionRequest()).model_copy(update={"request_key": uuid.uuid4().hex})
        self._open_embedded = open_embedded
        self._joined = joined
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_open = False
        """Set once, when everything is there; so it may be read without the lock."""

        self._pid = os.getpid()
        self._closed = False
        self._session_id: str | None = None
        self.model_numbers = itertools.count()
        self.sampler_numbers = itertools.count()

    @property
    def is_embedded(self) -> bool:
        """Whether the service runs in this process."""
        return self.endpoint.base_url is None

    # --- opening -------------------------------------------------------------------------------------------------

    def open(self) -> str:
        """Opens the session, unless it is open; its id.

        Raises:
            SessionEndedError: it was closed, or this process was forked from the one that opened it.
            MintError: the server refuses, or cannot be reached.
        """
        with self._lock:
            if self._closed:
                raise _ended(self._session_id)
            if self._loop is None:
                self._start()
            self._require_own_process()
            return self._session_id or ""

    async def open_async(self) -> None:
        """Same as `open`, without blocking the caller's event loop."""
        if not self._is_open:
            await asyncio.to_thread(self.open)

    def _start(self) -> None:
        self._embedded = self._open_embedded() if self._open_embedded is not None and self.is_embedded else None
        self.server = ServerConnection(self.endpoint, self._transport())
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, name="mint-client", daemon=True)
        thread.start()
        self._thread = thread
        self._pid = os.getpid()
        self._loop = loop
        try:
            asyncio.run_coroutine_threadsafe(self._connect(), loop).result()
        except BaseException:  # Ctrl-C, too
            asyncio.run_coroutine_threadsafe(self._drop_connections(), loop).result()
            self._stop()
            raise
        self._is_open = True
        _close_at_exit(self)

    async def _connect(self) -> None:
        if self._joined is not None:
            self._session_id = self._joined
            return
        response = await self.server.call(
            "POST",
            "create_session",
            self._request,
            patience_s=OPEN_PATIENCE_S,
            connect_patience_s=CONNECT_PATIENCE_S,
            timeout_s=min(TIMEOUT_S, OPEN_PATIENCE_S),
        )
        opened = wire.decode(CreateSessionResponse, response.content)
        self._session_id = opened.session_id
        for message in (opened.info_message, opened.warning_message, opened.error_message):
            if message is not None:
                log.warning("the server says: %s", message)
        self._heartbeats = asyncio.create_task(self._send_heartbeats(opened.session_id))

    def _transport(self) -> Transport:
        if self._embedded is not None:
            return InProcessTransport(self._embedded.app, self.endpoint.url)
        # Deferred: httpx, which embedded use does not need.
        from mint.client.connection.http_transport import HttpTransport

        return HttpTransport(self.endpoint.url)

    async def _send_heartbeats(self, session_id: str) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            response = await self.server.notify("session_heartbeat", SessionRequest(session_id=session_id))
            if response is not None and response.status_code == GONE:
                log.warning("the server has ended session %s", session_id)
                return

    # --- work ----------------------------------------------------------------------------------------------------

    def run(self, work: Coroutine[Any, Any, R], *, may_cancel: bool = False) -> concurrent.futures.Future[R]:
        """Runs a coroutine on the session's thread; any other thread may wait for the result.

        Cancelling the future stops the work only with `may_cancel`: a request that has taken its place in the order of
        a model must be sent, or those after it would wait for it.
        """
        # Under the lock: after `close` has let go of it, the loop may stop, and work given to it would never end.
        with self._lock:
            if not self._closed and self._loop is not None and self._pid == os.getpid():
                return asyncio.run_coroutine_threadsafe(self._until_closed(work, may_cancel), self._loop)
        work.close()  # Python warns of a coroutine that is neither awaited nor closed
        self._require_own_process()
        failed: concurrent.futures.Future[R] = concurrent.futures.Future()
        failed.set_exception(_ended(self._session_id))
        return failed

    async def _until_closed(self, work: Coroutine[Any, Any, R], may_cancel: bool) -> R:
        own = asyncio.current_task()
        assert own is not None
        own.add_done_callback(_read_error)
        try:
            if may_cancel:
                return await work
            task = asyncio.ensure_future(work)
            task.add_done_callback(_read_error)
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if self._closed:
                raise _ended(self._session_id) from None
            raise

    def _require_own_process(self) -> None:
        if self._pid != os.getpid():
            raise SessionEndedError(
                "belongs to the process that this one was forked from",
                field="session_id",
                value=self._session_id,
                remedy="Make the ServiceClient after the fork, or pass a SamplingClient on by pickle",
            )

    # --- closing -------------------------------------------------------------------------------------------------

    def close(self, outcome: SessionOutcome = "success", detail: str | None = None) -> None:
        """Ends the session; futures that are still open fail with `SessionEndedError`. Closing again does nothing.

        Takes a few seconds at most where the server does not answer: it ends a session without heartbeats itself.

        Raises:
            InvalidRequestError: `outcome` or `detail` is no text; the session goes on.
        """
        finished = checked(FinishSessionRequest, reason=checked(FinishReason, type=outcome), detail=detail)
        with self._lock:
            if self._closed:
                return
            self._closed = True
            # After a fork, the loop's thread is in the parent only, whose session must go on.
            if self._loop is None or self._pid != os.getpid():
                return
        _open_sessions.discard(self)
        asyncio.run_coroutine_threadsafe(self._disconnect(finished), self._loop).result()
        self._stop()

    async def _disconnect(self, finished: FinishSessionRequest) -> None:
        self.server.is_closing = True
        try:
            async with asyncio.timeout(CLOSE_S):
                if self._joined is None:
                    self._heartbeats.cancel()
                    await self.server.notify(f"sessions/{self._session_id}/finish", finished)
        except TimeoutError:
            log.debug("the session could not be closed on the server in time")
        await self._drop_connections()

    async def _drop_connections(self) -> None:
        """Cancels all work of the session's thread, and closes the connections."""
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=CLOSE_S)
            await asyncio.sleep(0)  # so that their waiters learn of it
        try:
            async with asyncio.timeout(CLOSE_S):
                await self.server.close()
        except TimeoutError:
            log.debug("the connections could not be closed in time")

    def _stop(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLOSE_S)  # bounded: a coroutine that blocks must not keep the program from ending
            if not self._thread.is_alive():
                self._loop.close()
            self._loop = None
        if self._embedded is not None:
            self._embedded.release()


def _read_error(done: asyncio.Task[Any]) -> None:
    """asyncio reports an error that nobody has read. After the waiter was cancelled, nobody does."""
    if not done.cancelled():
        done.exception()


def _ended(session_id: str | None) -> SessionEndedError:
    return SessionEndedError(
        "has ended, and its models and futures with it",
        field="session_id",
        value=session_id or "(never opened)",
        remedy="Make a new ServiceClient, and load a named checkpoint with create_training_client_from_state",
    )


_open_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


def _close_at_exit(session: Session) -> None:
    """Closes a session that is open when the program ends.

    The handlers of a program's end run in reverse order. The service in this process may have loaded libraries that
    have such handlers (Ray), and needs them until its sessions are closed. So each session comes behind what it has
    loaded.
    """
    _open_sessions.add(session)
    atexit.unregister(_close_all)
    atexit.register(_close_all)


def _close_all() -> None:
    ended_by = getattr(sys, "last_type", None)  # the uncaught exception, if one ends the program
    outcome: SessionOutcome = "success"
    if ended_by is not None:
        outcome = "interrupted" if issubclass(ended_by, KeyboardInterrupt) else "errored"
    for session in list(_open_sessions):
        try:
            session.close(outcome)
        except Exception:  # noqa: BLE001 - the others are to be closed all the same
            log.exception("a session could not be closed")
