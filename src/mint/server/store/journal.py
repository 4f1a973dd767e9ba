"""The journal: every accepted request that changes state, what became of it, and the rows that belong to it.

A commit accepts a request or makes a result final. `durability` decides when to send it. Knows no engine, no HTTP and
no meaning of a payload. Any thread may call.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mint.errors import DamagedDataError
from mint.models.fingerprint import BASE_FINGERPRINT
from mint.server.callers import LOCAL_OWNER
from mint.server.limits import MAX_SNAPSHOTS, ROW_BYTES
from mint.server.store.database import Database, OpenFor, Transaction, insert
from mint.server.store.rows import (
    BASE_NUMBERS,
    FINISHED,
    STATE_BYTES,
    CheckpointRow,
    JobRow,
    ModelRow,
    SamplerRow,
    SessionRow,
    SnapshotRow,
    TrainingRunRow,
    result_sha256,
    settings_sha256,
)

log = logging.getLogger("mint.store")

JOURNAL_FILE = "journal.sqlite3"
"""The journal's file in a data directory."""

FORGOTTEN_AT_ONCE = 256
"""How many ended sessions one transaction forgets: with 256 KiB of metadata each, it takes some tenths of a second."""

REMOVED_AT_ONCE = 1000
REMOVED_BYTES_AT_ONCE = 64 << 20
"""How many requests of ended models one transaction removes, and after how many bytes it takes no further one. Nobody
else can write meanwhile."""


@dataclass(frozen=True)
class Finish:
    """The changes committed when a job ends, in one transaction."""

    model_id: str
    seq_id: int
    status: str
    result: bytes
    digest: str | None = None
    micro_batching: dict[str, Any] | None = None
    model: Mapping[str, Any] | None = None  # columns of the model's row to set
    snapshot: SnapshotRow | None = None
    checkpoint: CheckpointRow | None = None
    sampler: SamplerRow | None = None
    dropped_snapshots: tuple[int, ...] = ()
    # seq_ids in [first, last) that give up their payload; of passes with a gradient the result; of passes without, both
    pruned_payloads: tuple[int, int] = (0, 0)
    pruned_results: tuple[int, int] = (0, 0)
    pruned_forwards: tuple[int, int] = (0, 0)


# The statements of a training step.
_ADD_MODEL = insert(ModelRow, "models", on_conflict="IGNORE")
_ADD_RUN = insert(TrainingRunRow, "runs", on_conflict="IGNORE")
_TOUCH_RUN = "UPDATE runs SET last_request_at = :now WHERE run_id = :model_id"
_ADD_JOB = insert(JobRow, "jobs", on_conflict="IGNORE")
_NAMED_AMONG = """
    SELECT value FROM json_each(:names) WHERE value IN (SELECT file FROM snapshots)
        OR value IN (SELECT file FROM samplers) OR value IN (SELECT weights_id FROM samplers)
        OR value IN (SELECT folder FROM checkpoints)
"""
_READ_JOB = "SELECT * FROM jobs WHERE model_id = :model_id AND seq_id = :seq_id"
# The number of a request that has a result, whatever damage has made of its status.
_LAST_FINISHED = """
    SELECT seq_id FROM jobs WHERE model_id = :model_id AND (status IN ('done', 'failed') OR result_sha256 IS NOT NULL)
    ORDER BY seq_id DESC LIMIT 1
"""
# A replay needs no payload of what has failed or changes nothing. A model without steps makes no snapshot that prunes
# them. A request whose status is damaged must be able to fail.
_FINISH_JOB = """
    UPDATE jobs SET status = :status, result = :result, digest = :digest, micro_batching = :micro_batching,
        result_sha256 = :result_sha256,
        payload = CASE WHEN :status = 'failed' OR kind IN ('forward', 'forward_only') THEN NULL ELSE payload END
    WHERE model_id = :model_id AND seq_id = :seq_id AND status NOT IN ('done', 'failed') AND result_sha256 IS NULL
    AND EXISTS (SELECT 1 FROM models WHERE models.model_id = :model_id)
"""
_ADVANCE_MODEL = "UPDATE models SET applied_seq = :seq_id WHERE model_id = :model_id"
_DESCRIBE_MODEL = """
    UPDATE models SET base_model = :base_model, lora = :lora, seed_given = :seed_given, effective = :effective,
        settings_sha256 = :settings_sha256
    WHERE model_id = :model_id
"""
_FORGET_NUMBERS = "UPDATE models SET effective = json_remove(effective, {}) WHERE model_id = :id".format(
    ", ".join(f"'$.{name}'" for name in (*BASE_NUMBERS, BASE_FINGERPRINT))
)
_DESCRIBE_RUN = "UPDATE runs SET base_model = :base_model, lora = :lora WHERE run_id = :model_id"
_PUT_SNAPSHOT = insert(SnapshotRow, "snapshots", on_conflict="REPLACE")
_PUT_CHECKPOINT = insert(CheckpointRow, "checkpoints", on_conflict="REPLACE")
_PUT_SAMPLER = insert(SamplerRow, "samplers", on_conflict="REPLACE")
_DROP_SNAPSHOT = "DELETE FROM snapshots WHERE model_id = :model_id AND seq_id = :seq_id"
_PRUNE_PAYLOADS = """
    UPDATE jobs SET payload = NULL WHERE model_id = :model_id AND seq_id >= :first AND seq_id < :last
"""
_PRUNE_RESULTS = """
    UPDATE jobs SET result = NULL
    WHERE model_id = :model_id AND seq_id >= :first AND seq_id < :last AND status = 'done' AND kind = 'forward_backward'
"""
_PRUNE_FORWARDS = """
    UPDATE jobs SET payload = NULL, result = NULL
    WHERE model_id = :model_id AND seq_id >= :first AND seq_id < :last AND status = 'done'
    AND kind IN ('forward', 'forward_only')
"""
_UNFINISHED_SIZES = """
    SELECT coalesce(length(payload), 0) FROM models JOIN jobs USING (model_id)
    WHERE session_id = :id AND seq_id > applied_seq AND status = 'pending'
"""

