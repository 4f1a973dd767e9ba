"""The training runs of a data directory, living or ended: listed and described.

A run exists once its model was created. `owner` is whose runs a question is about; None is the operator, who sees
everything. Runs of others do not exist for an owner, except those that have a public checkpoint. Any thread may call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from pathlib import Path

from mint.errors import CheckpointError
from mint.server.store.catalog_queries import MADE, METADATA_BYTES, UNEXPIRED, moment, owned_by, read_page, readable_by
from mint.server.store.checkpoint_catalog import checkpoint_record, no_run
from mint.server.store.checkpoint_folders import read_manifest
from mint.server.store.checkpoints import SAMPLER, TRAINING
from mint.server.store.journal import Journal
from mint.server.store.rows import CheckpointRow, TrainingRunRow
from mint.types.records import FIRST_PAGE, PageQuery, TrainingRun, TrainingRunsResponse

UNKNOWN_BASE = "unknown"
"""The base model of a run that nothing names: it failed before it had one, and has no checkpoint that can be read."""

_SHOWN_BYTES = (
    f"{METADATA_BYTES} + 2 * coalesce((SELECT max(length(user_metadata)) FROM checkpoints WHERE model_id = run_id), 0)"
)
"""A run is shown with its own metadata and that of two checkpoints: this is at least their size."""


class TrainingRunCatalog:
    """The training runs of one data directory."""

    def __init__(self, journal: Journal, data_dir: Path, *, clock: Callable[[], float] = time.time) -> None:
        """`clock` is the time of day."""
        self._database = journal.database
        self._data_dir = data_dir
        self._clock = clock

    def runs(self, owner: str | None, page: PageQuery = FIRST_PAGE) -> TrainingRunsResponse:
        """A page of training runs, newest first."""
        where = f"{MADE} AND {owned_by(owner)}"
        if page.access_scope == "accessible":
            where = f"({where} OR run_id IN (SELECT model_id FROM checkpoints WHERE public AND {UNEXPIRED}))"
        if page.project_id is not None:
            project = "SELECT session_id FROM sessions WHERE json_extract(details, '$.project_id') = :project_id"
            where = f"{where} AND session_id IN ({project})"
        rows, cursor = read_page(
            self._database,
            TrainingRunRow,
            "runs",
            where,
            "created_at DESC, run_id",
            page,
            row_bytes=_SHOWN_BYTES,
            owner=owner,
            now=self._clock(),
            project_id=page.project_id,
        )
        return TrainingRunsResponse(training_runs=self._describe(rows, owner), cursor=cursor)

    def run(self, owner: str | None, run_id: str, *, accessible: bool = False) -> TrainingRun:
        """One training run; if `accessible`, also another owner's that has a public checkpoint.

        Raises:
            NotFoundError: there is none of that id for this owner.
        """
        row = self._database.row(TrainingRunRow, f"SELECT * FROM runs WHERE run_id = :id AND {MADE}", id=run_id)
        if row is not None:
            is_readable = owner in (None, row.owner) or (accessible and self._last_checkpoints(owner, [run_id]))
            if is_readable:
                return self._describe([row], owner)[0]
        raise no_run(run_id)

    def base_models(self, owner: str | None, run_ids: Collection[str]) -> dict[str, str]:
        """Training run → base model, for those of an owner; `UNKNOWN_BASE` where nothing names it."""
        rows = self._database.rows(
            TrainingRunRow,
            f"SELECT * FROM runs WHERE {owned_by(owner)} AND run_id IN (SELECT value FROM json_each(:ids))",
            owner=owner,
            ids=list(run_ids),
        )
        return {run.training_run_id: run.base_model for run in self._describe(rows, owner)}

    def _describe(self, rows: list[TrainingRunRow], owner: str | None) -> list[TrainingRun]:
        ids = [row.run_id for row in rows]
        last = self._last_checkpoints(owner, ids)
        diverged = self._database.values(
            "SELECT model_id FROM models WHERE diverged IS NOT NULL "
            "AND model_id IN (SELECT value FROM json_each(:ids))",
            ids=ids,
        )
        return [
            self._record(
                row,
                last.get((row.run_id, TRAINING)),
                last.get((row.run_id, SAMPLER)),
                corrupted=row.run_id in diverged,
                is_mine=owner in (None, row.owner),
            )
            for row in rows
        ]

    def _last_checkpoints(self, owner: str | None, run_ids: list[str]) -> dict[tuple[str, str], CheckpointRow]:
        """Run and kind → the newest checkpoint that the owner may read."""
        newest = self._database.rows(
            CheckpointRow,
            # SQLite takes the other columns of an aggregate with max() from the row that has it
            "SELECT * FROM checkpoints WHERE rowid IN (SELECT newest FROM (SELECT rowid AS newest, max(created_at) "
            "FROM checkpoints WHERE model_id IN (SELECT value FROM json_each(:ids)) "
            f"AND {UNEXPIRED} AND {readable_by(owner)} GROUP BY model_id, kind))",
            ids=run_ids,
            owner=owner,
            now=self._clock(),
        )
        return {(row.model_id, row.kind): row for row in newest}

    def _record(
        self,
        row: TrainingRunRow,
        training: CheckpointRow | None,
        sampler: CheckpointRow | None,
        *,
        corrupted: bool,
        is_mine: bool,
    ) -> TrainingRun:
        return TrainingRun(
            training_run_id=row.run_id,
            base_model=row.base_model or self._base_model(training or sampler),
            model_owner=row.owner,
            corrupted=corrupted,
            lora_rank=None if row.lora is None else row.lora.get("rank"),
            last_request_time=moment(row.last_request_at),
            last_checkpoint=None if training is None else checkpoint_record(training),
            last_sampler_checkpoint=None if sampler is None else checkpoint_record(sampler),
            user_metadata=row.user_metadata if is_mine else None,
        )

    def _base_model(self, row: CheckpointRow | None) -> str:
        """The base model in a checkpoint's manifest, for runs whose own row does not name one (yet)."""
        try:
            return UNKNOWN_BASE if row is None else read_manifest(self._data_dir / row.folder).base_model
        except CheckpointError:
            return UNKNOWN_BASE
