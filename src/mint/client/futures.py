"""Futures of requests: `.result()` in plain code, `await` in async code. Knows threads and event loops, no requests."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Generator
from contextlib import suppress
from typing import Any, ClassVar, Generic, TypeVar, cast

from mint.errors import ResultTimeoutError

T = TypeVar("T")
C = TypeVar("C")


class APIFuture(Generic[T]):
    """The result of one request. Any number of waiters get the same object."""

    def __init__(self, future: concurrent.futures.Future[T]) -> None:
        """The session's thread resolves `future`."""
        self._future = future

    def result(self, timeout: float | None = None) -> T:
        """The result; waits at most `timeout` seconds (None: without limit).

        Raises:
            ResultTimeoutError: the time ran out; the request goes on, and `result` may be called again.
            MintError: the error of the request.
        """
        return wait(self._future, timeout)

    async def result_async(self, timeout: float | None = None) -> T:
        """Same as `result`, without blocking the event loop."""
        return await wait_async(self._future, timeout)

    def __await__(self) -> Generator[Any, None, T]:
        return self.result_async().__await__()

    def future(self) -> concurrent.futures.Future[T]:
        """The future of the standard library behind this one."""
        return self._future

    def cancel(self) -> bool:
        """Cancels the wait; False where the result is there already. The server is told to stop sampling; a request of
        a training client has its place in the order, and is carried out all the same."""
        return self._future.cancel()

    def done(self) -> bool:
        """Whether there is a result or an error."""
        return self._future.done()


class ClientFuture(Generic[C]):
    """A future of a client, and that client: it may be used before the server has made it.

    If the server refuses, `.result()`, `await` and all other methods raise its error. What `.result()` and `await` give
    is no future: code that resolves futures until it has a value comes to an end.
    """

    client_class: ClassVar[type[Any]]
    """The class of what `.result()` gives."""

    _made: concurrent.futures.Future[Any]

    def result(self, timeout: float | None = None) -> C:
        """The client, once the server has made it."""
        wait(self._made, timeout)
        return self._client()

    async def result_async(self, timeout: float | None = None) -> C:
        """Same as `result`, without blocking the event loop."""
        await wait_async(self._made, timeout)
        return self._client()

    def __await__(self) -> Generator[Any, None, C]:
        return self.result_async().__await__()

    def _client(self) -> C:
        client = object.__new__(self.client_class)
        client.__dict__ = self.__dict__  # one state: both number their requests from the same count
        return cast("C", client)

    def done(self) -> bool:
        """Whether the server has made it, or has refused."""
        return self._made.done()


def wait(future: concurrent.futures.Future[T], timeout: float | None) -> T:
    """The result; a time-out becomes a `ResultTimeoutError`."""
    try:
        return future.result(timeout)
    except TimeoutError as error:
        raise _timed_out(future, timeout, error) from None


async def wait_async(future: concurrent.futures.Future[T], timeout: float | None) -> T:
    """Same as `wait`; cancelling the waiter does not cancel the request."""
    if future.done() and not future.cancelled():
        return future.result()
    try:
        return await asyncio.wait_for(_in_this_loop(future), timeout)
    except TimeoutError as error:
        raise _timed_out(future, timeout, error) from None


def _in_this_loop(future: concurrent.futures.Future[T]) -> asyncio.Future[T]:
    """A future of the running loop that ends as `future` does.

    Unlike that of `asyncio.wrap_future`, it may be cancelled alone: others wait for `future`, too. And its error counts
    as read: where Ctrl-C ends a program's loop, nobody reads it any more, and asyncio would print a traceback.
    """
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[T] = loop.create_future()

    def settle() -> None:
        if waiter.done():
            return
        if future.cancelled():
            waiter.cancel()
        elif (error := future.exception()) is not None:
            waiter.set_exception(error)
            waiter.exception()
        else:
            waiter.set_result(future.result())

    def tell_loop(_done: concurrent.futures.Future[T]) -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle)

    future.add_done_callback(tell_loop)
    return waiter


def _timed_out(future: concurrent.futures.Future[Any], timeout: float | None, error: TimeoutError) -> Exception:
    if future.done() and not future.cancelled() and future.exception() is error:
        return cast("Exception", error)  # the request's own error, not ours
    return ResultTimeoutError(
        f"no result after {timeout:g} s" if timeout is not None else "no result",
        remedy="The request goes on: call result() again, with a longer timeout or none",
    )
