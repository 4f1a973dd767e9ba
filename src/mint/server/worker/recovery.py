"""Brings a model back after a restart: its newest good snapshot, then the finished requests since, bit for bit.

A replay is checked, never trusted: the digest of every step, and the logprobs of every pass, must be those that were
acknowledged. Where they are not, that model stops and says so; the others go on. Used on the worker's thread only.
"""

from __future__ import annotations

import logging

import mint.wire as wire
from mint.engine.protocol import LoraSpec
from mint.errors import CheckpointError, MintError, NotFoundError, RecoveryDivergedError
from mint.server.store import checkpoints
from mint.server.store.rows import JobRow, ModelRow, SnapshotRow
from mint.server.store.snapshot_files import read_snapshot
from mint.server.worker.trainer import Trainer, TrainingJob
from mint.types import ForwardBackwardOutput
from mint.wire.requests import ForwardBackwardRequest, LoadWeightsRequest, OptimStepRequest

log = logging.getLogger("mint.recovery")


def require_live(trainer: Trainer, model_id: str) -> None:
    """Makes sure that the model is in the engine, as it was after its last finished request.

    Raises:
        NotFoundError: it was never made, or its making failed.
        RecoveryDivergedError, CheckpointError: it cannot be brought back; the journal remembers why.
    """
    if model_id in trainer.live:
        return
    row = trainer.journal.model(model_id)
    if row is None or row.base_model is None or row.lora is None:
        raise NotFoundError(
            "is not a model here", field="model_id", value=model_id, remedy="Look at the error of the call that made it"
        )
    if row.diverged is not None:
        raise RecoveryDivergedError(row.diverged, remedy="Load a checkpoint into a new model")
    try:
        _restore(trainer, row)
    except MintError as error:
        trainer.forget(model_id)
        trainer.journal.mark_diverged(model_id, str(error))
        log.error("model %s not restored: %s", model_id, error)
        raise


def _restore(trainer: Trainer, row: ModelRow) -> None:
    assert row.base_model is not None and row.lora is not None  # the caller has checked: the model was made
    lora = LoraSpec(**row.lora)
    trainer.make(row.model_id, row.base_model, lora, seed_given=bool(row.seed_given))
    live = trainer.live[row.model_id]
    live.snapshots = trainer.journal.snapshots(row.model_id)
    start = 0
    for snapshot in live.snapshots:
        if _load_snapshot(trainer, snapshot):
            start = live.weights_seq = snapshot.seq_id
            break
        trainer.make(row.model_id, row.base_model, lora, seed_given=bool(row.seed_given))
    trainer.live[row.model_id].snapshots = [kept for kept in live.snapshots if kept.seq_id <= start]
    trainer.live[row.model_id].weights_seq = start
    jobs = trainer.journal.jobs(row.model_id, after=start - 1 if start == 0 else start, status=("done", "failed"))
    for job in jobs:
        if job.seq_id > 0 or job.kind == "load_weights":
            _replay(trainer, job)
    log.info("model %s restored from snapshot %d and %d requests", row.model_id, start, len(jobs))


def _load_snapshot(trainer: Trainer, snapshot: SnapshotRow) -> bool:
    """Whether the snapshot was good; a bad one is logged, and an older one is tried."""
    try:
        trainer.engine.write_state(snapshot.model_id, read_snapshot(trainer.data_dir / snapshot.file))
    except CheckpointError as error:
        log.warning("snapshot %s cannot be read: %s", snapshot.file, error)
        return False
    if trainer.engine.state_digest(snapshot.model_id) != snapshot.digest:
        log.warning("snapshot %s is damaged: its digest differs", snapshot.file)
        return False
    return True


def _replay(trainer: Trainer, job: JobRow) -> None:
    """Does again what a finished request did to the model, and compares."""
    if job.status == "failed":
        trainer.note_failed(job.model_id, job.kind)
    elif job.kind in ("forward_backward", "optim_step", "load_weights"):
        _redo(trainer, job)


def _redo(trainer: Trainer, job: JobRow) -> None:
    if job.payload is None:
        raise CheckpointError(
            f"model {job.model_id} cannot be restored: no snapshot is good, and request {job.seq_id} is pruned",
            remedy="Load a checkpoint into a new model",
        )
    request = TrainingJob.decode(job.kind, job.payload, wire.Encoding(job.encoding))
    match request:
        case ForwardBackwardRequest():
            result = trainer.run_pass(job.model_id, request.forward_backward_input, gradient=True)
            known = wire.decode_result(ForwardBackwardOutput, job.result or b"")
            same = wire.is_same(_bits_of(known), _bits_of(result))
        case OptimStepRequest():
            same = trainer.step(job.model_id, request)[1] == job.digest
            trainer.live[job.model_id].weights_seq = job.seq_id
        case LoadWeightsRequest():
            row = checkpoints.find_checkpoint(trainer.journal, request.path, reader=None)
            saved = checkpoints.evaluate_checkpoint(trainer.data_dir / row.folder, optimizer=request.optimizer)
            same = trainer.load(job.model_id, *saved) == job.digest
            trainer.live[job.model_id].weights_seq = job.seq_id
        case _:
            raise CheckpointError(f"request {job.seq_id} of {job.model_id} is in the journal but cannot be read")
    if not same:
        raise RecoveryDivergedError(
            f"replaying request {job.seq_id} ({job.kind}) of {job.model_id} gave other bits than were acknowledged; "
            "was the machine, the thread count, MINT_NATIVE, mint or torch changed?",
            remedy="Load a checkpoint into a new model",
        )


def _bits_of(output: ForwardBackwardOutput) -> ForwardBackwardOutput:
    """What a replay must give again; what comes beside the logprobs may be of another version's making."""
    logprobs = [{"logprobs": row["logprobs"]} for row in output.loss_fn_outputs]
    return ForwardBackwardOutput(loss_fn_output_type="", loss_fn_outputs=logprobs)
