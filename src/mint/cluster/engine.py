"""The engine of a cluster: ranks train together, and this process samples meanwhile.

Each model is on every rank. The digest of a state is that of one process with the same settings, whatever the number
of ranks. If a rank is lost, all are started again without models (`ModelsLostError`): the service restores them from
snapshots and the journal, as after a restart, and sampling goes on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mint.cluster.groups import RankGroup, RankLostError
from mint.cluster.rank import OpenEngine, Work
from mint.engine.protocol import (
    AdamSpec,
    BaseInfo,
    LoraSpec,
    LossSpec,
    MicroBatching,
    ModelsLostError,
    ModelState,
    PassResult,
    SampleBatch,
    SampleJob,
    SampleResult,
    TokenListener,
    TrainDatum,
    sample_together,
)
from mint.engine.torch_engine import TorchEngine
from mint.errors import InvalidRequestError, NotFoundError

log = logging.getLogger(__name__)

DECIDES_BITS = (
    "torch",
    "implementation",
    "attention",
    "instructions",
    "kernels",
    "dtype",
    "quantization",
    "threads",
    "micro_batch_rows",
)
"""The settings of a base that must be equal on all ranks."""


@dataclass(frozen=True)
class _Shape:
    base: str
    lora: LoraSpec


@dataclass(frozen=True)
class _Published:
    shape: _Shape
    weights: Mapping[str, np.ndarray]


class ClusterEngine:
    """`Engine` with two lanes: `trainers` ranks train, and the engine `sampler` of this process samples."""

    lanes = 2

    def __init__(self, sampler: TorchEngine, open_engine: OpenEngine, trainers: int) -> None:
        """`open_engine` makes the engine of a rank. The ranks start with the first model."""
        self._sampler = sampler
        self._open_engine = open_engine
        self._trainers = trainers
        self._group: RankGroup | None = None
        self._paths: dict[str, str] = {}
        self._bases: set[str] = set()  # on the ranks
        self._models: dict[str, _Shape] = {}
        self._lock = threading.Lock()  # of what was published, and is not in the sampler yet
        self._arriving: dict[str, _Published] = {}
        self._losses = 0

    @property
    def cluster_state(self) -> dict[str, int]:
        """The number of `trainers`, how many of them are `running` (none before the first model), and how often ranks
        were `lost`. Any thread may ask."""
        return {"trainers": self._trainers, "running": len(self.processes), "lost": self._losses}

    @property
    def processes(self) -> list[int]:
        """The process ids of the ranks. Any thread may ask."""
        group = self._group
        return [] if group is None else list(group.pids)

    def close(self) -> None:
        """Ends the ranks. They start again with the next model."""
        if self._group is not None:
            self._group.close()
        self._group = None
        self._models.clear()
        self._bases.clear()

    # --- both lanes ----------------------------------------------------------------------------------------------

    def load_base(self, name: str, path: str) -> BaseInfo:
        """Loads a base into the sampler. The ranks load it with its first model, so that they need not be idle now."""
        self._paths[name] = path
        return self._sampler.load_base(name, path)

    # --- the lane that trains ------------------------------------------------------------------------------------

    def create_model(self, model_id: str, base: str, lora: LoraSpec) -> dict[str, Any]:
        """A new lora with fresh optimizer on every rank; returns the settings that took effect.

        Raises:
            InvalidRequestError: the ranks have loaded the base with other settings than this process.
        """
        if base not in self._paths:
            raise NotFoundError("is not loaded", field="base_model", value=base)
        self._load_on_ranks(base)
        effective = self._run(lambda engine: engine.create_model(model_id, base, lora))
        self._models[model_id] = _Shape(base, lora)
        return effective

    def model_bytes(self, base: str, lora: LoraSpec) -> int:
        """The memory of a model on all ranks, which are on this machine."""
        return self._trainers * self._sampler.model_bytes(base, lora)

    def state_bytes(self, base: str, lora: LoraSpec) -> int:
        """Weights and two moments in float32."""
        return self._sampler.state_bytes(base, lora)

    def free_bytes(self) -> int | None:
        """The memory that is free on this machine; None if unknown."""
        return self._sampler.free_bytes()

    def drop_model(self, model_id: str) -> None:
        """Forgets a model; unknown ids are fine."""
        if self._models.pop(model_id, None) is not None:
            self._run(lambda engine: engine.drop_model(model_id))

    def has_model(self, model_id: str) -> bool:
        """Whether the model is on the ranks."""
        return model_id in self._models

    def forward(self, model_id: str, data: Sequence[TrainDatum], loss: LossSpec) -> PassResult:
        """Logprobs and loss; the model does not change."""
        return self._run_on(model_id, lambda engine: engine.forward(model_id, data, loss))

    def forward_backward(
        self,
        model_id: str,
        data: Sequence[TrainDatum],
        loss: LossSpec,
        *,
        micro_batching: MicroBatching | None = None,
    ) -> PassResult:
        """Runs `forward`, and adds the gradient of the summed loss to the accumulated one.

        Raises:
            OutOfMemoryError: memory does not suffice for one sequence, or for the given `micro_batching`.
        """

        def work(engine: Any) -> PassResult:
            return engine.forward_backward(model_id, data, loss, micro_batching=micro_batching)

        return self._run_on(model_id, work)

    def clear_gradient(self, model_id: str) -> None:
        """Throws the accumulated gradient away."""
        self._run_on(model_id, lambda engine: engine.clear_gradient(model_id))

    def optim_step(self, model_id: str, adam: AdamSpec) -> dict[str, float]:
        """Applies and clears the gradient, on every rank alike."""
        return self._run_on(model_id, lambda engine: engine.optim_step(model_id, adam))

    def read_state(self, model_id: str) -> ModelState:
        """A copy of weights and optimizer."""
        return self._run_on(model_id, lambda engine: engine.read_state(model_id))

    def write_state(self, model_id: str, state: ModelState) -> None:
        """Replaces weights and optimizer (moments None: a fresh optimizer) and clears the gradient.

        Raises:
            CheckpointError: names or shapes differ, or one moment is missing; the model is unchanged.
        """
        self._run_on(model_id, lambda engine: engine.write_state(model_id, state))

    def state_digest(self, model_id: str, *, like: str | None = None) -> str:
        """The hash of weights, moments and step count, which all ranks must have alike.

        Raises:
            ModelsLostError: they have not; the ranks start again.
        """
        self._require(model_id)
        group = self._started()
        digests = self._guard(lambda: group.run_for_all(lambda engine: engine.state_digest(model_id, like=like)))
        if len(set(digests)) > 1:
            group.close()
            self._lose(f"the ranks have different states of a model: {', '.join(digests)}", None)
        return digests[0]

    def publish(self, model_id: str, weights_id: str) -> None:
        """Takes a copy of the model's weights from the first rank. The sampler gets it with its first job."""
        weights = self._run_on(model_id, lambda engine: engine.read_state(model_id).weights)
        with self._lock:
            self._arriving[weights_id] = _Published(self._models[model_id], weights)

    # --- the lane that samples -----------------------------------------------------------------------------------

    def load_weights(self, weights_id: str, base: str, lora: LoraSpec, weights: Mapping[str, np.ndarray]) -> None:
        """Makes saved weights available for sampling.

        Raises:
            CheckpointError: names or shapes do not fit the base and `lora`.
        """
        self._sampler.load_weights(weights_id, base, lora, weights)
        with self._lock:
            self._arriving.pop(weights_id, None)

    def drop_weights(self, weights_id: str) -> None:
        """Forgets published weights; unknown ids are fine."""
        with self._lock:
            self._arriving.pop(weights_id, None)
        self._sampler.drop_weights(weights_id)

    def open_batch(self) -> SampleBatch:
        """An empty batch; training beside it changes nothing in it."""
        return _Batch(self, self._sampler.open_batch())

    def sample(self, jobs: Sequence[SampleJob]) -> list[SampleResult]:
        """Samples all jobs together; the result of each is a function of that job alone."""
        return sample_together(self.open_batch(), jobs)

    def bring(self, weights_id: str | None) -> None:
        """Puts weights that were published into the sampler, if they are not there."""
        with self._lock:
            published = None if weights_id is None else self._arriving.pop(weights_id, None)
        if weights_id is not None and published is not None:
            shape = published.shape
            self._sampler.load_weights(weights_id, shape.base, shape.lora, published.weights)

    def sampling_counters(self) -> dict[str, int]:
        """Those of the sampler (`TorchEngine.sampling_counters`)."""
        return self._sampler.sampling_counters()

    def kv_pages(self) -> dict[str, int]:
        """Those of the sampler (`TorchEngine.kv_pages`)."""
        return self._sampler.kv_pages()

    # --- the ranks -----------------------------------------------------------------------------------------------

    def _load_on_ranks(self, base: str) -> None:
        if base in self._bases:
            return
        path = self._paths[base]
        group = self._started()
        infos = self._guard(lambda: group.run_for_all(lambda engine: engine.load_base(base, path)))
        own = self._sampler.load_base(base, path).settings
        for rank, info in enumerate(infos):
            for name in DECIDES_BITS:
                if info.settings.get(name) != own.get(name):
                    raise InvalidRequestError(
                        f"is this setting of {base} on rank {rank}, and {own.get(name)} in the process that serves; "
                        "their results would differ",
                        field=name,
                        value=info.settings.get(name),
                        remedy="Set MINT_MICRO_BATCH_ROWS, MINT_DTYPE, MINT_THREADS, MINT_NATIVE and MINT_INSTRUCTIONS",
                    )
        self._bases.add(base)

    def _run_on(self, model_id: str, work: Work) -> Any:
        self._require(model_id)
        return self._run(work)

    def _require(self, model_id: str) -> None:
        if model_id not in self._models:
            raise NotFoundError("is not in memory", field="model_id", value=model_id)

    def _run(self, work: Work) -> Any:
        group = self._started()
        return self._guard(lambda: group.run(work))

    def _started(self) -> RankGroup:
        if self._group is None:
            self._group = self._guard(lambda: RankGroup(self._open_engine, self._trainers))
        return self._group

    def _guard(self, call: Any) -> Any:
        try:
            return call()
        except RankLostError as error:
            self._lose(str(error), error)

    def _lose(self, reason: str, error: Exception | None) -> None:
        """Forgets all models: the ranks have ended."""
        self._group = None
        self._models.clear()
        self._bases.clear()
        self._losses += 1
        log.error("%s; the ranks start again", reason)
        raise ModelsLostError(reason) from error


class _Batch:
    """A batch of the sampler, to which published weights come when a job needs them."""

    def __init__(self, engine: ClusterEngine, batch: SampleBatch) -> None:
        self._engine = engine
        self._batch = batch

    @property
    def keys(self) -> Collection[str]:
        return self._batch.keys

    def add(self, key: str, job: SampleJob, listener: TokenListener | None = None) -> None:
        self._engine.bring(job.weights_id)
        self._batch.add(key, job, listener)

    def cancel(self, key: str) -> None:
        self._batch.cancel(key)

    def step(self) -> dict[str, SampleResult]:
        return self._batch.step()
