"""The service on one data directory: opens its parts, starts and stops them.

The operations are methods of the parts (`sessions`, `training`, `sampling_sessions`, `sampling`, `results`), and those
on base models and checkpoints of the service itself. Operations take the caller first. They take the bytes of a request
where bytes arrive, return a message, and raise a `MintError` to refuse. Knows no HTTP.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import pydantic_core

import mint.wire as wire
from mint.engine.protocol import Engine
from mint.errors import DamagedDataError, InvalidRequestError, JournalError
from mint.models.peft_format import LayersOf, base_layers
from mint.server.callers import Caller, Quotas
from mint.server.disk_space import DiskSpace, folder_bytes
from mint.server.identity import identity_of
from mint.server.journal_use import JournalUse
from mint.server.limits import ServerLimits, default_published_bytes
from mint.server.lora_names import LoraNames
from mint.server.lost_journal import open_journal
from mint.server.private_files import open_data_dir
from mint.server.queue.futures import Futures
from mint.server.queue.queue import OWNER_BYTES, QueueLimits, RequestQueue
from mint.server.queue.scheduler import GAP_TIMEOUT_S, Lane, Pending
from mint.server.service.large_request_reader import LargeRequestReader
from mint.server.service.request_reader import RequestReader
from mint.server.service.results import Results
from mint.server.service.sample_deaths import SampleDeaths
from mint.server.service.sampling_requests import SamplingRequests
from mint.server.service.sampling_sessions import SamplingSessions
from mint.server.service.session_lifetime import SessionLifetime
from mint.server.service.sessions import Sessions
from mint.server.service.training_requests import TrainingRequests
from mint.server.service.uploads import import_checkpoint
from mint.server.storage_reservations import Reservation, StorageReservations
from mint.server.storage_state import START_REMEDY, StorageProblem, starting
from mint.server.store import checkpoint_folders, checkpoints
from mint.server.store.checkpoint_catalog import CheckpointCatalog
from mint.server.store.instances import Instance
from mint.server.store.journal import record_bytes, request_bytes
from mint.server.store.keys import ApiKeys
from mint.server.store.obsolete import JobRemoval, OrphanSweep
from mint.server.store.rows import CheckpointRow, SamplerRow
from mint.server.store.session_catalog import SessionCatalog
from mint.server.store.training_run_catalog import TrainingRunCatalog
from mint.server.worker.base_models import BaseModels
from mint.server.worker.live_models import LiveModels
from mint.server.worker.model_memory import ModelMemory
from mint.server.worker.samplers import Samplers
from mint.server.worker.trainer import Trainer
from mint.server.worker.worker import Worker
from mint.types import (
    GetServerCapabilitiesResponse,
    SupportedModel,
    WeightsInfoResponse,
)
from mint.types.sampling import LogprobsMode
from mint.wire.requests import (
    WeightsInfoRequest,
)

log = logging.getLogger("mint.service")

SAMPLE_DEATHS_FILE = "sample_deaths.json"

LONG_POLL_S = 25.0
MAX_COUNTED_S = 600.0
"""How much running time one round of housekeeping counts at most."""

VACUUM_ROUNDS = 10
"""How often one round of housekeeping gives free pages back: up to 80 MB, in about a second."""

ENDED_KEPT_S = 30 * 86_400.0
"""How long the records of ended sessions are listed, unless a run of them has a checkpoint: then they stay."""

FORGET_EVERY_S = 3600.0
FORGET_ROUNDS = 10
"""How often such records are looked for, and how many transactions remove them: of 256 sessions each, in a second or
two."""


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
        logprobs_mode: LogprobsMode = "raw",
        layers_of: LayersOf = base_layers,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Opens the data directory; `start` begins to work.

        `offered` are the names of the base models, None for any. `logprobs_mode` is that of samples for which neither
        the request nor the caller's key has one. `layers_of` finds the layers of a base model that an upload may train.
        `is_server`: clients reach it over a socket, and come back after its death. `clock` counts seconds and does not
        jump: by it the engine's time is shared, and sessions are suspended.
        """
        try:
            open_data_dir(data_dir)
            self.instance = Instance(data_dir, is_server=is_server)
        except OSError as error:
            raise JournalError(f"{data_dir} cannot be used: {error}", remedy=START_REMEDY) from error
        self.data_dir = data_dir
        self.limits = limits or ServerLimits()
        self._journal = open_journal(data_dir)
        identity = identity_of(data_dir)
        loss = "" if identity is None else identity.loss
        self.training_runs = TrainingRunCatalog(self._journal, data_dir)
        self.checkpoints = CheckpointCatalog(self._journal, data_dir)
        self.stored_sessions = SessionCatalog(self._journal)
        self._orphans = OrphanSweep(self._journal, data_dir)
        self._job_removal = JobRemoval(self._journal)
        self._engine = engine
        self.base_models = BaseModels(engine, aliases, offered)
        self.futures = Futures()
        self._reader = LargeRequestReader() if is_server else RequestReader()
        self._sample_deaths = SampleDeaths(data_dir / "instances" / SAMPLE_DEATHS_FILE)
        self.disk = DiskSpace(data_dir, self.limits.disk_reserve_bytes)
        self.reservations = StorageReservations(self.disk, self._journal.checkpoint_bytes)
        journal_use = JournalUse(
            partial(request_bytes, self._journal.database),
            partial(record_bytes, self._journal.database),
            lambda owner: self._journal.forget_ended(before=math.inf, owner=owner),
        )
        waiting = self.limits.waiting_bytes
        self._queue = queue or RequestQueue(QueueLimits(owner_bytes=min(OWNER_BYTES, waiting), total_bytes=waiting))
        self._layers_of = layers_of
        self._clock = clock
        self._housekeeping_at = clock()
        self._forget_at = clock()
        self._live_sessions = Sessions(
            self._journal, self.instance.instance_id, self.disk, journal_use, limits=self.limits, loss=loss, clock=clock
        )
        # What is checked must still hold when it is written: one thread at a time accepts or ends something. Decoding
        # comes before, waiting for the disk after.
        accepting = threading.RLock()
        self.training = TrainingRequests(
            self._reader,
            self._journal,
            self._queue,
            self.futures,
            self._live_sessions,
            self.base_models,
            self.disk,
            journal_use,
            self.reservations,
            self.limits,
            accepting,
        )
        self._samplers = Samplers(
            engine,
            self._journal,
            self.base_models,
            data_dir,
            max_unnamed=self.limits.max_unnamed_samplers,
            published_bytes=self._published_bytes(),
            cache_bytes=self.limits.lora_cache_bytes,
            disk=self.disk,
            clock=clock,
        )
        self._trainer = Trainer(
            LiveModels(engine, self.base_models),
            self._journal,
            data_dir,
            decode=self._reader.decode,
            model_memory_bytes=self.limits.model_memory_bytes,
            require_save=self.training.require_save,
            require_snapshots=self.training.require_snapshots,
            require_space=partial(self.disk.require_free_space, fresh=True),
            journal_room=journal_use.room,
        )
        self._worker = Worker(
            self._queue,
            self.futures,
            self._trainer,
            self._samplers,
            self._journal,
            data_dir,
            housekeeping=self._housekeeping,
            note_running=self.instance.mark,
            note_result=journal_use.add_result,
            gap_timeout_s=gap_timeout_s,
            loss=loss,
            clock=clock,
        )
        self.sessions = SessionLifetime(
            self._live_sessions,
            self.training,
            self._reader,
            self._journal,
            self._queue,
            self.futures,
            self._worker,
            self.instance,
            self._job_removal,
            accepting,
        )
        self.sampling_sessions = SamplingSessions(
            self._journal,
            data_dir,
            self._live_sessions,
            self._samplers,
            self.base_models,
            self.disk,
            journal_use,
            accepting,
        )
        self.sampling = SamplingRequests(
            self._reader,
            self._queue,
            self.futures,
            self._live_sessions,
            self.sampling_sessions,
            self._sample_deaths,
            logprobs_mode=logprobs_mode,
        )
        self.lora_names = LoraNames()
        self.results = Results(
            self._reader,
            self._journal,
            self._queue,
            self.futures,
            self._live_sessions,
            self._worker.eta,
            long_poll_s=long_poll_s,
            loss=loss,
        )

    def _published_bytes(self) -> int:
        """The room for unnamed samplers. What they take already counts as free, so that a restart changes nothing."""
        if self.limits.published_bytes is not None:
            return self.limits.published_bytes
        return default_published_bytes(self.disk.free_bytes + folder_bytes(self.data_dir / "published"))

    def start(self, quotas_of: Callable[[str], Quotas] | None = None) -> None:
        """Takes over the sessions of dead processes, and begins to work.

        `quotas_of` gives the quotas of an owner who has not called yet; None: nobody has any.
        """
        if quotas_of is not None:
            self.training.quotas_of = quotas_of
        # Two processes that start on one data directory must not both take over the same session.
        with starting(), self.instance.sole_adopter():
            self.sessions.adopt()
        self._job_removal.start()
        self._worker.start()

    def stop(self, *, save_within_s: float = 0.0) -> None:
        """Ends after the request that is running; what waits stays in the journal for the next process.

        Models are saved as far as that fits into the time, so that the next process need not replay requests.
        """
        self._worker.stop(save_within_s=save_within_s)
        self._reader.close()
        self._job_removal.close()
        try:
            self._journal.touch_sessions(self._live_sessions.last_seen())
        except (JournalError, DamagedDataError) as error:
            log.error("when sessions were last heard of is not stored: %s", error)
        self._journal.close()
        self.instance.close()

    def release_waiters(self) -> None:
        """Answers all who wait for a result with "ask again", now and from now on."""
        self.futures.release()

    def note_death(self) -> None:
        """Counts a death of the process for the sample requests that the engine is at. For the engine's thread, before
        the process ends; for a training request, the next process counts it."""
        self._sample_deaths.add(self._worker.sampling_now)

    def call_soon(self, callback: Callable[[], None], *, lane: Lane = "training") -> None:
        """Runs something on the engine's thread, or on that of a lane, between two requests."""
        self._worker.call_soon(callback, lane=lane)

    @property
    def is_working(self) -> bool:
        """Whether requests are being worked on."""
        return self._worker.is_alive

    def resize_cluster(self, *, trainers: int | None, samplers: int | None) -> None:
        """Sets how many processes train and sample from the next request on; None leaves a number as it is.

        Raises:
            InvalidRequestError: there is no cluster, or no process that only samples.
        """
        resize = getattr(self._engine, "resize", None)
        if resize is None:
            remedy = "Start it with --cluster"
            raise InvalidRequestError("has none: one process works", field="cluster", value="none", remedy=remedy)
        resize(trainers=trainers, samplers=samplers)

    def join_sampler(self, address: str, key: str) -> None:
        """A worker joins, to sample.

        Raises:
            InvalidRequestError: no workers are wanted, or the worker cannot be used.
        """
        self._of_workers("admit_sampler")(address, key)

    def dismiss_sampler(self, address: str, key: str) -> int:
        """A worker leaves: it gets no more jobs. How many it has yet.

        Raises:
            InvalidRequestError: no workers are wanted.
        """
        jobs: int = self._of_workers("dismiss_sampler")(address, key)
        return jobs

    def lora_archive(self, name: str) -> bytes:
        """The weights of a lora that a worker was told to load.

        Raises:
            NotFoundError: there is none of this name.
            InvalidRequestError: no workers are wanted.
        """
        archive: bytes = self._of_workers("lora_archive")(name)
        return archive

    def _of_workers(self, name: str) -> Any:
        found = getattr(self._engine, name, None)
        if found is None:
            remedy = "Start it with --sampler workers"
            raise InvalidRequestError("takes no workers", field="sampler", value="none", remedy=remedy)
        return found

    @property
    def cluster_state(self) -> Mapping[str, Any]:
        """Numbers of the processes that work for this one (`ClusterEngine.cluster_state`); empty without a cluster."""
        return getattr(self._engine, "cluster_state", {})

    @property
    def storage_problem(self) -> StorageProblem | None:
        """Why training waits and is refused; None while the data directory can be written."""
        return self._journal.storage.problem

    @property
    def journal_damage(self) -> str | None:
        """What is wrong with the journal; None while no damage was found."""
        return self._journal.storage.damage

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

    def api_keys(self, *, defaults: Quotas | None = None) -> ApiKeys:
        """The API keys of the data directory; `defaults` are the quotas of a key that has none of its own."""
        return ApiKeys(self._journal.database, defaults=defaults)

    def probe_storage(self) -> None:
        """Writes something that changes nothing.

        Raises:
            JournalError: the journal cannot be written.
        """
        self._journal.database.probe()

    @property
    def samplers(self) -> Samplers:
        """The samplers, and which of their LoRAs the engine holds."""
        return self._samplers

    @property
    def models_by_owner(self) -> Counter[str]:
        """How many models each owner has in the sessions that live here."""
        owners = self._live_sessions.owners()
        return Counter(owner for session_id, owner in owners.items() for _ in self._journal.models_of(session_id))

    @property
    def model_count(self) -> int:
        """How many models the sessions have that live here."""
        return self._journal.model_count(self._live_sessions.owners())

    @property
    def session_owners(self) -> dict[str, str]:
        """The owner of each session that lives here."""
        return self._live_sessions.owners()

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
        row = checkpoints.find_checkpoint(self._journal, path, reader=caller.owner)
        manifest = checkpoint_folders.read_manifest(self.data_dir / row.folder)
        trained = {key: manifest.lora[key] for key in ("train_unembed", "train_mlp", "train_attn")}
        return WeightsInfoResponse(base_model=manifest.base_model, lora_rank=manifest.lora["rank"], **trained)

    def find_checkpoint(self, path: str, *, reader: str | None) -> CheckpointRow:
        """The row of a checkpoint that the owner `reader` may read; None may read all.

        Raises:
            InvalidRequestError: `path` is no checkpoint's path or alias.
            NotFoundError: there is no such checkpoint that `reader` may read.
        """
        return checkpoints.find_checkpoint(self._journal, path, reader=reader)

    def import_checkpoint(
        self,
        caller: Caller,
        source: BinaryIO,
        *,
        base_model: str | None,
        name: str | None,
        reservation: Reservation,
    ) -> CheckpointRow:
        """Makes a checkpoint of an archive, as `uploads.import_checkpoint`, of a base model that is offered here.

        Raises:
            OverloadedError: the disk is filled up to the reserve.
            InvalidRequestError: the archive cannot be used, or a quota is exceeded.
        """
        self.disk.require_free_space()
        return import_checkpoint(
            self._journal,
            self.data_dir,
            source,
            owner=caller.owner,
            base_model=base_model,
            name=name,
            base_of=self.base_models.offered_base,
            layers_of=self._layers_of,
            fingerprint_of=self.base_models.fingerprint_of_folder,
            reservation=reservation,
        )

    def is_training_run(self, name: str) -> bool:
        """Whether a training run has this id, whoever owns it."""
        return self._journal.run(name) is not None

    def has_saved_weights(self, run_id: str) -> bool:
        """Whether a live model has saved or published weights."""
        return bool(self._journal.saves(run_id, limit=1))

    def newest_published(self, caller: Caller, run_id: str) -> SamplerRow | None:
        """The newest weights that a live model of the caller has published and that still exist; None if it has saved
        a checkpoint since, or has none."""
        run = self._journal.run(run_id)
        if run is None or run.owner != caller.owner:
            return None
        for result in self._journal.saves(run_id):
            content = pydantic_core.from_json(result)
            sampler = content.get("sampling_session_id")
            found = self._journal.sampler(sampler) if sampler else None
            if found is not None or content.get("path"):
                return found
        return None

    # --- housekeeping --------------------------------------------------------------------------------------------

    def _housekeeping(self) -> None:
        now = self._clock()
        # a process that was stopped for a while was not running
        running_s = min(now - self._housekeeping_at, MAX_COUNTED_S)
        self._housekeeping_at = now
        self.disk.look()
        self._journal.database.spare.take()
        self.sessions.expire(running_s)
        for _ in range(VACUUM_ROUNDS):
            if not self._journal.database.give_back_pages():
                break
        self._journal.database.give_back_log()
        if self.instance.is_housekeeper():
            with self._journal.storage.writing("the list of orphans"):
                self._orphans.advance(running_s)
            self.checkpoints.remove_expired(running_s)
            self._job_removal.start()
            self._forget_ended()

    def _forget_ended(self) -> None:
        """Removes the records of sessions that ended long ago, once an hour: looking for them reads all sessions."""
        if self._clock() < self._forget_at:
            return
        self._forget_at = self._clock() + FORGET_EVERY_S
        for _ in range(FORGET_ROUNDS):
            if not self._journal.forget_ended(before=time.time() - ENDED_KEPT_S):
                return
