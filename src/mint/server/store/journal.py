"""The journal: every accepted state-changing request, what became of it, and the rows that belong to it.

A commit here is the moment at which a request is accepted, or a result is true. Knows no engine, no HTTP and no
meaning of a payload. Any thread may call.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import sqlite

from mint.server.store import database as tables
from mint.server.store.database import LOCAL_OWNER, Database


@dataclass(frozen=True)
class SessionRow:
    """A session; `ended_at` is None while it lives. Times are seconds since the epoch."""

    session_id: str
    instance_id: str
    user_metadata: dict[str, Any] | None
    last_seen: float
    ended_at: float | None = None
    owner: str = LOCAL_OWNER
    details: dict[str, Any] | None = None
    created_at: float | None = None


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
class RunRow:
    """What stays known of a model after its session: a training run. `base_model` is None until the model is made."""

    run_id: str
    session_id: str
    owner: str
    created_at: float
    last_request_at: float
    base_model: str | None = None
    lora: dict[str, Any] | None = None
    user_metadata: dict[str, Any] | None = None
    ended_at: float | None = None


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
    encoding: str = "application/json"


@dataclass(frozen=True)
class SnapshotRow:
    """The state of a model right after job `seq_id`, in `file`."""

    model_id: str
    seq_id: int
    file: str
    digest: str


@dataclass(frozen=True)
class CheckpointRow:
    """A named checkpoint; `kind` is weights, sampler_weights or external_weights."""

    model_id: str
    kind: str
    name: str
    folder: str
    created_at: float
    owner: str = LOCAL_OWNER
    public: bool = False
    expires_at: float | None = None
    size_bytes: int | None = None
    user_metadata: dict[str, Any] | None = None


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


def _sql(statement: sa.ClauseElement) -> str:
    """The statement as SQLite reads it, with named parameters."""
    return str(statement.compile(dialect=sqlite.dialect(paramstyle="named")))


# What a training step executes, compiled once: building a statement takes longer than executing it.
_OF_MODEL = tables.jobs.c.model_id == sa.bindparam("model")
_PENDING = (tables.jobs.c.seq_id == sa.bindparam("seq")) & (tables.jobs.c.status == sa.literal_column("'pending'"))
_BETWEEN = (tables.jobs.c.seq_id >= sa.bindparam("first")) & (tables.jobs.c.seq_id < sa.bindparam("last"))
_ADD_MODEL = _sql(sa.insert(tables.models).prefix_with("OR IGNORE"))
_ADD_RUN = _sql(sa.insert(tables.runs).prefix_with("OR IGNORE"))
_ADD_JOB = _sql(sa.insert(tables.jobs).prefix_with("OR IGNORE"))
_READ_JOB = _sql(
    sa.select(*(tables.jobs.c[column.name] for column in fields(JobRow))).where(
        _OF_MODEL, tables.jobs.c.seq_id == sa.bindparam("seq")
    )
)
_TOUCH_RUN = _sql(
    sa.update(tables.runs)
    .where(tables.runs.c.run_id == sa.bindparam("run"))
    .values(last_request_at=sa.bindparam("now"))
)
_FINISH_JOB = _sql(
    sa.update(tables.jobs)
    .where(_OF_MODEL, _PENDING)
    .values({name: sa.bindparam(f"new_{name}") for name in ("status", "result", "digest")})
)
_ADVANCE_MODEL = _sql(
    sa.update(tables.models)
    .where(tables.models.c.model_id == sa.bindparam("model"))
    .values(applied_seq=sa.bindparam("seq"))
)
_MAKE_MODEL = _sql(
    sa.update(tables.models)
    .where(tables.models.c.model_id == sa.bindparam("model"))
    .values({name: sa.bindparam(f"new_{name}") for name in ("base_model", "lora", "seed_given", "effective")})
)
_NAME_RUN = _sql(
    sa.update(tables.runs)
    .where(tables.runs.c.run_id == sa.bindparam("model"))
    .values({name: sa.bindparam(f"new_{name}") for name in ("base_model", "lora")})
)
_KEEP_SNAPSHOT = _sql(sa.insert(tables.snapshots).prefix_with("OR REPLACE"))
_KEEP_CHECKPOINT = _sql(sa.insert(tables.checkpoints).prefix_with("OR REPLACE"))
_KEEP_SAMPLER = _sql(sa.insert(tables.samplers).prefix_with("OR REPLACE"))
_DROP_SNAPSHOT = _sql(
    sa.delete(tables.snapshots).where(
        tables.snapshots.c.model_id == sa.bindparam("model"), tables.snapshots.c.seq_id == sa.bindparam("seq")
    )
)
_PRUNE_PAYLOADS = _sql(sa.update(tables.jobs).where(_OF_MODEL, _BETWEEN).values(payload=sa.null()))


def _values(row: object) -> dict[str, Any]:
    """A row's columns as the driver takes them: objects are JSON."""
    return _stored(vars(row))


