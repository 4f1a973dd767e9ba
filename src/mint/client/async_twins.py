"""The `…_async` twin of a method, made from the method: name, signature, docstring and types."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from functools import update_wrapper
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

from mint.client.futures import APIFuture
from mint.client.session import Session

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Twin(Protocol[P, T_co]):
    """An async method with the parameters `P`. At runtime it is a plain function."""

    @overload
    def __get__(self, client: None, owner: type, /) -> Callable[..., Coroutine[Any, Any, T_co]]: ...
    @overload
    def __get__(self, client: object, owner: type, /) -> Callable[P, Coroutine[Any, Any, T_co]]: ...


class HasSession(Protocol):
    """A client."""

    _session: Session


C = TypeVar("C", bound=HasSession)


def awaited(method: Callable[Concatenate[C, P], Awaitable[T]]) -> Twin[P, T]:
    """The twin of a method that returns a future: awaiting it gives the future's result.

    It opens the session without blocking the event loop. Cancelling the waiter cancels a request that may be cancelled.
    """

    async def twin(self: C, *arguments: P.args, **options: P.kwargs) -> T:
        await self._session.open_async()
        future = method(self, *arguments, **options)
        try:
            return await future
        except asyncio.CancelledError:
            if isinstance(future, APIFuture):
                future.cancel()
            raise

    returned = method.__annotations__["return"]  # a text, because of the import of annotations
    kind = getattr(method, "__globals__", {}).get(returned)
    inner = getattr(kind, "client_class", None) or returned.removeprefix("APIFuture[").removesuffix("]")
    return _named(twin, method, inner, "awaiting it gives the result itself")


def submitted(method: Callable[Concatenate[C, P], T]) -> Twin[P, T]:
    """The twin of a method that submits a request: awaiting it gives the future, as in the other SDKs."""

    async def twin(self: C, *arguments: P.args, **options: P.kwargs) -> T:
        return method(self, *arguments, **options)

    return _named(twin, method, method.__annotations__["return"], "awaiting it gives the future")


def _named(twin: Any, method: Any, returned: str | type, gives: str) -> Any:
    update_wrapper(twin, method)
    twin.__annotations__ = {**method.__annotations__, "return": returned}
    twin.__signature__ = inspect.signature(method).replace(return_annotation=returned)
    twin.__name__ = f"{method.__name__}_async"
    twin.__qualname__ = f"{method.__qualname__}_async"
    twin.__doc__ = f"As `{method.__name__}`; {gives}."
    return twin
