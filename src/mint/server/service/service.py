"""The operations of the service: check whose it is, accept it durably, enqueue it, look it up.

Every operation takes the bytes of a request and returns a message, or raises a `MintError`. What an accepted request
does is the worker's business. Knows no HTTP.
"""

from __future__ import annotations

import logging
import re
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from pydantic import BaseModel

import mint.wire as wire
from mint.engine.protocol import Engine
from mint.errors import (
    InvalidRequestError,
    JournalError,
    MintError,
    RequestFailedError,
    SessionEndedError,
)
from mint.server.callers import Caller
from mint.server.ids import RequestName
from mint.server.queue.futures import Answer, FutureBook
from mint.server.queue.queue import Inbox
from mint.server.queue.scheduler import GAP_TIMEOUT_S, Pending
from mint.server.service.results import Retrieval
from mint.server.service.sampling_requests import SamplingDesk
from mint.server.service.sessions import STALE_S, Sessions
from mint.server.service.training_requests import TrainingDesk
from mint.server.store import checkpoints
from mint.server.store.checkpoint_catalog import CheckpointCatalog
from mint.server.store.instances import Instance
from mint.server.store.journal import Journal
from mint.server.store.rows import JobRow
from mint.server.store.run_catalog import RunCatalog
from mint.server.store.session_catalog import SessionCatalog
from mint.server.worker.base_models import Bases
from mint.server.worker.samplers import Samplers
from mint.server.worker.trainer import Trainer, TrainingJob
from mint.server.worker.worker import Worker
from mint.types import (
    CreateSessionResponse,
    GetServerCapabilitiesResponse,
    SupportedModel,
    WeightsInfoResponse,
)
from mint.wire.requests import (
    CreateSessionRequest,
    SessionRequest,
    WeightsInfoRequest,
)

log = logging.getLogger("mint.service")

MAX_ATTEMPTS = 5
"""A request in whose run the process has died this often is failed instead of being run again."""

NEWEST_TRIED_SDK = (0, 38, 0)
"""Of the public SDKs that have been run against this server."""

MAX_SESSION_BYTES = 256 * 1024
ORPHAN_AGE_S = 3600.0


