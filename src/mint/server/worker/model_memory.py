"""Keeps the models in the engine within their memory: those that were used longest ago are parked.

A parked model is not in the engine. Its state is in a snapshot and in the journal, and its next request restores it bit
for bit, as after a restart. Used on the thread that trains, except the properties. Knows no queue and no HTTP.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from pathlib import Path

from mint.engine.protocol import LoraSpec
from mint.errors import InvalidRequestError
from mint.server.limits import MODEL_MEMORY_SHARE
from mint.server.store.journal import Journal
from mint.server.store.obsolete import discard_files
from mint.server.worker.live_models import LiveModels
from mint.server.worker.snapshots import Snapshots

log = logging.getLogger("mint.memory")

EXPECTED_BYTES_PER_S = 50e6
"""How fast a snapshot is written, before one was: a slow disk."""


class ModelMemory:
    """The memory for the models of one service."""

    def __init__(
        self,
        models: LiveModels,
        journal: Journal,
        snapshots: Snapshots,
        data_dir: Path,
        *,
        limit_bytes: int | None,
    ) -> None:
        """`limit_bytes` None: a share of what is free once a base model is loaded."""
        self._models = models
        self._journal = journal
        self._snapshots = snapshots
        self._data_dir = data_dir
        self._is_derived = limit_bytes is None
        self._bases_at_measurement = 0
        self.limit_bytes = limit_bytes
        """The memory that models may take together; None while it is not known."""
        self.parked_count = 0
        """How often a model was parked."""

    @property
    def used_bytes(self) -> int:
        """The memory of the models in the engine."""
        return self._models.size_bytes

    @property
    def model_count(self) -> int:
        """The models in the engine."""
        return len(self._models.by_use)

    def evict_until_fits(self, model_id: str, base_model: str, spec: LoraSpec) -> None:
        """Parks other models until this one fits.

        Raises:
            InvalidRequestError: it would not fit alone.
            UnknownBaseModelError: there is no such base model.
            JournalError: the state of a model cannot be saved now.
        """
        self._models.bases.load(base_model)
        self._measure()
        if self.limit_bytes is None:
            return
        needed = self._models.engine.model_bytes(self._models.bases.key(base_model), spec)
        if needed > self.limit_bytes:
            raise InvalidRequestError(
                f"is the memory for models, in bytes, and a model of rank {spec.rank} takes {needed}",
                field="model_memory",
                value=self.limit_bytes,
                remedy="Choose a lower rank or train fewer modules; the operator can raise MINT_MODEL_MEMORY_MIB",
            )
        others = [name for name in self._models.by_use if name != model_id]
        while others and sum(map(self._models.bytes_of, others)) + needed > self.limit_bytes:
            name = self._next_to_park(others)
            self._park(name)
            others.remove(name)

    def save(self, model_id: str) -> None:
        """Saves the state after the last step of a model in the engine, if no snapshot holds it. Passes since then stay
        in the journal.

        Raises:
            JournalError: the storage does not work now.
        """
        live = self._models[model_id]
        history = live.snapshots
        saved_seq = history.rows[0].seq_id if history.rows else 0
        if live.weights_seq <= saved_seq:
            return
        digest, read_state = self._models.engine.state_digest(model_id), self._models.engine.read_state
        changes, obsolete = self._snapshots.save(history, model_id, live.weights_seq, read_state, digest, force=True)
        self._snapshots.wait_written(history)
        self._journal.add_snapshot(model_id, **changes)
        discard_files(self._journal, self._data_dir, obsolete)

    def save_all(self, *, until: float) -> None:
        """Saves as `save`, those first whose replay would take longest, until this moment of the monotonic clock: no
        snapshot is begun that would probably take longer.

        Raises:
            JournalError: the storage does not work now.
        """
        histories = {name: self._models[name].snapshots for name in self._models.by_use}
        for model_id in sorted(histories, key=lambda name: histories[name].replay_s, reverse=True):
            expected_s = histories[model_id].snapshot_s
            if expected_s is None:
                expected_s = self._models.bytes_of(model_id) / EXPECTED_BYTES_PER_S
            if time.monotonic() + expected_s < until:
                self.save(model_id)

    def _measure(self) -> None:
        """Derives the limit again after another base model was loaded."""
        if not self._is_derived or self._bases_at_measurement == self._models.bases.loaded_count:
            return
        self._bases_at_measurement = self._models.bases.loaded_count
        free = self._models.engine.free_bytes()
        self.limit_bytes = None if free is None else int(MODEL_MEMORY_SHARE * (free + self.used_bytes))
        log.info("models may take %s bytes of memory", self.limit_bytes)

    def _next_to_park(self, candidates: list[str]) -> str:
        """The least recently used model of the owner with the most model memory."""
        owners = {name: self._journal.owner(name) for name in candidates}
        used = Counter[str]()
        for name, owner in owners.items():
            used[owner] += self._models.bytes_of(name)
        largest = max(used.values())
        return next(name for name in candidates if used[owners[name]] == largest)

    def _park(self, model_id: str) -> None:
        """Takes a model out of the engine, and saves its state first if no snapshot holds it."""
        self.save(model_id)
        self._snapshots.wait_written(self._models[model_id].snapshots)
        self._models.park(model_id)
        self.parked_count += 1
        log.info("model %s parked", model_id)
