"""Which sessions there are and were, and what belongs to them.

`owner` is whose they are; None is the operator, for whom all are there. Knows rows only: whether a session is being
served, and by whom, is `sessions.py`'s business. Any thread may call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa

import mint.types.records as records
from mint.errors import NotFoundError
from mint.server.store import database as tables
from mint.server.store.journal import Journal, SessionRow
from mint.types.records import FIRST_PAGE, PageQuery

NO_PROJECT = "default"
"""The project of sessions that were put into none."""


class SessionCatalog:
    """The sessions of one data directory, living or ended."""

    def __init__(self, journal: Journal, *, clock: Callable[[], float] = time.time) -> None:
        """`clock` is the time of day."""
        self._journal = journal
        self._transaction = journal.database.transaction
        self._clock = clock

    def sessions(self, owner: str | None, page: PageQuery = FIRST_PAGE) -> records.ListSessionsResponse:
        """A page of session ids, living or ended, newest first."""
        known = tables.sessions.c
        chosen = sa.select(known.session_id).where(owned_by(known, owner)).order_by(*_newest_first)
        with self._transaction(write=False) as connection:
            found = connection.execute(chosen.limit(page.size).offset(page.offset)).scalars()
            return records.ListSessionsResponse(sessions=list(found))

    def session(self, owner: str | None, session_id: str) -> records.GetSessionResponse:
        """The runs and the living samplers of a session.

        Raises:
            NotFoundError: there is none of that id for this owner.
        """
        row = require_session(self._journal, owner, session_id)
        runs, samplers = tables.runs.c, tables.samplers.c
        of_runs = sa.select(runs.run_id).where(runs.session_id == session_id).order_by(runs.created_at, runs.run_id)
        of_samplers = sa.select(samplers.sampler_id).where(samplers.session_id == session_id)
        with self._transaction(write=False) as connection:
            return records.GetSessionResponse(
                training_run_ids=list(connection.execute(of_runs).scalars()),
                sampler_ids=list(connection.execute(of_samplers.order_by(samplers.sampler_id)).scalars()),
                user_metadata=row.user_metadata,
                display_name=(row.details or {}).get("display_name"),
            )

    def search_sessions(
        self, owner: str | None, request: records.SessionSearchRequest
    ) -> records.SessionSearchResponse:
        """A page of the owner's sessions that fit, newest first."""
        known = tables.sessions.c
        chosen = sa.select(tables.sessions).where(owned_by(known, owner)).order_by(*_newest_first)
        if request.cursor is not None:
            last_id = request.cursor.last_session_id
            anchor = self._journal.session(last_id)  # has the exact moment; the cursor's is rounded
            known_moment = anchor is not None and owner in (None, anchor.owner)
            last = (
                _created(anchor) if anchor is not None and known_moment else request.cursor.last_created_at.timestamp()
            )
            chosen = chosen.where((started < last) | ((started == last) & (known.session_id > last_id)))
        found: list[SessionRow] = []
        with self._transaction(write=False) as connection:
            for row in connection.execute(chosen):
                session = SessionRow(**row._mapping)
                if _fits(session, request):
                    found.append(session)
                if len(found) > request.limit:
                    break
        page = found[: request.limit]
        summaries = self._summaries(page)
        cursor = None
        if len(found) > request.limit:
            cursor = records.SessionSearchCursor(
                last_created_at=moment(_created(page[-1])), last_session_id=page[-1].session_id
            )
        return records.SessionSearchResponse(sessions=summaries, next_cursor=cursor)

    def assign_project(self, owner: str | None, session_id: str, project_id: str) -> None:
        """Puts a session, and with it its runs, into a project: a name to list them by.

        Raises:
            NotFoundError: there is no such session for this owner.
        """
        row = require_session(self._journal, owner, session_id)
        details = {**(row.details or {}), "project_id": project_id}
        mine = tables.sessions.c.session_id == session_id
        with self._transaction() as connection:
            connection.execute(sa.update(tables.sessions).where(mine).values(details=details))

    def _summaries(self, sessions: Iterable[SessionRow]) -> list[records.SessionSummary]:
        rows = list(sessions)
        kept, runs = tables.checkpoints.c, tables.runs.c
        sums = (
            sa.select(runs.session_id, sa.func.count(), sa.func.coalesce(sa.func.sum(kept.size_bytes), 0))
            .join_from(tables.runs, tables.checkpoints, runs.run_id == kept.model_id)
            .where(runs.session_id.in_([row.session_id for row in rows]), unexpired(self._clock()))
            .group_by(runs.session_id)
        )
        with self._transaction(write=False) as connection:
            stored = {name: (count, size) for name, count, size in connection.execute(sums).all()}
        return [_summary(row, *stored.get(row.session_id, (0, 0))) for row in rows]


def owned_by(columns: Any, owner: str | None) -> sa.ColumnElement[bool]:
    """That a row is this owner's; all are the operator's."""
    return sa.true() if owner is None else columns.owner == owner


def unexpired(now: float) -> sa.ColumnElement[bool]:
    """That a checkpoint is still to be seen."""
    expires_at = tables.checkpoints.c.expires_at
    return expires_at.is_(None) | (expires_at > now)


def moment(seconds: float) -> datetime:
    """Seconds since the epoch as an aware time."""
    return datetime.fromtimestamp(seconds, UTC)


def require_session(journal: Journal, owner: str | None, session_id: str) -> SessionRow:
    """The session, ended or not.

    Raises:
        NotFoundError: there is none of that id for this owner.
    """
    row = journal.session(session_id)
    if row is None or owner not in (None, row.owner):
        raise NotFoundError("is not a session here", field="session_id", value=session_id)
    return row


started = sa.func.coalesce(tables.sessions.c.created_at, tables.sessions.c.last_seen)
_newest_first = (started.desc(), tables.sessions.c.session_id)


def _created(row: SessionRow) -> float:
    return row.last_seen if row.created_at is None else row.created_at


def _fits(row: SessionRow, request: records.SessionSearchRequest) -> bool:
    """Whether a session is one of those looked for."""
    details, metadata = row.details or {}, row.user_metadata or {}
    if request.owner.type == "user" and row.owner not in (request.owner.owner_urns or []):
        return False
    if request.project_ids is not None and details.get("project_id", NO_PROJECT) not in request.project_ids:
        return False
    if any(metadata.get(key) != value for key, value in request.user_metadata.items()):
        return False
    state = "active" if row.ended_at is None else "client_finished"
    if request.statuses is not None and state not in {status.type for status in request.statuses}:
        return False
    named = []
    if request.session_id is not None:
        named.append(row.session_id == request.session_id)
    if request.display_name is not None:
        shown = str(details.get("display_name") or "").casefold()
        named.append(all(word in shown for word in request.display_name.casefold().split()))
    return any(named) if named else True


def _summary(row: SessionRow, count: int, size_bytes: int) -> records.SessionSummary:
    details = row.details or {}
    return records.SessionSummary(
        session_id=row.session_id,
        created_at=moment(_created(row)),
        owner=row.owner,
        project_id=details.get("project_id") or NO_PROJECT,
        status={"type": "active"} if row.ended_at is None else None,
        checkpoints_count=count,
        display_name=details.get("display_name"),
        user_metadata=row.user_metadata,
        checkpoint_storage_bytes=size_bytes,
    )
