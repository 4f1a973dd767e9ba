"""An engine that trains here, or on ranks, and samples at external samplers.

Its promise is weaker than that of other engines: sampler and trainer are two programs, whose logprobs differ. So the
distance is measured on every pass that trains on samples of the weights as they are (`gap`), and samplers that do not
apply loras are refused (`lora_check`).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mint.cluster.external.gap import Gap, GapMeter
from mint.cluster.external.lora_check import PROBE, START_S, check_lora
from mint.cluster.external.samplers import ExternalSamplers
from mint.engine.protocol import (
    AdamSpec,
    BaseInfo,
    Engine,
    LoraSpec,
    LossSpec,
    MicroBatching,
    ModelState,
    PassResult,
    SampleBatch,
    SampleJob,
    SampleResult,
    TrainDatum,
    sample_together,
)

START_LORA = LoraSpec(rank=1, seed=0, train_attn=True, train_mlp=True, train_unembed=False)
"""The shape that every sampler must take: checked as a base is loaded."""

PROMISE = "measured"
"""What `get_info` says of the distance between sampler and trainer; other engines compute both with the same code."""


class ExternalEngine:
    """`Engine` with two lanes: another engine trains, and external samplers sample."""

    lanes = 2

    def __init__(self, trainer: Engine, samplers: ExternalSamplers, *, start_s: float = START_S) -> None:
        """`trainer` is called from one thread at a time alone, also where it has one lane."""
        self._trainer = trainer
        self._samplers = samplers
        self._start_s = start_s
        self._trains = threading.Lock()  # `load_weights` checks weights on the other lane
        self._infos: dict[str, BaseInfo] = {}
        self._shapes: dict[str, tuple[str, LoraSpec]] = {}
        self._checked: dict[tuple[str, LoraSpec], float] = {}
        self._fresh: set[str] = set()  # models whose weights are those that were published last
        self.gap = GapMeter()

    @property
    def cluster_state(self) -> dict[str, Any]:
        """What the trainer says of its own ranks, and `external`: the samplers and the gap. Any thread may ask."""
        own: dict[str, Any] = getattr(self._trainer, "cluster_state", {})
        return own | {"external": {**self._samplers.state, "gap": self.gap.state}}

    @property
    def uses_gpu(self) -> bool:
        """Whether the trainer does."""
        return bool(getattr(self._trainer, "uses_gpu", False))

    def close(self) -> None:
        """Takes all loras out of the samplers, and ends the trainer's processes."""
        self._samplers.close()
        close = getattr(self._trainer, "close", None)
        if close is not None:
            close()

    # --- both lanes ----------------------------------------------------------------------------------------------

    def load_base(self, name: str, path: str) -> BaseInfo:
        """Loads a base into the trainer; checks that the samplers have the same, and apply loras to it.

        Raises:
            InvalidRequestError: they do not, or none answers.
        """
        with self._trains:
            info = self._trainer.load_base(name, path)
            self._infos[name] = info
            self._check(name, START_LORA)
            self._samplers.add_base(name, START_LORA, self._zeros(name))
        return info

    def check_at_start(self, bases: Sequence[str]) -> None:
        """Checks the samplers with those of the bases that they have, before anything is served.

        Raises:
            InvalidRequestError: they have none of them, or as `load_base` says.
        """
        if not self._samplers.addresses:
            return  # workers will join
        for base in self._samplers.served(bases, within_s=self._start_s):
            self.load_base(base, base)

    def admit_sampler(self, address: str, key: str) -> None:
        """A worker joins: it gets jobs once it has applied loras of all shapes that are in use. Any thread may call.

        Raises:
            InvalidRequestError: it does not answer, or does not apply them as the trainer does.
        """
        self._samplers.join(address, key, self._check_one)

    def dismiss_sampler(self, address: str, key: str) -> int:
        """A worker leaves: it gets no more jobs. How many it has yet."""
        return self._samplers.leave(address, key)

    def lora_archive(self, name: str) -> bytes:
        """A lora that a worker was told to load.

        Raises:
            NotFoundError: there is none of this name.
        """
        return self._samplers.folders.archive(name)

    def _check_one(self, address: str) -> None:
        for base, lora in list(self._checked):
            with self._trains:
                check_lora(
                    self._trainer, self._samplers, self._infos[base], lora, within_s=self._start_s, address=address
                )

    # --- the lane that trains ------------------------------------------------------------------------------------

    def create_model(self, model_id: str, base: str, lora: LoraSpec) -> dict[str, Any]:
        """A new lora with fresh optimizer; returns the settings that took effect.

        Raises:
            InvalidRequestError: a sampler does not apply loras of this shape.
        """
        with self._trains:
            gap = self._check(base, lora)
            effective = self._trainer.create_model(model_id, base, lora)
        self._shapes[model_id] = (base, lora)
        return effective | {
            "sampler": ", ".join(self._samplers.addresses),
            "sampler_promise": PROMISE,
            "sampler_gap_at_start": gap,
        }

    def model_bytes(self, base: str, lora: LoraSpec) -> int:
        """That of the trainer."""
        return self._trainer.model_bytes(base, lora)

    def state_bytes(self, base: str, lora: LoraSpec) -> int:
        """That of the trainer."""
        return self._trainer.state_bytes(base, lora)

    def free_bytes(self) -> int | None:
        """That of the trainer."""
        return self._trainer.free_bytes()

    def drop_model(self, model_id: str) -> None:
        """Forgets a model; unknown ids are fine."""
        self._fresh.discard(model_id)
        self._shapes.pop(model_id, None)
        with self._trains:
            self._trainer.drop_model(model_id)

    def has_model(self, model_id: str) -> bool:
        """Whether the trainer has the model."""
        return self._trainer.has_model(model_id)

    def forward(self, model_id: str, data: Sequence[TrainDatum], loss: LossSpec) -> PassResult:
        """Logprobs and loss; the model does not change."""
        with self._trains:
            result = self._trainer.forward(model_id, data, loss)
        self._measure(model_id, data, loss, result)
        return result

    def forward_backward(
        self,
        model_id: str,
        data: Sequence[TrainDatum],
        loss: LossSpec,
        *,
        micro_batching: MicroBatching | None = None,
    ) -> PassResult:
        """Runs `forward`, and adds the gradient of the summed loss to the accumulated one."""
        with self._trains:
            result = self._trainer.forward_backward(model_id, data, loss, micro_batching=micro_batching)
        self._measure(model_id, data, loss, result)
        return result

    def clear_gradient(self, model_id: str) -> None:
        """Throws the accumulated gradient away."""
        with self._trains:
            self._trainer.clear_gradient(model_id)

    def optim_step(self, model_id: str, adam: AdamSpec) -> dict[str, float]:
        """Applies and clears the gradient."""
        self._fresh.discard(model_id)
        with self._trains:
            return self._trainer.optim_step(model_id, adam)

    def read_state(self, model_id: str) -> ModelState:
        """A copy of weights and optimizer."""
        with self._trains:
            return self._trainer.read_state(model_id)

    def read_weights(self, model_id: str) -> dict[str, np.ndarray]:
        """A copy of the weights."""
        with self._trains:
            return self._trainer.read_weights(model_id)

    def write_state(self, model_id: str, state: ModelState) -> None:
        """Replaces weights and optimizer, and clears the gradient."""
        self._fresh.discard(model_id)
        with self._trains:
            self._trainer.write_state(model_id, state)

    def state_digest(self, model_id: str, *, like: str | None = None) -> str:
        """A hash of weights, moments and step count, bit for bit."""
        with self._trains:
            return self._trainer.state_digest(model_id, like=like)

    def publish(self, model_id: str, weights_id: str) -> None:
        """Takes a copy of the model's weights. A sampler loads it with its first job."""
        weights = self.read_weights(model_id)
        base, lora = self._shapes[model_id]
        self._samplers.add_weights(weights_id, base, lora, weights)
        self._fresh.add(model_id)

    # --- the lane that samples -----------------------------------------------------------------------------------

    def load_weights(self, weights_id: str, base: str, lora: LoraSpec, weights: Mapping[str, np.ndarray]) -> None:
        """Makes saved weights available for sampling.

        Raises:
            CheckpointError: names or shapes do not fit the base and `lora`.
        """
        with self._trains:
            self._trainer.load_weights(weights_id, base, lora, weights)  # it checks them
            self._trainer.drop_weights(weights_id)
        self._samplers.add_weights(weights_id, base, lora, weights)

    def drop_weights(self, weights_id: str) -> None:
        """Forgets published weights; unknown ids are fine."""
        self._samplers.drop_weights(weights_id)

    def open_batch(self) -> SampleBatch:
        """An empty batch; training beside it changes nothing in it."""
        return self._samplers.open_batch()

    def sample(self, jobs: Sequence[SampleJob]) -> list[SampleResult]:
        """Samples all jobs together."""
        return sample_together(self.open_batch(), jobs)

    # --- what is weaker ------------------------------------------------------------------------------------------

    def _check(self, base: str, lora: LoraSpec) -> float:
        shape = (base, replace(lora, seed=0))
        if shape not in self._checked:
            self._checked[shape] = check_lora(
                self._trainer, self._samplers, self._infos[base], shape[1], within_s=self._start_s
            )
        return self._checked[shape]

    def _zeros(self, base: str) -> Mapping[str, np.ndarray]:
        """The weights of a lora that changes nothing, as every new one is."""
        self._trainer.create_model(PROBE, base, START_LORA)
        try:
            return self._trainer.read_weights(PROBE)
        finally:
            self._trainer.drop_model(PROBE)

    def _measure(self, model_id: str, data: Sequence[TrainDatum], loss: LossSpec, result: PassResult) -> None:
        """Notes the gap, if the samples may be of the weights as they are."""
        if model_id not in self._fresh or loss.config.get("temperature", 1.0) != 1.0:
            return
        gap = Gap.of(data, result)
        if gap is not None:
            self.gap.add(gap)
