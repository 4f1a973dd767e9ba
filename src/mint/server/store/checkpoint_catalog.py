"""The named checkpoints of a data directory: listed, published, copied, expired, deleted.

`owner` is whose checkpoints a question is about; None is the operator, who sees everything. Checkpoints of others do
not exist for an owner, except public ones. Any thread may call.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mint.types.records as records
from mint.errors import CheckpointError, ConflictError, InvalidRequestError, NotFoundError
from mint.server.ids import model_id, new_session_id
from mint.server.store.catalog_queries import UNEXPIRED, moment, owned_by, read_page, readable_by
from mint.server.store.checkpoint_folders import Manifest, read_manifest, write_manifest
from mint.server.store.checkpoints import alias_of, check_ttl, find_checkpoint, no_checkpoint
from mint.server.store.database import insert
from mint.server.store.journal import Journal
from mint.server.store.rows import CheckpointRow, SessionRow, TrainingRunRow
from mint.server.store.session_catalog import require_session
from mint.types.checkpoint_path import CheckpointPath
from mint.types.records import FIRST_PAGE, Checkpoint, CheckpointsListResponse, PageQuery

log = logging.getLogger("mint.catalog")

EXPIRED_S = 24 * 3600.0
"""How long a service must run, and find a checkpoint expired all the time, before its files are removed."""

_IS_DUE = "expires_at <= :now AND folder NOT IN (SELECT weights_id FROM samplers WHERE weights_id IS NOT NULL)"

Hold = Callable[[int, int], None]
"""Reserves space for a copy, given its bytes and how many of them are new to the disk; raises if it does not fit."""

_THIS_ONE = "model_id = :model_id AND kind = :kind AND name = :name AND folder = :folder"
"""Condition: the checkpoint was not overwritten since its row was read. A new one of that name has another folder."""


class CheckpointCatalog:
    """The checkpoints of one data directory."""

    def __init__(
        self,
        journal: Journal,
        data_dir: Path,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`clock` is the time of day, which may jump."""
        self._journal = journal
        self._database = journal.database
        self._data_dir = data_dir
        self._clock = clock
        self._lock = threading.Lock()
        self._left: set[str] = set()  # folders that nobody names but a sampler

    def checkpoints(self, owner: str | None, page: PageQuery = FIRST_PAGE) -> CheckpointsListResponse:
        """A page of the checkpoints of all runs, newest first."""
        whose = readable_by(owner) if page.access_scope == "accessible" else owned_by(owner)
        rows, cursor = read_page(
            self._database,
            CheckpointRow,
            "checkpoints",
            f"{whose} AND {UNEXPIRED}",
            "created_at DESC, folder",
            page,
            owner=owner,
            now=self._clock(),
        )
        return CheckpointsListResponse(checkpoints=[checkpoint_record(row) for row in rows], cursor=cursor)

    def used_bytes(self, owner: str | None = None) -> int:
        """How many bytes the checkpoints of an owner, or of all, have together."""
        return self._journal.checkpoint_bytes(owner)

    def checkpoints_of(self, owner: str | None, run_id: str, page: PageQuery = FIRST_PAGE) -> CheckpointsListResponse:
        """A page of the checkpoints of a run, newest first; of another owner's run, the public ones.

        Raises:
            NotFoundError: there is no such run, or the owner may read nothing of it.
        """
        run = self._journal.run(run_id)
        rows, cursor = read_page(
            self._database,
            CheckpointRow,
            "checkpoints",
            f"model_id = :run_id AND {UNEXPIRED} AND {readable_by(owner)}",
            "created_at DESC, folder",
            page,
            run_id=run_id,
            owner=owner,
            now=self._clock(),
        )
        if not cursor.total_count and (run is None or owner not in (None, run.owner)):
            raise no_run(run_id)
        return CheckpointsListResponse(checkpoints=[checkpoint_record(row) for row in rows], cursor=cursor)

    def checkpoint(self, owner: str | None, path: str) -> Checkpoint:
        """One checkpoint by its path or `ckpt_…` id.

        Raises:
            InvalidRequestError: `path` is neither.
            NotFoundError: there is no such checkpoint that the owner may read.
        """
        return checkpoint_record(find_checkpoint(self._journal, path, reader=owner, now=self._clock()))

    def delete(self, owner: str | None, path: str) -> None:
        """Deletes a checkpoint, also an expired one. Models made from it are not affected.

        Its files stay as long as a sampler reads them.

        Raises:
            InvalidRequestError, NotFoundError: as `checkpoint`; also for a public one of another owner.
        """
        self._drop(self._own(owner, path, expired=True))

    def publish(self, owner: str | None, path: str, *, public: bool) -> None:
        """Makes a checkpoint public: readable by everyone who knows its path; or private again.

        Raises:
            InvalidRequestError, NotFoundError: as `delete`.
        """
        row = replace(self._own(owner, path), public=public)
        self._database.write(f"UPDATE checkpoints SET public = :public WHERE {_THIS_ONE}", **vars(row))

    def set_ttl(self, owner: str | None, path: str, ttl_seconds: int | None) -> None:
        """Lets a checkpoint expire so many seconds from now; None is never. Brings an expired one back.

        Raises:
            InvalidRequestError: out of range, or as `delete`.
            NotFoundError: as `delete`.
        """
        ttl = check_ttl(ttl_seconds)
        row = replace(self._own(owner, path, expired=True), expires_at=None if ttl is None else self._clock() + ttl)
        self._database.write(
            f"UPDATE checkpoints SET expires_at = :expires_at, expired_s = NULL WHERE {_THIS_ONE}", **vars(row)
        )

    def copy(
        self,
        owner: str | None,
        request: records.CopyWeightsRequest,
        *,
        key: str | None = None,
        hold: Hold = lambda stored_bytes, unwritten_bytes: None,
    ) -> str:
        """Copies a readable checkpoint into a new run of the owner; returns the path of the copy.

        The files are hard links where the file system has them. The same `key` with the same request gives the same
        copy. `hold` reserves what the copy takes, and may refuse it.

        Raises:
            InvalidRequestError: a field is not supported, or `hold` found the quota full.
            OverloadedError: `hold` found the disk filled up to its reserve.
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
        hold(source.size_bytes or 0, 0)
        manifest = read_manifest(self._data_dir / source.folder)
        run = TrainingRunRow(
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
            expired_s=None,
        )
        self._share(source, row, replace(manifest, path=target.uri, created_at=now), hold)
        details = {"display_name": f"copy of {source.kind}/{source.name}", "project_id": request.destination_project_id}
        self.add(SessionRow(session_id, "", None, now, now, whose, details, now), run, row)
        return target.uri

    def add(self, session: SessionRow, run: TrainingRunRow, row: CheckpointRow) -> None:
        """Adds a checkpoint that was not saved here, with a run of its own.

        Adds the session, too, unless it is there: one that has ended, so that nobody else can take its id.
        """
        with self._database.transaction() as transaction:
            transaction.execute(insert(SessionRow, "sessions", on_conflict="IGNORE"), **vars(session))
            transaction.execute(insert(TrainingRunRow, "runs"), **vars(run))
            transaction.execute(insert(CheckpointRow, "checkpoints"), **vars(row))

    def remove_expired(self, running_s: float) -> int:
        """Removes checkpoints that have been expired for `EXPIRED_S`, and folders whose last sampler is gone.

        To be called regularly by one process; `running_s` is for how long a service has run since the last call. The
        time of day decides what has expired, and may be wrong for a while. So a checkpoint that is found not to have
        expired, or that a living sampler uses, starts again. Returns how many checkpoints were removed.
        """
        now = self._clock()
        with self._database.transaction() as transaction:
            transaction.execute(
                f"UPDATE checkpoints SET expired_s = NULL "
                f"WHERE expired_s IS NOT NULL AND NOT coalesce({_IS_DUE}, FALSE)",
                now=now,
            )
            transaction.execute(
                f"UPDATE checkpoints SET expired_s = coalesce(expired_s + :running_s, 0) WHERE {_IS_DUE}",
                now=now,
                running_s=running_s,
            )
            removed = transaction.rows(
                CheckpointRow, "SELECT * FROM checkpoints WHERE expired_s >= :limit_s", limit_s=EXPIRED_S
            )
        with self._lock:
            left = list(self._left)
        for row in removed:
            log.info("checkpoint %s/%s/%s expired", row.model_id, row.kind, row.name)
            self._drop(row)
        for folder in left:
            self._remove_unused(folder)
        return len(removed)

    def _own(self, owner: str | None, path: str, *, expired: bool = False) -> CheckpointRow:
        """The row of a checkpoint that this owner may change; one that has expired only with `expired`."""
        now = float("-inf") if expired else self._clock()
        row = find_checkpoint(self._journal, path, reader=owner, now=now)
        if owner not in (None, row.owner):
            raise no_checkpoint(path)
        return row

    def _destination(
        self, owner: str | None, whose: str, request: records.CopyWeightsRequest, key: str | None
    ) -> tuple[str, int]:
        """The session of a copy, and the number of its run in it."""
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

    def _share(self, source: CheckpointRow, target: CheckpointRow, manifest: Manifest, hold: Hold) -> None:
        """Links, or else copies, the source's files to the target's folder."""
        folder = self._data_dir / target.folder

        def link(file: str, copy: str) -> str:
            # Links are enough: files of a checkpoint never change, and the manifest is replaced, not written into.
            try:
                os.link(file, copy)
            except OSError:  # no links on this file system, or too many
                hold(source.size_bytes or 0, source.size_bytes or 0)
                shutil.copyfile(file, copy)
            return copy

        try:
            shutil.copytree(self._data_dir / source.folder, folder, copy_function=link)
            write_manifest(folder, manifest)
        except BaseException as error:
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, OSError):  # shutil's own is one
                raise CheckpointError(f"the checkpoint cannot be copied: {error}", remedy="Free disk space") from error
            raise

    def _drop(self, row: CheckpointRow) -> None:
        """Removes the row first: a kill in between leaves a folder without a row, never a row without a folder."""
        self._database.write(f"DELETE FROM checkpoints WHERE {_THIS_ONE}", frees_space=True, **vars(row))
        self._remove_unused(row.folder)
        self._database.spare.take()

    def _remove_unused(self, folder: str) -> None:
        """Removes a folder, unless a checkpoint or a sampler names it; `remove_expired` tries that one again."""
        named = folder in self._journal.named_among([folder])
        with self._lock:
            (self._left.add if named else self._left.discard)(folder)
        if not named:
            shutil.rmtree(self._data_dir / folder, ignore_errors=True)


def checkpoint_record(row: CheckpointRow) -> Checkpoint:
    """A row as clients see it."""
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


def no_run(run_id: str) -> NotFoundError:
    return NotFoundError(
        "is not a training run here", field="training_run_id", value=run_id, remedy="See `mint runs list`"
    )
