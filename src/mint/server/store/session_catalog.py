"""The sessions of a data directory, living or ended, and what belongs to them.

`owner` is whose sessions a question is about; None is the operator, who sees everything. Knows rows only: which
process serves a session is the business of `service/sessions.py`. Any thread may call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import mint.types.records as records
from mint.errors import NotFoundError
from mint.server.store.catalog_queries import MADE, MAX_PAGE_BYTES, UNEXPIRED, moment, owned_by
from mint.server.store.database import decode
from mint.server.store.journal import Journal
from mint.server.store.rows import SessionRow
from mint.types.records import FIRST_PAGE, PageQuery

NO_PROJECT = "default"
"""The project of sessions that were put into none."""

_CREATED = "coalesce(created_at, last_seen)"  # sessions of the first schema have no created_at


class SessionCatalog:
    """The sessions of one data directory."""

    def __init__(self, journal: Journal, *, clock: Callable[[], float] = time.time) -> None:
        """`clock` is the time of day."""
        self._journal = journal
        self._database = journal.database
        self._clock = clock

    def sessions(self, owner: str | None, page: PageQuery = FIRST_PAGE) -> records.ListSessionsResponse:
        """A page of session ids, newest first."""
        found = self._database.values(
            f"SELECT session_id FROM sessions WHERE {owned_by(owner)} "
            f"ORDER BY {_CREATED} DESC, session_id LIMIT :size OFFSET :offset",
            owner=owner,
            size=page.size,
            offset=page.offset,
        )
        return records.ListSessionsResponse(sessions=found)

    def session(self, owner: str | None, session_id: str) -> records.GetSessionResponse:
        """The runs and the living samplers of a session.

        Raises:
            NotFoundError: there is none of that id for this owner.
        """
        row = require_session(self._journal, owner, session_id)
        return records.GetSessionResponse(
            training_run_ids=self._database.values(
                f"SELECT run_id FROM runs WHERE session_id = :id AND {MADE} ORDER BY created_at, run_id", id=session_id
            ),
            sampler_ids=self._database.values(
                "SELECT sampler_id FROM samplers WHERE session_id = :id ORDER BY sampler_id", id=session_id
            ),
            user_metadata=row.user_metadata,
            display_name=(row.details or {}).get("display_name"),
        )

    def search_sessions(
        self, owner: str | None, request: records.SessionSearchRequest
    ) -> records.SessionSearchResponse:
        """A page of the owner's sessions that match, newest first."""
        where = owned_by(owner)
        last = 0.0
        if request.cursor is not None:
            where += f" AND ({_CREATED} < :last OR ({_CREATED} = :last AND session_id > :last_id))"
            last = self._created_at(owner, request.cursor)
        page: list[SessionRow] = []
        size = 0
        has_more = False
        with self._database.transaction(write=False) as transaction:
            for found in transaction.execute(
                f"SELECT * FROM sessions WHERE {where} ORDER BY {_CREATED} DESC, session_id",
                owner=owner,
                last=last,
                last_id=None if request.cursor is None else request.cursor.last_session_id,
            ):
                session = decode(SessionRow, found)
                if not _matches(session, request):
                    continue
                size += len(found["user_metadata"] or "")
                has_more = len(page) == request.limit or (page != [] and size > MAX_PAGE_BYTES)
                if has_more:
                    break
                page.append(session)
        cursor = None
        if has_more:
            cursor = records.SessionSearchCursor(
                last_created_at=moment(_created(page[-1])), last_session_id=page[-1].session_id
            )
        return records.SessionSearchResponse(sessions=self._summaries(page), next_cursor=cursor)

    def assign_project(self, owner: str | None, session_id: str, project_id: str) -> None:
        """Puts a session, and with it its runs, into a project: a name to list them by.

        Raises:
            NotFoundError: there is no such session for this owner.
        """
        row = require_session(self._journal, owner, session_id)
        self._database.write(
            "UPDATE sessions SET details = :details WHERE session_id = :id",
            details={**(row.details or {}), "project_id": project_id},
            id=session_id,
        )

    def _created_at(self, owner: str | None, cursor: records.SessionSearchCursor) -> float:
        """The exact time of the cursor's session; the cursor itself has a rounded one."""
        row = self._journal.session(cursor.last_session_id)
        if row is not None and owner in (None, row.owner):
            return _created(row)
        return cursor.last_created_at.timestamp()

    def _summaries(self, sessions: Sequence[SessionRow]) -> list[records.SessionSummary]:
        with self._database.transaction(write=False) as transaction:
            stored = {
                session_id: (count, size_bytes)
                for session_id, count, size_bytes in transaction.execute(
                    "SELECT session_id, count(*), coalesce(sum(size_bytes), 0) "
                    "FROM runs JOIN checkpoints ON run_id = model_id "
                    f"WHERE session_id IN (SELECT value FROM json_each(:ids)) AND {UNEXPIRED} GROUP BY session_id",
                    ids=[row.session_id for row in sessions],
                    now=self._clock(),
                )
            }
        return [_summary(row, *stored.get(row.session_id, (0, 0))) for row in sessions]