# Goes from one model of the table of requests to the next: it does not read each request.
_ENDED_MODELS = """
    WITH RECURSIVE found (model_id) AS (
        SELECT min(model_id) FROM jobs
        UNION ALL
        SELECT (SELECT min(jobs.model_id) FROM jobs WHERE jobs.model_id > found.model_id) FROM found
        WHERE found.model_id IS NOT NULL
    )
    SELECT model_id FROM found WHERE model_id IS NOT NULL AND model_id NOT IN (SELECT model_id FROM models)
"""
_JOB_SIZES = """
    SELECT rowid, coalesce(length(payload), 0) + coalesce(length(result), 0) FROM jobs
    WHERE model_id = :model_id ORDER BY seq_id LIMIT :limit
"""
_REMOVE_JOBS = "DELETE FROM jobs WHERE rowid IN (SELECT value FROM json_each(:rows))"

# Ended sessions without a checkpoint. Their requests must be gone: their ids may be used again.
_ENDED_SESSIONS = """
    SELECT session_id FROM sessions
    WHERE ended_at < :before AND (:owner IS NULL OR owner = :owner) AND NOT EXISTS (
        SELECT 1 FROM runs JOIN checkpoints ON model_id = run_id WHERE runs.session_id = sessions.session_id
    ) AND NOT EXISTS (
        SELECT 1 FROM runs JOIN jobs ON model_id = run_id WHERE runs.session_id = sessions.session_id
    ) ORDER BY ended_at LIMIT :limit
"""

# Without those that have a checkpoint by now: they were found before this transaction.
_FORGET_RUNS = """
    DELETE FROM runs WHERE session_id IN (SELECT value FROM json_each(:ids))
    AND NOT EXISTS (SELECT 1 FROM checkpoints WHERE model_id = run_id)
"""
_FORGET_SESSIONS = """
    DELETE FROM sessions WHERE session_id IN (SELECT value FROM json_each(:ids))
    AND NOT EXISTS (SELECT 1 FROM runs WHERE runs.session_id = sessions.session_id)
"""

_OF_OWNER = "SELECT session_id FROM sessions WHERE owner = :owner"

