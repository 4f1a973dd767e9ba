"""Training requests: what is checked before one is accepted, and its way into the journal and the queue.

What an accepted request does is the worker's business.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

from pydantic import BaseModel

import mint.wire as wire
from mint.errors import (
    ConflictError,
    DamagedDataError,
    InvalidRequestError,
    JournalError,
    MintError,
    NotFoundError,
    OverloadedError,
    QuotaExceededError,
)
from mint.server.callers import Caller, Quotas
from mint.server.disk_space import DiskSpace
from mint.server.ids import request_id, session_of
from mint.server.journal_use import JournalUse
from mint.server.limits import ServerLimits
from mint.server.queue.futures import Futures
from mint.server.queue.jobs import TrainingJob
from mint.server.queue.queue import RequestQueue
from mint.server.service.request_reader import RequestReader
from mint.server.service.sessions import Sessions
from mint.server.storage_reservations import StorageReservations
from mint.server.store.journal import Journal, snapshot_bytes
from mint.server.store.rows import REMEDY, JobRow, ModelRow, TrainingRunRow
from mint.server.worker.base_models import BaseModels
from mint.types import GetInfoResponse, ModelData, UntypedPromise
from mint.wire.requests import ModelRequest, SaveWeightsForSamplerRequest
from mint.wire.responses import LiveModelsResponse, ModelSummary

MAX_AHEAD = 100_000
"""How far beyond its model's next request another may be: no client has so many under way."""

PASSES = frozenset({"forward", "forward_only", "forward_backward"})
SAVES = frozenset({"save_weights", "save_weights_for_sampler", "save_weights_external"})


