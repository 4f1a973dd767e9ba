"""Runs the training requests of a model, one at a time and in order, and says what each of them makes true.

What it guarantees: after a failed pass the next step is refused and the gradient cleared, never a half step; a step is
told to the journal together with a digest of the state it led to, and with a snapshot of it where the state is small.
Used on the worker's thread only. Does not know how requests arrive or who waits; nothing is true until the journal has
committed the `Outcome`.
"""

from __future__ import annotations

import secrets
import shutil
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel

import mint.wire as wire
from mint.engine.protocol import LOSSES, BaseInfo, Engine, LoraSpec, LossSpec, ModelState, PassResult
from mint.errors import ConflictError, InvalidRequestError, MintError, StepRefusedError
from mint.models.tensor_files import sync_file
from mint.server.callers import LOCAL_OWNER
from mint.server.ids import file_stem, sampler_id, seed_root, session_of
from mint.server.store import checkpoints
from mint.server.store.checkpoints import CheckpointPath, Manifest
from mint.server.store.journal import Finish, Journal
from mint.server.store.rows import CheckpointRow, SamplerRow, SnapshotRow
from mint.server.store.snapshot_files import size_bytes, write_snapshot, write_weights
from mint.server.worker import validation
from mint.server.worker.base_models import Bases
from mint.server.worker.lint import lint
from mint.types import (
    CreateModelResponse,
    ForwardBackwardOutput,
    LoadWeightsResponse,
    OptimStepResponse,
    SaveWeightsExternalResponse,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
    TensorData,
)
from mint.wire.requests import (
    CreateModelRequest,
    ForwardBackwardInput,
    ForwardBackwardRequest,
    ForwardRequest,
    LoadWeightsRequest,
    OptimStepRequest,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
)

SMALL_STATE_BYTES = 20 * 1024 * 1024
"""States up to this size are saved before every step is acknowledged."""

SNAPSHOT_INTERVAL_S = 10.0
KEPT_SNAPSHOTS = 3

REQUESTS: dict[str, type[BaseModel]] = {
    "create_model": CreateModelRequest,
    "forward": ForwardRequest,
    "forward_only": ForwardBackwardRequest,
    "forward_backward": ForwardBackwardRequest,
    "optim_step": OptimStepRequest,
    "save_weights": SaveWeightsRequest,
    "save_weights_for_sampler": SaveWeightsForSamplerRequest,
    "save_weights_external": SaveWeightsExternalRequest,
    "load_weights": LoadWeightsRequest,
}
"""Every kind of request that is journaled, and the type of its body."""


@dataclass(frozen=True)
class TrainingJob:
    """A request that the journal has accepted. `request` is the decoded payload, or why it cannot be decoded.

    `commit` is the journal's commit that accepted it: its answer is sent only after that is durable.
    """

    model_id: str
    seq_id: int
    kind: str
    request: BaseModel | MintError
    arrived_at: float = 0.0
    commit: int = 0

    @staticmethod
    def decode(kind: str, payload: bytes, encoding: wire.Encoding = wire.Encoding.JSON) -> BaseModel | MintError:
        """The request in a payload; a wrong one is the reason for which its job fails in its turn."""
        try:
            return wire.decode(REQUESTS[kind], payload, encoding)
        except InvalidRequestError as error:
            return error

    @staticmethod
    def kind_of(route: str, request: BaseModel | MintError) -> str:
        """The kind under which a route's request is journaled: a pass without a gradient cannot spoil one."""
        forward_only = isinstance(request, ForwardBackwardRequest) and request.forward_only
        return "forward_only" if forward_only else route


@dataclass(frozen=True)
class Outcome:
    """What the journal shall commit, the files that nobody needs then, and when one that it names is `written`."""

    finish: Finish
    obsolete_files: tuple[str, ...] = ()
    written: Future[None] | None = None


@dataclass
class LiveModel:
    """A model in the engine. `poisoned`: a pass has failed since the last step, so the next step is refused."""

    base_model: str
    base: BaseInfo
    lora: LoraSpec
    seed_given: bool
    poisoned: bool = False
    snapshots: list[SnapshotRow] = field(default_factory=list)  # newest first
    snapshot_at: float = 0.0
    weights_seq: int = 0  # the job that last changed the weights
    published_seq: int = 0  # the job that last froze them for sampling
    pruned_below: int = 0
    size_bytes: int = 0
    written: Future[None] = field(default_factory=lambda: _done())  # of the newest snapshot: once it is durable

    @property
    def is_fresh(self) -> bool:
        """Whether the weights are still those that were last published (a new model's are its base's)."""
        return self.published_seq >= self.weights_seq


