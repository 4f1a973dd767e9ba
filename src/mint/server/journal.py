"""The journal: every accepted state-changing request, what became of it, and the rows that belong to it. SQLite.

A commit here is the moment at which a request is accepted, or a result is true. Knows no engine, no HTTP and no
meaning of a payload. Any thread may call; writers of other processes on the same file are waited for.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import StaticPool

from mint.errors import JournalError

SCHEMA_VERSION = 1
BUSY_TIMEOUT_S = 30.0

_meta = sa.MetaData()
_sessions = sa.Table(
    "sessions",
    _meta,
    sa.Column("session_id", sa.String, primary_key=True),
    sa.Column("instance_id", sa.String, nullable=False, index=True),
    sa.Column("user_metadata", sa.JSON),
    sa.Column("last_seen", sa.Float, nullable=False),
    sa.Column("ended_at", sa.Float),
)
_models = sa.Table(
    "models",
    _meta,
    sa.Column("model_id", sa.String, primary_key=True),
    sa.Column("session_id", sa.String, nullable=False, index=True),
    sa.Column("base_model", sa.String),
    sa.Column("lora", sa.JSON),
    sa.Column("seed_given", sa.Boolean),
    sa.Column("effective", sa.JSON),
    sa.Column("applied_seq", sa.Integer, nullable=False),
    sa.Column("diverged", sa.String),
)
_jobs = sa.Table(
    "jobs",
    _meta,
    sa.Column("model_id", sa.String, primary_key=True),
    sa.Column("seq_id", sa.Integer, primary_key=True),
    sa.Column("kind", sa.String, nullable=False),
    sa.Column("payload", sa.LargeBinary),
    sa.Column("sha256", sa.String, nullable=False),
    sa.Column("status", sa.String, nullable=False),
    sa.Column("result", sa.LargeBinary),
    sa.Column("digest", sa.String),
    sa.Column("attempts", sa.Integer, nullable=False, default=0),
)
_snapshots = sa.Table(
    "snapshots",
    _meta,
    sa.Column("model_id", sa.String, primary_key=True),
    sa.Column("seq_id", sa.Integer, primary_key=True),
    sa.Column("file", sa.String, nullable=False),
    sa.Column("digest", sa.String, nullable=False),
)
_checkpoints = sa.Table(
    "checkpoints",
    _meta,
    sa.Column("model_id", sa.String, primary_key=True),
    sa.Column("kind", sa.String, primary_key=True),
    sa.Column("name", sa.String, primary_key=True),
    sa.Column("folder", sa.String, nullable=False),
    sa.Column("created_at", sa.Float, nullable=False),
)
_samplers = sa.Table(
    "samplers",
    _meta,
    sa.Column("sampler_id", sa.String, primary_key=True),
    sa.Column("session_id", sa.String, nullable=False, index=True),
    sa.Column("base_model", sa.String, nullable=False),
    sa.Column("model_path", sa.String),
    sa.Column("weights_id", sa.String),
    sa.Column("file", sa.String),
    sa.Column("lora", sa.JSON),
    sa.Column("seed_root", sa.String, nullable=False),
)


@dataclass(frozen=True)
class SessionRow:
    """A session; `ended_at` is None while it lives. Times are seconds since the epoch."""

    session_id: str
    instance_id: str
    user_metadata: dict[str, Any] | None
    last_seen: float
    ended_at: float | None = None


@dataclass(frozen=True)
class ModelRow:
    """A model; `base_model`, `lora`, … are None until its first job is done, `applied_seq` is its last finished job."""

    model_id: str
    session_id: str
    base_model: str | None = None
    lora: dict[str, Any] | None = None
    seed_given: bool | None = None
    effective: dict[str, Any] | None = None
    applied_seq: int = -1
    diverged: str | None = None


@dataclass(frozen=True)
class JobRow:
    """One request; `status` is pending, done or failed, `result` the body of its answer, `payload` None once pruned."""

    model_id: str
    seq_id: int
    kind: str
    payload: bytes | None
    sha256: str
    status: str = "pending"
    result: bytes | None = None
    digest: str | None = None
    attempts: int = 0


@dataclass(frozen=True)
class SnapshotRow:
    """The state of a model right after job `seq_id`, in `file`."""

    model_id: str
    seq_id: int
    file: str
    digest: str


@dataclass(frozen=True)
class CheckpointRow:
    """A named checkpoint; `kind` is weights or sampler_weights."""

    model_id: str
    kind: str
    name: str
    folder: str
    created_at: float


@dataclass(frozen=True)
class SamplerRow:
    """A sampling session. `weights_id` None is the base model; `file` holds weights published without a name."""

    sampler_id: str
    session_id: str
    base_model: str
    model_path: str | None
    weights_id: str | None
    file: str | None
    lora: dict[str, Any] | None
    seed_root: str


@dataclass(frozen=True)
class Finish:
    """What becomes true, in one transaction, when a job ends."""

    model_id: str
    seq_id: int
    status: str
    result: bytes
    digest: str | None = None
    model: Mapping[str, Any] | None = None  # columns of the model's row to set
    snapshot: SnapshotRow | None = None
    checkpoint: CheckpointRow | None = None
    sampler: SamplerRow | None = None
    dropped_snapshots: tuple[int, ...] = ()
    pruned_payloads: tuple[int, int] = (0, 0)  # seq_ids in [first, last) give up their payload


class Journal:
    """The tables of one data directory."""

    def __init__(self, path: Path) -> None:
        """Opens or creates the file.

        Raises:
            JournalError: it cannot be opened, or a newer mint wrote it.
        """
        self._lock = threading.RLock()
        self._sa = sa.create_engine(
            f"sqlite:///{path}",
            poolclass=StaticPool,
            connect_args={"check_same_thread": False, "timeout": BUSY_TIMEOUT_S},
        )
        event.listen(self._sa, "connect", _configure)
        event.listen(self._sa, "begin", _begin)
        with self._transaction() as connection:
            version = connection.exec_driver_sql("PRAGMA user_version").scalar_one()
            if version > SCHEMA_VERSION:
                raise JournalError(
                    f"{path} was written by a newer mint (schema {version}, this one reads {SCHEMA_VERSION})",
                    remedy="Upgrade mint, or use another MINT_HOME",
                )
            _meta.create_all(connection)
            connection.exec_driver_sql(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def close(self) -> None:
        """Closes the file; the journal cannot be used afterwards."""
        with self._lock:
            self._sa.dispose()

    # --- sessions ------------------------------------------------------------------------------------------------

    def add_session(self, row: SessionRow) -> None:
        """A new session; an existing one of that id is left as it is."""
        with self._transaction() as connection:
            connection.execute(sa.insert(_sessions).prefix_with("OR IGNORE"), vars(row))

    def session(self, session_id: str) -> SessionRow | None:
        """The session, ended or not."""
        with self._transaction(write=False) as connection:
            found = connection.execute(sa.select(_sessions).where(_sessions.c.session_id == session_id)).first()
        return SessionRow(**found._mapping) if found is not None else None

    def live_sessions(self) -> list[SessionRow]:
        """Every session that has not ended, of all instances."""
        with self._transaction(write=False) as connection:
            rows = connection.execute(sa.select(_sessions).where(_sessions.c.ended_at.is_(None))).all()
        return [SessionRow(**row._mapping) for row in rows]

    def adopt_sessions(
        self, dead: Sequence[str], *, running: Sequence[tuple[str, int]], instance_id: str, now: float
    ) -> None:
        """Moves the live sessions of dead instances to this one; counts an attempt for the jobs they died in."""
        mine = (_sessions.c.instance_id.in_(dead)) & _sessions.c.ended_at.is_(None)
        with self._transaction() as connection:
            for model_id, seq_id in running:
                job = (_jobs.c.model_id == model_id) & (_jobs.c.seq_id == seq_id) & (_jobs.c.status == "pending")
                connection.execute(sa.update(_jobs).where(job).values(attempts=_jobs.c.attempts + 1))
            connection.execute(sa.update(_sessions).where(mine).values(instance_id=instance_id, last_seen=now))

    def touch_sessions(self, seen: Mapping[str, float]) -> None:
        """Stores when sessions were last heard of."""
        with self._transaction() as connection:
            for session_id, moment in seen.items():
                found = _sessions.c.session_id == session_id
                connection.execute(sa.update(_sessions).where(found).values(last_seen=moment))

    def end_session(self, session_id: str, now: float) -> list[str]:
        """Ends a session and forgets its models, jobs, snapshots and samplers; returns the files nobody names now."""
        models = sa.select(_models.c.model_id).where(_models.c.session_id == session_id)
        with self._transaction() as connection:
            snapshots = connection.execute(sa.select(_snapshots.c.file).where(_snapshots.c.model_id.in_(models)))
            published = connection.execute(sa.select(_samplers.c.file).where(_samplers.c.session_id == session_id))
            files: list[str] = [file for (file,) in [*snapshots.all(), *published.all()] if file]
            for table in (_jobs, _snapshots):
                connection.execute(sa.delete(table).where(table.c.model_id.in_(models)))
            for table in (_models, _samplers):
                connection.execute(sa.delete(table).where(table.c.session_id == session_id))
            ended = sa.update(_sessions).where(_sessions.c.session_id == session_id)
            connection.execute(ended.values(ended_at=now))
        with self._transaction() as connection:
            connection.exec_driver_sql("PRAGMA incremental_vacuum")
        return files

    # --- models and jobs -----------------------------------------------------------------------------------------

    def add_job(self, job: JobRow, *, model: ModelRow | None = None) -> JobRow | None:
        """Accepts a request durably (with its model, for the job that makes one), unless its place is taken.

        Returns the row that already has this place, or None when the job was added.
        """
        with self._transaction() as connection:
            if model is not None:
                connection.execute(sa.insert(_models).prefix_with("OR IGNORE"), vars(model))
            added = connection.execute(sa.insert(_jobs).prefix_with("OR IGNORE"), vars(job))
            return None if added.rowcount else _read_job(connection, job.model_id, job.seq_id)

    def job(self, model_id: str, seq_id: int) -> JobRow | None:
        """One job, whatever became of it."""
        with self._transaction(write=False) as connection:
            return _read_job(connection, model_id, seq_id)

    def jobs(self, model_id: str, *, after: int, status: Iterable[str] = ("pending", "done", "failed")) -> list[JobRow]:
        """The jobs of a model with `seq_id > after`, in order."""
        chosen = (_jobs.c.model_id == model_id) & (_jobs.c.seq_id > after) & _jobs.c.status.in_(list(status))
        with self._transaction(write=False) as connection:
            rows = connection.execute(sa.select(_jobs).where(chosen).order_by(_jobs.c.seq_id)).all()
        return [JobRow(**row._mapping) for row in rows]

    def model(self, model_id: str) -> ModelRow | None:
        """One model."""
        with self._transaction(write=False) as connection:
            found = connection.execute(sa.select(_models).where(_models.c.model_id == model_id)).first()
        return ModelRow(**found._mapping) if found is not None else None

    def models_of(self, session_id: str) -> list[ModelRow]:
        """The models of a session, by id."""
        chosen = sa.select(_models).where(_models.c.session_id == session_id).order_by(_models.c.model_id)
        with self._transaction(write=False) as connection:
            return [ModelRow(**row._mapping) for row in connection.execute(chosen).all()]

    def mark_diverged(self, model_id: str, reason: str) -> None:
        """Stops a model: its replay did not give what was acknowledged."""
        with self._transaction() as connection:
            found = _models.c.model_id == model_id
            connection.execute(sa.update(_models).where(found).values(diverged=reason))

    def finish_job(self, finish: Finish) -> bool:
        """Everything that a job's end makes true, at once; False when its session has ended meanwhile."""
        jobs, models = _jobs.c, _models.c
        mine = jobs.model_id == finish.model_id
        values = {"status": finish.status, "result": finish.result, "digest": finish.digest}
        with self._transaction() as connection:
            chosen = sa.update(_jobs).where(mine, jobs.seq_id == finish.seq_id, jobs.status == "pending")
            if not connection.execute(chosen.values(values)).rowcount:
                return False
            columns = {**(finish.model or {}), "applied_seq": finish.seq_id}
            connection.execute(sa.update(_models).where(models.model_id == finish.model_id).values(columns))
            if finish.snapshot is not None:
                connection.execute(sa.insert(_snapshots).prefix_with("OR REPLACE"), vars(finish.snapshot))
            if finish.checkpoint is not None:
                connection.execute(sa.insert(_checkpoints).prefix_with("OR REPLACE"), vars(finish.checkpoint))
            if finish.sampler is not None:
                connection.execute(sa.insert(_samplers).prefix_with("OR REPLACE"), vars(finish.sampler))
            if finish.dropped_snapshots:
                old = _snapshots.c.seq_id.in_(finish.dropped_snapshots)
                connection.execute(sa.delete(_snapshots).where(_snapshots.c.model_id == finish.model_id, old))
            first, last = finish.pruned_payloads
            if last > first:
                old = (jobs.seq_id >= first) & (jobs.seq_id < last)
                connection.execute(sa.update(_jobs).where(mine, old).values(payload=None))
        return True

    def give_up(self, model_id: str, missing: Sequence[int], waiting: Sequence[int], result: bytes) -> None:
        """Fails requests that never arrived, and those that waited behind them."""
        absent = [JobRow(model_id, seq_id, "missing", None, "", "failed", result) for seq_id in missing]
        with self._transaction() as connection:
            for row in absent:
                connection.execute(sa.insert(_jobs).prefix_with("OR IGNORE"), vars(row))
            chosen = (_jobs.c.model_id == model_id) & _jobs.c.seq_id.in_(list(waiting))
            connection.execute(sa.update(_jobs).where(chosen).values(status="failed", result=result))
            last = max([*missing, *waiting])
            connection.execute(sa.update(_models).where(_models.c.model_id == model_id).values(applied_seq=last))

    # --- snapshots, checkpoints, samplers ------------------------------------------------------------------------

    def snapshots(self, model_id: str) -> list[SnapshotRow]:
        """The snapshots of a model, newest first."""
        chosen = sa.select(_snapshots).where(_snapshots.c.model_id == model_id).order_by(_snapshots.c.seq_id.desc())
        with self._transaction(write=False) as connection:
            return [SnapshotRow(**row._mapping) for row in connection.execute(chosen).all()]

    def checkpoint(self, model_id: str, kind: str, name: str) -> CheckpointRow | None:
        """A named checkpoint."""
        table = _checkpoints.c
        chosen = (table.model_id == model_id) & (table.kind == kind) & (table.name == name)
        with self._transaction(write=False) as connection:
            found = connection.execute(sa.select(_checkpoints).where(chosen)).first()
        return CheckpointRow(**found._mapping) if found is not None else None

    def checkpoints(self) -> list[CheckpointRow]:
        """Every named checkpoint, oldest first."""
        with self._transaction(write=False) as connection:
            rows = connection.execute(sa.select(_checkpoints).order_by(_checkpoints.c.created_at)).all()
        return [CheckpointRow(**row._mapping) for row in rows]

    def add_sampler(self, row: SamplerRow) -> None:
        """A new sampler; an existing one of that id is left as it is."""
        with self._transaction() as connection:
            connection.execute(sa.insert(_samplers).prefix_with("OR IGNORE"), vars(row))

    def sampler(self, sampler_id: str) -> SamplerRow | None:
        """One sampler."""
        with self._transaction(write=False) as connection:
            found = connection.execute(sa.select(_samplers).where(_samplers.c.sampler_id == sampler_id)).first()
        return SamplerRow(**found._mapping) if found is not None else None

    def drop_samplers(self, sampler_ids: Sequence[str]) -> None:
        """Forgets samplers."""
        with self._transaction() as connection:
            connection.execute(sa.delete(_samplers).where(_samplers.c.sampler_id.in_(list(sampler_ids))))

    def named_files(self) -> set[str]:
        """Every file and folder that a row names; whatever else lies in the data directory is an orphan."""
        columns = (_snapshots.c.file, _samplers.c.file, _checkpoints.c.folder)
        with self._transaction(write=False) as connection:
            return {name for column in columns for name in connection.execute(sa.select(column)).scalars() if name}

    @contextmanager
    def _transaction(self, *, write: bool = True) -> Generator[sa.Connection]:
        """One transaction on the one connection."""
        try:
            with self._lock, self._sa.connect().execution_options(mint_write=write) as connection, connection.begin():
                yield connection
        except SQLAlchemyError as error:
            raise JournalError(
                f"the journal cannot be used: {error}", remedy="Free disk space, or see the log"
            ) from error


def _configure(connection: sqlite3.Connection, _record: object) -> None:
    # SQLAlchemy's own recipe: the driver must not begin transactions by itself
    connection.isolation_level = None
    for pragma in (
        "auto_vacuum = INCREMENTAL",
        "journal_mode = WAL",
        "synchronous = FULL",
        "foreign_keys = OFF",
        "wal_autocheckpoint = 2000",
    ):
        connection.execute(f"PRAGMA {pragma}")


def _begin(connection: sa.Connection) -> None:
    # a writer takes the file's lock at once: a transaction that upgrades later can fail instead of waiting
    write = connection.get_execution_options().get("mint_write", True)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")


def _read_job(connection: sa.Connection, model_id: str, seq_id: int) -> JobRow | None:
    chosen = (_jobs.c.model_id == model_id) & (_jobs.c.seq_id == seq_id)
    found = connection.execute(sa.select(_jobs).where(chosen)).first()
    return JobRow(**found._mapping) if found is not None else None
