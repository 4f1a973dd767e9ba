"""The models that are in the engine, and what training requests do to them.

Keeps the promise that there is never half a step: after a failed pass the gradient is cleared, and the next step is
refused unless the data were sent again (`failed_passes`). Used on the worker's thread only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from mint.engine.protocol import (
    LOSSES,
    BaseInfo,
    Engine,
    LoraSpec,
    LossSpec,
    MicroBatching,
    ModelState,
    PassResult,
    TrainDatum,
)
from mint.errors import InvalidRequestError, StepRefusedError
from mint.models.fingerprint import BASE_FINGERPRINT
from mint.server.store.checkpoint_folders import Manifest
from mint.server.store.rows import STATE_BYTES
from mint.server.worker import validation
from mint.server.worker.base_models import BaseModels
from mint.server.worker.failed_passes import FailedPasses, data_digest
from mint.server.worker.lint import lint
from mint.server.worker.snapshots import SnapshotHistory
from mint.types import ForwardBackwardOutput, TensorData
from mint.wire.requests import ForwardBackwardInput, OptimStepRequest

log = logging.getLogger("mint.worker")

SKIPPED = "skipped_nonfinite"
"""The metric of a step that says whether it was skipped, and the field of the error of a step that fails for it."""

FLOAT32_MAX = float(np.finfo(np.float32).max)

MAX_SKIPPED_STEPS = 3
"""From so many skipped steps in a row on, a step fails."""


@dataclass
class LiveModel:
    """A model in the engine.

    `failed_passes` says whether the next step is refused, because a pass has failed since the last one.
    `first_not_finite` is the datum since the last step or load that first gave a loss that is not finite;
    `skipped_steps` counts the last steps that were skipped in a row, since the last load. The `seq` fields name the
    requests that last changed the weights, and last published them for sampling.
    """

    base_model: str
    base: BaseInfo
    lora: LoraSpec
    seed_given: bool
    size_bytes: int = 0
    failed_passes: FailedPasses = field(default_factory=FailedPasses)
    first_not_finite: str | None = None
    skipped_steps: int = 0
    skip_reason: str = ""
    weights_seq: int = 0
    published_seq: int = 0
    snapshots: SnapshotHistory = field(default_factory=SnapshotHistory)

    def note_step(self, metrics: Mapping[str, float]) -> None:
        """Counts steps that were skipped in a row, and says why."""
        first, self.first_not_finite = self.first_not_finite, None
        self.skipped_steps = self.skipped_steps + 1 if metrics[SKIPPED] else 0
        where = "all losses were finite" if first is None else f"the first loss that is not finite is that of {first}"
        self.skip_reason = f"grad_norm = {metrics['grad_norm']:g}, {where}"

    @property
    def base_fingerprint(self) -> str:
        """That of the base model in the engine."""
        return str(self.base.settings[BASE_FINGERPRINT])

    @property
    def is_published(self) -> bool:
        """Whether the weights are those that were last published (a new model's are its base's)."""
        return self.published_seq >= self.weights_seq


class LiveModels:
    """The models of one engine by id."""

    def __init__(self, engine: Engine, bases: BaseModels) -> None:
        self.engine = engine
        self.bases = bases
        self._models: dict[str, LiveModel] = {}  # by use: used longest ago first
        self._published: dict[str, int] = {}  # parked model → the request that last published its weights

    @property
    def by_use(self) -> list[str]:
        """The models in the engine, those used longest ago first; any thread may ask."""
        return list(self._models)

    @property
    def size_bytes(self) -> int:
        """The memory of all models in the engine; any thread may ask."""
        return sum(live.size_bytes for live in list(self._models.values()))

    def bytes_of(self, model_id: str) -> int:
        """The memory of a model in the engine."""
        return self._models[model_id].size_bytes

    def touch(self, model_id: str) -> bool:
        """Notes that a model is used now; False if it is not in the engine."""
        live = self._models.pop(model_id, None)
        if live is None:
            return False
        self._models[model_id] = live
        return True

    def __getitem__(self, model_id: str) -> LiveModel:
        return self._models[model_id]

    def state_bytes(self, base_model: str, spec: LoraSpec) -> int:
        """The size of the weights and moments of a model of this shape; loads its base model.

        Raises:
            UnknownBaseModelError: there is no such base model.
        """
        self.bases.load(base_model)
        return self.engine.state_bytes(self.bases.key(base_model), spec)

    def create(self, model_id: str, base_model: str, spec: LoraSpec, *, seed_given: bool) -> dict[str, Any]:
        """Puts a new model into the engine; returns the columns of its row, with every setting that took effect."""
        base, key = self.bases.load(base_model), self.bases.key(base_model)
        published_seq = self._published.pop(model_id, 0)
        self.drop(model_id)  # recovery makes a model again after a damaged snapshot
        settings = self.engine.create_model(model_id, key, spec)
        size_bytes = self.engine.model_bytes(key, spec)
        live = LiveModel(base_model, base, spec, seed_given, size_bytes, published_seq=published_seq)
        self._models[model_id] = live
        sizes = {"context_length": base.context_length, "vocab_size": base.vocab_size, "arch": base.arch}
        sizes[STATE_BYTES] = self.engine.state_bytes(key, spec)
        effective = {**base.settings, **sizes, **asdict(spec), **settings}
        return {"base_model": base_model, "lora": asdict(spec), "seed_given": seed_given, "effective": effective}

    def drop(self, model_id: str) -> None:
        """Takes a model out of the engine; when it is next needed, it is restored from the journal."""
        self.engine.drop_model(model_id)
        self._models.pop(model_id, None)
        self._published.pop(model_id, None)

    def park(self, model_id: str) -> None:
        """Same as `drop`, for a model that is to come back with all that the journal does not say of it."""
        published_seq = self._models[model_id].published_seq
        self.drop(model_id)
        self._published[model_id] = published_seq

    def forget_lost(self) -> None:
        """Forgets the models that the engine has lost (`ModelsLostError`): each is restored when it is next needed."""
        for model_id in self.by_use:
            if not self.engine.has_model(model_id):
                self.park(model_id)

    def forward(self, model_id: str, content: ForwardBackwardInput) -> ForwardBackwardOutput:
        """A forward pass.

        Raises:
            InvalidRequestError: the data do not fit the model.
        """
        live = self._models[model_id]
        checked = validation.check_pass(content, live.base)
        return _output(live, checked, self.engine.forward(model_id, checked.data, checked.loss))

    def forward_backward(
        self,
        model_id: str,
        seq_id: int,
        content: ForwardBackwardInput,
        *,
        micro_batching: MicroBatching | None = None,
    ) -> tuple[ForwardBackwardOutput, MicroBatching | None, str | None]:
        """A forward and a backward pass, which adds to the model's gradient; also returns its micro-batching, and after
        a failed pass the digest of its data.

        With the micro-batching of an earlier pass it computes the same bits again.

        Raises:
            InvalidRequestError: the data do not fit the model; nothing has changed.
            OutOfMemoryError: memory does not suffice; nothing has changed.
        """
        live = self._models[model_id]
        began = time.perf_counter()
        checked = validation.check_pass(content, live.base)
        result = self.engine.forward_backward(model_id, checked.data, checked.loss, micro_batching=micro_batching)
        live.snapshots.note_pass(time.perf_counter() - began)
        if live.first_not_finite is None and not _fits_float32(result.metrics.get("loss:sum", 0.0)):
            index = _first_not_finite(checked.data, result)
            live.first_not_finite = f"request {seq_id}" if index is None else f"data[{index}] of request {seq_id}"
        digest = data_digest(content) if live.failed_passes.wants_data else None
        if not live.failed_passes.note_success(digest):
            self.engine.clear_gradient(model_id)
        return _output(live, checked, result), result.micro_batching, digest

    def optim_step(
        self, model_id: str, seq_id: int, request: OptimStepRequest, *, like: str | None = None
    ) -> tuple[dict[str, float], str]:
        """Applies the gradient; returns the metrics, and the digest of the new state in the form of `like`."""
        live = self._models[model_id]
        began = time.perf_counter()
        metrics = self.engine.optim_step(model_id, validation.check_adam(request.adam_params))
        live.failed_passes = FailedPasses()
        live.weights_seq = seq_id
        digest = self.engine.state_digest(model_id, like=like)
        live.snapshots.note_step(time.perf_counter() - began)
        live.note_step(metrics)
        return metrics, digest

    def require_finite_steps(self, model_id: str) -> None:
        """Fails the last step if it was skipped, and those before it, too.

        Raises:
            StepRefusedError: from the `MAX_SKIPPED_STEPS`-th on; the state is that before the first of them.
        """
        live = self._models[model_id]
        if live.skipped_steps:
            log.warning("a step of %s was skipped: %s", model_id, live.skip_reason)
        if live.skipped_steps >= MAX_SKIPPED_STEPS:
            raise StepRefusedError(
                "is how many steps in a row were skipped, for gradients or updates that are not finite; "
                f"the weights are as before the first of them: {live.skip_reason}",
                field=SKIPPED,
                value=live.skipped_steps,
                remedy="Lower learning_rate, set grad_clip_norm=1, and look at that datum",
            )

    def require_fits(self, model_id: str, manifest: Manifest) -> None:
        """Checks that a model can take the state of a checkpoint.

        Raises:
            InvalidRequestError: the checkpoint is of another base model, or of other lora matrices.
            CheckpointError: its base model has other weights now.
        """
        live = self._models[model_id]
        shape, saved = _shape(live.lora), _shape(manifest.lora_spec)
        is_on_its_base = self.bases.is_base_of(manifest, live.base_model)
        if not is_on_its_base and live.base_model == self.bases.recorded_name(manifest.base_model):
            manifest.require_base(self.bases.fingerprint(live.base_model))
        if shape != saved or not is_on_its_base:
            raise InvalidRequestError(
                f"was saved from {manifest.base_model} with {saved}, but this model is {live.base_model} with {shape}",
                field="path",
                value=manifest.path,
                remedy="Use create_training_client_from_state, which makes a model of the checkpoint's own shape",
            )

    def load(self, model_id: str, seq_id: int, state: ModelState, *, like: str | None = None) -> str:
        """Puts the state of a checkpoint that fits (`require_fits`) into a model; returns the digest of the new state
        in the form of `like`."""
        live = self._models[model_id]
        self.engine.write_state(model_id, state)
        live.failed_passes = FailedPasses()
        live.first_not_finite = None
        live.skipped_steps = 0  # the weights before those steps are gone
        live.weights_seq = seq_id
        return self.engine.state_digest(model_id, like=like)

    def require_whole_gradient(self, model_id: str) -> None:
        """Refuses a step after a failed pass.

        Raises:
            StepRefusedError: the data of a failed pass were not sent again; the gradient is cleared, and the next step
                may run.
        """
        if not self._models[model_id].failed_passes.wants_data:
            return
        self.note_failed(model_id, "optim_step")
        raise StepRefusedError(
            "the step was refused: a forward_backward since the last step failed, so the gradient is incomplete; "
            "all of it was cleared, and the weights are unchanged",
            remedy="Call forward_backward and optim_step again. If the same data are sent again before optim_step, "
            "it is not refused",
        )

    def note_failed(self, model_id: str, kind: str, digest: str | None = None) -> None:
        """Notes a failed request: a pass, with the digest of its data, leaves the gradient incomplete; the step that is
        refused for it clears it."""
        live = self._models.get(model_id)
        if live is None:
            return
        if kind in ("forward_backward", "missing"):
            self.engine.clear_gradient(model_id)
            live.failed_passes.note_failure(digest)
        elif kind == "optim_step" and live.failed_passes.wants_data:
            self.engine.clear_gradient(model_id)
            live.failed_passes = FailedPasses()

    def note_unused(self, model_id: str, digest: str | None) -> None:
        """Notes a pass of the journal whose gradient a later failure has cleared; it is not run again."""
        self._models[model_id].failed_passes.note_success(digest)

    def passes_since_step(self, model_id: str, seq_id: int) -> tuple[int, int]:
        """The requests of a model from its last step or load up to `seq_id`, which is excluded; none if it is not here.

        Once `seq_id` is a failed pass, all passes among them are without effect (`passes_without_effect`).
        """
        live = self._models.get(model_id)
        return (0, 0) if live is None else (live.weights_seq + 1, seq_id)

    def note_skipped(self, model_id: str) -> None:
        """Notes a step that failed because it was skipped, as those before it."""
        live = self._models[model_id]
        self.engine.clear_gradient(model_id)
        live.failed_passes = FailedPasses()
        live.first_not_finite = None
        live.skipped_steps += 1


def _fits_float32(loss: float) -> bool:
    """Losses are summed in float64, but their slopes are float32."""
    return abs(loss) <= FLOAT32_MAX  # False for NaN


def _first_not_finite(data: Sequence[TrainDatum], result: PassResult) -> int | None:
    """The first datum with logprobs, or ratios to the sampler's logprobs, that are not finite where it is trained."""
    for index, (datum, logprobs_N) in enumerate(zip(data, result.logprobs, strict=True)):
        logs_N = logprobs_N[datum.trained]
        sampled = datum.inputs.get("logprobs")
        with np.errstate(over="ignore", invalid="ignore"):
            ratios_N = logs_N if sampled is None else np.exp((logs_N - sampled[datum.trained]).astype(np.float32))
        if not np.isfinite(ratios_N).all():
            return index
    return None


