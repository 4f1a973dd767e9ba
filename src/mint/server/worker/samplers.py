"""Samplers, which of their weights the engine holds, and which unnamed ones are kept.

A sampler's weights never change: they are frozen when published, and their file brings them back after a restart or
after the engine dropped them. Used on the thread that samples, except `row`.

A training loop publishes weights without a name at every step. So that the disk does not fill, unnamed samplers of a
model go, least recently used first: `superseded` has the rule. Named checkpoints and samplers of them never go.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from mint.engine.protocol import Engine, LoraSpec, SampleJob
from mint.errors import NotFoundError, RecoveryDivergedError
from mint.server.disk_space import DiskSpace
from mint.server.ids import session_of
from mint.server.limits import MAX_UNNAMED_SAMPLERS, MIB
from mint.server.queue.jobs import QueuedSample
from mint.server.store import checkpoint_folders
from mint.server.store.journal import Journal
from mint.server.store.obsolete import discard_files
from mint.server.store.rows import SamplerRow
from mint.server.store.snapshot_files import read_weights, reading
from mint.server.worker.base_models import BaseModels
from mint.server.worker.base_numbers import require_same_numbers
from mint.server.worker.sample_requests import sample_job

LEAST_CACHE_BYTES = 1024 * MIB
CACHE_SHARE = 0.125
"""The memory for LoRAs in the engine by default: a share of what is free with the first one, and at least so much."""

ARRAY_BYTES = 1024
"""What an array in the engine takes beside its numbers, about; a LoRA of rank 1 is mostly this."""

MAX_KNOWN_ROWS = 4096
"""Samplers of checkpoints whose rows are kept in memory; the others are read again."""

MAX_IN_ENGINE_OF_A_MODEL = 3
"""How many samplers of one training stay in the engine. A loop samples from the newest one; the memory of older ones
(weights, keys and values of their prompts) is free for the next."""

MIN_RETAINED = 16
"""Unnamed samplers of a model that are kept in any case: those used last. A new one counts as used."""

ALWAYS_RETAINED = 3
"""Unnamed samplers of a model that are kept even where the weights of all models take too much room."""

USED_WITHIN_S = 1800.0
"""Other unnamed samplers are kept while they were used within this time, in which the server ran."""

log = logging.getLogger("mint.samplers")


def superseded(used_at: Mapping[str, float], now: float, *, most: int = MAX_UNNAMED_SAMPLERS) -> list[str]:
    """The samplers of one model to delete; `used_at` has the time of each one's last use, in seconds and in that order.

    The `MIN_RETAINED` that were used last stay. Others stay while they were used within `USED_WITHIN_S`, as long as
    they are among the `most` that were used last.
    """
    older = list(used_at)[::-1][min(MIN_RETAINED, most) :]
    return [
        name for place, name in enumerate(older, MIN_RETAINED) if place >= most or now - used_at[name] > USED_WITHIN_S
    ]


def over_budget(held: Mapping[str, Mapping[str, int]], budget_bytes: int) -> list[str]:
    """The samplers to delete so that those of all models fit a budget.

    `held[model]` has the bytes of each sampler, in the order of their last use. The model that holds most gives its
    oldest, again and again; `ALWAYS_RETAINED` of each model stay.
    """
    left = {model: list(sizes.items()) for model, sizes in held.items()}
    bytes_of = {model: sum(sizes.values()) for model, sizes in held.items()}
    excess = sum(bytes_of.values()) - budget_bytes
    gone: list[str] = []
    while excess > 0:
        candidates = [model for model, samplers in left.items() if len(samplers) > ALWAYS_RETAINED]
        if not candidates:
            break
        largest = max(candidates, key=bytes_of.__getitem__)
        name, size_bytes = left[largest].pop(0)
        gone.append(name)
        bytes_of[largest] -= size_bytes
        excess -= size_bytes
    return gone


class Samplers:
    """The samplers of one data directory, and their weights in one engine."""

    def __init__(
        self,
        engine: Engine,
        journal: Journal,
        bases: BaseModels,
        data_dir: Path,
        *,
        max_unnamed: int = MAX_UNNAMED_SAMPLERS,
        published_bytes: int | None = None,
        cache_bytes: int | None = None,
        disk: DiskSpace | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`max_unnamed` bounds the unnamed samplers of a model; while `disk` is short, only `MIN_RETAINED` are kept.

        `published_bytes` bounds the files of all of them; None is no bound. `cache_bytes` bounds the LoRAs in the
        engine; None is a share of its memory. `clock` gives seconds in which this process ran.
        """
        self.cache_limit_bytes = cache_bytes
        """The memory that LoRAs in the engine may take, beside those that are being sampled; None: not known yet."""
        self.loaded_count = 0
        """How often a LoRA was read from its file."""
        self._disk = disk
        self._engine = engine
        self._journal = journal
        self._bases = bases
        self._data_dir = data_dir
        self._max_unnamed = max_unnamed
        self._published_bytes = published_bytes
        self._clock = clock
        self._in_engine: OrderedDict[str, int] = OrderedDict()  # → bytes; least recently used first
        self._in_engine_bytes = 0
        self._lock = threading.Lock()  # of the next five; nobody waits for the journal with it
        self._rows: dict[str, SamplerRow] = {}
        self._saved: OrderedDict[str, None] = (
            OrderedDict()
        )  # those in `_rows` without a file of their own, oldest first
        self._used_at: dict[str, dict[str, float]] = {}  # model → its unnamed samplers → last use
        self._sizes: dict[str, int] = {}  # of the files of unnamed samplers, in bytes
        self._times_dropped = 0
        self._recalled: set[str] = set()  # models whose samplers of earlier processes are in `_used_at`

    @property
    def in_engine_count(self) -> int:
        """How many LoRAs the engine holds for sampling."""
        return len(self._in_engine)

    @property
    def in_engine_bytes(self) -> int:
        """The memory that they take, about."""
        return self._in_engine_bytes

    def row(self, sampler_id: str) -> SamplerRow:
        """The sampler, which counts as used now; any thread may ask.

        Raises:
            NotFoundError: there is none of that id (any more).
            DamagedDataError: its row does not have its checksum.
        """
        while True:
            times_dropped = self._times_dropped
            row = self._rows.get(sampler_id)
            if row is None:
                row = self._journal.sampler(sampler_id)
                if row is None:
                    break
                row.verify_checksum()
            with self._lock:
                if times_dropped == self._times_dropped:  # else the row may be gone: look again
                    self._keep_row(row)
                    self._note_use(row)
                    return row
        raise NotFoundError(
            "is not a sampler here (any more): of the samplers that a model makes without a name, the "
            f"{MIN_RETAINED} used last are kept, and others while they are used at least every "
            f"{USED_WITHIN_S / 60:g} minutes, at most {self._max_unnamed}; fewer, but {ALWAYS_RETAINED}, where the "
            "weights of all models take too much of the disk",
            field="sampling_session_id",
            value=sampler_id,
            remedy="Publish the newest weights again; give a name to those that you need for longer: "
            "save_weights_for_sampler(name), then create_sampling_client(path)",
        )

    def published(self, row: SamplerRow) -> None:
        """Notes weights that a model has just published in the engine."""
        size_bytes = self._size_of(row)
        with self._lock:
            self._rows[row.sampler_id] = row
            self._sizes[row.sampler_id] = size_bytes
            used_at = self._used_at.setdefault(row.model_id or "", {})
            self._note_use(row)
            of_the_model = [name for name in used_at if name in self._in_engine]
        self._touch(row.weights_id or "", size_bytes)
        self._drop([name for name in of_the_model if name != row.weights_id][: -MAX_IN_ENGINE_OF_A_MODEL + 1])
        self._evict_idle(keep=row.weights_id)

    def drop_superseded(self, model_id: str, *, busy: Callable[[], Collection[str]]) -> None:
        """Forgets those that `published` weights of a model supersede, and removes their files once that is durable.

        Where all files together take too much, samplers of other models go, too. `busy` gives the samplers with
        requests that wait or run: these stay.
        """
        if model_id not in self._used_at:  # its session has ended meanwhile
            return
        if model_id not in self._recalled:
            self._recall(model_id)
        is_short = self._disk is not None and self._disk.is_short
        most = min(MIN_RETAINED, self._max_unnamed) if is_short else self._max_unnamed
        with self._lock:
            gone = superseded(self._used_at[model_id], self._clock(), most=most)
            if self._published_bytes is not None:
                held = {
                    model: {name: self._sizes.get(name, 0) for name in used_at if name not in gone}
                    for model, used_at in self._used_at.items()
                }
                gone += over_budget(held, self._published_bytes)
        if gone:
            gone = sorted(set(gone) - set(busy()))
        if not gone:
            return
        rows = [self._rows.get(name) or self._journal.sampler(name) for name in gone]
        self._journal.drop_samplers(gone)
        with self._lock:
            self._times_dropped += 1
            for name in gone:
                self._rows.pop(name, None)
                self._sizes.pop(name, None)
            for used_at in self._used_at.values():
                for name in gone:
                    used_at.pop(name, None)
        self._drop([name for name in gone if name in self._in_engine])
        files = [row.file or "" for row in rows if row is not None]
        durability = self._journal.durability
        discard = partial(discard_files, self._journal, self._data_dir, files)
        durability.call_when_durable(durability.newest_commit, discard)

    def _recall(self, model_id: str) -> None:
        """Notes the samplers that a model has published in earlier processes; they count as used now."""
        known = self._journal.unnamed_samplers(model_id)
        sizes = {name: self._size_of(self._journal.sampler(name)) for name in known}
        with self._lock:
            self._used_at[model_id] = {**dict.fromkeys(known, self._clock()), **self._used_at[model_id]}
            self._sizes = {**sizes, **self._sizes}
        self._recalled.add(model_id)

    def _size_of(self, row: SamplerRow | None) -> int:
        try:
            return 0 if row is None or row.file is None else (self._data_dir / row.file).stat().st_size
        except OSError:  # it is damaged; reading it says so
            return 0

    def end_session(self, session_id: str) -> None:
        """Forgets everything that a session has published."""
        with self._lock:
            rows = [row for row in self._rows.values() if row.session_id == session_id]
            for row in rows:
                del self._rows[row.sampler_id]
                self._saved.pop(row.sampler_id, None)
            for model_id in [name for name in self._used_at if session_of(name) == session_id]:
                for sampler_id in self._used_at.pop(model_id):
                    self._sizes.pop(sampler_id, None)
                self._recalled.discard(model_id)
        self._drop([row.sampler_id for row in rows if row.file is not None and row.sampler_id in self._in_engine])

    def withdraw(self, row: SamplerRow) -> None:
        """Takes back weights of a session that ended meanwhile; the caller removes their file."""
        self._engine.drop_weights(row.weights_id or "")

    def job(self, sample: QueuedSample) -> SampleJob:
        """The request as the engine takes it. Its weights are in the engine on return, and may be dropped later.

        Raises:
            MintError: the request, its sampler or its weights cannot be used.
        """
        row = sample.weights or self.row(sample.request.sampling_session_id)
        base = self._bases.load(row.base_model)
        folder = self._bases.folder(row.base_model)
        job = sample_job(sample.request, row, base, folder, owner=sample.owner)
        if row.weights_id is not None:
            self._load(row, row.weights_id)
            self._evict_idle(keep=row.weights_id)
        return job

    def _load(self, row: SamplerRow, weights_id: str) -> None:
        """Makes sure that the engine holds the sampler's weights."""
        if weights_id not in self._in_engine:
            self._require_same_numbers(row)
            assert row.lora is not None  # every sampler with weights of its own has a lora
            weights = self._read(row)
            self._engine.load_weights(weights_id, self._bases.key(row.base_model), LoraSpec(**row.lora), weights)
            self.loaded_count += 1
            size_bytes = sum(array.nbytes + ARRAY_BYTES for array in weights.values())
        else:
            size_bytes = self._in_engine[weights_id]
        self._touch(weights_id, size_bytes)

    def _require_same_numbers(self, row: SamplerRow) -> None:
        """Checks that weights which a model has published run on a base model with the numbers of their training.

        If not, the model stops, too: so an operator can decide about both with `mint recover`.

        Raises:
            RecoveryDivergedError: the weights, the dtype, the quantization or the set of kernels of the base model are
                others.
        """
        model = None if row.model_id is None else self._journal.model(row.model_id)
        if model is None:
            return
        try:
            require_same_numbers(model, self._bases.load(row.base_model).settings)
        except RecoveryDivergedError as error:
            if model.diverged is None:
                self._journal.mark_diverged(model.model_id, error.message)
                log.error("model %s has stopped, and its samplers: %s; see mint recover", model.model_id, error.message)
            raise

    def _read(self, row: SamplerRow) -> dict[str, np.ndarray]:
        if row.file is not None:
            with reading(f"the sampler {row.sampler_id}", remedy="Save the weights for sampling again"):
                return read_weights(self._data_dir / row.file, must_be_sealed=row.sha256 is not None)
        # by its folder, not by its path: the name may have been deleted, or given to another checkpoint, meanwhile
        manifest, state = checkpoint_folders.read_checkpoint(self._data_dir / (row.weights_id or ""), optimizer=False)
        manifest.require_base(self._bases.fingerprint(row.base_model))
        return dict(state.weights)

    def _keep_row(self, row: SamplerRow) -> None:
        self._rows[row.sampler_id] = row
        if row.file is None:
            self._saved[row.sampler_id] = None
            self._saved.move_to_end(row.sampler_id)
            if len(self._saved) > MAX_KNOWN_ROWS:
                oldest, _ = self._saved.popitem(last=False)
                self._rows.pop(oldest, None)

    def _touch(self, weights_id: str, size_bytes: int) -> None:
        self._in_engine_bytes += size_bytes - self._in_engine.pop(weights_id, 0)
        self._in_engine[weights_id] = size_bytes

    def _note_use(self, row: SamplerRow) -> None:
        used_at = self._used_at.get(row.model_id or "")
        if used_at is not None and row.file is not None:
            used_at.pop(row.sampler_id, None)  # the newest use is the last item
            used_at[row.sampler_id] = self._clock()

    def _evict_idle(self, *, keep: str | None) -> None:
        """Drops the least recently used LoRAs until the others fit the memory for them; `keep` stays in any case."""
        if self.cache_limit_bytes is None:
            free = self._engine.free_bytes()
            self.cache_limit_bytes = max(LEAST_CACHE_BYTES, int(CACHE_SHARE * (free or 0)))
        excess = self._in_engine_bytes - self.cache_limit_bytes
        gone = []
        for name, size_bytes in self._in_engine.items():
            if excess <= 0:
                break
            if name != keep:
                gone.append(name)
                excess -= size_bytes
        self._drop(gone)

    def _drop(self, names: Sequence[str]) -> None:
        for weights_id in names:
            self._engine.drop_weights(weights_id)
            self._in_engine_bytes -= self._in_engine.pop(weights_id)
