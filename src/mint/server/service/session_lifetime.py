"""The life of a session: opened, kept alive, suspended while its client is silent, resumed, ended.

`sessions` knows which sessions this process serves; here is what happens to their work. Models end here, too.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from typing import Any, get_args

import mint.wire as wire
from mint.errors import InvalidRequestError, NotFoundError, OverloadedError, SessionEndedError
from mint.server.callers import Caller
from mint.server.ids import keyed_session_id, new_session_id, request_id, session_of
from mint.server.queue.futures import FutureResult, Futures
from mint.server.queue.queue import RequestQueue
from mint.server.service.request_reader import RequestReader
from mint.server.service.sessions import SUSPENDED_S, Sessions
from mint.server.service.takeover import UnfinishedJob, adopt_sessions, unfinished_jobs
from mint.server.service.training_requests import TrainingRequests
from mint.server.store.instances import Instance
from mint.server.store.journal import Journal
from mint.server.store.obsolete import JobRemoval
from mint.server.worker.worker import Worker
from mint.types import CreateSessionResponse, UntypedPromise
from mint.types.records import SessionOutcome
from mint.wire.requests import MAX_METADATA_BYTES, CreateSessionRequest, FinishSessionRequest, SessionRequest
from mint.wire.responses import UnloadModelResponse

log = logging.getLogger("mint.service")

NEWEST_TRIED_SDK = (0, 38, 0)
"""The newest public SDK that this server was tried with."""

MAX_DETAIL = 1000
"""So many characters of what a client says of its session's end are kept."""

UNLOAD_SEQ_ID = 2**31
"""The number of a model's last request, beyond all that have a place in its order."""