# The length of a BLOB stands in the head of its row. That of a text does not: the lengths of metadata come from the
# indexes on these expressions.
_REQUEST_BYTES = f"""
    SELECT coalesce(sum({ROW_BYTES} + coalesce(length(payload), 0) + coalesce(length(result), 0)), 0)
    FROM jobs WHERE model_id IN (SELECT model_id FROM models WHERE session_id IN ({_OF_OWNER}))
"""
_RECORD_BYTES = f"""
    SELECT (SELECT coalesce(sum({ROW_BYTES} + (coalesce(length(user_metadata), 0) + coalesce(length(details), 0))), 0)
            FROM sessions WHERE owner = :owner)
         + (SELECT coalesce(sum({ROW_BYTES} + coalesce(length(user_metadata), 0)), 0) FROM runs WHERE owner = :owner)
         + (SELECT coalesce(sum({ROW_BYTES} + coalesce(length(user_metadata), 0)), 0)
            FROM checkpoints WHERE owner = :owner)
         + (SELECT {ROW_BYTES} * count(*) FROM samplers WHERE session_id IN ({_OF_OWNER}))
"""

# What older versions of mint have created has no size here until it is restored.
_SNAPSHOT_BYTES = f"""
    SELECT coalesce(sum({MAX_SNAPSHOTS} * json_extract(effective, '$.{STATE_BYTES}')), 0)
    FROM models WHERE session_id IN ({_OF_OWNER}) AND json_valid(effective)
"""


def request_bytes(database: Database, owner: str) -> int:
    """What the requests of an owner take in the journal, with their results."""
    return database.value(_REQUEST_BYTES, owner=owner)


def record_bytes(database: Database, owner: str) -> int:
    """What the other rows of an owner take, with their metadata: of sessions, runs, checkpoints and samplers."""
    return database.value(_RECORD_BYTES, owner=owner)


def snapshot_bytes(database: Database, owner: str) -> int:
    """What the snapshots of an owner's models may take, also those that are not written yet."""
    return database.value(_SNAPSHOT_BYTES, owner=owner)


