"""Who may look: everybody on this machine, or whoever has shown a key. Sessions of browsers, kept in memory.

A browser gets a random token as a cookie, never the key; the server keeps the token's hash and whose key it was. What a
browser sends by itself counts only if one of these pages made it send that. Knows keys through the callables it is
given, and no route.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response

from mint.errors import AuthenticationError, ForeignPageError
from mint.server.http.auth import address_of, key_of

IDLE_S = 12 * 3600.0
"""A session that is not used for this long ends; so does every one with the process, and with its key."""

MAX_SESSIONS = 1024
SAFE_METHODS = frozenset({"GET", "HEAD"})


class Visitor(Protocol):
    """Whom a key stands for."""

    @property
    def owner(self) -> str:
        """The owner's name."""
        ...

    @property
    def key_id(self) -> str | None:
        """The key's name."""
        ...


class KeyBook(Protocol):
    """The keys, as the composition root has them."""

    def verify(self, key: str) -> Visitor | None:
        """Who holds this key; None if it is none, or was revoked."""
        ...

    def holder(self, key_id: str) -> Visitor | None:
        """Whom the key of this name stands for; None if there is none, or it was revoked."""
        ...


@dataclass
class _Session:
    key_id: str
    used_at: float


class Login:
    """Asks for keys. Any thread may call."""

    def __init__(
        self, keys: KeyBook, *, admits: Callable[[Visitor], bool], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`admits` says whether the holder of a good key may see the runs; `clock` gives monotonic seconds."""
        self._keys = keys
        self._admits = admits
        self._clock = clock
        self._lock = threading.Lock()
        self._sessions: OrderedDict[str, _Session] = OrderedDict()

    def enter(self, key: str) -> str:
        """The token of a new session.

        Raises:
            AuthenticationError: the key is not known, or its owner may not see the runs.
        """
        visitor = self._admitted(self._keys.verify(key) if key else None)
        token = secrets.token_urlsafe(32)
        with self._lock:
            self._sessions[_digest(token)] = _Session(visitor.key_id or "", self._clock())
            while len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
        return token

    def leave(self, request: Request) -> None:
        """Ends the session that a request belongs to, if there is one."""
        with self._lock:
            self._sessions.pop(_digest(_token_of(request)), None)

    def visitor_of(self, request: Request) -> Visitor:
        """Who sends a request: by key, in `X-API-Key` or as `Authorization: Bearer`, or by the session's cookie.

        Raises:
            AuthenticationError: neither is there, or neither is good.
            ForeignPageError: the cookie came with a request that a page of another address has made.
        """
        key = key_of(request)
        if key:
            return self._admitted(self._keys.verify(key))
        visitor = self.session_of(request)
        if visitor is None:
            remedy = "Open /login in a browser, or send a key as Authorization: Bearer"
            raise AuthenticationError("these pages ask for an API key", remedy=remedy)
        return self._admitted(visitor)

    def session_of(self, request: Request) -> Visitor | None:
        """Whose session the request's cookie belongs to; None without a good one.

        Raises:
            ForeignPageError: as `visitor_of`.
        """
        token = _token_of(request)
        if not token:
            return None
        now = self._clock()
        with self._lock:
            session = self._sessions.get(_digest(token))
            if session is None or now - session.used_at > IDLE_S:
                self._sessions.pop(_digest(token), None)
                return None
            session.used_at = now
            self._sessions.move_to_end(_digest(token))
        if request.method not in SAFE_METHODS:
            require_own_page(request)
        return self._keys.holder(session.key_id)

    def _admitted(self, visitor: Visitor | None) -> Visitor:
        if visitor is None:
            remedy = "Ask the operator for one: mint keys create --owner NAME"
            raise AuthenticationError("the API key is not known here, or was revoked", remedy=remedy)
        if not self._admits(visitor):
            raise AuthenticationError(
                "may not see the runs of this server: they belong to who runs it",
                field="owner",
                value=visitor.owner,
                remedy=f"The operator can start it with: mint serve --operator {visitor.owner}",
            )
        return visitor


@dataclass(frozen=True)
class Door:
    """Who comes in. `screen` refuses a request, whoever sends it; `login` None asks for no key."""

    screen: Callable[[Request], None]
    login: Login | None = None

    def visitor_of(self, request: Request) -> Visitor | None:
        """Who sends a request; None where nobody is asked.

        Raises:
            AuthenticationError: nobody who may come in.
        """
        self.screen(request)
        if self.login is not None:
            return self.login.visitor_of(request)
        if request.method not in SAFE_METHODS:
            require_own_page(request, may_be_program=True)
        return None


def require_own_page(request: Request, *, may_be_program: bool = False) -> None:
    """That a request was made by one of the pages of its own address; `may_be_program`: or by no page at all.

    Raises:
        ForeignPageError: it was not, or nothing tells that it was.
    """
    origin, site = request.headers.get("origin"), request.headers.get("sec-fetch-site")
    if origin is None and site is None and may_be_program:
        return
    if origin is None:
        is_own = site == "same-origin"
    else:
        is_own = address_of(origin) == request.headers.get("host", "").lower() and site in (None, "same-origin")
    if not is_own:
        raise ForeignPageError(
            "this server takes nothing from web pages of other addresses",
            field="origin",
            value=origin or site or "(none)",
            remedy="Use its own pages, or send a key as Authorization: Bearer",
        )


def set_cookie(response: Response, request: Request, token: str) -> None:
    """Gives a browser its token; an empty one takes it away."""
    response.set_cookie(
        _cookie_name(request),
        token,
        max_age=int(IDLE_S) if token else 0,
        path="/",
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )


def _cookie_name(request: Request) -> str:
    """Cookies know no ports: two servers of one machine would take away each other's."""
    return f"mint_session_{request.url.port or 0}"


def _token_of(request: Request) -> str:
    return request.cookies.get(_cookie_name(request), "")


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()