@dataclass(frozen=True)
class _Effect:
    """What a request that succeeded has done."""

    result: BaseModel
    digest: str | None = None
    changes: dict[str, Any] = field(default_factory=dict)  # fields of `Finish`
    obsolete_files: tuple[str, ...] = ()
    written: Future[None] | None = None


class Trainer:
    """The training side of the worker."""

    def __init__(self, engine: Engine, journal: Journal, bases: Bases, data_dir: Path) -> None:
        self.engine = engine
        self.journal = journal
        self.bases = bases
        self.data_dir = data_dir
        self.live: dict[str, LiveModel] = {}
        self._runners: dict[str, Callable[[TrainingJob, Any], _Effect]] = {
            "create_model": self._create_model,
            "forward": self._forward,
            "forward_only": self._forward_backward,
            "forward_backward": self._forward_backward,
            "optim_step": self._optim_step,
            "save_weights": self._save_weights,
            "save_weights_for_sampler": self._save_weights_for_sampler,
            "save_weights_external": self._save_weights_external,
            "load_weights": self._load_weights,
        }

    def run(self, job: TrainingJob) -> Outcome:
        """Runs a request whose turn it is, on a model that is in the engine or is to be made by it."""
        try:
            if job.kind == "optim_step":
                self._refuse_half_step(job.model_id)
            if isinstance(job.request, MintError):
                raise job.request
            effect = self._runners[job.kind](job, job.request)
        except MintError as error:
            return self.fail(job, error)
        body = wire.encode_result(effect.result)
        finish = Finish(job.model_id, job.seq_id, "done", body, effect.digest, **effect.changes)
        return Outcome(finish, effect.obsolete_files, effect.written)

    def fail(self, job: TrainingJob, error: MintError) -> Outcome:
        """The outcome of a request that cannot be carried out; after a pass, the gradient is gone too."""
        if job.kind == "forward_backward":
            self.note_failed(job.model_id, job.kind)
        return Outcome(Finish(job.model_id, job.seq_id, "failed", wire.encode_error(error)))

    def note_failed(self, model_id: str, kind: str) -> None:
        """What a failed request does to a model: a pass poisons its gradient, a step that was refused ends that."""
        live = self.live.get(model_id)
        if live is None:
            return
        if kind in ("forward_backward", "missing"):
            self.engine.clear_gradient(model_id)
            live.poisoned = True
        elif kind == "optim_step" and live.poisoned:
            self.engine.clear_gradient(model_id)
            live.poisoned = False

    def forget(self, model_id: str) -> None:
        """Takes a model out of the engine; it is restored from the journal when it is next needed."""
        self.engine.drop_model(model_id)
        self.live.pop(model_id, None)

    def discard(self, files: tuple[str, ...]) -> None:
        """Removes files and folders of the data directory that no row names any more.

        A sampler may still read a snapshot, or the folder of a checkpoint that was replaced: what is in use goes with
        its last user, or at the next start.
        """
        in_use = set(files) & self.journal.named_files() if files else set()
        for name in set(files) - in_use:
            path = self.data_dir / name
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    # --- passes and steps ----------------------------------------------------------------------------------------

    def run_pass(self, model_id: str, content: ForwardBackwardInput, *, gradient: bool) -> ForwardBackwardOutput:
        """Checks the data against the model and runs them; raises before anything has changed if they are wrong."""
        live = self.live[model_id]
        checked = validation.check_pass(content, live.base)
        run = self.engine.forward_backward if gradient else self.engine.forward
        result = run(model_id, checked.data, checked.loss)
        doubts = lint(checked.data, checked.loss, result, stop_tokens=live.base.eos_token_ids, fresh=live.is_fresh)
        warnings = [*checked.warnings, *doubts]
        return ForwardBackwardOutput(
            loss_fn_outputs=_outputs(checked.loss, result),
            metrics={**result.metrics, "lint_warnings:sum": float(len(warnings))},
            warnings=warnings,
        )

    def step(self, model_id: str, request: OptimStepRequest) -> tuple[dict[str, float], str]:
        """Applies the gradient; the metrics, and the digest of the state it led to."""
        metrics = self.engine.optim_step(model_id, validation.check_adam(request.adam_params))
        return metrics, self.engine.state_digest(model_id)

    def _forward(self, job: TrainingJob, request: ForwardRequest) -> _Effect:
        return _Effect(self.run_pass(job.model_id, request.forward_input, gradient=False))

    def _forward_backward(self, job: TrainingJob, request: ForwardBackwardRequest) -> _Effect:
        content = request.forward_backward_input
        return _Effect(self.run_pass(job.model_id, content, gradient=not request.forward_only))

    def _optim_step(self, job: TrainingJob, request: OptimStepRequest) -> _Effect:
        _refuse_other_optimizer("optimizer_params", request.optimizer_params)
        metrics, digest = self.step(job.model_id, request)
        changes, obsolete = self._snapshot(job, digest, force=False)
        return _Effect(OptimStepResponse(metrics=metrics, state_digest=digest), digest, changes, obsolete)

    def _refuse_half_step(self, model_id: str) -> None:
        if not self.live[model_id].poisoned:
            return
        self.note_failed(model_id, "optim_step")
        raise StepRefusedError(
            "the step was refused: a forward_backward since the last step failed, so the gradient is incomplete; "
            "all of it was cleared, and the weights are unchanged",
            remedy="Correct the pass that failed, then call forward_backward and optim_step again",
        )

    # --- making and loading --------------------------------------------------------------------------------------

    def make(self, model_id: str, base_model: str, spec: LoraSpec, *, seed_given: bool) -> dict[str, Any]:
        """Puts a new model into the engine; the columns of its row, with every setting that took effect."""
        base = self.bases.load(base_model)
        self.forget(model_id)
        settings = self.engine.create_model(model_id, self.bases.key(base_model), spec)
        self.live[model_id] = LiveModel(base_model, base, spec, seed_given)
        sizes = {"context_length": base.context_length, "vocab_size": base.vocab_size, "arch": base.arch}
        effective = {**base.settings, **sizes, **asdict(spec), **settings}
        return {"base_model": base_model, "lora": asdict(spec), "seed_given": seed_given, "effective": effective}

    def load(self, model_id: str, manifest: Manifest, state: ModelState) -> str:
        """Puts a checkpoint's state into a model of the same shape; the digest of the result."""
        live = self.live[model_id]
        shape, saved = _shape(live.lora), _shape(manifest.lora_spec)
        if shape != saved or self.bases.key(live.base_model) != self.bases.key(manifest.base_model):
            raise InvalidRequestError(
                f"was saved from {manifest.base_model} with {saved}, but this model is {live.base_model} with {shape}",
                field="path",
                value=manifest.path,
                remedy="Use create_training_client_from_state, which makes a model of the checkpoint's own shape",
            )
        self.engine.write_state(model_id, state)
        live.poisoned = False
        return self.engine.state_digest(model_id)

    def _create_model(self, job: TrainingJob, request: CreateModelRequest) -> _Effect:
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
        columns = self.make(job.model_id, request.base_model, spec, seed_given=config.seed is not None)
        return _Effect(CreateModelResponse(model_id=job.model_id), changes={"model": columns})

    def _load_weights(self, job: TrainingJob, request: LoadWeightsRequest) -> _Effect:
        if request.weights_access_token not in (None, ""):
            raise InvalidRequestError(
                "is not supported",
                field="weights_access_token",
                value="(given)",
                remedy="Leave it out: load your own checkpoints, or those that their owners have published",
            )
        row = checkpoints.find_checkpoint(self.journal, request.path, reader=self._owner(job.model_id))
        manifest, state = checkpoints.evaluate_checkpoint(self.data_dir / row.folder, optimizer=request.optimizer)
        if request.base_model is not None and self.bases.key(request.base_model) != self.bases.key(manifest.base_model):
            raise InvalidRequestError(
                f"does not fit the checkpoint, which was saved from {manifest.base_model}",
                field="base_model",
                value=request.base_model,
                remedy="Leave it out",
            )
        made: dict[str, Any] = {}
        if job.seq_id == 0:
            seed_given = manifest.seed_given
            made = {"model": self.make(job.model_id, manifest.base_model, manifest.lora_spec, seed_given=seed_given)}
        digest = self.load(job.model_id, manifest, state)
        changes, obsolete = self._snapshot(job, digest, force=True)
        result = LoadWeightsResponse(path=request.path, model_id=job.model_id)
        return _Effect(result, digest, {**changes, **made}, obsolete)

    # --- saving --------------------------------------------------------------------------------------------------

    def _save_weights(self, job: TrainingJob, request: SaveWeightsRequest) -> _Effect:
        row, replaced = self._save(job, checkpoints.TRAINING, request, request.path, overwrite=request.overwrite)
        path = CheckpointPath(row.model_id, row.kind, row.name)
        return _Effect(SaveWeightsResponse(path=path.uri), None, {"checkpoint": row}, replaced)

    def _save_weights_for_sampler(self, job: TrainingJob, request: SaveWeightsForSamplerRequest) -> _Effect:
        if request.kind != "snapshot":
            remedy = "Pass snapshot: each sampler keeps the weights that it was made from"
            raise InvalidRequestError("is not supported", field="kind", value=request.kind, remedy=remedy)
        if request.sampling_session_seq_id is not None:
            return self._publish(job, request.sampling_session_seq_id)
        if request.path is None:
            raise InvalidRequestError("is missing", field="path", value="(none)", remedy="Give the checkpoint a name")
        row, replaced = self._save(job, checkpoints.SAMPLER, request, request.path, overwrite=False)
        self.live[job.model_id].published_seq = job.seq_id
        path = CheckpointPath(row.model_id, row.kind, row.name)
        return _Effect(SaveWeightsForSamplerResponse(path=path.uri), None, {"checkpoint": row}, replaced)

    def _save_weights_external(self, job: TrainingJob, request: SaveWeightsExternalRequest) -> _Effect:
        if request.age_encryption_recipients not in (None, []):
            raise InvalidRequestError(
                "is not supported",
                field="age_encryption_recipients",
                value=request.age_encryption_recipients,
                remedy="Leave it out, and encrypt what you have downloaded",
            )
        row, replaced = self._save(job, checkpoints.EXTERNAL, request, request.path, overwrite=False)
        path = CheckpointPath(row.model_id, row.kind, row.name)
        result = SaveWeightsExternalResponse(path=path.uri, size_bytes=row.size_bytes)
        return _Effect(result, None, {"checkpoint": row}, replaced)

    def _save(
        self,
        job: TrainingJob,
        kind: str,
        request: SaveWeightsRequest | SaveWeightsForSamplerRequest | SaveWeightsExternalRequest,
        name: str,
        *,
        overwrite: bool,
    ) -> tuple[CheckpointRow, tuple[str, ...]]:
        """The new checkpoint's row, and the folder that it replaces."""
        path = CheckpointPath(job.model_id, kind, checkpoints.check_name(name))
        ttl_s = checkpoints.check_ttl(request.ttl_seconds)
        existing = self.journal.checkpoint(job.model_id, kind, name)
        if existing is not None and not overwrite and not checkpoints.is_expired(existing, time.time()):
            remedy = "Choose another name, or call save_state with overwrite=True"
            raise ConflictError("names a checkpoint that exists already", field="name", value=name, remedy=remedy)
        live = self.live[job.model_id]
        state = self.engine.read_state(job.model_id)
        folder = f"checkpoints/{uuid.uuid5(uuid.NAMESPACE_URL, f'{job.model_id}/{job.seq_id}')}"
        now = time.time()
        manifest = Manifest(path.uri, live.base_model, asdict(live.lora), live.seed_given, state.step, now)
        with_optimizer = kind == checkpoints.TRAINING
        checkpoints.write_checkpoint(self.data_dir / folder, state, manifest, optimizer=with_optimizer)
        size = checkpoints.folder_size(self.data_dir / folder)
        expires_at = None if ttl_s is None else now + ttl_s
        row = CheckpointRow(
            job.model_id,
            kind,
            name,
            folder,
            now,
            owner=self._owner(job.model_id),
            expires_at=expires_at,
            size_bytes=size,
            user_metadata=request.user_metadata,
        )
        return row, (existing.folder,) if existing else ()

    def _owner(self, model_id: str) -> str:
        """Whose model it is; the journal knows, since a run outlives its session."""
        run = self.journal.run(model_id)
        return LOCAL_OWNER if run is None else run.owner

    def _publish(self, job: TrainingJob, number: int) -> _Effect:
        """Freezes the weights for a new sampling session, in the engine and in a file."""
        session_id = session_of(job.model_id)
        published_id = sampler_id(session_id, number)
        if self.journal.sampler(published_id) is not None:
            raise ConflictError("is taken", field="sampling_session_seq_id", value=number, remedy="Count upwards")
        live = self.live[job.model_id]
        file, written = self._write_published(job.model_id, f"published/{file_stem(published_id)}.safetensors")
        self.engine.publish(job.model_id, published_id)
        live.published_seq = job.seq_id
        root = seed_root(live.lora.seed if live.seed_given else None, number)
        lora = asdict(live.lora)
        row = SamplerRow(published_id, session_id, live.base_model, None, published_id, file, lora, root)
        result = SaveWeightsForSamplerResponse(sampling_session_id=published_id)
        return _Effect(result, changes={"sampler": row}, written=written)

    def _write_published(self, model_id: str, file: str) -> tuple[str, Future[None]]:
        """The file of the current weights, and when it is durable: `file`, or the snapshot that holds them already."""
        live = self.live[model_id]
        if live.snapshots and live.snapshots[0].seq_id == live.weights_seq:
            if live.size_bytes > SMALL_STATE_BYTES or live.written.done():
                live.written.result()  # a large one may not be there yet, and whatever went wrong is said here
            return live.snapshots[0].file, live.written
        write_weights(self.data_dir / file, self.engine.read_state(model_id))
        return file, _done()

    def _snapshot(self, job: TrainingJob, digest: str, *, force: bool) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Saves the state that a step or a load has led to, if it is time; what to commit, and files to discard."""
        live = self.live[job.model_id]
        live.weights_seq = job.seq_id
        now = time.monotonic()
        due = live.snapshot_at == 0.0 or now - live.snapshot_at >= SNAPSHOT_INTERVAL_S
        if not (force or due or live.size_bytes <= SMALL_STATE_BYTES):
            return {}, ()
        state = self.engine.read_state(job.model_id)
        live.size_bytes, live.snapshot_at = size_bytes(state), now
        file = f"snapshots/{file_stem(job.model_id)}-{job.seq_id}.safetensors"
        live.written.result()  # so that a loss of power can cost the newest alone, and the one before is replayed from
        if live.size_bytes <= SMALL_STATE_BYTES:
            write_snapshot(self.data_dir / file, state, digest=digest)
            live.written = self.journal.durability.submit(sync_file, self.data_dir / file)
        else:
            live.written = self.journal.durability.submit(_write_durably, self.data_dir / file, state, digest)
        row = SnapshotRow(job.model_id, job.seq_id, file, digest)
        kept = [row, *live.snapshots]
        live.snapshots, old = kept[:KEPT_SNAPSHOTS], kept[KEPT_SNAPSHOTS:]
        changes: dict[str, Any] = {"snapshot": row, "dropped_snapshots": tuple(gone.seq_id for gone in old)}
        if old:
            first, live.pruned_below = live.pruned_below, live.snapshots[-1].seq_id + 1
            changes["pruned_payloads"] = (first, live.pruned_below)
        return changes, tuple(gone.file for gone in old)


def _outputs(loss: LossSpec, result: PassResult) -> list[dict[str, TensorData]]:
    """Per datum the logprobs of its targets, and under a policy's loss the entropies of what they were drawn from."""
    rows = [{"logprobs": TensorData.from_numpy(row)} for row in result.logprobs]
    if "logprobs" not in LOSSES[loss.name].required:
        return rows
    for row, entropies in zip(rows, result.entropies, strict=False):  # no entropies without distributions
        row["entropies"] = TensorData.from_numpy(entropies)
    return rows


def _refuse_other_optimizer(field: str, config: dict[str, Any] | None) -> None:
    """Says no to an optimizer that is asked for by name and is not AdamW; other fields of an AdamW are its defaults."""
    name = "adamw" if config is None else config.get("type", "adamw")
    if name not in ("adamw", "adam"):
        remedy = "Leave it out: the optimizer is AdamW, with the settings of each step's adam_params"
        raise InvalidRequestError("is not an optimizer here", field=f"{field}.type", value=name, remedy=remedy)


def _shape(lora: LoraSpec) -> str:
    trained = [name for name in ("attn", "mlp", "unembed") if getattr(lora, f"train_{name}")]
    return f"rank {lora.rank} on {'+'.join(trained)}"


def _write_durably(path: Path, state: ModelState, digest: str) -> None:
    write_snapshot(path, state, digest=digest)
    sync_file(path)


def _done() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future
