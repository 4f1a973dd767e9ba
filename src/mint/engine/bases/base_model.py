"""A base model as the engine uses it: training passes, samplers, and what is kept for loras.

`decoder_base` runs it on mint's own decoder, `transformers_base` on the modules of transformers.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from mint.engine.lora import LoraWeights, Site
from mint.engine.memory.sampling_limits import SamplingLimits
from mint.engine.protocol import (
    BaseInfo,
    LoraSpec,
    LossSpec,
    MicroBatching,
    PassResult,
    SampleJob,
    SampleResult,
    TokenListener,
    TrainDatum,
)
from mint.engine.reductions.division import ALONE, Peers
from mint.engine.reductions.state_division import StateDivision
from mint.engine.training_pass import TrainedDecoder, run_pass

log = logging.getLogger(__name__)


RECOMPUTE = {None: "long sequences", True: "always", False: "never"}
"""The setting `recompute` of `get_info`."""


def log_micro_batches(name: str, chosen: MicroBatching, budget: int) -> None:
    """Logs how a pass is cut, on a device that has a `budget` of bytes for activations."""
    log.info(
        "%s: micro-batches of %d rows (MINT_MICRO_BATCH_ROWS), for activations of at most %d MiB; computed again: %s "
        "(MINT_RECOMPUTE)",
        name,
        chosen.rows,
        budget >> 20,
        RECOMPUTE[chosen.recompute],
    )


def log_limits(name: str, limits: SamplingLimits, free_bytes: int | None) -> None:
    """Logs how much one step of sampling runs."""
    log.info(
        "%s: sampling decodes %d sequences together and computes %d prompt tokens at once, as %s are free",
        name,
        limits.rows,
        limits.prefill_tokens,
        in_mib(free_bytes),
    )


def in_mib(free_bytes: int | None) -> str:
    """An amount of memory as the log says it."""
    return "an unknown amount" if free_bytes is None else f"{free_bytes >> 20} MiB"


class BaseSampler(Protocol):
    """The jobs of one sampling batch on one base model: `SampleBatch`, with the loras resolved."""

    @property
    def keys(self) -> Collection[str]:
        """The jobs without a result yet."""
        ...

    def add(self, key: str, job: SampleJob, lora: LoraWeights | None, listener: TokenListener | None) -> None:
        """Adds a job; it joins at the next step."""
        ...

    def cancel(self, key: str) -> None:
        """Removes the job at the next step; unknown keys are ignored."""
        ...

    def step(self) -> dict[str, SampleResult]:
        """Runs prompts and draws one token for every sequence; returns the results of the jobs that ended."""
        ...


class BaseDecoder(TrainedDecoder, Protocol):
    """The forward and backward of a base model, and the products that a lora can train."""

    def sites(self, lora: LoraSpec) -> list[Site]:
        """The products that `lora` trains, in the order of storage.

        Raises:
            InvalidRequestError: it trains nothing that this model has.
        """
        ...


class BaseModel(ABC):
    """A loaded base model: frozen weights, to which loras are added."""

    def __init__(self, decoder: BaseDecoder, info: BaseInfo, micro_batching: MicroBatching) -> None:
        """`info` describes the model, with the settings that took effect."""
        self.info = info
        self._trained = decoder
        self._micro_batching = micro_batching

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return self._trained.device

    def sites(self, lora: LoraSpec) -> list[Site]:
        """The products that `lora` trains, in the order of storage.

        Raises:
            InvalidRequestError: it trains nothing that this model has.
        """
        return self._trained.sites(lora)

    def run_pass(
        self,
        lora: LoraWeights,
        data: Sequence[TrainDatum],
        loss: LossSpec,
        *,
        gradient: Tensor | None,
        repeated: MicroBatching | None,
        peers: Peers = ALONE,
        state: StateDivision | None = None,
    ) -> PassResult:
        """Logprobs and metrics; the gradient of the summed loss is added to `gradient`, the lora's own, if given.

        `repeated` is how an earlier pass was cut, to compute the same bits again. `peers` run the pass together, and
        may divide the model by `state` (`run_pass`).

        Raises:
            OutOfMemoryError: memory does not suffice; nothing is added to `gradient`.
        """
        return run_pass(
            self._trained,
            lora,
            data,
            loss,
            gradient=gradient,
            micro_batching=repeated or self._micro_batching,
            may_shrink=repeated is None,
            peers=peers,
            state=state,
        )

    @abstractmethod
    def open_sampler(self) -> BaseSampler:
        """An empty batch."""

    @abstractmethod
    def kept_bytes(self, lora: LoraSpec, *, with_gradient: bool) -> int:
        """Bytes that the base keeps for a used lora, beside the weights of the lora: its merged matrices."""

    @abstractmethod
    def forget(self, lora: LoraWeights) -> None:
        """Frees what is kept for a lora that is not expected again."""

    def published(self, lora: LoraWeights) -> LoraWeights:
        """`lora` as it is kept for sampling alone: the same bits of results, perhaps in less memory."""
        return lora

    @abstractmethod
    def add_weights(self, lora: LoraWeights) -> None:
        """Announces published weights: jobs may use them until `drop_weights`."""

    @abstractmethod
    def drop_weights(self, lora: LoraWeights) -> None:
        """Forgets what is cached under these weights."""

    @property
    @abstractmethod
    def counters(self) -> Mapping[str, int]:
        """Totals of all samplers since the start: `prefilled`, `reused`, `sampled`, `steps`, `preemptions`."""

    @property
    @abstractmethod
    def kv_pages(self) -> Mapping[str, int]:
        """Pages of the KV cache now: `in_use`, `cached` by the prefix cache, `total`; any thread may ask."""
