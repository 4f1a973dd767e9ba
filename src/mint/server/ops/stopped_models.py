"""The models of a data directory that have stopped, and what an operator decides about them.

A model stops when its state cannot be restored as it was acknowledged (`server/worker/recovery`). A decision is stored
in the journal; the next process that serves the model acts on it, at the model's next request. Knows no engine: the
caller says how the arrays of a snapshot are verified.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from enum import StrEnum
from itertools import count
from pathlib import Path

from mint.engine.protocol import ModelState
from mint.errors import CheckpointError, DamagedDataError, InvalidRequestError
from mint.models.fingerprint import BASE_FINGERPRINT
from mint.server.spare_space import SpareSpace
from mint.server.store import checkpoint_folders, checkpoints
from mint.server.store.checkpoint_folders import Manifest
from mint.server.store.database import OpenFor
from mint.server.store.instances import ServerLock, visiting
from mint.server.store.journal import JOURNAL_FILE, Journal
from mint.server.store.rows import (
    REPLAY_ACCEPTED,
    REPLAY_LOST,
    CheckpointRow,
    JobRow,
    ModelRow,
    SnapshotRow,
    passes_without_effect,
)
from mint.server.store.snapshot_files import read_snapshot, size_bytes
from mint.types.checkpoint_path import CheckpointPath

CHANGING_KINDS = frozenset({"forward_backward", "optim_step", "load_weights"})
"""The requests that are run again in a replay."""

IsSound = Callable[[ModelState, str], bool]
"""Whether the arrays of a state have this digest."""


class Decision(StrEnum):
    """What to do with a stopped model."""

    RETRY = "retry"
    """Restore it again, and compare as before: for when what had changed was changed back."""

    ACCEPT = "accept"
    """Replay the finished requests, and go on from the state to which they lead here. First the newest sound
    snapshot is saved as a checkpoint."""

    AT_SNAPSHOT = "at-snapshot"
    """Go back to the newest sound snapshot, which is saved as a checkpoint, too. The finished requests after it count
    as failed."""


@dataclass(frozen=True)
class FinishedRequest:
    """A request that was acknowledged."""

    seq_id: int
    kind: str


@dataclass(frozen=True)
class StoppedModel:
    """A model that has stopped: why, its newest sound snapshot (0 is the new model), and the requests done after that.

    `snapshot` is None if none is sound. `obstacle` says why those requests cannot be replayed.
    """

    model_id: str
    owner: str
    reason: str
    snapshot: int | None
    requests: tuple[FinishedRequest, ...]
    obstacle: str | None


def stopped_models(data_dir: Path, is_sound: IsSound) -> list[StoppedModel]:
    """The stopped models of a data directory; also beside a running server.

    Raises:
        InvalidRequestError: it holds no data of mint.
        JournalError: it cannot be read.
    """
    with closing(Journal(_journal_file(data_dir), OpenFor.READING)) as journal:
        return [_describe(journal, data_dir, row, is_sound) for row in journal.stopped_models()]


@dataclass(frozen=True)
class Decided:
    """A stored decision, and what it concerns. `checkpoint` is the path under which the snapshot's state was saved, for
    programs that start anew."""

    decision: Decision
    stopped: StoppedModel
    checkpoint: str | None


def decide(data_dir: Path, model_id: str, decision: Decision, is_sound: IsSound) -> Decided:
    """Stores a decision.

    Raises:
        InvalidRequestError: the data directory is in use, the model has not stopped, or it cannot go on in this way.
        DamagedDataError: the settings of the model are damaged.
        JournalError: the decision cannot be stored.
    """
    file = _journal_file(data_dir)
    # a new checkpoint must not take the space that is kept for deleting one
    opened_for = OpenFor.COMMAND if decision is Decision.RETRY else OpenFor.SERVICE
    if opened_for is OpenFor.COMMAND:
        SpareSpace(file).release_if_short()  # the locks are files, too
    with (
        closing(ServerLock(data_dir)),
        closing(Journal(file, opened_for)) as journal,
        visiting(data_dir) as instance,
    ):
        row = journal.model(model_id)
        if row is None or row.diverged is None:
            problem = "is not a model here" if row is None else "has not stopped"
            remedy = "`mint recover` without a model lists those that have"
            raise InvalidRequestError(problem, field="model", value=model_id, remedy=remedy)
        session = journal.session(row.session_id)
        if session is not None and instance.is_held(session.instance_id):
            remedy = "End that program first"
            raise InvalidRequestError("is in use by a running program", field="model", value=model_id, remedy=remedy)
        stopped = _describe(journal, data_dir, row, is_sound)
        if decision is not Decision.RETRY:
            row.verify()
            _require_possible(stopped, decision)
        saved = None if decision is Decision.RETRY else _save_snapshot(journal, data_dir, row, stopped)
        journal.restart_model(
            model_id,
            replay=_replay(journal, stopped, decision),
            checkpoint=saved,
            accept_numbers=decision is not Decision.RETRY,
        )
        path = None if saved is None else CheckpointPath(saved.model_id, saved.kind, saved.name).uri
        return Decided(decision, stopped, path)


def _save_snapshot(journal: Journal, data_dir: Path, row: ModelRow, stopped: StoppedModel) -> CheckpointRow | None:
    """Writes the newest sound snapshot as a checkpoint of the model, with its optimizer; None for the new model."""
    snapshot = next((each for each in journal.snapshots(row.model_id) if each.seq_id == stopped.snapshot), None)
    if snapshot is None or row.base_model is None or row.lora is None:
        return None
    state = read_snapshot(data_dir / snapshot.file, snapshot)
    path = _free_path(journal, row.model_id, f"recovered-{snapshot.seq_id}")
    folder = _folder_of(path)
    now = time.time()
    manifest = Manifest(
        path.uri,
        row.base_model,
        row.lora,
        bool(row.seed_given),
        state.step,
        now,
        base_fingerprint=(row.effective or {}).get(BASE_FINGERPRINT),
    )
    with journal.storage.writing("a checkpoint", size_bytes(state)):
        checkpoint_folders.write_checkpoint(data_dir / folder, state, manifest, optimizer=True)
    size = checkpoint_folders.folder_size(data_dir / folder)
    return CheckpointRow(row.model_id, path.kind, path.name, folder, now, owner=stopped.owner, size_bytes=size)


def _free_path(journal: Journal, model_id: str, name: str) -> CheckpointPath:
    """The path of this name, or with the first number behind it that no checkpoint of a user has."""
    path = CheckpointPath(model_id, checkpoints.TRAINING, name)
    numbers = count(2)
    while True:
        existing = journal.checkpoint(path.model_id, path.kind, path.name)
        if existing is None or existing.folder == _folder_of(path):
            return path
        path = CheckpointPath(model_id, checkpoints.TRAINING, f"{name}-{next(numbers)}")


def _folder_of(path: CheckpointPath) -> str:
    """Made of the path: written again after a kill, or by another decision at the same snapshot, it is the same."""
    return f"checkpoints/{uuid.uuid5(uuid.NAMESPACE_URL, path.uri)}"


def _require_possible(stopped: StoppedModel, decision: Decision) -> None:
    if stopped.snapshot is None:
        remedy = "Restore a backup, or load a checkpoint into a new model"
        raise InvalidRequestError("has no sound snapshot", field="model", value=stopped.model_id, remedy=remedy)
    if decision is Decision.ACCEPT and stopped.obstacle is not None:
        remedy = "Choose --at-snapshot, or restore a backup"
        raise InvalidRequestError(stopped.obstacle, field="--accept", value=stopped.model_id, remedy=remedy)


def _replay(journal: Journal, stopped: StoppedModel, decision: Decision) -> dict[int, str]:
    """What the journal shall say of each finished request after the snapshot."""
    if decision is Decision.RETRY:
        return {}
    return {
        # what has failed is not run in any case: this spares it the check of its payload, which may be why it failed
        job.seq_id: REPLAY_ACCEPTED if decision is Decision.ACCEPT and _is_done(job) else REPLAY_LOST
        for job in journal.finished_jobs(stopped.model_id, after=stopped.snapshot or 0)
    }


def _describe(journal: Journal, data_dir: Path, row: ModelRow, is_sound: IsSound) -> StoppedModel:
    try:
        return _describe_readable(journal, data_dir, row, is_sound)
    except DamagedDataError as error:
        return StoppedModel(row.model_id, "(unknown)", row.diverged or "", None, (), error.message)


def _describe_readable(journal: Journal, data_dir: Path, row: ModelRow, is_sound: IsSound) -> StoppedModel:
    snapshots = journal.snapshots(row.model_id)
    newest = next((each.seq_id for each in snapshots if _is_good(each, data_dir, is_sound)), None if snapshots else 0)
    finished = journal.finished_jobs(row.model_id, after=newest or 0)
    cleared = passes_without_effect(finished)
    done = [job for job in finished if _is_done(job) and job.seq_id not in cleared]
    requests = tuple(FinishedRequest(job.seq_id, job.kind) for job in done)
    owner = journal.owner(row.model_id)
    return StoppedModel(row.model_id, owner, row.diverged or "", newest, requests, _obstacle(row, done))


def _is_done(job: JobRow) -> bool:
    return job.status == "done" and job.replay != REPLAY_LOST


def _obstacle(row: ModelRow, done: list[JobRow]) -> str | None:
    """Why these requests cannot be replayed."""
    for job in done:
        try:
            row.verify_finished(job)
            job.verify()
        except DamagedDataError as error:
            return error.message
        if job.payload is None and job.kind in CHANGING_KINDS:
            return f"request {job.seq_id} is no longer in the journal"
    return None


def _is_good(snapshot: SnapshotRow, data_dir: Path, is_sound: IsSound) -> bool:
    try:
        return is_sound(read_snapshot(data_dir / snapshot.file, snapshot), snapshot.digest)
    except CheckpointError:
        return False


def _journal_file(data_dir: Path) -> Path:
    file = data_dir / JOURNAL_FILE
    if not file.is_file():
        remedy = "Give the directory that mint serve uses, or the MINT_HOME of the program"
        raise InvalidRequestError("holds no data of mint", field="--data-dir", value=data_dir, remedy=remedy)
    return file
