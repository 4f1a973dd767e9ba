"""The operations of the server: authenticate, validate, accept, return results.

Operations take the caller first. They take the bytes of a request where bytes arrive, return a message, and raise a
`MintError` to refuse. What an accepted request does is the worker's business. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import pydantic_core
from pydantic import BaseModel

import mint.wire as wire
from mint.engine.protocol import Engine
from mint.errors import (
    ConflictError,
    DamagedDataError,
    InvalidRequestError,
    JournalError,
    MintError,
    NotFoundError,
    OverloadedError,
    SessionEndedError,
)
from mint.server.callers import Caller, Quotas
from mint.server.disk_space import DiskSpace, folder_bytes
from mint.server.ids import RequestId, keyed_session_id, new_session_id, request_id, sampler_id, session_of
from mint.server.limits import ServerLimits, default_published_bytes
from mint.server.private_files import open_data_dir
from mint.server.queue.futures import FutureResult, Futures
from mint.server.queue.jobs import TrainingJob
from mint.server.queue.queue import OWNER_BYTES, QueueLimits, RequestQueue
from mint.server.queue.queue_position import QueueIndex, QueuePosition
from mint.server.queue.scheduler import GAP_TIMEOUT_S, Pending
from mint.server.service.large_request_reader import LargeRequestReader
from mint.server.service.new_samplers import new_sampler
from mint.server.service.request_reader import RequestReader
from mint.server.service.sample_deaths import SampleDeaths
from mint.server.service.sampling_requests import SamplingRequests
from mint.server.service.sessions import SUSPENDED_S, Sessions
from mint.server.service.takeover import UnfinishedJob, adopt_sessions, unfinished_jobs
from mint.server.service.uploads import import_checkpoint
from mint.server.storage_state import START_REMEDY, StorageProblem, starting
from mint.server.store import checkpoint_folders, checkpoints
from mint.server.store.checkpoint_catalog import CheckpointCatalog
from mint.server.store.instances import Instance
from mint.server.store.journal import JOURNAL_FILE, Journal
from mint.server.store.obsolete_files import OrphanSweep
from mint.server.store.rows import CheckpointRow, JobRow, ModelRow, SamplerRow, TrainingRunRow
from mint.server.store.session_catalog import SessionCatalog
from mint.server.store.training_run_catalog import TrainingRunCatalog
from mint.server.worker.base_models import BaseModels
from mint.server.worker.live_models import LiveModels
from mint.server.worker.model_memory import ModelMemory
from mint.server.worker.samplers import Samplers
from mint.server.worker.snapshots import RETAINED_RESULTS
from mint.server.worker.trainer import Trainer
from mint.server.worker.worker import Worker
from mint.types import (
    CreateSamplingSessionResponse,
    CreateSessionResponse,
    ForwardBackwardOutput,
    GetInfoResponse,
    GetServerCapabilitiesResponse,
    ModelData,
    SampleResponse,
    SamplerInfo,
    SupportedModel,
    UntypedPromise,
    WeightsInfoResponse,
)
from mint.wire.requests import (
    CreateSamplingSessionRequest,
    CreateSessionRequest,
    JoinSamplingSessionRequest,
    ModelRequest,
    RetrieveFuturesRequest,
    SaveWeightsForSamplerRequest,
    SessionRequest,
    WeightsInfoRequest,
)
from mint.wire.responses import (
    FutureCompletion,
    JoinSamplingSessionResponse,
    LiveModelsResponse,
    ModelSummary,
    RetrieveFuturesResponse,
    UnloadModelResponse,
)

log = logging.getLogger("mint.service")

NEWEST_TRIED_SDK = (0, 38, 0)
"""The newest public SDK that this server was tried with."""

SAMPLE_DEATHS_FILE = "sample_deaths.json"

MAX_SESSION_BYTES = 256 * 1024

UNLOAD_SEQ_ID = 2**31
"""The number of a model's last request, beyond all that have a place in its order."""

MAX_AHEAD = 100_000
"""How far beyond its model's next request another may be: no client has so many under way."""

SAVES = frozenset({"save_weights", "save_weights_for_sampler", "save_weights_external"})

CLONE_SEQ_IDS = 10**9
"""A clone of a sampling client numbers its requests from its own number times this."""

MAX_CLONES = 2**32
"""A clone's number times `CLONE_SEQ_IDS` must fit 63 bits."""

