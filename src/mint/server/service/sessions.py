"""Which sessions live, who serves them, and when they were last heard of.

A session ends when its client says so, or after `EXPIRY_S` without a request or heartbeat. Whatever belongs to it goes
with it, except named checkpoints. Any thread may ask.
"""

from __future__ import annotations

import re
import threading
import time
from typing import Any

from mint.errors import NotFoundError, OverloadedError, SessionEndedError
from mint.server.callers import Caller
from mint.server.ids import new_session_id
from mint.server.store.journal import Journal
from mint.server.store.rows import SessionRow

EXPIRY_S = 900.0
MADE_UP_SESSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{7,127}", re.ASCII)
STALE_S = 24 * 3600.0
"""Sessions of a dead process that were silent for this long before are not taken over."""


class Sessions:
    """The sessions that this process serves."""

    def __init__(self, journal: Journal, instance_id: str) -> None:
        self._journal = journal
        self._instance_id = instance_id
        self._lock = threading.Lock()
        self._heard_at: dict[str, float] = {}  # monotonic seconds; this process's live sessions
        self._owners: dict[str, str] = {}

    def create(
        self,
        owner: str,
        user_metadata: dict[str, Any] | None,
        details: dict[str, Any] | None = None,
        *,
        session_id: str | None = None,
    ) -> str:
        """A new session's id; `session_id` is one that a client has made up, and that is free."""
        session_id = session_id or new_session_id()
        now = time.time()
        row = SessionRow(session_id, self._instance_id, user_metadata, now, None, owner, details, now)
        self._journal.add_session(row)
        self.resume(session_id, owner)
        return session_id

    def resume(self, session_id: str, owner: str) -> None:
        """Serves a session from now on; its silence is counted from here."""
        with self._lock:
            self._heard_at[session_id] = time.monotonic()
            self._owners[session_id] = owner

    def of(self, owner: str) -> list[str]:
        """The sessions of an owner that live here, oldest first."""
        with self._lock:
            return [session_id for session_id, known in self._owners.items() if known == owner]

    def owner(self, session_id: str) -> str | None:
        """Whose session it is; None if it is not served here."""
        with self._lock:
            return self._owners.get(session_id)

    def owners(self) -> dict[str, str]:
        """Whose each live session is."""
        with self._lock:
            return dict(self._owners)

    def is_known(self, session_id: str) -> bool:
        """Whether there is, or ever was, a session of that id, whoever owns it."""
        return self.owner(session_id) is not None or self._journal.session(session_id) is not None

    def require_room(self, caller: Caller) -> None:
        """That the caller may have one more session.

        Raises:
            OverloadedError: the quota is used up.
        """
        limit, used = caller.quotas.max_sessions, len(self.of(caller.owner))
        if limit is not None and used >= limit:
            raise OverloadedError(
                f"{limit} sessions may live at once, and so many do",
                field="max_sessions",
                value=used + 1,
                remedy="Close one (ServiceClient.close), or ask the operator for more",
            )

    def require_or_open(self, session_id: str, caller: Caller) -> None:
        """As `require`; a session that its client has made up without asking is opened.

        MinT's own scripts for raw HTTP do so. An id that is, or was, in use stays whose it is.
        """
        if MADE_UP_SESSION.fullmatch(session_id) and not self.is_known(session_id):
            self.require_room(caller)
            self.create(caller.owner, None, session_id=session_id)
        self.require(session_id, caller.owner)

    def require(self, session_id: str, owner: str) -> None:
        """Notes that the session was heard of by its owner.

        Raises:
            NotFoundError: there never was such a session of this owner here, or another process serves it.
            SessionEndedError: it has ended.
        """
        with self._lock:
            if self._owners.get(session_id) == owner:
                self._heard_at[session_id] = time.monotonic()
                return
        row = self._journal.session(session_id)
        if row is not None and row.owner != owner:
            row = None
        if row is None or row.ended_at is None:
            why = "is not a session here" if row is None else "is served by another process"
            raise NotFoundError(why, field="session_id", value=session_id, remedy="Make a new ServiceClient")
        raise SessionEndedError(
            "has ended, and its models and futures with it",
            field="session_id",
            value=session_id,
            remedy="Make a new ServiceClient, and load a named checkpoint with create_training_client_from_state",
        )

    def end(self, session_id: str) -> bool:
        """Forgets a session; False if it was not served here."""
        with self._lock:
            self._owners.pop(session_id, None)
            return self._heard_at.pop(session_id, None) is not None

    def expired(self) -> list[str]:
        """Sessions that have been silent for too long."""
        limit = time.monotonic() - EXPIRY_S
        with self._lock:
            return [session_id for session_id, heard_at in self._heard_at.items() if heard_at < limit]

    def last_seen(self) -> dict[str, float]:
        """When each live session was last heard of, in seconds since the epoch."""
        offset = time.time() - time.monotonic()
        with self._lock:
            return {session_id: heard_at + offset for session_id, heard_at in self._heard_at.items()}
