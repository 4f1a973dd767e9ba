"""Who sends a request: the holder of an API key, or without keys only programs on this machine.

A web page in a browser can send requests to a server on the same machine: directly (its `Origin` header shows that), or
through a host name of its own that resolves to this machine (its `Host` header shows that). Programs send neither.

A key is checked when a request comes. What takes long is done under an `OpenKey`, which goes on checking.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from typing import Protocol, TypeVar
from urllib.parse import urlsplit

from starlette.requests import Request

from mint.errors import AuthenticationError, ForeignPageError, MintError, OperatorOnlyError
from mint.server.callers import Caller
from mint.server.http.key_guesses import GuardedKeys


class KeyHolder(Protocol):
    """The holder of a key."""

    @property
    def owner(self) -> str:
        """The owner's name."""
        ...


Holder = TypeVar("Holder", bound=KeyHolder)

Authenticate = Callable[[Request], Caller]
"""Says who sends a request, or raises `AuthenticationError`."""

Recall = Callable[[Request], Caller | None]
"""Says who sends a request if that was asked a moment ago, without reading the database; None if it was not."""

Admit = Callable[[Caller], bool]
"""Whether a caller is an operator of the server. May read the database."""

CHECKED_S = 0.5
"""How often a key is checked while something is done for it."""

Check = Callable[[Request], Awaitable[object]]
"""Raises `AuthenticationError` if the key of a request is not valid any more."""

Screen = Callable[[Request], None]
"""Refuses a request, whoever sends it, by raising a `MintError`."""


def accept_all(_request: Request) -> None:
    """A screen that refuses nothing."""


def by_key(keys: GuardedKeys) -> Authenticate:
    """Asks for a key, in `X-API-Key` or as `Authorization: Bearer`."""

    def authenticate(request: Request) -> Caller:
        key = key_of(request)
        if not key:
            remedy = "Send one as X-API-Key or Authorization: Bearer (clients: MINT_API_KEY or TINKER_API_KEY)"
            raise AuthenticationError("this server asks for an API key, and none was sent", remedy=remedy)
        caller = keys.verify(key, sender_of(request))
        if caller is None:
            remedy = "Ask the operator for one: mint keys create --owner NAME"
            raise AuthenticationError("the API key is not known here, or was revoked", remedy=remedy)
        return caller

    return authenticate


def recall_by_key(keys: GuardedKeys) -> Recall:
    """Recalls the holder of the key that `by_key` would ask for."""

    def recall(request: Request) -> Caller | None:
        key = key_of(request)
        return keys.recall(key, sender_of(request)) if key else None

    return recall


def require_operator(caller: Holder, is_operator: Callable[[Holder], bool]) -> None:
    """Checks that a caller is an operator.

    Raises:
        OperatorOnlyError: it is not.
    """
    if not is_operator(caller):
        raise OperatorOnlyError(
            "is no operator of this server",
            field="owner",
            value=caller.owner,
            remedy=f"The operator can start it with: mint serve --operator {caller.owner}",
        )


def key_of(request: Request) -> str:
    """The key that a request carries, in `X-API-Key` or as `Authorization: Bearer`; empty where there is none."""
    given = request.headers.get("x-api-key", "").strip()
    if given:
        return given
    scheme, _, credentials = request.headers.get("authorization", "").partition(" ")
    return credentials.strip() if scheme.lower() == "bearer" else ""


def sender_of(request: Request) -> str:
    """The address that a request came from; a proxy on this machine names it in `X-Forwarded-For`."""
    return "" if request.client is None else request.client.host


def refuse_foreign_pages(*, any_host: bool = False) -> Screen:
    """Refuses what only a page of another site sends; `any_host` if the server has host names of its own."""

    def screen(request: Request) -> None:
        host = name_of_host(request.headers.get("host", ""))
        if not any_host and not is_loopback_name(host):
            raise ForeignPageError(
                "this server asks for no key, and so answers only to names of this machine",
                field="host",
                value=host or "(none)",
                remedy="Use http://127.0.0.1 or http://localhost, or make keys: mint keys create --owner NAME",
            )
        origin = request.headers.get("origin")
        if origin is not None and address_of(origin) != request.headers.get("host", "").lower():
            raise ForeignPageError(
                "this server asks for no key, and so takes nothing from web pages of other addresses",
                field="origin",
                value=origin,
                remedy="Call it from a program, or make keys: mint keys create --owner NAME",
            )

    return screen


def is_loopback(host: str) -> bool:
    """Whether an address or name resolves to this machine only; an empty one stands for every address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        pass
    if not host:
        return False
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return bool(found) and all(ipaddress.ip_address(str(entry[4][0]).partition("%")[0]).is_loopback for entry in found)


def is_loopback_name(name: str) -> bool:
    """Whether a name is one of this machine, without resolving it: a hostile name server could give any address."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def name_of_host(host: str) -> str:
    """The name in a `Host` header, without port and brackets."""
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def address_of(origin: str) -> str:
    """The `host:port` of an `Origin` header; empty for `null` and for an invalid one."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


class OpenKey:
    """A key for which something is being done."""

    def __init__(self) -> None:
        self._revoked = asyncio.Event()
        self._waiting: set[asyncio.Task[object]] = set()

    def revoke(self) -> None:
        """Notes that the key is not valid any more, and ends the waits for it."""
        self._revoked.set()
        for task in self._waiting:
            task.cancel()

    def require_valid(self) -> None:
        """Does nothing while the key is valid.

        Raises:
            AuthenticationError: it was revoked.
        """
        if self._revoked.is_set():
            remedy = "Ask the operator for another one: mint keys create --owner NAME"
            raise AuthenticationError("the API key was revoked meanwhile", remedy=remedy)

    @contextmanager
    def waiting(self) -> Generator[None]:
        """Something that the current task waits for, and that ends when the key is revoked.

        Raises:
            AuthenticationError: the key was revoked.
        """
        self.require_valid()
        task = asyncio.current_task()
        assert task is not None
        self._waiting.add(task)
        try:
            yield
        except asyncio.CancelledError:
            # as asyncio.timeout does: if somebody else has cancelled the task, too, it stays cancelled
            if self._revoked.is_set() and task.uncancel() == 0:
                self.require_valid()
            raise
        finally:
            self._waiting.discard(task)


class OpenKeys:
    """The keys for which something is being done. Each is checked by one task, however many requests it has."""

    def __init__(self, check: Check | None) -> None:
        """None if no keys are asked for: none is ever revoked."""
        self._check = check
        self._open: dict[str, tuple[OpenKey, asyncio.Task[None]]] = {}
        self._users: dict[str, int] = {}

    @contextmanager
    def use(self, request: Request) -> Generator[OpenKey]:
        """Checks the key of this request until the end of the context."""
        if self._check is None:
            yield OpenKey()
            return
        key = key_of(request)
        if key not in self._open:
            opened = OpenKey()
            self._open[key] = opened, asyncio.create_task(self._watch(self._check, request, opened))
        opened, watching = self._open[key]
        self._users[key] = self._users.get(key, 0) + 1
        try:
            yield opened
        finally:
            self._users[key] -= 1
            if not self._users[key]:
                watching.cancel()
                del self._users[key], self._open[key]

    async def _watch(self, check: Check, request: Request, opened: OpenKey) -> None:
        while True:
            await asyncio.sleep(CHECKED_S)
            try:
                await check(request)
            except AuthenticationError:
                opened.revoke()
                return
            except MintError:  # the database cannot be read, so nothing is known of the key
                continue