def require_session(journal: Journal, owner: str | None, session_id: str) -> SessionRow:
    """The session, ended or not.

    Raises:
        NotFoundError: there is none of that id for this owner.
    """
    row = journal.session(session_id)
    if row is None or owner not in (None, row.owner):
        raise NotFoundError(
            "is not a session here", field="session_id", value=session_id, remedy="List the sessions to see their ids"
        )
    return row


def _created(row: SessionRow) -> float:
    return row.last_seen if row.created_at is None else row.created_at


def _project(row: SessionRow) -> str:
    return (row.details or {}).get("project_id") or NO_PROJECT  # a copy without a project has None


def _matches(row: SessionRow, request: records.SessionSearchRequest) -> bool:
    details = row.details or {}
    metadata = row.user_metadata or {}
    if request.owner.type == "user" and row.owner not in (request.owner.owner_urns or []):
        return False
    if request.project_ids is not None and _project(row) not in request.project_ids:
        return False
    if any(metadata.get(key) != value for key, value in request.user_metadata.items()):
        return False
    if request.statuses is not None and not any(_has_status(row, wanted) for wanted in request.statuses):
        return False
    named = []
    if request.session_id is not None:
        named.append(row.session_id == request.session_id)
    if request.display_name is not None:
        shown = str(details.get("display_name") or "").casefold()
        named.append(all(word in shown for word in request.display_name.casefold().split()))
    return any(named) if named else True


def _has_status(row: SessionRow, wanted: records.SessionStatusQuery) -> bool:
    if wanted.type == "active":
        return row.ended_at is None
    if wanted.type != "client_finished" or row.ended_at is None:
        return False
    return wanted.reasons is None or _ending(row).get("reason") in wanted.reasons


def _ending(row: SessionRow) -> dict[str, Any]:
    """What its client said when it finished the session; empty if it said nothing."""
    return (row.details or {}).get("ending", {})


def _status(row: SessionRow) -> dict[str, Any] | None:
    if row.ended_at is None:
        return {"type": "active"}
    ending = _ending(row)
    if not ending:
        return None
    return {"type": "client_finished", "reason": {"type": ending["reason"]}, "detail": ending.get("detail")}


def _summary(row: SessionRow, count: int, size_bytes: int) -> records.SessionSummary:
    details = row.details or {}
    return records.SessionSummary(
        session_id=row.session_id,
        created_at=moment(_created(row)),
        owner=row.owner,
        project_id=_project(row),
        status=_status(row),
        checkpoints_count=count,
        display_name=details.get("display_name"),
        user_metadata=row.user_metadata,
        checkpoint_storage_bytes=size_bytes,
    )
