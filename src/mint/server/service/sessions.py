"""The sessions that this process serves, and when each was last heard of.

A session ends when its client says so. After `SILENCE_S` without a request or heartbeat it is suspended: its work
leaves the queue and the engine, and everything in it stays on the disk. Its client's next request resumes it. After
`SUSPENDED_S` more it ends. Both times are counted while a service runs, on a clock that does not jump: neither a wrong
time of day nor the time for which no service runs ends a session. Any thread may call.
"""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from mint.errors import NotFoundError, SessionEndedError
from mint.server.callers import LOCAL_OWNER, Caller
from mint.server.disk_space import DiskSpace
from mint.server.ids import session_of
from mint.server.journal_use import JournalUse
from mint.server.limits import ServerLimits
from mint.server.store.journal import Journal
from mint.server.store.rows import SessionRow

SILENCE_S = 900.0
SUSPENDED_S = 72 * 3600.0
HOW_SESSIONS_END = (
    f"a session ends when its client closes it or an operator ends it, or after {SILENCE_S / 60:.0f} minutes without a "
    f"request and {SUSPENDED_S / 3600:.0f} hours suspended"
)

CLIENT_MADE_ID = re.compile(r"(?!sess-[0-9a-f]{32}$)[A-Za-z0-9][A-Za-z0-9._-]{7,127}", re.ASCII)
"""Ids that a client may choose. Those of the server's own form are made by it alone: an unknown one must get the same
answer as another owner's."""