class TrainingRequests:
    """The training requests of one service, and the models that they train. Any thread may call."""

    def __init__(
        self,
        reader: RequestReader,
        journal: Journal,
        queue: RequestQueue,
        futures: Futures,
        sessions: Sessions,
        base_models: BaseModels,
        disk: DiskSpace,
        journal_use: JournalUse,
        reservations: StorageReservations,
        limits: ServerLimits,
        accepting: threading.RLock,
    ) -> None:
        """Requests are accepted under `accepting`."""
        self._reader = reader
        self._journal = journal
        self._queue = queue
        self._futures = futures
        self._sessions = sessions
        self._base_models = base_models
        self._disk = disk
        self._journal_use = journal_use
        self._reservations = reservations
        self._limits = limits
        self._accepting = accepting
        self._quotas: dict[str, Quotas] = {}  # of owners that save or make models
        self.quotas_of: Callable[[str], Quotas] = lambda owner: Quotas()
        """The quotas of an owner who has neither saved nor made a model since this process began."""

    def submit(
        self, caller: Caller, kind: str, body: bytes, encoding: wire.Encoding = wire.Encoding.JSON
    ) -> UntypedPromise:
        """Accepts a training request (`forward_backward`, `optim_step`, …: the keys of `REQUESTS`).

        On return it is in the journal and survives a power failure. The same request again gets the same promise.

        Raises:
            InvalidRequestError: not even its place in the order of its model can be read.
            ConflictError: its place is taken by another request.
            DamagedDataError: what the journal has of the model contradicts itself.
            NotFoundError, SessionEndedError: there is no such model.
            QuotaExceededError: a model is new, and the caller has as many as the quota allows; or the caller's room in
                the journal is used up, and there is none for an error, either.
            OverloadedError: too much waits already, or a model is new and the disk is filled up to the reserve.
            JournalError: the storage does not work now, or the disk is filled up to the reserve and this is a pass; it
                may be sent again.
        """
        self._journal.storage.require_working()
        row, request = self._reader.read_training(kind, body, encoding)
        with self._accepting:
            row, commit = self._accept(caller, row, request)
        # Outside of the lock: requests that are accepted meanwhile share the next fsync.
        self._journal.durability.wait_durable(commit)
        return UntypedPromise(request_id=request_id(row.model_id, row.seq_id), model_id=row.model_id)

    def _accept(self, caller: Caller, row: JobRow, request: BaseModel | MintError) -> tuple[JobRow, int]:
        """Writes a request to the journal and to the queue; returns its row and the commit that must be durable."""
        now = time.time()
        model = run = None
        if row.seq_id == 0:
            session_id, _, rest = row.model_id.partition(":")
            session_id = self._sessions.require_or_open(session_id, caller)
            row = replace(row, model_id=f"{session_id}:{rest}")
            self._require_new_model(caller, row)
            metadata = getattr(request, "user_metadata", None)
            model = ModelRow(row.model_id, session_id)
            run = TrainingRunRow(row.model_id, session_id, caller.owner, now, now, user_metadata=metadata)
        elif not self._sessions.touch_model(row.model_id, caller.owner):
            self._sessions.require_model(row.model_id, caller.owner)
        if row.kind in PASSES:
            self._require_space_for_pass(row)
        next_seq = self._require_capacity(caller, row)
        refusal: MintError | None = None  # the request takes its place, and its future fails with this
        if row.kind in SAVES or row.seq_id == 0:
            self._quotas[caller.owner] = caller.quotas
        if row.kind in SAVES:
            refusal = self._storage_error(caller, request)
        if row.seq_id > 0:
            no_room = self._no_room_in_journal(caller, row)
            if no_room is not None:
                row, refusal = replace(row, payload=None), no_room
        existing = self._journal.add_job(row, now=now, model=model, run=run)
        # For a repeated request, too: its first copy may have been committed and not yet be durable.
        commit = self._journal.durability.newest_commit
        if existing is None:
            self.enqueue(row, refusal or request, caller.owner, next_seq=next_seq, commit=commit)
        elif not self._reader.is_repeat(existing, row, request):
            raise ConflictError(
                f"was used before by another request ({existing.kind}) of {row.model_id}",
                field="seq_id" if row.seq_id else "model_seq_id",
                value=row.seq_id,
                remedy="Count upwards by one for every new request; send a repeated one unchanged",
            )
        return row, commit

    def enqueue(
        self, row: JobRow, request: BaseModel | MintError, owner: str, *, next_seq: int, commit: int = 0
    ) -> None:
        """Puts a request of the journal into the queue. `next_seq` is the number that its model waits for."""
        self._futures.open(request_id(row.model_id, row.seq_id), owner=owner)
        size_bytes = len(row.payload or b"")
        job = TrainingJob(row.model_id, row.seq_id, row.kind, request, time.monotonic(), commit, owner, size_bytes)
        self._queue.add_training(job, next_seq=next_seq)

    def _require_new_model(self, caller: Caller, row: JobRow) -> None:
        """Checks that a model may be created: under a name that was not used before, within the caller's quotas, and
        while the disk has space for something new."""
        name = row.model_id
        run = self._journal.run(name)
        if run is not None and run.ended_at is not None:
            remedy = "Make the next one under another number"
            raise NotFoundError("was unloaded", field="model_id", value=name, remedy=remedy)
        if run is None:
            if caller.quotas.max_models is not None:
                caller.quotas.require_model(len(self._models_of(caller)))
            self._limits.require_below("max_models", self._journal.model_count(self._sessions.owners()))
            self._disk.require_free_space()  # before the journal: the row of a training run is kept for long
            # its metadata is in two rows: in the request, and in that of the run
            size = 2 * len(row.payload or b"")
            self._journal_use.add_record(caller.owner, size, caller.quotas.max_journal_bytes)

    def _require_space_for_pass(self, row: JobRow) -> None:
        try:
            self._disk.require_space_for_passes()
        except JournalError:
            if self._journal.job(row.model_id, row.seq_id) is None:  # a repeated one stores nothing
                raise

    def _require_capacity(self, caller: Caller, row: JobRow) -> int:
        """Checks that the request may wait, and that those before it can still come.

        Returns the number of the request that the model waits for.

        Raises:
            InvalidRequestError: it is far beyond that number.
            DamagedDataError: the journal should have a request at its place, and has none.
            OverloadedError: it has no room.
        """
        next_seq = self._queue.next_seq(row.model_id)
        if next_seq is None:
            model = self._journal.model(row.model_id)
            next_seq = 0 if model is None else self._journal.next_seq(model)
        if row.seq_id < next_seq and self._journal.job(row.model_id, row.seq_id) is None:
            self._journal.storage.note_damage("a row is missing")
            raise DamagedDataError(
                f"the journal is damaged: request {next_seq - 1} of {row.model_id} should be the last finished one "
                f"(applied_seq), but there is no request {row.seq_id}",
                remedy=REMEDY,
            )
        if row.seq_id > next_seq + MAX_AHEAD:
            raise InvalidRequestError(
                f"is far beyond the next request of {row.model_id}, which is {next_seq}",
                field="seq_id",
                value=row.seq_id,
                remedy="Count upwards by one for every new request",
            )
        size_bytes = len(row.payload or b"")
        try:
            most = caller.quotas.max_waiting_requests
            self._queue.require_capacity(caller.owner, size_bytes, max_requests=most)
        except OverloadedError:
            if self._journal.job(row.model_id, row.seq_id) is not None:  # a repeated one is no new one
                return next_seq
            if row.seq_id != next_seq:
                raise
            self._queue.require_capacity_for_next(row.model_id, caller.owner, size_bytes)
        return next_seq

    def _no_room_in_journal(self, caller: Caller, row: JobRow) -> MintError | None:
        """The error if the data of a request are more than the caller may have in the journal, else None.

        The next step of the model is refused then, and the earlier passes give up their data: so there is room again.
        """
        try:
            quota = caller.quotas.max_journal_bytes
            size_bytes = len(row.payload or b"")
            return self._journal_use.add_request(caller.owner, size_bytes, quota, is_save=row.kind in SAVES)
        except QuotaExceededError:
            if self._journal.job(row.model_id, row.seq_id) is None:  # a repeated one stores nothing
                raise
            return None

    def _storage_error(self, caller: Caller, request: BaseModel | MintError) -> MintError | None:
        """The error if no new checkpoint may be stored, else None. Weights without a name are bounded, and a loop needs
        them: they are stored in any case."""
        if isinstance(request, SaveWeightsForSamplerRequest) and request.sampling_session_seq_id is not None:
            return None
        shortage = self._disk.shortage()
        if shortage is not None:
            return shortage
        if caller.quotas.max_checkpoint_bytes is None:
            return None
        return caller.quotas.save_error(self._reservations.used_bytes(caller.owner))

    def require_save(self, owner: str, size_bytes: int) -> None:
        """Checks on the worker's thread, before a checkpoint is written, that there is still space and quota for it.

        `size_bytes` is by how much it makes the owner's checkpoints larger.

        Raises:
            OverloadedError: the disk is filled up to the reserve.
            InvalidRequestError: the owner's quota is used up.
        """
        self._disk.require_free_space(fresh=True)
        error = self._quotas_of(owner).save_error(self._reservations.used_bytes(owner), size_bytes)
        if error is not None:
            raise error

    def require_snapshots(self, owner: str, needed_bytes: int) -> None:
        """Checks on the worker's thread, before a model is made, that its snapshots fit into its owner's quota.

        Raises:
            QuotaExceededError: they do not fit.
        """
        quotas = self._quotas_of(owner)
        if quotas.max_snapshot_bytes is not None:
            quotas.require_snapshots(snapshot_bytes(self._journal.database, owner), needed_bytes)

    def _quotas_of(self, owner: str) -> Quotas:
        """Of a request that an earlier process has accepted, it is not known with which key it came."""
        return self._quotas.get(owner) or self.quotas_of(owner)

    def get_info(self, caller: Caller, body: bytes) -> GetInfoResponse:
        """What a model is, and every setting that took effect."""
        name = wire.decode(ModelRequest, body).model_id
        self._sessions.require(session_of(name), caller.owner)
        row = self._journal.model(name)
        if row is None or row.base_model is None or row.lora is None:
            raise NotFoundError("is not a model here", field="model_id", value=name, remedy="Create one first")
        effective = row.effective or {}
        folder = str(self._base_models.folder(row.base_model))
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
        return [row for session_id in self._sessions.of(caller.owner) for row in self._journal.models_of(session_id)]