class SessionLifetime:
    """Opens, suspends, resumes and ends the sessions of one service. Any thread may call, except as a method says."""

    def __init__(
        self,
        sessions: Sessions,
        training: TrainingRequests,
        reader: RequestReader,
        journal: Journal,
        queue: RequestQueue,
        futures: Futures,
        worker: Worker,
        instance: Instance,
        job_removal: JobRemoval,
        accepting: threading.RLock,
    ) -> None:
        """`accepting` is held while something is accepted or ended."""
        self._sessions = sessions
        self._training = training
        self._reader = reader
        self._journal = journal
        self._queue = queue
        self._futures = futures
        self._worker = worker
        self._instance = instance
        self._job_removal = job_removal
        self._accepting = accepting
        self._turned_away: set[str] = set()  # suspended sessions for which the queue had no room, since `expire`
        sessions.on_return = self._resume

    def create(self, caller: Caller, body: bytes) -> CreateSessionResponse:
        """Opens a session; warns clients whose SDK is newer than those that were tried.

        A request with a key that comes again, because its answer was lost, gets the session of the first.

        Raises:
            QuotaExceededError, OverloadedError: as `Sessions.require_one_more`.
            OverloadedError: the disk is filled up to the reserve.
        """
        if len(body) > MAX_METADATA_BYTES:
            remedy = f"Send at most {MAX_METADATA_BYTES} bytes of tags and user_metadata"
            raise InvalidRequestError("is too large", field="body", value=f"{len(body)} bytes", remedy=remedy)
        request = wire.decode(CreateSessionRequest, body)
        details = request.model_dump(include={"tags", "sdk_version", "project_id", "display_name"}, exclude_none=True)
        key = request.request_key
        session_id = new_session_id() if key is None else keyed_session_id(caller.owner, key)
        with self._accepting:
            if key is None or not self._sessions.is_of(session_id, caller.owner):
                self._sessions.require_one_more(caller, len(body))
                self._sessions.create(session_id, caller.owner, request.user_metadata, details)
            commit = self._journal.durability.newest_commit  # for a repeated request, too
        # Outside of the lock: sessions that are opened meanwhile share the next fsync.
        self._journal.durability.wait_durable(commit)
        return CreateSessionResponse(session_id=session_id, warning_message=_version_warning(request.sdk_version))

    def heartbeat(self, caller: Caller, body: bytes) -> None:
        """Keeps a session alive."""
        session_id = wire.decode(SessionRequest, body).session_id
        if not self._sessions.touch(session_id, caller.owner):
            self._sessions.require(self._sessions.stored_id(session_id, caller.owner), caller.owner)

    def finish(self, caller: Caller, session_id: str, request: FinishSessionRequest | None = None) -> None:
        """Ends a session: its models, futures, published weights and snapshots go; named checkpoints stay, and so does
        the reason in `request`."""
        session_id = self._sessions.stored_id(session_id, caller.owner)
        if self._sessions.suspended().get(session_id) != caller.owner:  # a suspended one need not come back for this
            self._sessions.require(session_id, caller.owner)
        ending = None
        if request is not None and request.reason is not None and request.reason.type in get_args(SessionOutcome):
            detail = None if request.detail is None else request.detail[:MAX_DETAIL]
            ending = {"reason": request.reason.type, "detail": detail}
            log.info("session %s ends: %s", session_id, request.reason.type)
        self._end(session_id, ending)

    def unload_model(self, caller: Caller, model_id: str) -> UntypedPromise:
        """Drops a model at once, with all requests that wait for it. Its checkpoints and samplers stay.

        Raises:
            NotFoundError, SessionEndedError: there is no such model (any more).
        """
        self._sessions.require(session_of(model_id), caller.owner)
        promise = UntypedPromise(request_id=request_id(model_id, UNLOAD_SEQ_ID), model_id=model_id)
        with self._accepting:
            if self._futures.fingerprint(promise.request_id) is not None:  # the same request again
                return promise
            self._sessions.require_model(model_id, caller.owner)
            # The worker must not start a request whose row is about to go; if the journal cannot be written, all stay.
            with self._queue.held([model_id]):
                files = self._journal.end_model(model_id, time.time())
                self._queue.drop_models([model_id])
            self._sessions.forget_models([model_id])
            error = NotFoundError("was unloaded", field="model_id", value=model_id, remedy="Create another one")
            self._futures.finish(dict.fromkeys(self._futures.open_of(model_id), FutureResult.of_error(error)))
            self._futures.open(promise.request_id, owner=caller.owner)
            unloaded = FutureResult(wire.encode(UnloadModelResponse(model_id=model_id)))
            self._futures.finish({promise.request_id: unloaded})
        self._worker.drop_model(model_id, files)
        self._job_removal.start()
        return promise

    def adopt(self) -> None:
        """Serves the sessions of dead processes from now on. Call inside `Instance.sole_adopter`."""
        for session in adopt_sessions(self._journal, self._instance, self._reader.decode):
            if session.is_suspended:
                self._sessions.suspend(session.session_id, session.owner)
            else:
                self._sessions.resume(session.session_id, session.owner)
            self._enqueue_unfinished(session.owner, session.unfinished)
            if session.unfinished and not self._instance.is_server:  # the clients of a server live on
                log.warning(
                    "session %s: a program that was killed has left unfinished requests (%d), which run from now on; "
                    "`mint sessions end %s` drops them",
                    session.session_id,
                    len(session.unfinished),
                    session.session_id,
                )

    def expire(self, running_s: float) -> None:
        """Counts `running_s` for suspended sessions, ends those whose time is over, and suspends silent ones.

        It does not count for a session whose client has come back and found the queue full. An operator may have set
        the time of any session to be over. For the worker's thread.
        """
        self._journal.touch_sessions(self._sessions.last_seen())
        with self._accepting:
            turned_away, self._turned_away = self._turned_away, set()
        suspended = [session_id for session_id in self._sessions.suspended() if session_id not in turned_away]
        if suspended:
            self._journal.add_suspended_time(suspended, running_s)
        served = [*self._sessions.suspended(), *self._sessions.owners()]
        for session_id in self._journal.expired_sessions(served, limit_s=SUSPENDED_S):
            log.warning("session %s ends: its client has not come back, or an operator ended it", session_id)
            self._end(session_id)
        for session_id, owner in self._sessions.silent().items():
            self._suspend(session_id, owner)

    def _end(self, session_id: str, ending: dict[str, Any] | None = None) -> None:
        with self._accepting:
            if not self._sessions.is_served(session_id):
                return
            models = [row.model_id for row in self._journal.models_of(session_id)]
            with self._queue.held(models, session_id):  # as in `unload_model`
                files = self._journal.end_session(session_id, time.time(), ending)
                self._queue.drop_session(session_id, models)
            self._sessions.forget_models(models)
            self._sessions.end(session_id)
        error = SessionEndedError("has ended", field="session_id", value=session_id, remedy="Make a new ServiceClient")
        self._futures.finish(dict.fromkeys(self._futures.open_of(session_id), FutureResult.of_error(error)))
        self._worker.end_session(session_id, models, files)
        self._job_removal.start()

    def _suspend(self, session_id: str, owner: str) -> None:
        """Takes a session out of the queue and the engine; what was accepted stays in the journal."""
        with self._accepting:
            if session_id not in self._sessions.silent():  # it was heard of meanwhile
                return
            models = [row.model_id for row in self._journal.models_of(session_id)]
            self._sessions.suspend(session_id, owner)
            self._queue.drop_session(session_id, models)
            self._worker.suspend_session(session_id, models)
        log.info("session %s is suspended: its client is silent", session_id)

    def _resume(self, session_id: str) -> None:
        """Resumes a suspended session, whose client has come back, as after a restart; or ends it if its time is over.

        Raises:
            OverloadedError: the queue has no room for its unfinished requests; it stays suspended.
        """
        with self._accepting:
            owner = self._sessions.suspended().get(session_id)
            if owner is None:
                return
            if self._journal.expired_sessions([session_id], limit_s=SUSPENDED_S):
                self._end(session_id)
                return
            try:
                self._queue.require_capacity_for_return(owner, *self._journal.unfinished_size(session_id))
            except OverloadedError:
                self._turned_away.add(session_id)
                raise
            self._journal.resume_session(session_id)
            # before the session counts as resumed: a client that asks for a result must find that one is expected
            self._enqueue_unfinished(owner, unfinished_jobs(self._journal, session_id, self._reader.decode))
            self._sessions.resume(session_id, owner)
        log.info("session %s is resumed: its client is back", session_id)

    def _enqueue_unfinished(self, owner: str, jobs: list[UnfinishedJob]) -> None:
        for job in jobs:
            self._training.enqueue(job.row, job.request, owner, next_seq=job.next_seq)


def _version_warning(sdk_version: str) -> str | None:
    found = re.match(r"(\d{1,9})\.(\d{1,9})(?:\.(\d{1,9}))?", sdk_version, re.ASCII)
    if found is None or tuple(int(part or 0) for part in found.groups()) <= NEWEST_TRIED_SDK:
        return None
    tried = ".".join(map(str, NEWEST_TRIED_SDK))
    return (
        f"This server was tried with SDK versions up to {tried}, and you have {found[0]}: what is new there may be "
        f"refused or ignored. Everything that {tried} can do should work."
    )
