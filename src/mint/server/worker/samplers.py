"""Samplers, and which of their weights the engine holds.

A sampler's weights never change: they are frozen when published, and their file brings them back after a restart or
after the engine dropped them to make room. Used on the worker's thread, except `row`. Knows no queue and no HTTP.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mint.engine.protocol import Engine, LoraSpec, SampleJob
from mint.errors import NotFoundError
from mint.server.ids import session_of
from mint.server.queue.jobs import QueuedSample
from mint.server.store import checkpoint_folders
from mint.server.store.journal import Journal
from mint.server.store.rows import SamplerRow
from mint.server.store.snapshot_files import read_weights
from mint.server.worker.base_models import BaseModels
from mint.server.worker.sample_requests import sample_job

MAX_IN_ENGINE = 16
"""Sets of weights that stay in the engine's memory; the others are in their files."""

MAX_IN_ENGINE_OF_A_MODEL = 3
"""How many samplers of one training stay in the engine. A loop samples from the newest one; the memory of older ones
(weights, keys and values of their prompts) is free for the next."""

MAX_PUBLISHED = 64
"""Nameless published weights that a session keeps, by last use; older ones are forgotten, and their files removed."""


class Samplers:
    """The samplers of one data directory, and their weights in one engine."""

    def __init__(self, engine: Engine, journal: Journal, bases: BaseModels, data_dir: Path) -> None:
        self._engine = engine
        self._journal = journal
        self._bases = bases
        self._data_dir = data_dir
        self._rows: dict[str, SamplerRow] = {}
        self._in_engine: OrderedDict[str, None] = OrderedDict()  # least recently used first
        self._model_of: dict[str, str] = {}  # published sampler → the model that it was made from
        self._used: OrderedDict[str, None] = OrderedDict()  # published samplers, least recently used first

    def row(self, sampler_id: str) -> SamplerRow:
        """The sampler; any thread may ask.

        Raises:
            NotFoundError: there is none of that id (any more).
        """
        row = self._rows.get(sampler_id) or self._journal.sampler(sampler_id)
        if row is None:
            raise NotFoundError(
                "is not a sampler here",
                field="sampling_session_id",
                value=sampler_id,
                remedy="Weights published without a name are kept while they are used; save_weights_for_sampler(name) "
                "keeps them for good",
            )
        self._rows[sampler_id] = row
        return row

    def published(self, row: SamplerRow, model_id: str) -> tuple[str, ...]:
        """Notes weights that the model has just published in the engine; returns the files that make room for them."""
        self._rows[row.sampler_id] = row
        self._model_of[row.sampler_id] = model_id
        self._touch(row)
        mine = [known for known in self._used if session_of(known) == row.session_id]
        gone = mine[:-MAX_PUBLISHED]
        files = tuple(self._rows[known].file or "" for known in gone)
        if gone:
            self._journal.drop_samplers(gone)
        for known in gone:
            self._forget(known)
        older = [name for name in self._in_engine if self._model_of.get(name) == model_id][:-MAX_IN_ENGINE_OF_A_MODEL]
        self._drop(older)
        self._make_room(keep=row.weights_id)
        return files

    def end_session(self, session_id: str) -> None:
        """Forgets everything that a session has published."""
        for sampler_id in list(self._rows):  # a copy: other threads add rows
            if session_of(sampler_id) == session_id:
                self._forget(sampler_id)

    def withdraw(self, row: SamplerRow) -> None:
        """Takes back weights of a session that ended meanwhile; the caller removes their file."""
        self._engine.drop_weights(row.weights_id or "")

    def job(self, sample: QueuedSample) -> SampleJob:
        """The request as the engine takes it. Its weights are in the engine on return, and may be dropped later.

        Raises:
            MintError: the request, its sampler or its weights cannot be used.
        """
        row = sample.weights or self.row(sample.request.sampling_session_id)
        base, folder = self._bases.load(row.base_model), self._bases.folder(row.base_model)
        job = sample_job(sample.request, row, base, folder, owner=sample.owner)
        if row.weights_id is not None:
            self._load(row, row.weights_id)
            if len(self._in_engine) > MAX_IN_ENGINE:
                self._make_room(keep=row.weights_id)
        return job

    def _load(self, row: SamplerRow, weights_id: str) -> None:
        """Makes sure that the engine holds the sampler's weights."""
        if weights_id not in self._in_engine:
            assert row.lora is not None  # every sampler with weights of its own has a lora
            self._engine.load_weights(
                weights_id, self._bases.key(row.base_model), LoraSpec(**row.lora), self._read(row)
            )
        self._touch(row)

    def _read(self, row: SamplerRow) -> dict[str, np.ndarray]:
        if row.file is not None:
            return read_weights(self._data_dir / row.file)
        # by its folder, not by its path: the name may have been deleted, or given to another checkpoint, meanwhile
        _, state = checkpoint_folders.read_checkpoint(self._data_dir / (row.weights_id or ""), optimizer=False)
        return dict(state.weights)

    def _touch(self, row: SamplerRow) -> None:
        self._in_engine[row.weights_id or ""] = None
        self._in_engine.move_to_end(row.weights_id or "")
        if row.file is not None:
            self._used[row.sampler_id] = None
            self._used.move_to_end(row.sampler_id)

    def _make_room(self, *, keep: str | None) -> None:
        idle = [name for name in self._in_engine if name != keep]
        self._drop(idle[: max(0, len(self._in_engine) - MAX_IN_ENGINE)])

    def _drop(self, names: Sequence[str]) -> None:
        for weights_id in names:
            self._engine.drop_weights(weights_id)
            del self._in_engine[weights_id]

    def _forget(self, sampler_id: str) -> None:
        row = self._rows.pop(sampler_id)
        self._used.pop(sampler_id, None)
        self._model_of.pop(sampler_id, None)
        if row.file is not None and row.weights_id in self._in_engine:
            self._drop([row.weights_id])
