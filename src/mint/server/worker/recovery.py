"""Brings a model back after a restart: its newest good snapshot, then the finished requests since, bit for bit.

A replay is checked: the digest of every step and the logprobs of every pass must equal those that were acknowledged.
The base model must have the weights, dtype, quantization and kernels with which the model was trained. If something
differs, that model stops until an operator decides (`server/ops/stopped_models`), and the others go on. Used on the
worker's thread only.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mint.wire as wire
from mint.engine.protocol import LoraSpec, MicroBatching
from mint.errors import (
    CheckpointError,
    DamagedDataError,
    JournalError,
    MintError,
    NotFoundError,
    OutOfMemoryError,
    RecoveryDivergedError,
)
from mint.models.fingerprint import BASE_FINGERPRINT
from mint.server.queue.jobs import Decode
from mint.server.store import checkpoint_folders, checkpoints
from mint.server.store.journal import Journal
from mint.server.store.rows import (
    REPLAY_ACCEPTED,
    REPLAY_LOST,
    STATE_BYTES,
    JobRow,
    ModelRow,
    SnapshotRow,
    base_numbers,
    passes_without_effect,
)
from mint.server.store.snapshot_files import read_snapshot
from mint.server.worker.base_numbers import recover_remedy, require_same_numbers
from mint.server.worker.live_models import SKIPPED, LiveModels
from mint.server.worker.model_memory import ModelMemory
from mint.types import ForwardBackwardOutput, OptimStepResponse
from mint.wire.requests import ForwardBackwardRequest, LoadWeightsRequest, OptimStepRequest

log = logging.getLogger("mint.recovery")

_OLDER_MICRO_BATCHING: dict[str, Any] = {"order": "running"}
"""What jobs of older versions do not say: they added micro-batches one after the other."""

COUNTED_STEPS = 16
"""How many steps before a snapshot are looked at, to count those that were skipped in a row."""


class Recovery:
    """Restores the models of one data directory."""

    def __init__(
        self, models: LiveModels, memory: ModelMemory, journal: Journal, data_dir: Path, decode: Decode
    ) -> None:
        self._models = models
        self._memory = memory
        self._journal = journal
        self._data_dir = data_dir
        self._decode = decode

    def restore(self, model_id: str) -> None:
        """Puts a model into the engine as it was after its last finished request.

        Raises:
            NotFoundError: it was never created, or its creation failed.
            RecoveryDivergedError, CheckpointError, DamagedDataError: it cannot be restored; the journal remembers why.
            InvalidRequestError: it does not fit into the memory for models.
            OutOfMemoryError, JournalError: it cannot be restored now; the next request tries again.
        """
        row = self._journal.model(model_id)
        if row is not None:
            row.verify()
        if row is None or row.base_model is None or row.lora is None:
            raise NotFoundError(
                "is not a model here",
                field="model_id",
                value=model_id,
                remedy="Look at the error of the call that made it",
            )
        if row.diverged is not None:
            raise RecoveryDivergedError(row.diverged, remedy=recover_remedy(model_id))
        lora = LoraSpec(**row.lora)
        self._memory.evict_until_fits(model_id, row.base_model, lora)
        try:
            self._restore(row, row.base_model, lora)
        except (OutOfMemoryError, JournalError):
            self._models.drop(model_id)
            raise
        except MintError as error:
            raise self.stop(model_id, error) from error

    def stop(self, model_id: str, error: MintError) -> MintError:
        """Stops a model: its requests fail until an operator decides. Returns the error of this request."""
        reason = error.reason
        self._models.drop(model_id)
        if isinstance(error, DamagedDataError):
            self._journal.storage.note_damage("a row is not as it was written")  # without ids: anybody may read this
        try:
            self._journal.mark_diverged(model_id, reason)
        except DamagedDataError as damage:
            log.error("that model %s has stopped cannot be stored: %s", model_id, damage)
        log.error("model %s has stopped: %s; see mint recover", model_id, reason)
        return type(error)(reason, remedy=recover_remedy(model_id))

    def _restore(self, row: ModelRow, base_model: str, lora: LoraSpec) -> None:
        snapshots = self._journal.snapshots(row.model_id)
        start = 0
        created = self._models.create(row.model_id, base_model, lora, seed_given=bool(row.seed_given))
        require_same_numbers(row, created["effective"])
        for snapshot in snapshots:
            if self._load_snapshot(snapshot):
                start = snapshot.seq_id
                break
            # A new model again: a damaged snapshot may have been written into this one.
            self._models.create(row.model_id, base_model, lora, seed_given=bool(row.seed_given))
        live = self._models[row.model_id]
        live.snapshots.rows = [good for good in snapshots if good.seq_id <= start]
        live.weights_seq = start
        live.skipped_steps = self._skipped_steps(row.model_id, start)
        # Request 0 made the model. Without a snapshot it is replayed if it loaded a checkpoint, too.
        jobs = self._journal.finished_jobs(row.model_id, after=start - 1 if start == 0 else start)
        _require_all(row, start, jobs)
        cleared = passes_without_effect(jobs)
        for job in jobs:
            if job.seq_id in cleared:
                self._models.note_unused(job.model_id, job.digest)
            elif job.seq_id > 0 or job.kind == "load_weights":
                self._replay(job)
        if any(job.replay == REPLAY_ACCEPTED for job in jobs):
            self._memory.save(row.model_id)  # the next restart needs no luck to give these bits again
        if base_numbers(row.effective) is None or not {STATE_BYTES, BASE_FINGERPRINT} <= (row.effective or {}).keys():
            # The operator has accepted the numbers of now, or an older mint wrote the row.
            self._journal.set_effective(row.model_id, created["effective"])
        log.info("model %s restored from snapshot %d and %d requests", row.model_id, start, len(jobs))

    def _skipped_steps(self, model_id: str, seq_id: int) -> int:
        """How many of the steps up to a request were skipped in a row, since the last load."""
        count = 0
        for job in self._journal.steps_and_loads_before(model_id, seq_id + 1, limit=COUNTED_STEPS):
            if job.kind == "load_weights":
                break
            if _was_skipped(job):
                count += 1
            elif job.status == "done":
                break
        return count

    def _load_snapshot(self, snapshot: SnapshotRow) -> bool:
        """Whether the snapshot was good; a bad one is logged, and an older one is tried.

        Raises:
            CheckpointError: its arrays are those of another architecture than the base model has now.
        """
        engine = self._models.engine
        try:
            state = read_snapshot(self._data_dir / snapshot.file, snapshot)
        except CheckpointError as error:
            log.warning("snapshot %s cannot be read: %s", snapshot.file, error)
            return False
        try:
            engine.write_state(snapshot.model_id, state)
        except CheckpointError as error:
            raise CheckpointError(
                f"the LoRA of model {snapshot.model_id} does not fit the base model that is there now: {error.reason}; "
                "put the base model of before back and use --retry"
            ) from error
        if engine.state_digest(snapshot.model_id, like=snapshot.digest) != snapshot.digest:
            log.warning("snapshot %s is damaged: its digest differs", snapshot.file)
            return False
        return True

    def _replay(self, job: JobRow) -> None:
        """Applies a finished request again, and compares the result with the one that was acknowledged."""
        if job.replay != REPLAY_LOST:
            job.verify()
        if job.replay == REPLAY_LOST or job.status == "failed":
            if job.kind == "optim_step" and _was_skipped(job):
                self._models.note_skipped(job.model_id)
            else:
                digest = None if job.replay == REPLAY_LOST else job.digest
                self._models.note_failed(job.model_id, job.kind, digest)
            return
        if job.kind not in ("forward_backward", "optim_step", "load_weights"):
            return
        acknowledged, replayed = self._digests(job)
        if acknowledged == replayed:
            return
        difference = f"replaying request {job.seq_id} ({job.kind}) of {job.model_id} gave {replayed}"
        if job.replay == REPLAY_ACCEPTED:
            log.warning("%s; %s was acknowledged, and the operator has accepted this", difference, acknowledged)
            return
        raise RecoveryDivergedError(
            f"{difference}, but {acknowledged} was acknowledged; "
            "was the machine, the thread count, MINT_NATIVE, mint or torch changed?",
            remedy=recover_remedy(job.model_id),
        )

    def _digests(self, job: JobRow) -> tuple[str | None, str | None]:
        """The digest of what was acknowledged, and that of what the request gives now; of a pass, of its logprobs."""
        if job.payload is None:
            raise CheckpointError(
                f"model {job.model_id} cannot be restored: no snapshot is good, and request {job.seq_id} is pruned",
                remedy="Restore a backup, or load a checkpoint into a new model",
            )
        match self._decode(job.kind, job.payload, wire.Encoding(job.encoding)):
            case ForwardBackwardRequest() as request:
                # Another split into micro-batches, or another order of their sum, would give other bits.
                recorded = job.micro_batching
                decided = None if recorded is None else MicroBatching(**_OLDER_MICRO_BATCHING | recorded)
                content = request.forward_backward_input
                result, *_ = self._models.forward_backward(job.model_id, job.seq_id, content, micro_batching=decided)
                known = wire.decode_result(ForwardBackwardOutput, job.result or b"")
                return _digest_of(known), _digest_of(result)
            case OptimStepRequest() as request:
                _, digest = self._models.optim_step(job.model_id, job.seq_id, request, like=job.digest)
                return job.digest, digest
            case LoadWeightsRequest() as request:
                # For any reader: this one was allowed to when the request ran.
                row = checkpoints.find_checkpoint(self._journal, request.path, reader=None)
                # It fitted the model when the request ran, and the model is on the same base, or on one that the
                # operator has accepted (`require_same_numbers`).
                _, saved = checkpoint_folders.read_checkpoint(self._data_dir / row.folder, optimizer=request.optimizer)
                return job.digest, self._models.load(job.model_id, job.seq_id, saved, like=job.digest)
            case _:
                raise CheckpointError(f"request {job.seq_id} of {job.model_id} is in the journal but cannot be read")


def _require_all(row: ModelRow, start: int, jobs: Sequence[JobRow]) -> None:
    """Checks that the finished requests behind the snapshot `start` are those up to `applied_seq`.

    Raises:
        DamagedDataError: the journal has lost some, or has others.
    """
    if start > row.applied_seq and start > 0:
        raise DamagedDataError(
            f"the journal is damaged: a snapshot of {row.model_id} is of request {start}, but the last finished "
            f"request is {row.applied_seq} (applied_seq)",
            remedy=recover_remedy(row.model_id),
        )
    for job in jobs:
        row.verify_finished(job)
    missing = sorted({*range(start + 1, row.applied_seq + 1)} - {job.seq_id for job in jobs})
    if missing:
        numbers = f"{missing[0]} to {missing[-1]}" if len(missing) > 1 else str(missing[0])
        raise DamagedDataError(
            f"the journal is damaged: it has lost finished requests of {row.model_id}, or their status: {numbers}",
            remedy=recover_remedy(row.model_id),
        )


def _was_skipped(step: JobRow) -> bool:
    """Whether a step was skipped because it would not have been finite, and has failed for that or not."""
    error = wire.decode_error(step.result or b"")
    if error is not None:
        return error.get("field") == SKIPPED
    return bool(step.result) and wire.decode_result(OptimStepResponse, step.result).metrics.get(SKIPPED, 0.0) > 0


def _logprobs_of(output: ForwardBackwardOutput) -> ForwardBackwardOutput:
    """The part that a replay must give again; another version of mint may send other things beside the logprobs."""
    logprobs = [{"logprobs": row["logprobs"]} for row in output.loss_fn_outputs]
    return ForwardBackwardOutput(loss_fn_output_type="", loss_fn_outputs=logprobs)


def _digest_of(output: ForwardBackwardOutput) -> str:
    return hashlib.sha256(wire.encode_result(_logprobs_of(output))).hexdigest()[:32]
