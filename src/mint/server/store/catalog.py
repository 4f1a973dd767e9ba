"""What is kept, and what may be done to it: runs and checkpoints; listed, published, copied, expired, deleted.

`owner` is whose things a question is about; None is the operator, for whom everything is there. What others own does
not exist, except what they have published. Knows rows and folders; it knows no engine, no request in flight and no
HTTP. Any thread may call.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import sqlalchemy as sa

import mint.types.records as records
from mint.errors import CheckpointError, ConflictError, InvalidRequestError, NotFoundError
from mint.server.ids import model_id, new_session_id
from mint.server.store import database as tables
from mint.server.store.checkpoints import (
    SAMPLER,
    TRAINING,
    CheckpointPath,
    Manifest,
    alias_of,
    check_ttl,
    find_checkpoint,
    no_checkpoint,
    read_manifest,
    write_manifest,
)
from mint.server.store.journal import CheckpointRow, Journal, RunRow, SessionRow
from mint.server.store.session_catalog import moment, owned_by, require_session, unexpired
from mint.types.records import (
    FIRST_PAGE,
    Checkpoint,
    CheckpointsListResponse,
    Cursor,
    PageQuery,
    TrainingRun,
    TrainingRunsResponse,
)

log = logging.getLogger("mint.catalog")

EXPIRY_GRACE_S = 600.0
"""How long a checkpoint must be seen to be due, on a clock that does not jump, before its files go."""


class Catalog:
    """The rows and folders of one data directory."""

    def __init__(
        self,
        journal: Journal,
        data_dir: Path,
        *,
        clock: Callable[[], float] = time.time,
        ticks: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` is the time of day, which may jump; `ticks` counts seconds, and does not."""
        self._journal = journal
        self._transaction = journal.database.transaction
        self._data_dir = data_dir
        self._clock = clock
        self._ticks = ticks
        self._lock = threading.Lock()
        self._due: dict[str, float] = {}  # folder → when, in ticks, it was first seen to be due
        self._left: set[str] = set()  # folders that nobody names but a sampler

    # --- runs ----------------------------------------------------------------------------------------------------

    def runs(self, owner: str | None, page: PageQuery = FIRST_PAGE) -> TrainingRunsResponse:
        """A page of training runs, newest first."""
        runs, sessions = tables.runs.c, tables.sessions.c
        found = owned_by(runs, owner)
        if page.access_scope == "accessible":
            published = sa.select(tables.checkpoints.c.model_id).where(tables.checkpoints.c.public, self._unexpired)
            found |= runs.run_id.in_(published)
        if page.project_id is not None:
            project = sessions.details["project_id"].as_string() == page.project_id
            found &= runs.session_id.in_(sa.select(sessions.session_id).where(project))
        newest = sa.select(tables.runs).where(found).order_by(runs.created_at.desc(), runs.run_id)
        with self._transaction(write=False) as connection:
            total = connection.execute(sa.select(sa.func.count()).where(found).select_from(tables.runs)).scalar_one()
            rows = connection.execute(newest.limit(page.size).offset(page.offset)).all()
        cursor = Cursor(offset=page.offset, limit=page.size, total_count=total)
        return TrainingRunsResponse(
            training_runs=self._described([RunRow(**row._mapping) for row in rows], owner), cursor=cursor
        )

    def run(self, owner: str | None, run_id: str, *, accessible: bool = False) -> TrainingRun:
        """One training run.

        Raises:
            NotFoundError: there is none of that id for this owner.
        """
        row = self._journal.run(run_id)
        mine = row is not None and owner in (None, row.owner)
        if row is None or not (mine or (accessible and self._rows_of(owner, run_id))):
            raise _no_run(run_id)
        return self._described([row], owner)[0]

    def _described(self, rows: list[RunRow], owner: str | None) -> list[TrainingRun]:
        ids = [row.run_id for row in rows]
        models, kept = tables.models.c, tables.checkpoints.c
        seen = kept.model_id.in_(ids) & self._unexpired & _readable(owner)
        with self._transaction(write=False) as connection:
            diverged = sa.select(models.model_id).where(models.model_id.in_(ids), models.diverged.is_not(None))
            corrupted = set(connection.execute(diverged).scalars())
            oldest = sa.select(tables.checkpoints).where(seen).order_by(kept.created_at)
            saved = [CheckpointRow(**row._mapping) for row in connection.execute(oldest).all()]
        last = {(row.model_id, row.kind): row for row in saved}
        return [
            self._run_record(
                row,
                last.get((row.run_id, TRAINING)),
                last.get((row.run_id, SAMPLER)),
                corrupted=row.run_id in corrupted,
                is_mine=owner in (None, row.owner),
            )
            for row in rows
        ]

    def _run_record(
        self,
        row: RunRow,
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
            last_checkpoint=None if training is None else record(training),
            last_sampler_checkpoint=None if sampler is None else record(sampler),
            user_metadata=row.user_metadata if is_mine else None,
        )

    def _base_model(self, row: CheckpointRow | None) -> str:
        """What the manifest says: for runs whose own row does not know (yet)."""
        try:
            return "unknown" if row is None else read_manifest(self._data_dir / row.folder).base_model
        except CheckpointError:
            return "unknown"

    # --- checkpoints ---------------------------------------------------------------------------------------------

    def checkpoints(self, owner: str | None, page: PageQuery = FIRST_PAGE) -> CheckpointsListResponse:
        """A page of checkpoints of all runs, newest first."""
        kept = tables.checkpoints.c
        whose = _readable(owner) if page.access_scope == "accessible" else owned_by(kept, owner)
        found = whose & self._unexpired
        newest = sa.select(tables.checkpoints).where(found).order_by(kept.created_at.desc(), kept.folder)
        with self._transaction(write=False) as connection:
            count = sa.select(sa.func.count()).where(found).select_from(tables.checkpoints)
            total = connection.execute(count).scalar_one()
            rows = connection.execute(newest.limit(page.size).offset(page.offset)).all()
        cursor = Cursor(offset=page.offset, limit=page.size, total_count=total)
        return CheckpointsListResponse(
            checkpoints=[record(CheckpointRow(**row._mapping)) for row in rows], cursor=cursor
        )

    def checkpoints_of(self, owner: str | None, run_id: str) -> CheckpointsListResponse:
        """All checkpoints of a run, newest first; of another's run, those that are published.

        Raises:
            NotFoundError: there is no such run, or nothing in it is for this owner.
        """
        run = self._journal.run(run_id)
        rows = self._rows_of(owner, run_id)
        if not rows and (run is None or owner not in (None, run.owner)):
            raise _no_run(run_id)
        return CheckpointsListResponse(checkpoints=[record(row) for row in rows])

    def checkpoint(self, owner: str | None, path: str) -> Checkpoint:
        """One checkpoint by its path or `ckpt_…` id.

        Raises:
            InvalidRequestError: the text is neither.
            NotFoundError: there is none for this owner.
        """
        return record(find_checkpoint(self._journal, path, reader=owner, now=self._clock()))

    def delete(self, owner: str | None, path: str) -> None:
        """Forgets a checkpoint for good. What was made from it goes on: its files stay while a sampler reads them.

        Raises:
            InvalidRequestError, NotFoundError: as `checkpoint`; what others have published cannot be deleted.
        """
        self._drop(self._own(owner, path))

    def publish(self, owner: str | None, path: str, *, public: bool) -> None:
        """Makes a checkpoint readable by everyone who knows its path, or by its owner alone again.

        Raises:
            InvalidRequestError, NotFoundError: as `delete`.
        """
        self._change(self._own(owner, path), {"public": public})

    def set_ttl(self, owner: str | None, path: str, ttl_seconds: int | None) -> None:
        """How long a checkpoint is kept from now on; None is for good.

        Raises:
            InvalidRequestError: out of range, or as `delete`.
            NotFoundError: as `delete`.
        """
        ttl = check_ttl(ttl_seconds)
        self._change(self._own(owner, path), {"expires_at": None if ttl is None else self._clock() + ttl})

    def copy(
        self,
        owner: str | None,
        request: records.CopyWeightsRequest,
        *,
        key: str | None = None,
        max_bytes: int | None = None,
    ) -> str:
        """Copies a readable checkpoint into a new run of the owner's, and gives its path. The bytes are shared.

        The same `key` with the same request gives the same copy. `max_bytes` bounds what the owner stores in all.

        Raises:
            InvalidRequestError: a field cannot be honoured, or the quota is full.
            NotFoundError: no such checkpoint, or no such session.
            ConflictError: the slot in the session is taken.
        """
        now = self._clock()
        source = find_checkpoint(self._journal, request.source_path, reader=owner, now=now)
        ttl = check_ttl(request.ttl_seconds)
        whose = owner or source.owner
        session_id, number = self._destination(owner, whose, request, key)
        target = CheckpointPath(model_id(session_id, number), source.kind, source.name)
        taken = self._journal.run(target.model_id)
        if taken is not None:
            if key is not None and self._journal.checkpoint(target.model_id, target.kind, target.name) is not None:
                return target.uri
            raise ConflictError(
                "is taken", field="model_seq_id", value=number, remedy="Count upwards by one for every new model"
            )
        self.check_storage(whose, max_bytes, source.size_bytes or 0)
        manifest = read_manifest(self._data_dir / source.folder)
        run = RunRow(
            target.model_id, session_id, whose, now, now, manifest.base_model, dict(manifest.lora), ended_at=now
        )
        row = replace(
            source,
            model_id=target.model_id,
            folder=f"checkpoints/{uuid.uuid4()}",
            created_at=now,
            owner=whose,
            public=False,
            expires_at=None if ttl is None else now + ttl,
        )
        self._share(source, row, replace(manifest, path=target.uri, created_at=now))
        details = {"display_name": f"copy of {source.kind}/{source.name}", "project_id": request.destination_project_id}
        self.add(SessionRow(session_id, "", None, now, now, whose, details, now), run, row)
        return target.uri

    def add(self, session: SessionRow, run: RunRow, row: CheckpointRow) -> None:
        """A run that was never trained here, with the checkpoint that it consists of.

        A session that is not there yet is added as one that has ended: nobody else can take its name.
        """
        with self._transaction() as connection:
            connection.execute(sa.insert(tables.sessions).prefix_with("OR IGNORE"), vars(session))
            connection.execute(sa.insert(tables.runs), vars(run))
            connection.execute(sa.insert(tables.checkpoints), vars(row))

    def check_storage(self, owner: str, max_bytes: int | None, more_bytes: int) -> None:
        """Refuses what would not fit into an owner's quota; None is no bound.

        Raises:
            InvalidRequestError: the owner's checkpoints would weigh more than `max_bytes`.
        """
        if max_bytes is None:
            return
        used = self._journal.checkpoint_bytes(owner)
        if used + more_bytes > max_bytes:
            raise InvalidRequestError(
                f"is the quota for checkpoints; {used} bytes are in use, and {more_bytes} more are needed",
                field="max_checkpoint_bytes",
                value=max_bytes,
                remedy="Delete checkpoints, or save with ttl_seconds",
            )

    def tidy(self) -> int:
        """Removes what has expired, and folders that were kept only for samplers now gone; how many expired.

        Called now and then. A checkpoint that a live sampling session uses is left alone. One wrong reading of the
        time of day removes nothing: a checkpoint must be due at every look for `EXPIRY_GRACE_S`.
        """
        kept, used = tables.checkpoints.c, tables.samplers.c.weights_id
        in_use = sa.select(used).where(used.is_not(None))
        over = (kept.expires_at <= self._clock()) & kept.folder.not_in(in_use)
        with self._transaction(write=False) as connection:
            rows = connection.execute(sa.select(tables.checkpoints).where(over)).all()
        due = [CheckpointRow(**row._mapping) for row in rows]
        now = self._ticks()
        with self._lock:
            self._due = {row.folder: self._due.get(row.folder, now) for row in due}
            ripe = [row for row in due if now - self._due[row.folder] >= EXPIRY_GRACE_S]
            left = list(self._left)
        for row in ripe:
            log.info("checkpoint %s/%s/%s expired", row.model_id, row.kind, row.name)
            self._drop(row)
        for folder in left:
            self._remove_unused(folder)
        return len(ripe)

    # --- inside --------------------------------------------------------------------------------------------------

    @property
    def _unexpired(self) -> sa.ColumnElement[bool]:
        return unexpired(self._clock())

    def _rows_of(self, owner: str | None, run_id: str) -> list[CheckpointRow]:
        kept = tables.checkpoints.c
        found = (kept.model_id == run_id) & self._unexpired & _readable(owner)
        newest = sa.select(tables.checkpoints).where(found).order_by(kept.created_at.desc(), kept.folder)
        with self._transaction(write=False) as connection:
            return [CheckpointRow(**row._mapping) for row in connection.execute(newest).all()]

    def _own(self, owner: str | None, path: str) -> CheckpointRow:
        """The row of a checkpoint that this owner may change."""
        row = find_checkpoint(self._journal, path, reader=owner, now=self._clock())
        if owner not in (None, row.owner):
            raise no_checkpoint(path)
        return row

    def _destination(
        self, owner: str | None, whose: str, request: records.CopyWeightsRequest, key: str | None
    ) -> tuple[str, int]:
        """The session and the slot in it that a copy goes to."""
        if request.weights_access_token is not None:
            raise InvalidRequestError(
                "is not supported",
                field="weights_access_token",
                value="(given)",
                remedy="Let the owner publish the checkpoint",
            )
        if (request.session_id is None) != (request.model_seq_id is None):
            raise InvalidRequestError(
                "belongs to session_id, and one of them is missing",
                field="model_seq_id",
                value=request.model_seq_id,
                remedy="Give both or neither",
            )
        if request.session_id is not None and request.model_seq_id is not None:
            require_session(self._journal, owner, request.session_id)
            return request.session_id, request.model_seq_id
        if key is None:
            return new_session_id(), 0
        named = f"{whose}\0{key}\0{request.model_dump_json()}"
        return f"sess-{uuid.uuid5(uuid.NAMESPACE_URL, named).hex}", 0

    def _share(self, source: CheckpointRow, target: CheckpointRow, manifest: Manifest) -> None:
        """The source's files under another folder, by links where the file system has them."""
        folder = self._data_dir / target.folder
        try:
            shutil.copytree(self._data_dir / source.folder, folder, copy_function=_link)
            write_manifest(folder, manifest)
        except (OSError, shutil.Error) as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise CheckpointError(f"the checkpoint cannot be copied: {error}", remedy="Free disk space") from error

    def _change(self, row: CheckpointRow, values: Mapping[str, Any]) -> None:
        with self._transaction() as connection:
            connection.execute(sa.update(tables.checkpoints).where(_this(row)).values(values))

    def _drop(self, row: CheckpointRow) -> None:
        """The row first: a death in between leaves an orphan, never a checkpoint without files."""
        with self._transaction() as connection:
            connection.execute(sa.delete(tables.checkpoints).where(_this(row)))
        self._remove_unused(row.folder)

    def _remove_unused(self, folder: str) -> None:
        """Removes a folder, unless a checkpoint or a sampler names it; then it is tried again later."""
        named = folder in self._journal.named_files()
        with self._lock:
            (self._left.add if named else self._left.discard)(folder)
        if not named:
            shutil.rmtree(self._data_dir / folder, ignore_errors=True)