def _stored(columns: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    return {prefix + name: json.dumps(value) if isinstance(value, dict) else value for name, value in columns.items()}


class Journal:
    """The tables of one data directory."""

    def __init__(self, path: Path) -> None:
        """Opens or creates the file.

        Raises:
            JournalError: it cannot be opened, or a newer mint wrote it.
        """
        self.database = Database(path)
        self.durability = self.database.durability
        self._transaction = self.database.transaction

    def close(self) -> None:
        """Closes the file; the journal cannot be used afterwards."""
        self.database.close()

    # --- sessions ------------------------------------------------------------------------------------------------

    def add_session(self, row: SessionRow) -> None:
        """A new session; an existing one of that id is left as it is."""
        with self._transaction() as connection:
            connection.execute(sa.insert(tables.sessions).prefix_with("OR IGNORE"), vars(row))

    def session(self, session_id: str) -> SessionRow | None:
        """The session, ended or not."""
        with self._transaction(write=False) as connection:
            found = connection.execute(
                sa.select(tables.sessions).where(tables.sessions.c.session_id == session_id)
            ).first()
        return SessionRow(**found._mapping) if found is not None else None

    def live_sessions(self) -> list[SessionRow]:
        """Every session that has not ended, of all instances."""
        with self._transaction(write=False) as connection:
            rows = connection.execute(sa.select(tables.sessions).where(tables.sessions.c.ended_at.is_(None))).all()
        return [SessionRow(**row._mapping) for row in rows]

    def adopt_sessions(
        self, dead: Sequence[str], *, running: Sequence[tuple[str, int]], instance_id: str, now: float
    ) -> None:
        """Moves the live sessions of dead instances to this one; counts an attempt for the jobs they died in."""
        mine = (tables.sessions.c.instance_id.in_(dead)) & tables.sessions.c.ended_at.is_(None)
        with self._transaction() as connection:
            for model_id, seq_id in running:
                job = (
                    (tables.jobs.c.model_id == model_id)
                    & (tables.jobs.c.seq_id == seq_id)
                    & (tables.jobs.c.status == "pending")
                )
                connection.execute(sa.update(tables.jobs).where(job).values(attempts=tables.jobs.c.attempts + 1))
            connection.execute(sa.update(tables.sessions).where(mine).values(instance_id=instance_id, last_seen=now))

    def touch_sessions(self, seen: Mapping[str, float]) -> None:
        """Stores when sessions were last heard of."""
        with self._transaction() as connection:
            for session_id, moment in seen.items():
                found = tables.sessions.c.session_id == session_id
                connection.execute(sa.update(tables.sessions).where(found).values(last_seen=moment))

    def end_session(self, session_id: str, now: float) -> list[str]:
        """Ends a session and forgets its models, jobs, snapshots and samplers; returns the files nobody names now."""
        models = sa.select(tables.models.c.model_id).where(tables.models.c.session_id == session_id)
        with self._transaction() as connection:
            snapshots = connection.execute(
                sa.select(tables.snapshots.c.file).where(tables.snapshots.c.model_id.in_(models))
            )
            published = connection.execute(
                sa.select(tables.samplers.c.file).where(tables.samplers.c.session_id == session_id)
            )
            files: list[str] = [file for (file,) in [*snapshots.all(), *published.all()] if file]
            for table in (tables.jobs, tables.snapshots):
                connection.execute(sa.delete(table).where(table.c.model_id.in_(models)))
            for table in (tables.models, tables.samplers):
                connection.execute(sa.delete(table).where(table.c.session_id == session_id))
            for table in (tables.sessions, tables.runs):
                over = (table.c.session_id == session_id) & table.c.ended_at.is_(None)
                connection.execute(sa.update(table).where(over).values(ended_at=now))
        with self._transaction() as connection:
            connection.exec_driver_sql("PRAGMA incremental_vacuum")
        return files

    def end_model(self, model_id: str, now: float) -> list[str]:
        """Forgets one model with its jobs and snapshots; returns the files nobody names now."""
        with self._transaction() as connection:
            chosen = sa.select(tables.snapshots.c.file).where(tables.snapshots.c.model_id == model_id)
            files = list(connection.execute(chosen).scalars())
            for table in (tables.jobs, tables.snapshots, tables.models):
                connection.execute(sa.delete(table).where(table.c.model_id == model_id))
            ended = sa.update(tables.runs).where(tables.runs.c.run_id == model_id)
            connection.execute(ended.values(ended_at=now))
        return files

    # --- models and jobs -----------------------------------------------------------------------------------------

    def add_job(
        self, job: JobRow, *, now: float, model: ModelRow | None = None, run: RunRow | None = None
    ) -> JobRow | None:
        """Accepts a request (with its model and run, for the job that makes one), unless its place is taken.

        It survives the process at once, but a loss of power only after `durability.wait_durable`. Returns the row that
        already has this place, or None when the job was added.
        """
        with self.database.statements(durable=False) as driver:
            if model is not None:
                driver.execute(_ADD_MODEL, _values(model))
            if run is not None:
                driver.execute(_ADD_RUN, _values(run))
            driver.execute(_TOUCH_RUN, {"run": job.model_id, "now": now})
            if driver.execute(_ADD_JOB, vars(job)).rowcount:
                return None
            return JobRow(*driver.execute(_READ_JOB, {"model": job.model_id, "seq": job.seq_id}).fetchone())

    def job(self, model_id: str, seq_id: int) -> JobRow | None:
        """One job, whatever became of it."""
        with self._transaction(write=False) as connection:
            return _read_job(connection, model_id, seq_id)

    def jobs(self, model_id: str, *, after: int, status: Iterable[str] = ("pending", "done", "failed")) -> list[JobRow]:
        """The jobs of a model with `seq_id > after`, in order."""
        chosen = (
            (tables.jobs.c.model_id == model_id)
            & (tables.jobs.c.seq_id > after)
            & tables.jobs.c.status.in_(list(status))
        )
        with self._transaction(write=False) as connection:
            rows = connection.execute(sa.select(tables.jobs).where(chosen).order_by(tables.jobs.c.seq_id)).all()
        return [JobRow(**row._mapping) for row in rows]

    def model(self, model_id: str) -> ModelRow | None:
        """One model."""
        with self._transaction(write=False) as connection:
            found = connection.execute(sa.select(tables.models).where(tables.models.c.model_id == model_id)).first()
        return ModelRow(**found._mapping) if found is not None else None

    def models_of(self, session_id: str) -> list[ModelRow]:
        """The models of a session, by id."""
        chosen = (
            sa.select(tables.models).where(tables.models.c.session_id == session_id).order_by(tables.models.c.model_id)
        )
        with self._transaction(write=False) as connection:
            return [ModelRow(**row._mapping) for row in connection.execute(chosen).all()]

    def run(self, run_id: str) -> RunRow | None:
        """What is known of a model, living or not."""
        with self._transaction(write=False) as connection:
            found = connection.execute(sa.select(tables.runs).where(tables.runs.c.run_id == run_id)).first()
        return RunRow(**found._mapping) if found is not None else None

    def mark_diverged(self, model_id: str, reason: str) -> None:
        """Stops a model: its replay did not give what was acknowledged."""
        with self._transaction() as connection:
            found = tables.models.c.model_id == model_id
            connection.execute(sa.update(tables.models).where(found).values(diverged=reason))

    def finish_job(self, finish: Finish) -> bool:
        """Everything that a job's end makes true, at once; False when its session has ended meanwhile.

        It survives the process at once, but a loss of power only once something is accepted after it, or named: until
        then the job would be run again, and give the same. What takes an older state away waits for what came before.
        """
        drops_state = bool(finish.dropped_snapshots) and not self.durability.is_durable(self.durability.newest_commit)
        durable = drops_state or finish.checkpoint is not None
        place = {"model": finish.model_id, "seq": finish.seq_id}
        values = {"new_status": finish.status, "new_result": finish.result, "new_digest": finish.digest}
        with self.database.statements(durable=durable) as driver:
            if not driver.execute(_FINISH_JOB, {**place, **values}).rowcount:
                return False
            driver.execute(_ADVANCE_MODEL, place)
            if finish.model is not None:
                made = {"model": finish.model_id, **_stored(finish.model, "new_")}
                driver.execute(_MAKE_MODEL, made)
                driver.execute(_NAME_RUN, made)
            for statement, row in (
                (_KEEP_SNAPSHOT, finish.snapshot),
                (_KEEP_CHECKPOINT, finish.checkpoint),
                (_KEEP_SAMPLER, finish.sampler),
            ):
                if row is not None:
                    driver.execute(statement, _values(row))
            for seq_id in finish.dropped_snapshots:
                driver.execute(_DROP_SNAPSHOT, {"model": finish.model_id, "seq": seq_id})
            first, last = finish.pruned_payloads
            if last > first:
                driver.execute(_PRUNE_PAYLOADS, {"model": finish.model_id, "first": first, "last": last})
        return True

    def give_up(self, model_id: str, missing: Sequence[int], waiting: Sequence[int], result: bytes) -> None:
        """Fails requests that never arrived, and those that waited behind them."""
        absent = [JobRow(model_id, seq_id, "missing", None, "", "failed", result) for seq_id in missing]
        with self._transaction() as connection:
            for row in absent:
                connection.execute(sa.insert(tables.jobs).prefix_with("OR IGNORE"), vars(row))
            chosen = (tables.jobs.c.model_id == model_id) & tables.jobs.c.seq_id.in_(list(waiting))
            connection.execute(sa.update(tables.jobs).where(chosen).values(status="failed", result=result))
            last = max([*missing, *waiting])
            connection.execute(
                sa.update(tables.models).where(tables.models.c.model_id == model_id).values(applied_seq=last)
            )

    # --- snapshots, checkpoints, samplers ------------------------------------------------------------------------

    def snapshots(self, model_id: str) -> list[SnapshotRow]:
        """The snapshots of a model, newest first."""
        chosen = (
            sa.select(tables.snapshots)
            .where(tables.snapshots.c.model_id == model_id)
            .order_by(tables.snapshots.c.seq_id.desc())
        )
        with self._transaction(write=False) as connection:
            return [SnapshotRow(**row._mapping) for row in connection.execute(chosen).all()]

    def checkpoint(self, model_id: str, kind: str, name: str) -> CheckpointRow | None:
        """A named checkpoint."""
        table = tables.checkpoints.c
        chosen = (table.model_id == model_id) & (table.kind == kind) & (table.name == name)
        with self._transaction(write=False) as connection:
            found = connection.execute(sa.select(tables.checkpoints).where(chosen)).first()
        return CheckpointRow(**found._mapping) if found is not None else None

    def checkpoint_in(self, folder: str) -> CheckpointRow | None:
        """The checkpoint whose files lie in this folder."""
        with self._transaction(write=False) as connection:
            found = connection.execute(
                sa.select(tables.checkpoints).where(tables.checkpoints.c.folder == folder)
            ).first()
        return CheckpointRow(**found._mapping) if found is not None else None

    def checkpoints(self) -> list[CheckpointRow]:
        """Every named checkpoint, oldest first."""
        with self._transaction(write=False) as connection:
            rows = connection.execute(sa.select(tables.checkpoints).order_by(tables.checkpoints.c.created_at)).all()
        return [CheckpointRow(**row._mapping) for row in rows]

    def saves(self, model_id: str, *, limit: int = 100) -> list[bytes]:
        """The results of a live model's latest saves and publications, newest first."""
        table = tables.jobs.c
        is_save = table.kind.in_(("save_weights", "save_weights_for_sampler"))
        chosen = (table.model_id == model_id) & (table.status == "done") & is_save
        newest = sa.select(table.result).where(chosen).order_by(table.seq_id.desc()).limit(limit)
        with self._transaction(write=False) as connection:
            return [result for result in connection.execute(newest).scalars() if result]

    def checkpoint_bytes(self, owner: str) -> int:
        """How large an owner's checkpoints are together."""
        table = tables.checkpoints.c
        chosen = sa.select(sa.func.coalesce(sa.func.sum(table.size_bytes), 0)).where(table.owner == owner)
        with self._transaction(write=False) as connection:
            return int(connection.execute(chosen).scalar_one())

    def add_sampler(self, row: SamplerRow) -> None:
        """A new sampler; an existing one of that id is left as it is."""
        with self._transaction() as connection:
            connection.execute(sa.insert(tables.samplers).prefix_with("OR IGNORE"), vars(row))

    def sampler(self, sampler_id: str) -> SamplerRow | None:
        """One sampler."""
        with self._transaction(write=False) as connection:
            found = connection.execute(
                sa.select(tables.samplers).where(tables.samplers.c.sampler_id == sampler_id)
            ).first()
        return SamplerRow(**found._mapping) if found is not None else None

    def drop_samplers(self, sampler_ids: Sequence[str]) -> None:
        """Forgets samplers."""
        with self._transaction() as connection:
            connection.execute(sa.delete(tables.samplers).where(tables.samplers.c.sampler_id.in_(list(sampler_ids))))

    def named_files(self) -> set[str]:
        """Every file and folder that a row names; whatever else lies in the data directory is an orphan."""
        samplers = tables.samplers.c
        # a sampler reads a checkpoint's folder for as long as it lives, also after the checkpoint was deleted
        columns = (tables.snapshots.c.file, samplers.file, samplers.weights_id, tables.checkpoints.c.folder)
        with self._transaction(write=False) as connection:
            return {name for column in columns for name in connection.execute(sa.select(column)).scalars() if name}


def _read_job(connection: sa.Connection, model_id: str, seq_id: int) -> JobRow | None:
    chosen = (tables.jobs.c.model_id == model_id) & (tables.jobs.c.seq_id == seq_id)
    found = connection.execute(sa.select(tables.jobs).where(chosen)).first()
    return JobRow(**found._mapping) if found is not None else None
