"""Runs training requests, one at a time and in order, and says what the journal shall commit for each.

A step is committed together with a digest of the state it led to, and with a snapshot of a small state. A result is
final only after the journal has committed it (`JobOutcome`). Used on the worker's thread only.
"""

from __future__ import annotations

import logging
import secrets
import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel

import mint.wire as wire
from mint.engine.protocol import LoraSpec, ModelsLostError, ModelState, is_out_of_memory
from mint.errors import (
    ConflictError,
    DamagedDataError,
    InvalidRequestError,
    JournalError,
    MintError,
    OutOfMemoryError,
)
from mint.server.ids import file_stem, sampler_id, seed_root, session_of
from mint.server.limits import MAX_SNAPSHOTS
from mint.server.queue.futures import FutureResult
from mint.server.queue.jobs import MEMORY_PATIENCE_S, Decode, TrainingJob
from mint.server.store import checkpoint_folders, checkpoints
from mint.server.store.checkpoint_folders import Manifest
from mint.server.store.journal import Finish, Journal
from mint.server.store.rows import CheckpointRow, SamplerRow
from mint.server.store.snapshot_files import size_bytes
from mint.server.worker import validation
from mint.server.worker.failed_passes import data_digest
from mint.server.worker.live_models import LiveModels
from mint.server.worker.model_memory import ModelMemory
from mint.server.worker.recovery import Recovery
from mint.server.worker.snapshots import ROOM_SHARE, Snapshots, prune_results
from mint.types import (
    CreateModelResponse,
    LoadWeightsResponse,
    OptimStepResponse,
    SaveWeightsExternalResponse,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
)
from mint.types.checkpoint_path import CheckpointPath
from mint.wire.requests import (
    CreateModelRequest,
    ForwardBackwardRequest,
    ForwardRequest,
    LoadWeightsRequest,
    OptimStepRequest,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
)

log = logging.getLogger("mint.worker")


MAX_LOSSES = 3
"""So often a request is run again after the engine has lost its models; then it fails, for it may be the reason."""

CHANGES_STATE = frozenset({"create_model", "load_weights", "optim_step"})


@dataclass(frozen=True)
class JobOutcome:
    """What the journal shall commit, and the files to delete after that."""

    finish: Finish
    obsolete_files: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Success:
    """What a request that succeeded has done; `changes` are fields of `Finish`."""

    result: BaseModel
    digest: str | None = None
    changes: dict[str, Any] = field(default_factory=dict)
    obsolete_files: tuple[str, ...] = ()


class _MemoryShortError(OutOfMemoryError):
    """Memory is short for a request, which shall be tried again."""