class Sessions:
    """The live sessions of one process."""

    def __init__(
        self,
        journal: Journal,
        instance_id: str,
        disk: DiskSpace,
        journal_use: JournalUse,
        *,
        limits: ServerLimits,
        loss: str = "",
        clock: Callable[[], float],
    ) -> None:
        """`loss` says why a session may be unknown that was opened here. `clock` counts seconds, and does not jump."""
        self._journal = journal
        self._instance_id = instance_id
        self._disk = disk
        self._journal_use = journal_use
        self._limits = limits
        self._loss = loss
        self._clock = clock
        self.on_return: Callable[[str], None] = lambda session_id: None
        """Called with a suspended session whose client has come back: resumes it with its work, or refuses to."""
        self._lock = threading.Lock()
        self._heard_at: dict[str, float] = {}  # by the clock
        self._owners: dict[str, str] = {}
        self._suspended: dict[str, str] = {}  # session → owner
        self._session_of: dict[str, str] = {}  # of models that are in the journal: a cache

    def create(
        self, session_id: str, owner: str, user_metadata: dict[str, Any] | None, details: dict[str, Any] | None = None
    ) -> None:
        """Opens a session under an unused id. Survives a loss of power after `durability.wait_durable`.

        Raises:
            OverloadedError: the disk is filled up to the reserve.
        """
        self._disk.require_free_space()
        now = time.time()
        row = SessionRow(session_id, self._instance_id, user_metadata, now, None, owner, details, now)
        self._journal.add_session(row)
        self.resume(session_id, owner)

    def require_one_more(self, caller: Caller, metadata_bytes: int = 0) -> None:
        """Checks that the caller may open one more session, with so much metadata.

        Raises:
            QuotaExceededError: a quota of the caller is used up.
            OverloadedError: all owners together have as many as the server allows.
        """
        caller.quotas.require_session(len(self.of(caller.owner)))
        self._limits.require_below("max_sessions", len(self.owners()))
        self._journal_use.add_record(caller.owner, metadata_bytes, caller.quotas.max_journal_bytes)

    def resume(self, session_id: str, owner: str) -> None:
        """Serves a session from now on; its silence is counted from here."""
        with self._lock:
            self._suspended.pop(session_id, None)
            self._heard_at[session_id] = self._clock()
            self._owners[session_id] = owner

    def suspend(self, session_id: str, owner: str) -> None:
        """Keeps a session until its client comes back."""
        with self._lock:
            self._owners.pop(session_id, None)
            self._heard_at.pop(session_id, None)
            self._suspended[session_id] = owner

    def suspended(self) -> dict[str, str]:
        """The owner of each suspended session."""
        with self._lock:
            return dict(self._suspended)

    def of(self, owner: str) -> list[str]:
        """The live sessions of an owner that are not suspended, oldest first."""
        with self._lock:
            return [session_id for session_id, known in self._owners.items() if known == owner]

    def owners(self) -> dict[str, str]:
        """The owner of each live session that is not suspended."""
        with self._lock:
            return dict(self._owners)

    def touch(self, session_id: str, owner: str) -> bool:
        """Notes that the owner of a live session was heard of; False if there is no such session here."""
        with self._lock:
            if self._owners.get(session_id) != owner:
                return False
            self._heard_at[session_id] = self._clock()
            return True

    def touch_model(self, model_id: str, owner: str) -> bool:
        """Same as `touch` for the session of a model; False, too, before the first `require_model` of the model."""
        with self._lock:
            session_id = self._session_of.get(model_id)
            if session_id is None or self._owners.get(session_id) != owner:
                return False
            self._heard_at[session_id] = self._clock()
            return True

    def forget_models(self, model_ids: Iterable[str]) -> None:
        """These models are no more."""
        with self._lock:
            for model_id in model_ids:
                self._session_of.pop(model_id, None)

    def require(self, session_id: str, owner: str) -> None:
        """Same as `touch`; resumes a suspended session, and reads the journal to say why there is none.

        Raises:
            NotFoundError: there never was such a session of this owner, or another process serves it.
            SessionEndedError: it has ended.
            OverloadedError: it is suspended, and the queue has no room for its unfinished requests now.
        """
        if self.touch(session_id, owner):
            return
        if self.suspended().get(session_id) == owner:
            self.on_return(session_id)
            if self.touch(session_id, owner):
                return
        row = self._journal.session(session_id)
        if row is not None and row.owner != owner:
            row = None
        if row is None or row.ended_at is None:
            why = "is served by another process" if row is not None else "is not a session here"
            if row is None and self._loss:
                why = f"{why}: {self._loss}"
            raise NotFoundError(why, field="session_id", value=session_id, remedy="Make a new ServiceClient")
        raise SessionEndedError(
            f"has ended, and its models and futures with it ({HOW_SESSIONS_END})",
            field="session_id",
            value=session_id,
            remedy="Make a new ServiceClient, and load a named checkpoint with create_training_client_from_state",
        )

    def require_model(self, model_id: str, owner: str) -> None:
        """Same as `require` for the session of a model, which `touch_model` knows from then on.

        Raises:
            NotFoundError, SessionEndedError: there is no such model of this owner (any more).
        """
        session_id = session_of(model_id)
        self.require(session_id, owner)
        if self._journal.model(model_id) is None:
            raise NotFoundError("is not a model here", field="model_id", value=model_id, remedy="Create one first")
        with self._lock:
            self._session_of[model_id] = session_id

    def require_or_open(self, session_id: str, caller: Caller) -> str:
        """Same as `require`, but opens a session under an unused id that the client has chosen; returns its id.

        MinT's own scripts for raw HTTP do so. Whoever has a key gets a session of their own under another id, made of
        the chosen one and the owner: two owners who choose one id neither meet nor learn of each other.

        Raises:
            NotFoundError, SessionEndedError: as `require`.
            QuotaExceededError, OverloadedError: as `require_one_more`.
        """
        if self.touch(session_id, caller.owner):
            return session_id
        session_id = self.stored_id(session_id, caller.owner)
        if CLIENT_MADE_ID.fullmatch(session_id) and not self.is_of(session_id, caller.owner):
            session_id = _own_id(session_id, caller.owner)
            if self._journal.session(session_id) is None:
                self.require_one_more(caller)
                self.create(session_id, caller.owner, None)
        self.require(session_id, caller.owner)
        return session_id

    def stored_id(self, session_id: str, owner: str) -> str:
        """The id of the session that `require_or_open` has opened for an id that its client has chosen.

        The same id if there is none, or if the owner has a session of that very id.
        """
        own = _own_id(session_id, owner)
        return own if not self.is_of(session_id, owner) and self.is_of(own, owner) else session_id

    def is_of(self, session_id: str, owner: str) -> bool:
        """Whether an owner has, or had, a session of this id."""
        with self._lock:
            known = self._owners.get(session_id) or self._suspended.get(session_id)
        if known is None:
            row = self._journal.session(session_id)
            known = None if row is None else row.owner
        return known == owner

    def is_served(self, session_id: str) -> bool:
        """Whether a session is served here, or suspended."""
        with self._lock:
            return session_id in self._owners or session_id in self._suspended

    def end(self, session_id: str) -> None:
        """Forgets a session."""
        with self._lock:
            self._heard_at.pop(session_id, None)
            self._owners.pop(session_id, None)
            self._suspended.pop(session_id, None)

    def silent(self) -> dict[str, str]:
        """The owner of each session that has been silent for too long."""
        limit = self._clock() - SILENCE_S
        with self._lock:
            silent = [session_id for session_id, heard_at in self._heard_at.items() if heard_at < limit]
            return {session_id: self._owners[session_id] for session_id in silent}

    def last_seen(self) -> dict[str, float]:
        """When each live session was last heard of, in seconds since the epoch."""
        offset = time.time() - self._clock()
        with self._lock:
            return {session_id: heard_at + offset for session_id, heard_at in self._heard_at.items()}


def _own_id(session_id: str, owner: str) -> str:
    """The id under which an owner's session is stored if the client has chosen `session_id`."""
    if owner == LOCAL_OWNER:  # the only owner of a server without keys
        return session_id
    digest = hashlib.sha256(f"{len(owner)} {owner} {session_id}".encode()).hexdigest()
    return f"own-{digest[:32]}"
