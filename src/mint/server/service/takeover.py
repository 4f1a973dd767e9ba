"""Takes over the sessions of dead processes, with the requests that they had accepted and not finished.

Writes to the journal who serves them now, and counts an attempt for each request in which a process has died. The
caller puts what it gets into the queue.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import BaseModel

import mint.wire as wire
from mint.errors import DamagedDataError, MintError, QuotaExceededError, RequestFailedError
from mint.server.ids import RequestId
from mint.server.queue.jobs import Decode
from mint.server.store.instances import Instance
from mint.server.store.journal import Journal
from mint.server.store.rows import JobRow, ModelRow

log = logging.getLogger("mint.service")

MAX_ATTEMPTS = 5
"""A request in whose run the process has died this often is failed instead of being run again."""


@dataclass(frozen=True)
class UnfinishedJob:
    """A request of a dead process, or of a suspended session. `next_seq` is the number that its model waits for."""

    row: JobRow
    request: BaseModel | MintError
    next_seq: int


@dataclass(frozen=True)
class AdoptedSession:
    """A session that this process serves now; a suspended one stays so, with its requests in the journal."""

    session_id: str
    owner: str
    is_suspended: bool
    unfinished: list[UnfinishedJob]


def adopt_sessions(journal: Journal, instance: Instance, decode: Decode) -> Iterator[AdoptedSession]:
    """The sessions of dead processes, one after another. Call inside `Instance.sole_adopter`.

    All of them are taken over in one durable commit, before the first one is returned. However long no process ran, no
    session ends by it: clocks may be wrong, and the clients could not come.
    """
    live = journal.live_sessions()
    dead = instance.dead_among(row.instance_id for row in live)
    if not dead:
        return
    marks = [RequestId.parse(mark) for mark in dead.values()]
    running = [(name.target_id, name.number) for name in marks if name is not None and not name.is_sample]
    journal.adopt_sessions(list(dead), running=running, instance_id=instance.instance_id, now=time.time())
    instance.remove(dead)
    for session in live:
        if session.instance_id in dead:
            is_suspended = session.suspended_s is not None
            unfinished = [] if is_suspended else unfinished_jobs(journal, session.session_id, decode)
            yield AdoptedSession(session.session_id, session.owner, is_suspended, unfinished)
    log.info("took over the sessions of %d dead processes", len(dead))


def unfinished_jobs(journal: Journal, session_id: str, decode: Decode) -> list[UnfinishedJob]:
    """The accepted requests of a session that have no result, in the order of each model."""
    try:
        models = journal.models_of(session_id)
    except DamagedDataError as error:  # the other sessions go on; whoever asks for these is told
        log.error("the models of session %s cannot be read: %s", session_id, error)
        return []
    return [job for model in models for job in _unfinished_jobs(journal, model, decode)]


def _unfinished_jobs(journal: Journal, model: ModelRow, decode: Decode) -> list[UnfinishedJob]:
    next_seq = journal.next_seq(model)
    try:
        rows = journal.jobs(model.model_id, after=next_seq - 1)
        return [UnfinishedJob(row, _request_of(row, decode), next_seq) for row in rows]
    except DamagedDataError as error:
        log.error("the requests of model %s cannot be read: %s", model.model_id, error)
        return [
            UnfinishedJob(JobRow(model.model_id, seq_id, "unreadable", None, ""), error, next_seq)
            for seq_id in journal.accepted_numbers(model.model_id, after=next_seq - 1)
        ]


def _request_of(row: JobRow, decode: Decode) -> BaseModel | MintError:
    """The request of a dead process, or an error if it is damaged, or is what keeps killing processes."""
    try:
        row.verify()
    except DamagedDataError as error:
        return error
    if row.payload is None:
        return QuotaExceededError(
            "there was no room for the data of this request when it was accepted",
            field="max_journal_bytes",
            remedy="Send the data again, with a new number",
        )
    if row.attempts < MAX_ATTEMPTS:
        return decode(row.kind, row.payload, wire.Encoding(row.encoding))
    return RequestFailedError(
        f"the process died {row.attempts} times while it ran this request", remedy="See the server's log"
    )