def _output(live: LiveModel, checked: validation.CheckedPass, result: PassResult) -> ForwardBackwardOutput:
    doubts = lint(
        checked.data,
        checked.loss,
        result,
        stop_tokens=live.base.eos_token_ids,
        fresh=live.is_published,
        given_logprobs=checked.given_logprobs,
    )
    warnings = [*checked.warnings, *doubts]
    return ForwardBackwardOutput(
        loss_fn_outputs=_outputs(checked.loss, result),
        metrics={**result.metrics, "lint_warnings:sum": float(len(warnings))},
        warnings=warnings,
    )


def _outputs(loss: LossSpec, result: PassResult) -> list[dict[str, TensorData]]:
    """For each datum the logprobs of its targets, and with a policy loss the entropies of their distributions."""
    with_entropies = bool(result.entropies) and "logprobs" in LOSSES[loss.name].required
    outputs: list[dict[str, TensorData]] = []
    for index, logprobs in enumerate(result.logprobs):
        output = {"logprobs": TensorData.from_numpy(logprobs)}
        if with_entropies:
            output["entropies"] = TensorData.from_numpy(result.entropies[index])
        outputs.append(output)
    return outputs


def _shape(lora: LoraSpec) -> str:
    trained = [name for name in ("attn", "mlp", "unembed") if getattr(lora, f"train_{name}")]
    return f"rank {lora.rank} on {'+'.join(trained)}"