def record(row: CheckpointRow) -> Checkpoint:
    """A row as management shows it."""
    return Checkpoint(
        checkpoint_id=f"{row.kind}/{row.name}",
        checkpoint_type=records.TYPE_OF_KIND[row.kind],
        time=moment(row.created_at),
        tinker_path=CheckpointPath(row.model_id, row.kind, row.name).uri,
        size_bytes=row.size_bytes,
        public=row.public,
        user_metadata=row.user_metadata,
        expires_at=None if row.expires_at is None else moment(row.expires_at),
        alias=alias_of(row.folder),
    )


def _readable(owner: str | None) -> sa.ColumnElement[bool]:
    return owned_by(tables.checkpoints.c, owner) | tables.checkpoints.c.public


def _this(row: CheckpointRow) -> sa.ColumnElement[bool]:
    """The row as it was read: one that was overwritten meanwhile is another checkpoint."""
    kept = tables.checkpoints.c
    return (
        (kept.model_id == row.model_id) & (kept.kind == row.kind) & (kept.name == row.name)
    ) & (kept.folder == row.folder)  # fmt: skip


def _link(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:  # no links on this file system, or too many
        shutil.copyfile(source, target)
    return target


def _no_run(run_id: str) -> NotFoundError:
    return NotFoundError(
        "is not a training run here", field="training_run_id", value=run_id, remedy="See `mint runs list`"
    )