class Trainer:
    """Runs the training requests of one data directory."""

    def __init__(
        self,
        models: LiveModels,
        journal: Journal,
        data_dir: Path,
        *,
        decode: Decode,
        model_memory_bytes: int | None,
        require_save: Callable[[str, int], None],
        require_snapshots: Callable[[str, int], None],
        require_space: Callable[[int], None],
        journal_room: Callable[[str], int | None],
    ) -> None:
        """`decode` decodes requests of the journal; `model_memory_bytes` is the limit of `ModelMemory`. `require_save`
        raises if an owner may not save so many bytes now: others of its requests may have saved meanwhile.
        `require_snapshots` raises if an owner's new model may not have snapshots of so many bytes.
        `require_space` raises if so many bytes would fill the disk up to its reserve. `journal_room` is
        `JournalUse.room`."""
        self.models = models
        self._bases = models.bases
        self._journal = journal
        self._data_dir = data_dir
        self._require_save = require_save
        self._require_snapshots = require_snapshots
        self._require_space = require_space
        self._journal_room = journal_room
        self._short_since: dict[tuple[str, int], float] = {}  # requests for which memory was short → since when
        self._losses: Counter[tuple[str, int]] = Counter()  # how often the engine lost its models in a request
        self._snapshots = Snapshots(journal, data_dir)
        self.memory = ModelMemory(models, journal, self._snapshots, data_dir, limit_bytes=model_memory_bytes)
        self._recovery = Recovery(models, self.memory, journal, data_dir, decode)
        self._runners: dict[str, Callable[[TrainingJob, Any], _Success]] = {
            "create_model": self._create_model,
            "forward": self._forward,
            "forward_only": self._forward_only,
            "forward_backward": self._forward_backward,
            "optim_step": self._optim_step,
            "save_weights": self._save_weights,
            "save_weights_for_sampler": self._save_weights_for_sampler,
            "save_weights_external": self._save_weights_external,
            "load_weights": self._load_weights,
        }

    def run(self, job: TrainingJob) -> JobOutcome:
        """Runs a request whose turn it is; restores its model first, if it is not in the engine.

        Raises:
            JournalError: the storage does not work now; the request shall be run again.
            OutOfMemoryError: memory is short now, and has not been for long; the request shall be run again.
            ModelsLostError: the engine has lost its models; the request shall be run again.
        """
        self.models.forget_lost()
        try:
            if not self.models.touch(job.model_id) and job.seq_id > 0:
                self._restore(job)
            if job.kind == "optim_step":
                self.models.require_whole_gradient(job.model_id)
            if isinstance(job.request, MintError):  # a body that could not be decoded fails here, in its turn
                raise job.request
            effect = self._runners[job.kind](job, job.request)
        except JournalError:
            if job.kind in CHANGES_STATE:  # the engine is ahead of the journal: restore the model, then run it again
                self.models.drop(job.model_id)
            raise
        except DamagedDataError as error:  # without this request, all that follow would compute other bits
            return self._failed(job, self.stop(job.model_id, error))
        except _MemoryShortError:
            raise
        except MintError as error:
            return self._failed(job, error)
        except ModelsLostError as error:
            self._losses[job.model_id, job.seq_id] += 1
            if self._losses[job.model_id, job.seq_id] < MAX_LOSSES:
                raise
            log.error("request %d (%s) of %s fails: %s", job.seq_id, job.kind, job.model_id, error)
            return self._failed(job, error)
        except Exception as error:  # the boundary: an engine may raise anything, and the client must be told
            if is_out_of_memory(error) and self._may_wait(job):
                self.models.drop(job.model_id)  # its state is unknown: restore it, then run the request again
                raise _MemoryShortError(f"memory is short for a request ({job.kind}): {error!r}") from error
            log.exception("request %d (%s) of %s failed", job.seq_id, job.kind, job.model_id)
            outcome = self._failed(job, error)
            if job.kind != "forward_backward":
                self.models.drop(job.model_id)  # its state is unknown: the next request restores it
            return outcome
        self._forget_trials(job)
        body = wire.encode_result(effect.result)
        room = self._journal_room(job.owner)
        pruned = prune_results(self.models[job.model_id].snapshots, job.seq_id, len(body), room_bytes=room)
        finish = Finish(job.model_id, job.seq_id, "done", body, effect.digest, **effect.changes, **pruned)
        return JobOutcome(finish, effect.obsolete_files)

    def stop(self, model_id: str, error: MintError) -> MintError:
        """Stops a model, as `Recovery.stop`."""
        return self._recovery.stop(model_id, error)

    def drop(self, model_id: str) -> None:
        """Takes a model out of the engine, and forgets the trials of its requests."""
        self.models.drop(model_id)
        for trials in (self._short_since, self._losses):
            for request in [request for request in trials if request[0] == model_id]:
                del trials[request]

    def _restore(self, job: TrainingJob) -> None:
        try:
            self._recovery.restore(job.model_id)
        except OutOfMemoryError as error:
            if self._may_wait(job):
                raise _MemoryShortError(f"memory is short to restore a model: {error}") from error
            raise

    def _may_wait(self, job: TrainingJob) -> bool:
        """Whether a request for which memory is short may be tried again."""
        now = time.monotonic()
        return now - self._short_since.setdefault((job.model_id, job.seq_id), now) < MEMORY_PATIENCE_S

    def _forget_trials(self, job: TrainingJob) -> None:
        self._short_since.pop((job.model_id, job.seq_id), None)
        self._losses.pop((job.model_id, job.seq_id), None)

    def _failed(self, job: TrainingJob, error: Exception) -> JobOutcome:
        self._forget_trials(job)
        self.models.forget_lost()
        pruned = (0, 0)
        digest = None
        if job.kind == "forward_backward":
            if isinstance(job.request, ForwardBackwardRequest):
                digest = data_digest(job.request.forward_backward_input)
            self.models.note_failed(job.model_id, job.kind, digest)
            pruned = self.models.passes_since_step(job.model_id, job.seq_id)
        body = FutureResult.of_error(error).body
        return JobOutcome(Finish(job.model_id, job.seq_id, "failed", body, digest, pruned_payloads=pruned))

    # --- passes and steps ----------------------------------------------------------------------------------------

    def _forward(self, job: TrainingJob, request: ForwardRequest) -> _Success:
        return _Success(self.models.forward(job.model_id, request.forward_input))

    def _forward_backward(self, job: TrainingJob, request: ForwardBackwardRequest) -> _Success:
        output, used, digest = self.models.forward_backward(job.model_id, job.seq_id, request.forward_backward_input)
        return _Success(output, digest, {} if used is None else {"micro_batching": asdict(used)})

    def _forward_only(self, job: TrainingJob, request: ForwardBackwardRequest) -> _Success:
        return _Success(self.models.forward(job.model_id, request.forward_backward_input))

    def _optim_step(self, job: TrainingJob, request: OptimStepRequest) -> _Success:
        _refuse_other_optimizer("optimizer_params", request.optimizer_params)
        metrics, digest = self.models.optim_step(job.model_id, job.seq_id, request)
        self.models.require_finite_steps(job.model_id)
        history = self.models[job.model_id].snapshots
        read_state = self.models.engine.read_state
        frees = self._must_free_payloads(job)
        changes, obsolete = self._snapshots.save(
            history, job.model_id, job.seq_id, read_state, digest, force=frees, frees_payloads=frees
        )
        return _Success(OptimStepResponse(metrics=metrics, state_digest=digest), digest, changes, obsolete)

    def _must_free_payloads(self, job: TrainingJob) -> bool:
        """Whether the owner's quota of the journal is half used up, and this model's payloads are a good part of what
        is left: without a snapshot that replaces them, its next requests would find no room."""
        room = self._journal_room(job.owner)
        if room is None:
            return False
        pruned_below = self.models[job.model_id].snapshots.pruned_below
        return ROOM_SHARE * self._journal.payload_bytes(job.model_id, first=pruned_below) > room

    # --- creating and loading ------------------------------------------------------------------------------------

    def _create_model(self, job: TrainingJob, request: CreateModelRequest) -> _Success:
        _refuse_other_optimizer("optimizer_config", request.optimizer_config)
        if request.rollout_correction_config is not None:
            raise InvalidRequestError(
                "is not supported",
                field="rollout_correction_config",
                value=request.rollout_correction_config,
                remedy="Correct on the client, or bound ratios with loss_fn_config: tis_cap, clip_high_threshold",
            )
        config = validation.check_lora(request.lora_config)
        seed = secrets.randbits(31) if config.seed is None else config.seed
        spec = LoraSpec(config.rank, seed, config.train_attn, config.train_mlp, config.train_unembed)
        base_model = self._bases.require(request.base_model)
        self._make_room(job, base_model, spec)
        columns = self.models.create(job.model_id, base_model, spec, seed_given=config.seed is not None)
        return _Success(CreateModelResponse(model_id=job.model_id), changes={"model": columns})

    def _make_room(self, job: TrainingJob, base_model: str, spec: LoraSpec) -> None:
        """Checks that the base has a fitting tokenizer and that a new model may have its snapshots, and makes room for
        it in the memory."""
        self._bases.require_fitting_tokenizer(base_model)
        self._require_snapshots(job.owner, MAX_SNAPSHOTS * self.models.state_bytes(base_model, spec))
        self.memory.evict_until_fits(job.model_id, base_model, spec)

    def _load_weights(self, job: TrainingJob, request: LoadWeightsRequest) -> _Success:
        _refuse_other_optimizer("optimizer_config", request.optimizer_config)
        if request.weights_access_token not in (None, ""):
            raise InvalidRequestError(
                "is not supported",
                field="weights_access_token",
                value="(given)",
                remedy="Leave it out: load your own checkpoints, or those that their owners have published",
            )
        row = checkpoints.find_checkpoint(self._journal, request.path, reader=self._journal.owner(job.model_id))
        manifest, state = checkpoint_folders.read_checkpoint(self._data_dir / row.folder, optimizer=request.optimizer)
        # Each load writes a snapshot, which has the weights and two moments.
        self._require_space(3 * sum(array.nbytes for array in state.weights.values()))
        base_model = manifest.base_model
        if job.seq_id == 0 or request.base_model is not None:
            base_model = self._bases.require_base_of(manifest, request.base_model or manifest.base_model)
        created: dict[str, Any] = {}
        if job.seq_id == 0:
            self._make_room(job, base_model, manifest.lora_spec)
            columns = self.models.create(job.model_id, base_model, manifest.lora_spec, seed_given=manifest.seed_given)
            created = {"model": columns}
        self.models.require_fits(job.model_id, manifest)
        digest = self.models.load(job.model_id, job.seq_id, state)
        history = self.models[job.model_id].snapshots
        read_state = self.models.engine.read_state
        changes, obsolete = self._snapshots.save(history, job.model_id, job.seq_id, read_state, digest, force=True)
        self._snapshots.wait_written(history)  # the next load sees how much room is left
        result = LoadWeightsResponse(path=request.path, model_id=job.model_id)
        return _Success(result, digest, {**changes, **created}, obsolete)

    # --- saving --------------------------------------------------------------------------------------------------

    def _save_weights(self, job: TrainingJob, request: SaveWeightsRequest) -> _Success:
        row, replaced = self._save(job, checkpoints.TRAINING, request, request.path, overwrite=request.overwrite)
        path = CheckpointPath(row.model_id, row.kind, row.name)
        return _Success(SaveWeightsResponse(path=path.uri), None, {"checkpoint": row}, replaced)

    def _save_weights_for_sampler(self, job: TrainingJob, request: SaveWeightsForSamplerRequest) -> _Success:
        if request.kind != "snapshot":
            remedy = "Pass snapshot: each sampler keeps the weights that it was made from"
            raise InvalidRequestError("is not supported", field="kind", value=request.kind, remedy=remedy)
        if request.sampling_session_seq_id is not None:
            return self._publish(job, request.sampling_session_seq_id)
        if request.path is None:
            raise InvalidRequestError("is missing", field="path", value="(none)", remedy="Give the checkpoint a name")
        row, replaced = self._save(job, checkpoints.SAMPLER, request, request.path, overwrite=False)
        self.models[job.model_id].published_seq = job.seq_id
        path = CheckpointPath(row.model_id, row.kind, row.name)
        return _Success(SaveWeightsForSamplerResponse(path=path.uri), None, {"checkpoint": row}, replaced)

    def _save_weights_external(self, job: TrainingJob, request: SaveWeightsExternalRequest) -> _Success:
        if request.age_encryption_recipients not in (None, []):
            raise InvalidRequestError(
                "is not supported",
                field="age_encryption_recipients",
                value=request.age_encryption_recipients,
                remedy="Leave it out; `tinker checkpoint download` and `mint checkpoints download` do not ask for it",
            )
        row, replaced = self._save(job, checkpoints.EXTERNAL, request, request.path, overwrite=False)
        path = CheckpointPath(row.model_id, row.kind, row.name)
        result = SaveWeightsExternalResponse(path=path.uri, size_bytes=row.size_bytes)
        return _Success(result, None, {"checkpoint": row}, replaced)

    def _save(
        self,
        job: TrainingJob,
        kind: str,
        request: SaveWeightsRequest | SaveWeightsForSamplerRequest | SaveWeightsExternalRequest,
        name: str,
        *,
        overwrite: bool,
    ) -> tuple[CheckpointRow, tuple[str, ...]]:
        """Writes a named checkpoint; returns its row, and the folder that it replaces."""
        path = CheckpointPath(job.model_id, kind, checkpoints.check_name(name))
        ttl_s = checkpoints.check_ttl(request.ttl_seconds)
        existing = self._journal.checkpoint(job.model_id, kind, name)
        if existing is not None and not overwrite and not checkpoints.is_expired(existing, time.time()):
            remedy = "Choose another name, or call save_state with overwrite=True"
            raise ConflictError("names a checkpoint that exists already", field="name", value=name, remedy=remedy)
        owner = self._journal.owner(job.model_id)
        live = self.models[job.model_id]
        state = self.models.engine.read_state(job.model_id)
        with_optimizer = kind == checkpoints.TRAINING
        # Without the headers and the manifest: their size is known only when they are written.
        size = size_bytes(state if with_optimizer else ModelState(state.weights))
        self._require_save(owner, size - (existing.size_bytes or 0 if existing else 0))
        # A name made of the request: run again after a crash, it writes to the same folder and leaves no orphan.
        folder = f"checkpoints/{uuid.uuid5(uuid.NAMESPACE_URL, f'{job.model_id}/{job.seq_id}')}"
        now = time.time()
        manifest = Manifest(
            path.uri,
            live.base_model,
            asdict(live.lora),
            live.seed_given,
            state.step,
            now,
            base_fingerprint=live.base_fingerprint,
        )
        with self._journal.storage.writing("a checkpoint", size):
            checkpoint_folders.write_checkpoint(self._data_dir / folder, state, manifest, optimizer=with_optimizer)
        row = CheckpointRow(
            job.model_id,
            kind,
            name,
            folder,
            now,
            owner=owner,
            expires_at=None if ttl_s is None else now + ttl_s,
            size_bytes=checkpoint_folders.folder_size(self._data_dir / folder),
            user_metadata=request.user_metadata,
        )
        return row, (existing.folder,) if existing else ()

    def _publish(self, job: TrainingJob, number: int) -> _Success:
        """Freezes the weights for a new sampling session, in the engine and in a file."""
        session_id = session_of(job.model_id)
        published_id = sampler_id(session_id, number)
        if self._journal.sampler(published_id) is not None:
            raise ConflictError("is taken", field="sampling_session_seq_id", value=number, remedy="Count upwards")
        live = self.models[job.model_id]
        file = f"published/{file_stem(published_id)}.safetensors"
        self._snapshots.save_weights(file, self.models.engine.read_weights(job.model_id))
        self.models.engine.publish(job.model_id, published_id)
        live.published_seq = job.seq_id
        root = seed_root(live.lora.seed if live.seed_given else None, number)
        lora = asdict(live.lora)
        row = SamplerRow(published_id, session_id, live.base_model, None, published_id, file, lora, root, job.model_id)
        result = SaveWeightsForSamplerResponse(sampling_session_id=published_id)
        return _Success(result, changes={"sampler": row})


def _refuse_other_optimizer(field: str, config: dict[str, Any] | None) -> None:
    """Refuses an optimizer that is named and is not AdamW, and settings, which are those of each step."""
    remedy = "Leave it out: the optimizer is AdamW, with the settings of each step's adam_params"
    for key, value in (config or {}).items():
        if key == "type" and value not in (None, "adamw", "adam"):
            raise InvalidRequestError("is not an optimizer here", field=f"{field}.type", value=value, remedy=remedy)
        if key != "type" and value is not None:
            raise InvalidRequestError("is not read", field=f"{field}.{key}", value=value, remedy=remedy)