LONG_POLL_S = 25.0
MAX_COUNTED_S = 600.0
"""How much running time one round of housekeeping counts at most."""

QUEUE_INDEX_AGE_S = 0.1
"""How old the index of the queue may be from which waiting clients are told: thousands of them may ask at once."""


class Service:
    """The operations on one data directory, with one engine.

    Methods may be called from any thread; coroutines from any event loop, which they never block.
    """

    def __init__(
        self,
        engine: Engine,
        data_dir: Path,
        *,
        aliases: Mapping[str, str],
        offered: Collection[str] | None = None,
        is_server: bool = False,
        gap_timeout_s: float = GAP_TIMEOUT_S,
        long_poll_s: float = LONG_POLL_S,
        queue: RequestQueue | None = None,
        limits: ServerLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Opens the data directory; `start` begins to work.

        `offered` are the names of the base models, None for any. `is_server`: clients reach it over a socket, and come
        back after its death. `clock` counts seconds and does not jump: by it the engine's time is shared, and sessions
        are suspended.
        """
        try:
            open_data_dir(data_dir)
            self.instance = Instance(data_dir, is_server=is_server)
        except OSError as error:
            raise JournalError(f"{data_dir} cannot be used: {error}", remedy=START_REMEDY) from error
        self.data_dir = data_dir
        self.long_poll_s = long_poll_s
        self.limits = limits or ServerLimits()
        self.journal = Journal(data_dir / JOURNAL_FILE)
        self.training_runs = TrainingRunCatalog(self.journal, data_dir)
        self.checkpoints = CheckpointCatalog(self.journal, data_dir)
        self.stored_sessions = SessionCatalog(self.journal)
        self._orphans = OrphanSweep(self.journal, data_dir)
        self.base_models = BaseModels(engine, aliases, offered)
        self.futures = Futures()
        self._reader = LargeRequestReader() if is_server else RequestReader()
        self._sample_deaths = SampleDeaths(data_dir / "instances" / SAMPLE_DEATHS_FILE)
        self.disk = DiskSpace(data_dir, self.limits.disk_reserve_bytes)
        self._quotas: dict[str, Quotas] = {}  # of owners that save
        waiting = self.limits.waiting_bytes
        self._queue = queue or RequestQueue(QueueLimits(owner_bytes=min(OWNER_BYTES, waiting), total_bytes=waiting))
        self._clock = clock
        self._housekeeping_at = clock()
        self._sessions = Sessions(
            self.journal, self.instance.instance_id, resume_session=self._resume_session, clock=clock
        )
        self._samplers = Samplers(
            engine,
            self.journal,
            self.base_models,
            data_dir,
            max_unnamed=self.limits.max_unnamed_samplers,
            published_bytes=self._published_bytes(),
            disk=self.disk,
            clock=clock,
        )
        self._trainer = Trainer(
            LiveModels(engine, self.base_models),
            self.journal,
            data_dir,
            decode=self._reader.decode,
            model_memory_bytes=self.limits.model_memory_bytes,
            require_save=self._require_save,
        )
        self._worker = Worker(
            self._queue,
            self.futures,
            self._trainer,
            self._samplers,
            self.journal,
            data_dir,
            housekeeping=self._housekeeping,
            note_running=self.instance.mark,
            gap_timeout_s=gap_timeout_s,
            clock=clock,
        )
        self.sampling = SamplingRequests(
            self._reader, self._queue, self.futures, self._sessions, self._samplers, self._sample_deaths
        )
        self._queue_index = QueueIndex(self._queue.pending(), self._worker.eta)
        self._indexed_at = 0.0
        # What is checked must still hold when it is written: one thread at a time accepts or ends something. Decoding
        # comes before, waiting for the disk after.
        self._accepting = threading.RLock()

    def _published_bytes(self) -> int:
        """The room for unnamed samplers. What they take already counts as free, so that a restart changes nothing."""
        if self.limits.published_bytes is not None:
            return self.limits.published_bytes
        return default_published_bytes(self.disk.free_bytes + folder_bytes(self.data_dir / "published"))

    def start(self) -> None:
        """Takes over the sessions of dead processes, and begins to work."""
        # Two processes that start on one data directory must not both take over the same session.
        with starting(), self.instance.sole_adopter():
            self._adopt_sessions()
        self._worker.start()

    def stop(self, *, save_within_s: float = 0.0) -> None:
        """Ends after the request that is running; what waits stays in the journal for the next process.

        Models are saved as far as that fits into the time, so that the next process need not replay requests.
        """
        self._worker.stop(save_within_s=save_within_s)
        self._reader.close()
        try:
            self.journal.touch_sessions(self._sessions.last_seen())
        except JournalError as error:
            log.error("when sessions were last heard of is not stored: %s", error)
        self.journal.close()
        self.instance.close()

    def release_waiters(self) -> None:
        """Answers all who wait for a result with "ask again", now and from now on."""
        self.futures.release()

    def note_death(self) -> None:
        """Counts a death of the process for the sample requests that the engine is at. For the engine's thread, before
        the process ends; for a training request, the next process counts it."""
        self._sample_deaths.add(self._worker.sampling_now)

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Runs something on the engine's thread, between two requests."""
        self._worker.call_soon(callback)

    @property
    def is_working(self) -> bool:
        """Whether requests are being worked on."""
        return self._worker.is_alive

    @property
    def storage_problem(self) -> StorageProblem | None:
        """Why training waits and is refused; None while the data directory can be written."""
        return self.journal.storage.problem

    @property
    def pending(self) -> Pending:
        """The requests that wait for the engine."""
        return self._queue.pending()

    @property
    def sampled_sequences(self) -> int:
        """Sequences that are being sampled."""
        return self._worker.sampled_sequences

    @property
    def memory(self) -> ModelMemory:
        """The memory of the models."""
        return self._trainer.memory

    def probe_storage(self) -> None:
        """Writes something that changes nothing.

        Raises:
            JournalError: the journal cannot be written.
        """
        self.journal.database.probe()

    @property
    def models_by_owner(self) -> Counter[str]:
        """How many models each owner has in the sessions that live here."""
        owners = self._sessions.owners()
        return Counter(owner for session_id, owner in owners.items() for _ in self.journal.models_of(session_id))

    @property
    def model_count(self) -> int:
        """How many models the sessions have that live here."""
        return self.journal.model_count(self._sessions.owners())

    @property
    def session_owners(self) -> dict[str, str]:
        """The owner of each session that lives here."""
        return self._sessions.owners()

    # --- sessions ------------------------------------------------------------------------------------------------

    def create_session(self, caller: Caller, body: bytes) -> CreateSessionResponse:
        """Opens a session; warns clients whose SDK is newer than those that were tried.

        A request with a key that comes again, because its answer was lost, gets the session of the first.

        Raises:
            OverloadedError: the caller's quota of sessions is used up.
        """
        if len(body) > MAX_SESSION_BYTES:
            remedy = f"Send at most {MAX_SESSION_BYTES} bytes of tags and user_metadata"
            raise InvalidRequestError("is too large", field="body", value=f"{len(body)} bytes", remedy=remedy)
        request = wire.decode(CreateSessionRequest, body)
        details = request.model_dump(include={"tags", "sdk_version", "project_id", "display_name"}, exclude_none=True)
        key = request.request_key
        session_id = new_session_id() if key is None else keyed_session_id(caller.owner, key)
        with self._accepting:
            if key is None or not self._sessions.is_of(session_id, caller.owner):
                caller.quotas.require_session(len(self._sessions.of(caller.owner)))
                self._require_below("max_sessions", len(self._sessions.owners()), self.limits.max_sessions)
                self._sessions.create(session_id, caller.owner, request.user_metadata, details)
        return CreateSessionResponse(session_id=session_id, warning_message=_version_warning(request.sdk_version))

    def heartbeat(self, caller: Caller, body: bytes) -> None:
        """Keeps a session alive."""
        session_id = wire.decode(SessionRequest, body).session_id
        if not self._sessions.touch(session_id, caller.owner):
            self._sessions.require(self._sessions.stored_id(session_id, caller.owner), caller.owner)

    def finish_session(self, caller: Caller, session_id: str) -> None:
        """Ends a session: its models, futures, published weights and snapshots go; named checkpoints stay."""
        session_id = self._sessions.stored_id(session_id, caller.owner)
        self._sessions.require(session_id, caller.owner)
        self._end_session(session_id)

    def _end_session(self, session_id: str) -> None:
        with self._accepting:
            if not self._sessions.end(session_id):
                return
            models = [row.model_id for row in self.journal.models_of(session_id)]
            # From the queue first: the worker must not start a request whose rows are about to go.
            self._sessions.forget_models(models)
            self._queue.drop_session(session_id, models)
            files = self.journal.end_session(session_id, time.time())
        error = SessionEndedError("has ended", field="session_id", value=session_id, remedy="Make a new ServiceClient")
        self.futures.finish(dict.fromkeys(self.futures.open_of(session_id), FutureResult.of_error(error)))
        self._worker.end_session(session_id, models, files)

    # --- training ------------------------------------------------------------------------------------------------

    def submit(
        self, caller: Caller, kind: str, body: bytes, encoding: wire.Encoding = wire.Encoding.JSON
    ) -> UntypedPromise:
        """Accepts a training request (`forward_backward`, `optim_step`, …: the keys of `REQUESTS`).

        On return it is in the journal and survives a power failure. The same request again gets the same promise.

        Raises:
            InvalidRequestError: not even its place in the order of its model can be read.
            ConflictError: its place is taken by another request.
            NotFoundError, SessionEndedError: there is no such model.
            OverloadedError: a quota is used up, or too much waits already.
            JournalError: the storage does not work now; it may be sent again.
        """
        self.journal.storage.require_working()
        row, request = self._reader.read_training(kind, body, encoding)
        with self._accepting:
            row, commit = self._accept(caller, row, request)
        # Outside of the lock: requests that are accepted meanwhile share the next fsync.
        self.journal.durability.wait_durable(commit)
        return UntypedPromise(request_id=request_id(row.model_id, row.seq_id), model_id=row.model_id)

    def _accept(self, caller: Caller, row: JobRow, request: BaseModel | MintError) -> tuple[JobRow, int]:
        """Writes a request to the journal and to the queue; returns its row and the commit that must be durable."""
        now = time.time()
        model = run = None
        if row.seq_id == 0:
            session_id, _, rest = row.model_id.partition(":")
            session_id = self._sessions.require_or_open(session_id, caller)
            row = replace(row, model_id=f"{session_id}:{rest}")
            self._require_new_model(caller, row.model_id)
            metadata = getattr(request, "user_metadata", None)
            model = ModelRow(row.model_id, session_id)
            run = TrainingRunRow(row.model_id, session_id, caller.owner, now, now, user_metadata=metadata)
        elif not self._sessions.touch_model(row.model_id, caller.owner):
            self._require_model(caller, row.model_id)
        next_seq = self._require_capacity(caller, row)
        if row.kind in SAVES:
            self._quotas[caller.owner] = caller.quotas
        if row.seq_id == 0 or row.kind in SAVES:
            request = self._storage_error(caller, row, request) or request
        existing = self.journal.add_job(row, now=now, model=model, run=run)
        # For a repeated request, too: its first copy may have been committed and not yet be durable.
        commit = self.journal.durability.newest_commit
        if existing is None:
            self._enqueue(row, request, caller.owner, next_seq=next_seq, commit=commit)
        elif not self._reader.is_repeat(existing, row, request):
            raise ConflictError(
                f"was used before by another request ({existing.kind}) of {row.model_id}",
                field="seq_id" if row.seq_id else "model_seq_id",
                value=row.seq_id,
                remedy="Count upwards by one for every new request; send a repeated one unchanged",
            )
        return row, commit

    def _enqueue(
        self, row: JobRow, request: BaseModel | MintError, owner: str, *, next_seq: int, commit: int = 0
    ) -> None:
        self.futures.open(request_id(row.model_id, row.seq_id), owner=owner)
        size_bytes = len(row.payload or b"")
        job = TrainingJob(row.model_id, row.seq_id, row.kind, request, time.monotonic(), commit, owner, size_bytes)
        self._queue.add_training(job, next_seq=next_seq)

    def _require_new_model(self, caller: Caller, name: str) -> None:
        """Checks that a model may be created under a name that was not used before, and within the caller's quota."""
        run = self.journal.run(name)
        if run is not None and run.ended_at is not None:
            remedy = "Make the next one under another number"
            raise NotFoundError("was unloaded", field="model_id", value=name, remedy=remedy)
        if run is None:
            if caller.quotas.max_models is not None:
                caller.quotas.require_model(len(self._models_of(caller)))
            self._require_below("max_models", self.model_count, self.limits.max_models)

    def _require_below(self, name: str, used: int, limit: int) -> None:
        """Checks that all owners together may have one more.

        Raises:
            OverloadedError: a limit of the server is reached.
        """
        if used >= limit:
            raise OverloadedError(
                f"the limit of {limit} {name.removeprefix('max_')} on this server is reached",
                field=f"{name} of this server",
                value=used + 1,
                remedy=f"Try again later; the operator can raise MINT_SERVE_{name.upper()}",
            )

    def _require_model(self, caller: Caller, name: str) -> None:
        """Checks that the caller has this model, and remembers it."""
        session_id = session_of(name)
        self._sessions.require(session_id, caller.owner)
        if self.journal.model(name) is None:
            raise NotFoundError("is not a model here", field="model_id", value=name, remedy="Create one first")
        self._sessions.add_model(name, session_id)

    def _require_capacity(self, caller: Caller, row: JobRow) -> int:
        """Checks that the request may wait, and that those before it can still come.

        Returns the number of the request that the model waits for.
        """
        next_seq = self._queue.next_seq(row.model_id)
        if next_seq is None:
            model = self.journal.model(row.model_id)
            next_seq = 0 if model is None else model.applied_seq + 1
        if row.seq_id > next_seq + MAX_AHEAD:
            raise InvalidRequestError(
                f"is far beyond the next request of {row.model_id}, which is {next_seq}",
                field="seq_id",
                value=row.seq_id,
                remedy="Count upwards by one for every new request",
            )
        try:
            most = caller.quotas.max_waiting_requests
            self._queue.require_capacity(caller.owner, len(row.payload or b""), max_requests=most)
        except OverloadedError:
            # the request that runs next is always accepted: otherwise a full queue could not move on
            if row.seq_id != next_seq and self.journal.job(row.model_id, row.seq_id) is None:
                raise
        return next_seq

    def _storage_error(self, caller: Caller, row: JobRow, request: BaseModel | MintError) -> MintError | None:
        """The error if nothing new of this kind may be stored, else None: the request takes its place, and its future
        fails with it. Weights without a name are bounded, and a loop needs them: they are stored in any case."""
        if isinstance(request, SaveWeightsForSamplerRequest) and request.sampling_session_seq_id is not None:
            return None
        shortage = self.disk.shortage()
        if shortage is not None:
            return shortage
        if row.kind not in SAVES or caller.quotas.max_checkpoint_bytes is None:
            return None
        return caller.quotas.save_error(self.journal.checkpoint_bytes(caller.owner))

    def _require_save(self, owner: str) -> None:
        """Checks on the worker's thread, before a checkpoint is written, that there is still space and quota for it.

        Raises:
            OverloadedError: the disk is filled up to the reserve.
            InvalidRequestError: the owner's quota is used up.
        """
        self.disk.require_free_space(fresh=True)
        quotas = self._quotas.get(owner)  # unknown after a restart, until the owner saves again
        error = None if quotas is None else quotas.save_error(self.journal.checkpoint_bytes(owner))
        if error is not None:
            raise error

    def get_info(self, caller: Caller, body: bytes) -> GetInfoResponse:
        """What a model is, and every setting that took effect."""
        name = wire.decode(ModelRequest, body).model_id
        self._sessions.require(session_of(name), caller.owner)
        row = self.journal.model(name)
        if row is None or row.base_model is None or row.lora is None:
            raise NotFoundError("is not a model here", field="model_id", value=name, remedy="Create one first")
        effective = row.effective or {}
        folder = str(self.base_models.folder(row.base_model))
        arch = str(effective.get("arch", "qwen3"))
        return GetInfoResponse(
            model_id=name,
            model_data=ModelData(model_name=row.base_model, tokenizer_id=folder, arch=arch),
            lora_rank=row.lora["rank"],
            model_name=row.base_model,
            effective=effective,
        )

    def live_models(self, caller: Caller) -> LiveModelsResponse:
        """The caller's models, oldest first."""
        return LiveModelsResponse(
            models=[
                ModelSummary(
                    model_id=row.model_id,
                    session_id=row.session_id,
                    base_model=row.base_model,
                    lora_rank=None if row.lora is None else row.lora["rank"],
                )
                for row in self._models_of(caller)
            ]
        )

    def _models_of(self, caller: Caller) -> list[ModelRow]:
        return [row for session_id in self._sessions.of(caller.owner) for row in self.journal.models_of(session_id)]

    def unload_model(self, caller: Caller, model_id: str) -> UntypedPromise:
        """Drops a model at once, with all requests that wait for it. Its checkpoints and samplers stay.

        Raises:
            NotFoundError, SessionEndedError: there is no such model (any more).
        """
        self._sessions.require(session_of(model_id), caller.owner)
        promise = UntypedPromise(request_id=request_id(model_id, UNLOAD_SEQ_ID), model_id=model_id)
        with self._accepting:
            if self.futures.fingerprint(promise.request_id) is not None:  # the same request again
                return promise
            self._require_model(caller, model_id)
            self._sessions.forget_models([model_id])
            self._queue.drop_models([model_id])
            files = self.journal.end_model(model_id, time.time())
            error = NotFoundError("was unloaded", field="model_id", value=model_id, remedy="Create another one")
            self.futures.finish(dict.fromkeys(self.futures.open_of(model_id), FutureResult.of_error(error)))
            self.futures.open(promise.request_id, owner=caller.owner)
            unloaded = FutureResult(wire.encode(UnloadModelResponse(model_id=model_id)))
            self.futures.finish({promise.request_id: unloaded})
        self._worker.drop_model(model_id, files)
        return promise

    # --- sampling ------------------------------------------------------------------------------------------------

    def create_sampling_session(self, caller: Caller, body: bytes) -> CreateSamplingSessionResponse:
        """A sampler over a base model or over a checkpoint."""
        request = wire.decode(CreateSamplingSessionRequest, body)
        with self._accepting:
            session_id = self._sessions.require_or_open(request.session_id, caller)
            request = request.model_copy(update={"session_id": session_id})
            name = sampler_id(session_id, request.sampling_session_seq_id)
            existing = self.journal.sampler(name)
            if existing is None:
                row = new_sampler(name, request, self.journal, self.data_dir, self.base_models, reader=caller.owner)
                self.journal.add_sampler(row)
            elif existing.model_path != request.model_path or request.base_model not in (None, existing.base_model):
                raise ConflictError(
                    "was used before by another request",
                    field="sampling_session_seq_id",
                    value=request.sampling_session_seq_id,
                    remedy="Count upwards by one for every new sampler",
                )
        return CreateSamplingSessionResponse(sampling_session_id=name)

    def sampler_info(self, caller: Caller, name: str) -> SamplerInfo:
        """What a sampler samples from."""
        row = self.sampling.require_sampler(caller, name)
        folder = str(self.base_models.folder(row.base_model))
        return SamplerInfo(sampler_id=name, base_model=row.base_model, model_path=row.model_path, tokenizer_id=folder)

    def join_sampling_session(self, caller: Caller, body: bytes) -> JoinSamplingSessionResponse:
        """A number for one more client of a sampler, which no other client has; the first client's is 0."""
        self.sampling.require_sampler(caller, wire.decode(JoinSamplingSessionRequest, body).sampling_session_id)
        return JoinSamplingSessionResponse(client_counter=1 + secrets.randbelow(MAX_CLONES))

    def sample(self, caller: Caller, body: bytes) -> UntypedPromise:
        """Accepts a sample request, as `SamplingRequests.accept`."""
        return self.sampling.accept(caller, body)

    def cancel(self, caller: Caller, body: bytes) -> None:
        """Cancels a sample request, as `SamplingRequests.cancel`; training requests keep their place in the order."""
        self.sampling.cancel(caller, body)

    # --- results -------------------------------------------------------------------------------------------------

    async def retrieve(self, caller: Caller, name: str) -> FutureResult | None:
        """The result of an accepted request, as soon as it is there; None if that takes longer than a long poll.

        Raises:
            NotFoundError: no such request; a lost sample request may be sent again.
            SessionEndedError: its session has ended.
        """
        parsed = _parse_request_id(name)
        session_id = session_of(parsed.target_id)
        # `touch` looks in memory only. `require` asks the journal, which this event loop must not wait for.
        if not self._sessions.touch(session_id, caller.owner):
            await asyncio.to_thread(self._sessions.require, session_id, caller.owner)
        result = await self.futures.wait(name, self.long_poll_s)
        if result is not None or self.futures.fingerprint(name) is not None:
            return result
        # no longer in memory
        row = None if parsed.is_sample else await asyncio.to_thread(self.journal.job, parsed.target_id, parsed.number)
        try:
            if row is not None:
                await asyncio.to_thread(row.verify_checksum)
        except DamagedDataError as error:  # final: clients would ask again for ever if it was a server's error
            log.error("%s", error)
            return FutureResult.of_error(error)
        if row is not None and row.result is None and row.status != "pending":
            raise NotFoundError(
                "has run, but its result is no longer kept: "
                f"{RETAINED_RESULTS} later requests of its model have run since",
                field="request_id",
                value=name,
                remedy="Read the results of passes before you send so many more requests",
            )
        if row is None or row.result is None:
            raise NotFoundError("does not exist or was deleted", field="request_id", value=name)
        return FutureResult(row.result, failed=row.status == "failed")

    async def retrieve_many(self, caller: Caller, body: bytes) -> RetrieveFuturesResponse:
        """Which of a sampler's requests have finished since the last time; waits for one as `retrieve` does."""
        request = wire.decode(RetrieveFuturesRequest, body)
        sampler = request.target.sampling_session_id
        cursor = request.prev_cursor
        if not self._sessions.touch(session_of(sampler), caller.owner):
            await asyncio.to_thread(self._sessions.require, session_of(sampler), caller.owner)
        for name in request.retrieved_request_ids:
            if name.startswith(f"{sampler}:"):
                self.futures.forget(name)
        wanted_s = self.long_poll_s if request.timeout is None else request.timeout
        deadline = time.monotonic() + (min(wanted_s, self.long_poll_s) if wanted_s > 0 else 0.0)
        while True:
            found = await self.futures.wait_for_any(sampler, cursor, deadline - time.monotonic())
            cursor = max([cursor, *(number for number, _, _ in found)])
            own = [
                FutureCompletion(state="failed" if failed else "finished", request_id=name)
                for _, name, failed in found
                if _clone_of(name) == request.target.cloned_sampler_id
            ]
            if own or not found:
                return RetrieveFuturesResponse(completions=own, cursor=cursor)

    def result_as_json(self, result: FutureResult, kind: type[ForwardBackwardOutput] | type[SampleResponse]) -> bytes:
        """A result of this kind for a client that reads only JSON."""
        return self._reader.result_as_json(result.body, kind)

    def queue_position(self, caller: Caller, name: str) -> QueuePosition:
        """Where a request is that has no result yet."""
        parsed = _parse_request_id(name)
        at_limit = self._queue.is_full(caller.owner, max_requests=caller.quotas.max_waiting_requests)
        now = time.monotonic()
        # Without a lock: two threads at once build the index twice, and either may be used.
        if now - self._indexed_at > QUEUE_INDEX_AGE_S:
            self._queue_index = QueueIndex(self._queue.pending(), self._worker.eta)
            self._indexed_at = now
        return self._queue_index.position(parsed, now, at_limit=at_limit)

    # --- base models, training runs and checkpoints --------------------------------------------------------------

    def capabilities(self) -> GetServerCapabilitiesResponse:
        """The base models that can be used by name."""
        models = [
            SupportedModel(model_name=name, max_context_length=self.base_models.context_length(name))
            for name in self.base_models.names
        ]
        return GetServerCapabilitiesResponse(supported_models=models)

    def weights_info(self, caller: Caller, body: bytes) -> WeightsInfoResponse:
        """What a checkpoint was saved from."""
        path = wire.decode(WeightsInfoRequest, body).tinker_path
        row = checkpoints.find_checkpoint(self.journal, path, reader=caller.owner)
        manifest = checkpoint_folders.read_manifest(self.data_dir / row.folder)
        trained = {key: manifest.lora[key] for key in ("train_unembed", "train_mlp", "train_attn")}
        return WeightsInfoResponse(base_model=manifest.base_model, lora_rank=manifest.lora["rank"], **trained)

    def find_checkpoint(self, path: str, *, reader: str | None) -> CheckpointRow:
        """The row of a checkpoint that the owner `reader` may read; None may read all.

        Raises:
            InvalidRequestError: `path` is no checkpoint's path or alias.
            NotFoundError: there is no such checkpoint that `reader` may read.
        """
        return checkpoints.find_checkpoint(self.journal, path, reader=reader)

    def import_checkpoint(
        self, caller: Caller, source: BinaryIO, *, base_model: str | None, name: str | None
    ) -> CheckpointRow:
        """Makes a checkpoint of an archive, as `uploads.import_checkpoint`, of a base model that is offered here.

        Raises:
            OverloadedError: the disk is filled up to the reserve.
            InvalidRequestError: the archive cannot be used, or a quota is exceeded.
        """
        self.disk.require_free_space()
        return import_checkpoint(
            self.journal,
            self.data_dir,
            source,
            owner=caller.owner,
            base_model=base_model,
            name=name,
            folder_of=self.base_models.offered_folder,
            max_bytes=caller.quotas.max_checkpoint_bytes,
        )

    def is_training_run(self, name: str) -> bool:
        """Whether a training run has this id, whoever owns it."""
        return self.journal.run(name) is not None

    def has_saved_weights(self, run_id: str) -> bool:
        """Whether a live model has saved or published weights."""
        return bool(self.journal.saves(run_id, limit=1))

    def newest_published(self, caller: Caller, run_id: str) -> SamplerRow | None:
        """The newest weights that a live model of the caller has published and that still exist; None if it has saved
        a checkpoint since, or has none."""
        run = self.journal.run(run_id)
        if run is None or run.owner != caller.owner:
            return None
        for result in self.journal.saves(run_id):
            content = pydantic_core.from_json(result)
            sampler = content.get("sampling_session_id")
            found = self.journal.sampler(sampler) if sampler else None
            if found is not None or content.get("path"):
                return found
        return None

    # --- housekeeping --------------------------------------------------------------------------------------------

    def _adopt_sessions(self) -> None:
        """Serves the sessions of dead processes from now on."""
        for session in adopt_sessions(self.journal, self.instance, self._reader.decode):
            if session.is_suspended:
                self._sessions.suspend(session.session_id, session.owner)
            else:
                self._sessions.resume(session.session_id, session.owner)
            self._enqueue_unfinished(session.owner, session.unfinished)

    def _enqueue_unfinished(self, owner: str, jobs: list[UnfinishedJob]) -> None:
        for job in jobs:
            self._enqueue(job.row, job.request, owner, next_seq=job.next_seq)

    def _housekeeping(self) -> None:
        now = self._clock()
        # a process that was stopped for a while was not running
        running_s = min(now - self._housekeeping_at, MAX_COUNTED_S)
        self._housekeeping_at = now
        self.disk.look()
        self.journal.database.spare.take()
        self.journal.touch_sessions(self._sessions.last_seen())
        suspended = list(self._sessions.suspended())
        if suspended:
            for session_id in self.journal.add_suspended_time(suspended, running_s, limit_s=SUSPENDED_S):
                log.warning("session %s ends: its client has not come back", session_id)
                self._end_session(session_id)
        for session_id, owner in self._sessions.silent().items():
            self._suspend_session(session_id, owner)
        if self.instance.is_housekeeper():
            with self.journal.storage.writing("the list of orphans"):
                self._orphans.advance(running_s)
            self.checkpoints.remove_expired(running_s)

    def _suspend_session(self, session_id: str, owner: str) -> None:
        """Takes a session out of the queue and the engine; what was accepted stays in the journal."""
        with self._accepting:
            if session_id not in self._sessions.silent():  # it was heard of meanwhile
                return
            models = [row.model_id for row in self.journal.models_of(session_id)]
            self._sessions.suspend(session_id, owner)
            self._queue.drop_session(session_id, models)
            self._worker.suspend_session(session_id, models)
        log.info("session %s is suspended: its client is silent", session_id)

    def _resume_session(self, session_id: str) -> None:
        """Resumes a suspended session, whose client has come back, as after a restart."""
        with self._accepting:
            owner = self._sessions.suspended().get(session_id)
            if owner is None:
                return
            self.journal.resume_session(session_id)
            # before the session counts as resumed: a client that asks for a result must find that one is expected
            self._enqueue_unfinished(owner, unfinished_jobs(self.journal, session_id, self._reader.decode))
            self._sessions.resume(session_id, owner)
        log.info("session %s is resumed: its client is back", session_id)


def _version_warning(sdk_version: str) -> str | None:
    found = re.match(r"(\d{1,9})\.(\d{1,9})(?:\.(\d{1,9}))?", sdk_version, re.ASCII)
    if found is None or tuple(int(part or 0) for part in found.groups()) <= NEWEST_TRIED_SDK:
        return None
    tried = ".".join(map(str, NEWEST_TRIED_SDK))
    return (
        f"This server was tried with SDK versions up to {tried}, and you have {found[0]}: what is new there may be "
        f"refused or ignored. Everything that {tried} can do should work."
    )


def _parse_request_id(name: str) -> RequestId:
    parsed = RequestId.parse(name)
    if parsed is None:
        raise NotFoundError("is not a request here", field="request_id", value=name)
    return parsed


def _clone_of(name: str) -> int:
    parsed = RequestId.parse(name)
    return 0 if parsed is None else parsed.number // CLONE_SEQ_IDS