class Service:
    """One data directory, one engine."""

    def __init__(
        self,
        engine: Engine,
        data_dir: Path,
        *,
        aliases: Mapping[str, str],
        offered: Collection[str] | None = None,
        is_server: bool = False,
        gap_timeout_s: float = GAP_TIMEOUT_S,
    ) -> None:
        """Opens the data directory; `start` begins to work. `offered` are the base models' names, None for any.

        `is_server`: others reach it over a socket, and come back after its death.
        """
        try:
            data_dir.mkdir(parents=True, exist_ok=True)
            self.instance = Instance(data_dir, is_server=is_server)
        except OSError as error:
            raise JournalError(f"{data_dir} cannot be used: {error}", remedy="Set MINT_HOME to a folder") from error
        self.data_dir = data_dir
        self.journal = Journal(data_dir / checkpoints.JOURNAL_FILE)
        self.run_catalog = RunCatalog(self.journal, data_dir)
        self.checkpoint_catalog = CheckpointCatalog(self.journal, data_dir)
        self.session_catalog = SessionCatalog(self.journal)
        self.bases = Bases(engine, aliases, offered)
        self.futures = FutureBook()
        self._inbox = Inbox()
        self._sessions = Sessions(self.journal, self.instance.instance_id)
        self._trainer = Trainer(engine, self.journal, self.bases, data_dir)
        self._samplers = Samplers(engine, self.journal, self.bases, data_dir)
        self._worker = Worker(
            self._inbox,
            self.futures,
            self._trainer,
            self._samplers,
            housekeeping=self._housekeeping,
            mark=self.instance.mark,
            gap_timeout_s=gap_timeout_s,
        )
        self._training = TrainingDesk(
            self.journal, self._sessions, self.futures, self._inbox, self._trainer, self.bases, run_soon=self.run_soon
        )
        self.submit, self.get_info = self._training.submit, self._training.get_info
        self.unload_model, self.live_models = self._training.unload, self._training.live_models
        desk = SamplingDesk(
            self.journal, self._sessions, self.futures, self._inbox, self._samplers, self.bases, data_dir
        )
        self.create_sampling_session, self.sampler_info = desk.create_sampling_session, desk.sampler_info
        self.join_sampling_session, self.sample_now = desk.join, desk.sample_now
        self.sample, self.cancel = desk.sample, desk.cancel
        retrieval = Retrieval(self.journal, self._sessions, self.futures, self._inbox, self._worker.pace)
        self.retrieve, self.retrieve_many = retrieval.retrieve, retrieval.retrieve_many
        self.queue_facts = retrieval.facts

    def start(self) -> None:
        """Takes over what dead processes have left, and begins to work."""
        with self.instance.sole_adopter():
            self._adopt()
            self._sweep_orphans()
        self._worker.start()

    def stop(self) -> None:
        """Ends after the request that is running; what waits stays in the journal for the next process."""
        self._worker.stop()
        try:
            self.journal.touch_sessions(self._sessions.last_seen())
        except JournalError as error:
            log.error("when sessions were last heard of is not stored: %s", error)
        self.journal.close()
        self.instance.close()

    @property
    def is_working(self) -> bool:
        """Whether requests are being worked on."""
        return self._worker.is_alive

    def release_waiters(self) -> None:
        """Answers everybody who waits for a result with "ask again", now and from now on."""
        self.futures.release()

    def run_soon(self, errand: Callable[[], None]) -> None:
        """Runs something on the engine's thread, between two requests."""
        self._worker.run_soon(errand)

    @property
    def waiting(self) -> Pending:
        """What has been accepted and is not finished."""
        return self._inbox.pending()

    @property
    def sampled_rows(self) -> int:
        """Sequences that are being sampled."""
        return self._worker.sampled_rows

    @property
    def session_owners(self) -> dict[str, str]:
        """Whose each session is that lives here."""
        return self._sessions.owners()

    @property
    def open_sessions(self) -> int:
        """How many sessions live here, whoever owns them."""
        return len(self._sessions.last_seen())

    # --- sessions ------------------------------------------------------------------------------------------------

    def create_session(self, caller: Caller, body: bytes) -> CreateSessionResponse:
        """Opens a session; whoever comes with an SDK newer than those tried is told so.

        Raises:
            OverloadedError: the caller's quota of sessions is used up.
        """
        if len(body) > MAX_SESSION_BYTES:
            remedy = f"Send at most {MAX_SESSION_BYTES} bytes of tags and user_metadata"
            raise InvalidRequestError("is too large", field="body", value=f"{len(body)} bytes", remedy=remedy)
        request = wire.decode(CreateSessionRequest, body)
        self._sessions.require_room(caller)
        details = request.model_dump(include={"tags", "sdk_version", "project_id", "display_name"}, exclude_none=True)
        session_id = self._sessions.create(caller.owner, request.user_metadata, details)
        return CreateSessionResponse(session_id=session_id, warning_message=_version_warning(request.sdk_version))

    def heartbeat(self, caller: Caller, body: bytes) -> None:
        """Keeps a session alive."""
        self._sessions.require(wire.decode(SessionRequest, body).session_id, caller.owner)

    def finish_session(self, caller: Caller, session_id: str) -> None:
        """Ends a session: its models, futures, published weights and snapshots go; named checkpoints stay."""
        self._sessions.require(session_id, caller.owner)
        self._end_session(session_id)

    def _end_session(self, session_id: str) -> None:
        if not self._sessions.end(session_id):
            return
        models = [row.model_id for row in self.journal.models_of(session_id)]
        self._training.forget(models)
        self._inbox.drop(models, session_id)
        files = tuple(self.journal.end_session(session_id, time.time()))
        error = SessionEndedError("has ended", field="session_id", value=session_id, remedy="Make a new ServiceClient")
        body = wire.encode_error(error)
        self.futures.finish({name: Answer(body, failed=True) for name in self.futures.open_of(session_id)})

        def let_go() -> None:
            self._worker.cancel_samples(session_id)
            self._samplers.end_session(session_id)
            for name in models:
                self._trainer.forget(name)
            self._trainer.discard(files)

        self._worker.run_soon(let_go)

    # --- looking up ----------------------------------------------------------------------------------------------

    def capabilities(self) -> GetServerCapabilitiesResponse:
        """The base models that can be used by name."""
        models = [
            SupportedModel(model_name=name, max_context_length=self.bases.context_length(name))
            for name in self.bases.names
        ]
        return GetServerCapabilitiesResponse(supported_models=models)

    def weights_info(self, caller: Caller, body: bytes) -> WeightsInfoResponse:
        """What a checkpoint was saved from."""
        path = wire.decode(WeightsInfoRequest, body).tinker_path
        row = checkpoints.find_checkpoint(self.journal, path, reader=caller.owner)
        manifest = checkpoints.read_manifest(self.data_dir / row.folder)
        trained = {key: manifest.lora[key] for key in ("train_unembed", "train_mlp", "train_attn")}
        return WeightsInfoResponse(base_model=manifest.base_model, lora_rank=manifest.lora["rank"], **trained)

    # --- keeping house -------------------------------------------------------------------------------------------

    def _adopt(self) -> None:
        """Takes over the sessions of dead processes, with all that they had accepted and not finished."""
        live = self.journal.live_sessions()
        dead = self.instance.dead_among(row.instance_id for row in live)
        if not dead:
            return
        now = time.time()
        marks = [RequestName.parse(mark) for mark in dead.values()]
        running = [(name.owner, name.number) for name in marks if name is not None and not name.is_sample]
        self.journal.adopt_sessions(list(dead), running=running, instance_id=self.instance.instance_id, now=now)
        self.instance.bury(dead)
        for session in (row for row in live if row.instance_id in dead):
            self._sessions.resume(session.session_id, session.owner)
            if now - session.last_seen > STALE_S:
                self._end_session(session.session_id)
                continue
            for model in self.journal.models_of(session.session_id):
                for job in self.journal.jobs(model.model_id, after=model.applied_seq, status=("pending",)):
                    self._training.enqueue(job, _adopted_request(job), owner=session.owner)
        log.info("took over the sessions of %d dead processes", len(dead))

    def _sweep_orphans(self) -> None:
        """Removes files that a death has left between writing and committing; young ones may still be in the making."""
        named = self.journal.named_files()
        limit = time.time() - ORPHAN_AGE_S
        for folder in ("snapshots", "published", "checkpoints"):
            for path in (self.data_dir / folder).glob("*"):
                if str(path.relative_to(self.data_dir)) not in named and path.stat().st_mtime < limit:
                    log.info("orphan %s removed", path)
                    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    def _housekeeping(self) -> None:
        self.journal.touch_sessions(self._sessions.last_seen())
        for session_id in self._sessions.expired():
            log.info("session %s expired", session_id)
            self._end_session(session_id)
        self.checkpoint_catalog.remove_expired()


def _version_warning(sdk_version: str) -> str | None:
    found = re.match(r"(\d{1,9})\.(\d{1,9})(?:\.(\d{1,9}))?", sdk_version, re.ASCII)
    if found is None or tuple(int(part or 0) for part in found.groups()) <= NEWEST_TRIED_SDK:
        return None
    tried = ".".join(map(str, NEWEST_TRIED_SDK))
    return (
        f"This server was tried with SDK versions up to {tried}, and you have {found[0]}: what is new there may be "
        f"refused or ignored. Everything that {tried} can do should work."
    )


def _adopted_request(row: JobRow) -> BaseModel | MintError:
    """What a dead process had accepted, unless it is what keeps killing processes."""
    if row.attempts < MAX_ATTEMPTS:
        return TrainingJob.decode(row.kind, row.payload or b"", wire.Encoding(row.encoding))
    return RequestFailedError(
        f"the process died {row.attempts} times while it ran this request", remedy="See the server's log"
    )
