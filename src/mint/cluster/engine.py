"""The engine of a cluster: ranks train together, and meanwhile replicas sample, or this process.

Each model is on every rank. The digest of a state is that of one process with the same settings, whatever the number
of ranks. If a rank is lost, all are started again without models (`ModelsLostError`): the service restores them from
snapshots and the journal, as after a restart, and sampling goes on.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from mint.cluster.collectives.parallelism import ALIKE, Parallelism, ranks
from mint.cluster.groups import DEADLINE_S, RankGroup, RankLostError
from mint.cluster.lifetime.adoption import keep_renewing
from mint.cluster.local_sampling import LocalSampling
from mint.cluster.packed_values import PackedData, PackedResult
from mint.cluster.rank import Work
from mint.cluster.ray_runtime import HERE, Place
from mint.cluster.replica import OpenReplica
from mint.cluster.replicas import Replicas
from mint.engine.protocol import (
    AdamSpec,
    BaseInfo,
    Engine,
    LoraSpec,
    LossSpec,
    MicroBatching,
    ModelsLostError,
    ModelState,
    PassResult,
    SampleBatch,
    SampleJob,
    SampleResult,
    TrainDatum,
    sample_together,
)
from mint.engine.reductions.state_division import divides_lora
from mint.engine.torch_engine import TorchEngine
from mint.errors import InvalidRequestError, NotFoundError

log = logging.getLogger(__name__)

START_ATTEMPTS = 3
"""How often ranks are started before a request that needs them fails."""

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
    "tensor_chunks",
    "base_fingerprint",
)
"""The settings of a base that must be equal on all ranks."""


@dataclass(frozen=True)
class _Shape:
    base: str
    lora: LoraSpec


class ClusterEngine:
    """`Engine` with two lanes: ranks train, and replicas sample."""

    lanes = 2

    def __init__(
        self,
        own: TorchEngine,
        open_engine: OpenReplica,
        trainers: int,
        *,
        samplers: int = 0,
        place: Place = HERE,
        deadline_s: float = DEADLINE_S,
        parallelism: Parallelism = ALIKE,
    ) -> None:
        """`trainers` ranks and `samplers` replicas; without replicas, the engine `own` of this process samples.

        `open_engine` makes the engine of a rank or a replica. The ranks start with the first model, the replicas with
        the first sample, at `place`. All ranks start again if one waits for others for `deadline_s`, and none takes a
        step meanwhile. `parallelism` says how the ranks divide the work; `own` cuts its layers as they do.

        Raises:
            InvalidRequestError: `parallelism` is not for so many ranks.
        """
        parallelism.require_divisor(trainers)
        self._parallelism = parallelism
        self._own = own
        self._place = place
        self._open_engine = open_engine
        self._trainers = trainers
        self._deadline_s = deadline_s
        self._sampling: LocalSampling | Replicas
        if samplers:
            check_base = partial(self._require_same, "a replica")
            self._sampling = Replicas(open_engine, samplers, check_base=check_base, place=place)
        else:
            self._sampling = LocalSampling(own)
        self._group: RankGroup | None = None
        self._paths: dict[str, str] = {}
        self._bases: set[str] = set()  # on the ranks
        self._models: dict[str, _Shape] = {}
        self._digests: dict[str, str] = {}  # of models that have not changed since their last step
        self._losses = 0
        if place.crew is not None:
            renew = partial(keep_renewing, place.crew, place)
            threading.Thread(target=renew, name="mint-lease", daemon=True).start()

    @property
    def cluster_state(self) -> dict[str, Any]:
        """The number of `trainers`, how many of them are `running` (none before the first model), how often some were
        `lost`, the processes of the `ranks`, whether they divide the base (`sharded`), how many compute each layer
        together (`tensor_parallel`; None: each alone, in one piece), whether they divide the experts
        (`expert_parallel`), in which order they add up (`reductions`); with
        replicas, also what `Replicas.state` has. Any thread may ask."""
        running = self.processes
        own = {
            "trainers": self._trainers,
            "running": len(running),
            "lost": self._losses,
            "ranks": running,
            "sharded": self._parallelism.shards,
            "tensor_parallel": self._parallelism.tensor_parallel,
            "expert_parallel": self._parallelism.experts,
            "reductions": self._parallelism.reductions,
        }
        return own | self._sampling.state

    def resize(self, *, trainers: int | None = None, samplers: int | None = None) -> None:
        """Sets the number of ranks from the next training request on, and that of replicas from the next sample on.

        None leaves a number as it is. The ranks start again, and the service restores the models. A replica that is
        not wanted any more gets no further jobs, and ends after those that it has. Any thread may call.

        Raises:
            InvalidRequestError: this process samples, not replicas; or the ranks do not divide as they must; or
                another number of them would have other bits.
        """
        if trainers is not None:
            self._parallelism.require_divisor(trainers)
            if not self._parallelism.is_exact and trainers != self._trainers:
                raise InvalidRequestError(
                    f"cannot be changed: with ordinary reductions the models have the bits of {ranks(self._trainers)}",
                    field="trainers",
                    value=trainers,
                    remedy="Start the server with --reductions exact, and load checkpoints into new models",
                )
        if samplers is not None:
            if not isinstance(self._sampling, Replicas):
                raise InvalidRequestError(
                    "cannot be changed: the server's own process samples",
                    field="samplers",
                    value=samplers,
                    remedy="Start the server with --samplers",
                )
            self._sampling.wanted = samplers
        if trainers is not None:
            self._trainers = trainers

    @property
    def processes(self) -> list[int]:
        """The process ids of the ranks. Any thread may ask."""
        group = self._group
        return [] if group is None else list(group.pids)

    @property
    def replica_processes(self) -> list[int]:
        """The process ids of the replicas. Any thread may ask."""
        return self._sampling.processes

    def close(self) -> None:
        """Ends ranks and replicas. They start again when they are needed."""
        self._sampling.close()
        if self._group is not None:
            self._group.close()
        self._forget_ranks()

    # --- both lanes ----------------------------------------------------------------------------------------------

    def load_base(self, name: str, path: str) -> BaseInfo:
        """Loads a base into this process. Ranks load it with its first model, replicas with its first sample."""
        self._paths[name] = path
        info = self._own.load_base(name, path)
        self._sampling.load_base(name, path)
        return replace(info, settings={**info.settings, **self._parallelism.promise(self._trainers)})

    # --- the lane that trains ------------------------------------------------------------------------------------

    def create_model(self, model_id: str, base: str, lora: LoraSpec) -> dict[str, Any]:
        """A new lora with fresh optimizer on every rank; returns the settings that took effect.

        Raises:
            InvalidRequestError: the ranks have loaded the base with other settings than this process.
        """
        if base not in self._paths:
            raise NotFoundError("is not loaded", field="base_model", value=base)
        self._load_on_ranks(base)
        self._digests.pop(model_id, None)
        effective = self._run(lambda engine: engine.create_model(model_id, base, lora))
        self._models[model_id] = _Shape(base, lora)
        return effective

    def model_bytes(self, base: str, lora: LoraSpec) -> int:
        """The memory of a model on all ranks, which are on this machine. A large LoRA is there once. What a pass
        gathers of it is not counted, because one pass runs at a time."""
        weights = self.state_bytes(base, lora) // 3
        divided = 4 * weights if divides_lora(weights // 4) else 0
        return self._trainers * (self._own.model_bytes(base, lora) - divided) + divided

    def state_bytes(self, base: str, lora: LoraSpec) -> int:
        """Weights and two moments in float32."""
        return self._own.state_bytes(base, lora)

    def free_bytes(self) -> int | None:
        """The memory that is free on this machine; None if unknown."""
        return self._own.free_bytes()

    def drop_model(self, model_id: str) -> None:
        """Forgets a model; unknown ids are fine."""
        self._digests.pop(model_id, None)
        if self._models.pop(model_id, None) is not None:
            self._run(lambda engine: engine.drop_model(model_id))

    def has_model(self, model_id: str) -> bool:
        """Whether the model is on the ranks."""
        return model_id in self._models

    def forward(self, model_id: str, data: Sequence[TrainDatum], loss: LossSpec) -> PassResult:
        """Logprobs and loss; the model does not change."""
        sent: Any = PackedData(data)  # examples, where it arrives

        def work(engine: Engine) -> PackedResult:
            return PackedResult(engine.forward(model_id, sent, loss))

        return self._run_on(model_id, work, changes=False)

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
        sent: Any = PackedData(data)  # examples, where it arrives

        def work(engine: Engine) -> PackedResult:
            return PackedResult(engine.forward_backward(model_id, sent, loss, micro_batching=micro_batching))

        return self._run_on(model_id, work)

    def clear_gradient(self, model_id: str) -> None:
        """Throws the accumulated gradient away."""
        self._run_on(model_id, lambda engine: engine.clear_gradient(model_id))

    def optim_step(self, model_id: str, adam: AdamSpec) -> dict[str, float]:
        """Applies and clears the gradient, on every rank alike.

        Raises:
            ModelsLostError: the ranks have different states after it; they start again.
        """

        def work(engine: Engine) -> tuple[dict[str, float], str]:  # the digest, too: it is asked for next
            return engine.optim_step(model_id, adam), engine.state_digest(model_id)

        answers = self._run_for_all(model_id, work)
        digest = self._require_one([digest for _, digest in answers])
        self._digests[model_id] = digest
        return answers[0][0]

    def read_state(self, model_id: str) -> ModelState:
        """A copy of weights and optimizer."""
        return self._run_on(model_id, lambda engine: engine.read_state(model_id), changes=False)

    def read_weights(self, model_id: str) -> dict[str, np.ndarray]:
        """A copy of the weights of the first rank."""
        return self._run_on(model_id, lambda engine: engine.read_weights(model_id), changes=False)

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
        if like is None and model_id in self._digests:
            return self._digests[model_id]
        return self._require_one(
            self._run_for_all(model_id, lambda engine: engine.state_digest(model_id, like=like), changes=False)
        )

    def publish(self, model_id: str, weights_id: str) -> None:
        """Takes a copy of the model's weights from the first rank. A sampler gets it with its first job."""
        weights, shape = self.read_weights(model_id), self._models[model_id]
        self._sampling.add_weights(weights_id, shape.base, shape.lora, weights)

    # --- the lane that samples -----------------------------------------------------------------------------------

    def load_weights(self, weights_id: str, base: str, lora: LoraSpec, weights: Mapping[str, np.ndarray]) -> None:
        """Makes saved weights available for sampling.

        Raises:
            CheckpointError: names or shapes do not fit the base and `lora`.
        """
        self._own.load_weights(weights_id, base, lora, weights)  # also where replicas sample: it checks them
        self._own.drop_weights(weights_id)
        self._sampling.add_weights(weights_id, base, lora, weights)

    def drop_weights(self, weights_id: str) -> None:
        """Forgets published weights; unknown ids are fine."""
        self._sampling.drop_weights(weights_id)

    def open_batch(self) -> SampleBatch:
        """An empty batch; training beside it changes nothing in it."""
        return self._sampling.open_batch()

    def sample(self, jobs: Sequence[SampleJob]) -> list[SampleResult]:
        """Samples all jobs together; the result of each is a function of that job alone."""
        return sample_together(self.open_batch(), jobs)

    def sampling_counters(self) -> dict[str, int]:
        """Those of all samplers (`TorchEngine.sampling_counters`)."""
        return self._sampling.sampling_counters()

    def kv_pages(self) -> dict[str, int]:
        """Those of all samplers (`TorchEngine.kv_pages`)."""
        return self._sampling.kv_pages()

    # --- the ranks -----------------------------------------------------------------------------------------------

    def _load_on_ranks(self, base: str) -> None:
        if base in self._bases:
            return
        path = self._paths[base]
        group = self._started()
        infos = self._guard(lambda: group.run_for_all(lambda engine: engine.load_base(base, path)))
        for rank, info in enumerate(infos):
            self._require_same(f"rank {rank}", info)
        self._bases.add(base)

    def _require_same(self, process: str, info: BaseInfo) -> None:
        """Checks that a base has in another process the settings that it has here.

        Raises:
            InvalidRequestError: it has not.
        """
        own = self._own.load_base(info.name, self._paths[info.name]).settings
        for name in DECIDES_BITS:
            if info.settings.get(name) != own.get(name):
                raise InvalidRequestError(
                    f"is this setting of {info.name} on {process}, and {own.get(name)} in the process that serves; "
                    "their results would differ",
                    field=name,
                    value=info.settings.get(name),
                    remedy="Set MINT_MICRO_BATCH_ROWS, MINT_DTYPE, MINT_THREADS, MINT_NATIVE and MINT_INSTRUCTIONS; "
                    "if it is the base_fingerprint, give all processes the same weight files, and start again",
                )

    def _run_on(self, model_id: str, work: Work, *, changes: bool = True) -> Any:
        """`work` may change the model, unless it is said not to."""
        self._require(model_id)
        if changes:
            self._digests.pop(model_id, None)
        return self._run(work)

    def _run_for_all(self, model_id: str, work: Work, *, changes: bool = True) -> list[Any]:
        """Same as `_run_on`; the values of all ranks."""
        self._require(model_id)
        if changes:
            self._digests.pop(model_id, None)
        group = self._started()
        return self._guard(lambda: group.run_for_all(work))

    def _require_one(self, digests: Sequence[str]) -> str:
        """The digest of all ranks.

        Raises:
            ModelsLostError: they differ; the ranks start again.
        """
        if len(set(digests)) > 1:
            if self._group is not None:
                self._group.close()
            self._lose(f"the ranks have different states of a model: {', '.join(digests)}", None)
        return digests[0]

    def _require(self, model_id: str) -> None:
        if model_id not in self._models:
            raise NotFoundError("is not in memory", field="model_id", value=model_id)

    def _run(self, work: Work) -> Any:
        group = self._started()
        return self._guard(lambda: group.run(work))

    def _started(self) -> RankGroup:
        """The ranks, in the number that is wanted now.

        Raises:
            ModelsLostError: they were started in another number, and have ended; or they cannot be started.
        """
        if self._group is not None and self._group.wanted != self._trainers:
            reason = f"there were {self._group.wanted} ranks, and {self._trainers} are wanted"
            self._group.close()
            self._forget_ranks()
            raise ModelsLostError(reason)
        if self._group is None:
            self._group = self._guard(self._start_group)
        return self._group

    def _start_group(self) -> RankGroup:
        """Starts the ranks, and tries again: for some seconds, Ray places processes on a node that is lost."""
        wanted = self._trainers
        for _ in range(START_ATTEMPTS - 1):
            with contextlib.suppress(RankLostError):
                return self._new_group(wanted)
        return self._new_group(wanted)

    def _new_group(self, wanted: int) -> RankGroup:
        return RankGroup(
            self._open_engine,
            wanted,
            place=self._place,
            deadline_s=self._deadline_s,
            parallelism=self._parallelism,
        )

    def _guard(self, call: Any) -> Any:
        try:
            return call()
        except RankLostError as error:
            self._lose(str(error), error)

    def _lose(self, reason: str, error: Exception | None) -> None:
        """Forgets all models: the ranks have ended."""
        self._forget_ranks()
        self._losses += 1
        log.error("%s; the ranks start again", reason)
        raise ModelsLostError(reason) from error

    def _forget_ranks(self) -> None:
        self._group = None
        self._models.clear()
        self._digests.clear()
        self._bases.clear()
