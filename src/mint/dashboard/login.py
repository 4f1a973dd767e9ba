"""Access to the dashboard: open to everybody on this machine, or by API key. Browser sessions live in memory.

A browser gets a random token as a cookie, never the key; the server stores the token's hash and the id of its key. A
request with a cookie counts only if one of these pages sent it (protection against cross-site requests). Knows keys
only through `KeyStore`, and no route.
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
from mint.server.http.auth import KeyHolder, address_of, key_of, require_operator, sender_of

IDLE_S = 12 * 3600.0
"""A session ends when it has not been used for this long, when its key is revoked, and when the process ends."""

MAX_SESSIONS = 1024
SAFE_METHODS = frozenset({"GET", "HEAD"})


class Visitor(KeyHolder, Protocol):
    """The holder of a key, and the key's name."""

    @property
    def key_id(self) -> str | None:
        """The key's name."""
        ...


class KeyStore(Protocol):
    """The API keys of a server; `mint.server.http.key_guesses` implements it."""

    def verify(self, key: str, address: str) -> Visitor | None:
        """The holder of a key that came from `address`; None if the key is unknown or revoked."""
        ...

    def holder(self, key_id: str) -> Visitor | None:
        """The holder of the key with this id; None if it is unknown or revoked."""
        ...


@dataclass
class _BrowserSession:
    key_id: str
    used_at: float


class Login:
    """Checks keys and sessions. Thread-safe."""

    def __init__(
        self, keys: KeyStore, *, admits: Callable[[Visitor], bool], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`admits` says whether the holder of a valid key may see the runs; `clock` returns monotonic seconds."""
        self._keys = keys
        self._admits = admits
        self._clock = clock
        self._lock = threading.Lock()
        self._sessions: OrderedDict[str, _BrowserSession] = OrderedDict()

    def enter(self, key: str, address: str) -> str:
        """The token of a new session for a browser at `address`.

        Raises:
            AuthenticationError: the key is unknown.
            OperatorOnlyError: its owner may not see the runs.
            OverloadedError: too many different wrong keys have come from there.
        """
        visitor = self._admitted(self._keys.verify(key, address) if key else None)
        token = secrets.token_urlsafe(32)
        with self._lock:
            # By its hash: the time of a look-up says nothing about a token.
            self._sessions[_digest(token)] = _BrowserSession(visitor.key_id or "", self._clock())
            while len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
        return token

    def leave(self, request: Request) -> None:
        """Ends the session of a request, if it has one."""
        with self._lock:
            self._sessions.pop(_digest(_token_of(request)), None)

    def visitor_of(self, request: Request) -> Visitor:
        """The sender of a request, by a key in `X-API-Key` or `Authorization: Bearer`, or by the session's cookie.

        Raises:
            AuthenticationError: there is neither a valid key nor a valid session.
            OperatorOnlyError: its holder may not see the runs.
            ForeignPageError: the cookie came with a request that a page of another origin made.
        """
        key = key_of(request)
        if key:
            return self._admitted(self._keys.verify(key, sender_of(request)))
        visitor = self.session_of(request)
        if visitor is None:
            remedy = "Open /login in a browser, or send a key as Authorization: Bearer"
            raise AuthenticationError("these pages ask for an API key", remedy=remedy)
        return self._admitted(visitor)

    def session_of(self, request: Request) -> Visitor | None:
        """The holder of the session that the request's cookie names; None without a valid cookie.

        Raises:
            ForeignPageError: a page of another origin made the request.
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
        # `SameSite` of the cookie is not enough: pages on other ports of the same host are of the same site.
        if request.method not in SAFE_METHODS:
            require_own_page(request)
        return self._keys.holder(session.key_id)

    def _admitted(self, visitor: Visitor | None) -> Visitor:
        if visitor is None:
            remedy = "Ask the operator for one: mint keys create --owner NAME"
            raise AuthenticationError("the API key is not known here, or was revoked", remedy=remedy)
        require_operator(visitor, self._admits)
        return visitor


@dataclass(frozen=True)
class AccessCheck:
    """Decides who may see the dashboard.

    `screen` refuses requests whoever sends them; without `login` no key is needed.
    """

    screen: Callable[[Request], None]
    login: Login | None = None

    def visitor_of(self, request: Request) -> Visitor | None:
        """The sender of a request; None if no key is needed.

        Raises:
            AuthenticationError: the sender has no valid key or session.
            OperatorOnlyError: the sender has one, and is no operator.
        """
        self.screen(request)
        if self.login is not None:
            return self.login.visitor_of(request)
        if request.method not in SAFE_METHODS:
            require_own_page(request, may_be_program=True)
        return None


def require_own_page(request: Request, *, may_be_program: bool = False) -> None:
    """Checks that a page of this server's own origin made a request; with `may_be_program`, also that no page did.

    Raises:
        ForeignPageError: another page made it, or the headers do not say.
    """
    origin = request.headers.get("origin")
    site = request.headers.get("sec-fetch-site")
    if origin is None and site is None and may_be_program:
        return
    if origin is None:
        is_own = site == "same-origin"
    else:
        is_own = address_of(origin) == request.headers.get("host", "").lower() and site in (None, "same-origin")
    if not is_own:
        raise ForeignPageError(
            "this server accepts no requests from web pages of other origins",
            field="origin",
            value=origin or site or "(none)",
            remedy="Use its own pages, or send a key as Authorization: Bearer",
        )


def set_cookie(response: Response, request: Request, token: str) -> None:
    """Sets the cookie with a browser's token; an empty token deletes it."""
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
    """With the port, because cookies ignore ports: two servers on one machine would overwrite each other's."""
    return f"mint_session_{request.url.port or 0}"


def _token_of(request: Request) -> str:
    return request.cookies.get(_cookie_name(request), "")


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()