class Journal:
    """The journal of one data directory."""

    def __init__(self, path: Path, opened_for: OpenFor = OpenFor.SERVICE) -> None:
        """Opens or creates the file.

        Raises:
            JournalError: it cannot be opened, or a newer mint wrote it.
        """
        self.database = Database(path, opened_for)
        self.durability = self.database.durability
        self.storage = self.database.storage

    def close(self) -> None:
        """Closes the file; the journal cannot be used afterwards."""
        self.database.close()

    # --- sessions ------------------------------------------------------------------------------------------------

    def add_session(self, row: SessionRow) -> None:
        """Adds a session; an existing one of that id is left as it is. Survives a loss of power after
        `durability.wait_durable`."""
        with self.database.transaction(durable=False) as transaction:
            transaction.execute(insert(SessionRow, "sessions", on_conflict="IGNORE"), **vars(row))

    def session(self, session_id: str) -> SessionRow | None:
        """The session, ended or not."""
        return self.database.row(SessionRow, "SELECT * FROM sessions WHERE session_id = :id", id=session_id)

    def live_sessions(self) -> list[SessionRow]:
        """Every session that has not ended, of all instances."""
        return self.database.rows(SessionRow, "SELECT * FROM sessions WHERE ended_at IS NULL")

    def adopt_sessions(
        self, dead: Sequence[str], *, running: Sequence[tuple[str, int]], instance_id: str, now: float
    ) -> None:
        """Moves the live sessions of dead instances to this one; counts an attempt for the jobs they died in.

        This commit is durable, and so is then all that the dead instances have accepted: their log is written again,
        because one of them may have died of a failed fsync.
        """
        self.database.write_log_again()
        with self.database.transaction() as transaction:
            for model_id, seq_id in running:
                transaction.execute(
                    "UPDATE jobs SET attempts = attempts + 1 "
                    "WHERE model_id = :model_id AND seq_id = :seq_id AND status = 'pending'",
                    model_id=model_id,
                    seq_id=seq_id,
                )
            transaction.execute(
                "UPDATE sessions SET instance_id = :instance_id, last_seen = :now "
                "WHERE ended_at IS NULL AND instance_id IN (SELECT value FROM json_each(:dead))",
                instance_id=instance_id,
                now=now,
                dead=list(dead),
            )

    def touch_sessions(self, seen: Mapping[str, float]) -> None:
        """Stores when sessions were last heard of."""
        with self.database.transaction() as transaction:
            for session_id, moment in seen.items():
                transaction.execute(
                    "UPDATE sessions SET last_seen = :moment WHERE session_id = :id", id=session_id, moment=moment
                )

    def add_suspended_time(self, session_ids: Sequence[str], seconds: float) -> None:
        """Adds to the time for which sessions have been suspended."""
        self.database.write(
            "UPDATE sessions SET suspended_s = coalesce(suspended_s, 0) + :seconds "
            "WHERE session_id IN (SELECT value FROM json_each(:ids)) AND ended_at IS NULL",
            ids=list(session_ids),
            seconds=seconds,
        )

    def expire_session(self, session_id: str, *, limit_s: float) -> None:
        """Counts a session as suspended for this long, so that the process that serves it ends it."""
        self.database.write(
            "UPDATE sessions SET suspended_s = :limit_s WHERE session_id = :id AND ended_at IS NULL",
            id=session_id,
            limit_s=limit_s,
        )

    def expired_sessions(self, session_ids: Sequence[str], *, limit_s: float) -> list[str]:
        """Those of some sessions that have not ended, and were suspended for this long or are to end."""
        return self.database.values(
            "SELECT session_id FROM sessions WHERE session_id IN (SELECT value FROM json_each(:ids)) "
            "AND ended_at IS NULL AND suspended_s >= :limit_s",
            ids=list(session_ids),
            limit_s=limit_s,
        )

    def resume_session(self, session_id: str) -> None:
        """Stores that a session is not suspended (any more)."""
        self.database.write("UPDATE sessions SET suspended_s = NULL WHERE session_id = :id", id=session_id)

    def end_session(self, session_id: str, now: float, ending: dict[str, Any] | None = None) -> list[str]:
        """Ends a session and forgets its models, snapshots and samplers; returns the files nobody names now.

        `ending` is kept among the session's details.

        Of many jobs some are left to `remove_jobs`.
        """
        of_models = "model_id IN (SELECT model_id FROM models WHERE session_id = :id)"
        with self.database.transaction() as transaction:
            models = transaction.values("SELECT model_id FROM models WHERE session_id = :id", id=session_id)
            files = transaction.values(
                f"SELECT file FROM snapshots WHERE {of_models} "
                "UNION ALL SELECT file FROM samplers WHERE session_id = :id AND file IS NOT NULL",
                id=session_id,
            )
            if ending is not None:
                transaction.execute(
                    "UPDATE sessions SET details = json_patch(coalesce(details, '{}'), :ending) "
                    "WHERE session_id = :id AND ended_at IS NULL",
                    id=session_id,
                    ending={"ending": ending},
                )
            for statement in (
                f"DELETE FROM snapshots WHERE {of_models}",
                "DELETE FROM models WHERE session_id = :id",
                "DELETE FROM samplers WHERE session_id = :id",
                "UPDATE sessions SET ended_at = :now WHERE session_id = :id AND ended_at IS NULL",
                "UPDATE runs SET ended_at = :now WHERE session_id = :id AND ended_at IS NULL",
            ):
                transaction.execute(statement, id=session_id, now=now)
            _remove_jobs(transaction, models)
        self.database.give_back_pages()
        return files

    def forget_ended(self, *, before: float, owner: str | None = None) -> int:
        """Removes the records of sessions that ended before a moment, and of their runs, those that ended first first.

        Those with a checkpoint stay. At most `FORGOTTEN_AT_ONCE` sessions go, of one owner or of all; returns how many.
        """
        found = self.database.values(_ENDED_SESSIONS, before=before, owner=owner, limit=FORGOTTEN_AT_ONCE)
        if found:
            with self.database.transaction() as transaction:
                transaction.execute(_FORGET_RUNS, ids=found)
                transaction.execute(_FORGET_SESSIONS, ids=found)
        return len(found)

    def end_model(self, model_id: str, now: float) -> list[str]:
        """Forgets one model with its snapshots; returns the files nobody names now.

        Of many jobs some are left to `remove_jobs`.
        """
        with self.database.transaction() as transaction:
            files = transaction.values("SELECT file FROM snapshots WHERE model_id = :id", id=model_id)
            for statement in (
                "DELETE FROM snapshots WHERE model_id = :id",
                "DELETE FROM models WHERE model_id = :id",
                "UPDATE runs SET ended_at = :now WHERE run_id = :id",
            ):
                transaction.execute(statement, id=model_id, now=now)
            _remove_jobs(transaction, [model_id])
        return files

    def ended_models(self) -> list[str]:
        """The models that have ended and whose jobs are still here."""
        return self.database.values(_ENDED_MODELS)

    def remove_jobs(self, ended_models: Sequence[str]) -> bool:
        """Removes some jobs of models that have ended: `REMOVED_AT_ONCE` at most. False if there were none.

        A loss of power may bring them back; they are removed again then.
        """
        with self.database.transaction(durable=False) as transaction:
            return _remove_jobs(transaction, ended_models)

    # --- models and jobs -----------------------------------------------------------------------------------------

    def add_job(
        self, job: JobRow, *, now: float, model: ModelRow | None = None, run: TrainingRunRow | None = None
    ) -> JobRow | None:
        """Accepts a request (with its model and run, for the job that makes one), unless its place is taken.

        The commit survives the end of the process, but a loss of power only after `durability.wait_durable`. Returns
        the row that already has this place, or None when the job was added.
        """
        # IGNORE and then a query: a repeated request is found without a race between looking and adding.
        with self.database.transaction(durable=False) as transaction:
            if model is not None:
                transaction.execute(_ADD_MODEL, **vars(model))
            if run is not None:
                transaction.execute(_ADD_RUN, **vars(run))
            transaction.execute(_TOUCH_RUN, model_id=job.model_id, now=now)
            if transaction.execute(_ADD_JOB, **vars(job)).rowcount:
                return None
            return transaction.row(JobRow, _READ_JOB, model_id=job.model_id, seq_id=job.seq_id)

    def job(self, model_id: str, seq_id: int) -> JobRow | None:
        """One job, whatever became of it."""
        return self.database.row(JobRow, _READ_JOB, model_id=model_id, seq_id=seq_id)

    def jobs(self, model_id: str, *, after: int) -> list[JobRow]:
        """The jobs of a model with `seq_id > after`, in order."""
        return self.database.rows(
            JobRow,
            "SELECT * FROM jobs WHERE model_id = :model_id AND seq_id > :after ORDER BY seq_id",
            model_id=model_id,
            after=after,
        )

    def finished_jobs(self, model_id: str, *, after: int) -> list[JobRow]:
        """Those of `jobs` that have a result."""
        return self.database.rows(
            JobRow,
            "SELECT * FROM jobs WHERE model_id = :model_id AND seq_id > :after "
            "AND status IN (SELECT value FROM json_each(:finished)) ORDER BY seq_id",
            model_id=model_id,
            after=after,
            finished=list(FINISHED),
        )

    def next_seq(self, model: ModelRow) -> int:
        """The number of the request that a model waits for: that behind its last finished one.

        If the row of the model and the rows of its requests disagree, the number is one with which all that wait can
        run: a restore finds the damage then, and they fail with it.
        """
        applied = -1
        try:
            model.verify()
            applied = model.applied_seq
        except DamagedDataError as error:
            log.error("%s", error)
        try:
            last = max(self.database.values(_LAST_FINISHED, model_id=model.model_id), default=-1)
        except DamagedDataError:
            return applied + 1
        waiting = self.accepted_numbers(model.model_id, after=last)[:1]
        return min([*waiting, max(applied, last) + 1])

    def accepted_numbers(self, model_id: str, *, after: int) -> list[int]:
        """The numbers of a model's requests beyond `after`, as the index has them: none if that is damaged, too."""
        try:
            return self.database.values(
                "SELECT seq_id FROM jobs WHERE model_id = :model_id AND seq_id > :after ORDER BY seq_id",
                model_id=model_id,
                after=after,
            )
        except DamagedDataError:
            return []

    def payload_bytes(self, model_id: str, *, first: int) -> int:
        """How many bytes the payloads of a model's requests have, from number `first` on."""
        return self.database.value(
            "SELECT coalesce(sum(length(payload)), 0) FROM jobs WHERE model_id = :model_id AND seq_id >= :first",
            model_id=model_id,
            first=first,
        )

    def unfinished_size(self, session_id: str) -> tuple[int, int]:
        """How many accepted requests of a session have no result, and how many bytes their payloads have."""
        found = self.database.values(_UNFINISHED_SIZES, id=session_id)
        return len(found), sum(found)

    def steps_and_loads_before(self, model_id: str, seq_id: int, *, limit: int) -> list[JobRow]:
        """The finished optimizer steps, and the loads that succeeded, before a request; the latest first."""
        return self.database.rows(
            JobRow,
            "SELECT * FROM jobs WHERE model_id = :model_id AND seq_id < :seq_id "
            "AND (kind = 'optim_step' AND status IN ('done', 'failed') OR kind = 'load_weights' AND status = 'done') "
            "ORDER BY seq_id DESC LIMIT :limit",
            model_id=model_id,
            seq_id=seq_id,
            limit=limit,
        )

    def model(self, model_id: str) -> ModelRow | None:
        """One model."""
        return self.database.row(ModelRow, "SELECT * FROM models WHERE model_id = :id", id=model_id)

    def models_of(self, session_id: str) -> list[ModelRow]:
        """The models of a session, by id."""
        return self.database.rows(
            ModelRow, "SELECT * FROM models WHERE session_id = :id ORDER BY model_id", id=session_id
        )

    def model_count(self, session_ids: Iterable[str]) -> int:
        """How many models these sessions have together."""
        return self.database.value(
            "SELECT count(*) FROM models WHERE session_id IN (SELECT value FROM json_each(:ids))", ids=list(session_ids)
        )

    def run(self, run_id: str) -> TrainingRunRow | None:
        """What is known of a model, living or not."""
        return self.database.row(TrainingRunRow, "SELECT * FROM runs WHERE run_id = :id", id=run_id)

    def owner(self, model_id: str) -> str:
        """Who owns a model, living or not."""
        run = self.run(model_id)
        return LOCAL_OWNER if run is None else run.owner

    def mark_diverged(self, model_id: str, reason: str) -> None:
        """Stops a model: it could not be restored as it was acknowledged."""
        self.database.write("UPDATE models SET diverged = :reason WHERE model_id = :id", id=model_id, reason=reason)

    def set_effective(self, model_id: str, effective: Mapping[str, Any]) -> None:
        """Stores the settings that take effect for a model from now on."""
        self.database.write(
            "UPDATE models SET effective = :effective WHERE model_id = :id", id=model_id, effective=effective
        )

    def stopped_models(self) -> list[ModelRow]:
        """The models that are stopped, by id."""
        return self.database.rows(ModelRow, "SELECT * FROM models WHERE diverged IS NOT NULL ORDER BY model_id")

    def restart_model(
        self,
        model_id: str,
        *,
        replay: Mapping[int, str],
        checkpoint: CheckpointRow | None = None,
        accept_numbers: bool = False,
    ) -> None:
        """Lets a stopped model be restored again; stores what was decided about the replay of some of its requests, and
        a checkpoint of its state. With `accept_numbers` its base model may have another dtype, quantization and set of
        kernels."""
        with self.database.transaction() as transaction:
            if checkpoint is not None:
                transaction.execute(_PUT_CHECKPOINT, **vars(checkpoint))
            for seq_id, decision in replay.items():
                job = transaction.row(JobRow, _READ_JOB, model_id=model_id, seq_id=seq_id)
                if job is None:
                    continue
                sealed = job.result_sha256 is not None and job.result is not None
                content = (job.status, job.result or b"", job.digest, job.micro_batching, decision)
                transaction.execute(
                    "UPDATE jobs SET replay = :decision, result_sha256 = :sha256 "
                    "WHERE model_id = :model_id AND seq_id = :seq_id",
                    decision=decision,
                    sha256=result_sha256(*content) if sealed else job.result_sha256,
                    model_id=model_id,
                    seq_id=seq_id,
                )
            transaction.execute("UPDATE models SET diverged = NULL WHERE model_id = :id", id=model_id)
            if accept_numbers:
                transaction.execute(_FORGET_NUMBERS, id=model_id)

    def finish_job(self, finish: Finish) -> bool:
        """Commits everything that a job's end makes true; False when its session has ended meanwhile.

        The commit survives the end of the process, but a loss of power only after the next fsync. Until then the job
        would be run again, and give the same: so no file may be removed before that which it would need.

        Raises:
            JournalError: nothing was committed.
        """
        place = {"model_id": finish.model_id, "seq_id": finish.seq_id}
        with self.database.transaction(durable=False) as transaction:
            # Only a pending job can be finished: the rows of an ended session are gone, and their result is dropped.
            ended = transaction.execute(
                _FINISH_JOB,
                **place,
                status=finish.status,
                result=finish.result,
                digest=finish.digest,
                micro_batching=finish.micro_batching,
                result_sha256=result_sha256(finish.status, finish.result, finish.digest, finish.micro_batching),
            )
            if not ended.rowcount:
                return False
            transaction.execute(_ADVANCE_MODEL, **place)
            if finish.model is not None:
                settings = settings_sha256(finish.model["base_model"], finish.model["lora"], finish.model["seed_given"])
                transaction.execute(_DESCRIBE_MODEL, model_id=finish.model_id, **finish.model, settings_sha256=settings)
                transaction.execute(_DESCRIBE_RUN, model_id=finish.model_id, **finish.model)
            for statement, row in (
                (_PUT_SNAPSHOT, finish.snapshot),
                (_PUT_CHECKPOINT, finish.checkpoint),
                (_PUT_SAMPLER, None if finish.sampler is None else finish.sampler.sealed()),
            ):
                if row is not None:
                    transaction.execute(statement, **vars(row))
            for seq_id in finish.dropped_snapshots:
                transaction.execute(_DROP_SNAPSHOT, model_id=finish.model_id, seq_id=seq_id)
            for statement, (first, last) in (
                (_PRUNE_PAYLOADS, finish.pruned_payloads),
                (_PRUNE_RESULTS, finish.pruned_results),
                (_PRUNE_FORWARDS, finish.pruned_forwards),
            ):
                if last > first:
                    transaction.execute(statement, model_id=finish.model_id, first=first, last=last)
        return True

    def give_up(self, model_id: str, missing: Sequence[int], waiting: Sequence[int], result: bytes) -> bool:
        """Fails requests that never arrived, and those that waited behind them.

        Returns False, and does nothing, if one of `missing` has arrived meanwhile.
        """
        with self.database.transaction() as transaction:
            if any(transaction.row(JobRow, _READ_JOB, model_id=model_id, seq_id=seq_id) for seq_id in missing):
                return False
            for seq_id in missing:
                row = JobRow(model_id, seq_id, "missing", None, "", "failed", result)
                transaction.execute(_ADD_JOB, **vars(row))
            transaction.execute(
                "UPDATE jobs SET status = 'failed', result = :result, payload = NULL "
                "WHERE model_id = :model_id AND seq_id IN (SELECT value FROM json_each(:waiting))",
                result=result,
                model_id=model_id,
                waiting=list(waiting),
            )
            transaction.execute(_ADVANCE_MODEL, model_id=model_id, seq_id=max([*missing, *waiting]))
        return True

    # --- snapshots, checkpoints, samplers ------------------------------------------------------------------------

    def add_snapshot(
        self,
        model_id: str,
        *,
        snapshot: SnapshotRow,
        dropped_snapshots: tuple[int, ...] = (),
        pruned_payloads: tuple[int, int] = (0, 0),
    ) -> None:
        """Adds a snapshot that no request has made; the other arguments are as in `Finish`."""
        first, last = pruned_payloads
        with self.database.transaction() as transaction:
            transaction.execute(_PUT_SNAPSHOT, **vars(snapshot))
            for seq_id in dropped_snapshots:
                transaction.execute(_DROP_SNAPSHOT, model_id=model_id, seq_id=seq_id)
            transaction.execute(_PRUNE_PAYLOADS, model_id=model_id, first=first, last=last)

    def snapshots(self, model_id: str) -> list[SnapshotRow]:
        """The snapshots of a model, newest first."""
        return self.database.rows(
            SnapshotRow, "SELECT * FROM snapshots WHERE model_id = :id ORDER BY seq_id DESC", id=model_id
        )

    def checkpoint(self, model_id: str, kind: str, name: str) -> CheckpointRow | None:
        """A named checkpoint."""
        return self.database.row(
            CheckpointRow,
            "SELECT * FROM checkpoints WHERE model_id = :model_id AND kind = :kind AND name = :name",
            model_id=model_id,
            kind=kind,
            name=name,
        )

    def checkpoint_in(self, folder: str) -> CheckpointRow | None:
        """The checkpoint whose files lie in this folder."""
        return self.database.row(CheckpointRow, "SELECT * FROM checkpoints WHERE folder = :folder", folder=folder)

    def saves(self, model_id: str, *, limit: int = 100) -> list[bytes]:
        """The results of a live model's latest saves and publications, newest first."""
        found = self.database.values(
            "SELECT result FROM jobs WHERE model_id = :model_id AND status = 'done' "
            "AND kind IN ('save_weights', 'save_weights_for_sampler') ORDER BY seq_id DESC LIMIT :limit",
            model_id=model_id,
            limit=limit,
        )
        return [result for result in found if result]

    def checkpoint_bytes(self, owner: str | None = None) -> int:
        """How many bytes the checkpoints of an owner, or of all, have together."""
        condition = "TRUE" if owner is None else "owner = :owner"  # not one condition with OR: it would use no index
        return self.database.value(
            f"SELECT coalesce(sum(size_bytes), 0) FROM checkpoints WHERE {condition}", owner=owner
        )

    def add_sampler(self, row: SamplerRow) -> None:
        """Adds a sampler; an existing one of that id is left as it is. Survives a loss of power after
        `durability.wait_durable`."""
        with self.database.transaction(durable=False) as transaction:
            transaction.execute(insert(SamplerRow, "samplers", on_conflict="IGNORE"), **vars(row.sealed()))

    def sampler(self, sampler_id: str) -> SamplerRow | None:
        """One sampler."""
        return self.database.row(SamplerRow, "SELECT * FROM samplers WHERE sampler_id = :id", id=sampler_id)

    def unnamed_samplers(self, model_id: str) -> list[str]:
        """The ids of the samplers that a model has made without a name."""
        return self.database.values(
            "SELECT sampler_id FROM samplers WHERE model_id = :model_id AND file IS NOT NULL", model_id=model_id
        )

    def drop_samplers(self, sampler_ids: Sequence[str]) -> None:
        """Forgets samplers. Their files may be removed once this commit is durable."""
        with self.database.transaction(durable=False) as transaction:
            transaction.execute(
                "DELETE FROM samplers WHERE sampler_id IN (SELECT value FROM json_each(:ids))", ids=list(sampler_ids)
            )

    def named_among(self, files: Iterable[str]) -> set[str]:
        """Those of some files and folders that a row names. Takes as long as there are names, not rows."""
        return set(self.database.values(_NAMED_AMONG, names=list(files)))

    def named_files(self) -> set[str]:
        """Every file and folder that a row names; whatever else lies in the data directory is an orphan."""
        # a sampler reads a checkpoint's folder for as long as it lives, also after the checkpoint was deleted
        found = self.database.values(
            "SELECT file FROM snapshots UNION SELECT file FROM samplers "
            "UNION SELECT weights_id FROM samplers UNION SELECT folder FROM checkpoints"
        )
        return {name for name in found if name}


def _remove_jobs(transaction: Transaction, models: Sequence[str]) -> bool:
    """Removes the first jobs of some models, as many as one transaction may; False if there were none."""
    rows: list[int] = []
    size_bytes = 0
    for model_id in models:
        for row, row_bytes in transaction.execute(_JOB_SIZES, model_id=model_id, limit=REMOVED_AT_ONCE - len(rows)):
            if size_bytes >= REMOVED_BYTES_AT_ONCE:
                break
            rows.append(row)
            size_bytes += row_bytes
    transaction.execute(_REMOVE_JOBS, rows=rows)
    return bool(rows)
