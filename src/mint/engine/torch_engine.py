"""The engine on PyTorch: base models, loras in training with their optimizers, and published weights for sampling.

Holds state and delegates the arithmetic: `trained_model` trains a lora, and a base model (`bases`) samples.
Knows nothing of tenants, journals or HTTP.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from mint.engine.bases.base_model import BaseModel
from mint.engine.bases.cache_sizes import CacheSizes
from mint.engine.bases.decoder_base import DecoderBase
from mint.engine.bases.multi_base_batch import MultiBaseBatch
from mint.engine.bases.trained_model import TrainedModel
from mint.engine.chunked.chunk_shapes import MOST_CHUNKS
from mint.engine.cpu.build import NativeBuild
from mint.engine.devices import Device
from mint.engine.instruction_sets import sum_in_one_order
from mint.engine.lora import LoraLayout, LoraWeights, parameter_count
from mint.engine.model.config import read_decoder_config
from mint.engine.protocol import (
    LORA_ALPHA,
    AdamSpec,
    BaseInfo,
    LoraSpec,
    LossSpec,
    MicroBatching,
    ModelState,
    PassResult,
    SampleJob,
    SampleResult,
    TrainDatum,
    sample_together,
)
from mint.engine.quantized.number_formats import Quantization
from mint.engine.reductions.division import ALONE, Peers
from mint.errors import CheckpointError, InvalidRequestError, NotFoundError
from mint.models.fingerprint import BASE_FINGERPRINT, fingerprint
from mint.models.folder import ModelFolder

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class _Published:
    base: BaseModel
    weights: LoraWeights


class TorchEngine:
    """`Engine` on one device. `threads` is part of what makes a run reproducible bit for bit."""

    lanes = 1

    def __init__(
        self,
        *,
        dtype: Literal["float32", "bfloat16"] | None = None,
        threads: int | None = None,
        device: str | None = None,
        kv_cache_bytes: int | None = None,
        prefix_cache_bytes: int | None = None,
        cache_sharers: int = 1,
        recompute: bool | None = None,
        offload_activations: bool = False,
        micro_batch_rows: int | None = None,
        native: NativeBuild | Path | None = None,
        gpu_kernels: bool = True,
        batch_invariant: bool = False,
        gpu_off: Collection[str] = (),
        implementation: Literal["mint", "transformers"] | None = None,
        quantize: Quantization | None = None,
        chunked: bool = False,
        most_chunks: int = MOST_CHUNKS,
        peers: Peers = ALONE,
    ) -> None:
        """`dtype` of the base weights: by default bfloat16 on a GPU that multiplies it, else float32. `device` by
        default the GPU.

        `kv_cache_bytes` bounds the KV cache of each base; None: a quarter of the memory that is free once the base is
        loaded, and no more than it can use. Up to `prefix_cache_bytes` of it (None: an eighth, or 512 MiB if that is
        more), and at most half, are kept for later prompts that begin alike. `cache_sharers` processes on this machine
        divide the quarter. With `recompute`, training computes its activations again instead of keeping them: the same
        bits, less memory, about a third more time. None does so only for sequences that are too long otherwise. With
        `offload_activations`, what is kept then, the inputs of layers, lies in the host's memory, or of a CPU in a
        temporary file: the same bits. `micro_batch_rows` are the rows of a micro-batch, which decide the last bits of a
        gradient; None: by the memory of the device. `native` are kernels in C for a CPU, or the folder where they are
        compiled and cached; None uses torch alone, whose last bits differ. Without `gpu_kernels` a GPU runs plain
        operations of torch: no FlexAttention, and no CUDA graphs of Triton kernels. With `batch_invariant` a sampled
        row on a GPU has the same bits in any batch, as it has on a CPU. `gpu_off` names fast paths that a GPU does not
        take (`SETTING` in `cuda/fast_paths.py`). `implementation` is what computes base models:
        by default mint's own decoder where it knows the family, else the modules of transformers. With `quantize` the
        frozen matrices of the layers take 4 or 8 bits for each number, on mint's own decoder alone. With
        `chunked` the layers of base models are cut into fixed chunks, which `peers` may divide: other last bits, the
        same for every number of processes; `most_chunks`, a power of two, is the largest number of them. `peers` are
        the processes that run each pass together; all get the same calls that train.

        Raises:
            InvalidRequestError: torch does not compute on the device; `chunked` on a GPU, or with `quantize`.
            MissingExtraError: native kernels are required and cannot be compiled.
        """
        sum_in_one_order()
        self._device = Device(device, native, gpu_kernels=gpu_kernels, batch_invariant=batch_invariant, gpu_off=gpu_off)
        self._device.require()
        self._dtype = self._device.default_dtype if dtype is None else DTYPES[dtype]
        if threads is not None:
            torch.set_num_threads(threads)
        self._recompute = recompute
        self._offload = offload_activations
        self._micro_batch_rows = micro_batch_rows
        self._implementation = implementation
        self._quantize: Quantization | None = quantize
        self._chunked = chunked
        self._most_chunks = most_chunks
        is_cpu = self._device.torch.type == "cpu"
        if chunked and (not is_cpu or quantize is not None):
            raise InvalidRequestError(
                "cuts layers of float32 or bfloat16 into chunks, on a CPU",
                field="tensor_parallel",
                value=f"MINT_QUANTIZE={quantize}" if is_cpu else "a GPU",
                remedy="Leave it out; or unset MINT_QUANTIZE, and set MINT_DEVICE=cpu on a machine with a GPU",
            )
        self._peers = peers
        self._bases: dict[str, BaseModel] = {}
        self._models: dict[str, TrainedModel] = {}
        self._published: dict[str, _Published] = {}
        self._caches = CacheSizes(kv_cache_bytes, prefix_cache_bytes, cache_sharers)

    @property
    def uses_gpu(self) -> bool:
        """Whether it computes on a GPU, which some errors take away from the process."""
        return self._device.is_gpu

    def load_base(self, name: str, path: str) -> BaseInfo:
        """Loads a Hugging Face folder as base `name`; does nothing if it is loaded.

        Raises:
            InvalidRequestError: neither mint nor transformers computes the family, or the folder lacks or adds tensors.
            CheckpointError: a weight file is damaged.
        """
        if name not in self._bases:
            folder = Path(path)
            try:
                base = self._open(name, ModelFolder(folder))
                settings = {**base.info.settings, BASE_FINGERPRINT: fingerprint(folder)}
                base.info = replace(base.info, settings=settings)
                self._bases[name] = base
            except InvalidRequestError as error:
                if error.field == "base_model" and error.value is None:
                    error.value = path
                raise
            except CheckpointError as error:
                error.remedy = error.remedy or "Download or copy the model again"
                raise
        return self._bases[name].info

    def create_model(self, model_id: str, base: str, lora: LoraSpec) -> dict[str, Any]:
        """A new lora with fresh optimizer; returns the settings that took effect."""
        found = self._base(base)
        model = TrainedModel(found, lora, self._peers, fused=self._device.fuses_optimizer)
        self._models[model_id] = model
        return {
            **found.info.settings,
            "arch": found.info.arch,
            "alpha": LORA_ALPHA,
            "scale": LORA_ALPHA / lora.rank,
            "rank": lora.rank,
            "seed": lora.seed,
            "trained_modules": sorted({name.rsplit(".", 1)[-1] for name in model.layout.module_names}),
            "trainable_parameters": model.layout.size,
            "lora_dtype": "float32",
        }

    def model_bytes(self, base: str, lora: LoraSpec) -> int:
        """The memory of a model of this shape: weights, gradient and two moments in float32, a copy of the weights that
        is published for sampling, and what its base keeps for both (merged matrices)."""
        found = self._base(base)
        kept = found.kept_bytes(lora, with_gradient=True) + found.kept_bytes(lora, with_gradient=False)
        return 5 * 4 * parameter_count(found.sites(lora), lora.rank) + kept

    def state_bytes(self, base: str, lora: LoraSpec) -> int:
        """Weights and two moments in float32."""
        return 3 * 4 * parameter_count(self._base(base).sites(lora), lora.rank)

    def free_bytes(self) -> int | None:
        """The memory that is free on the device; None if unknown."""
        return self._device.free_bytes

    def drop_model(self, model_id: str) -> None:
        """Forgets a model; unknown ids are fine."""
        model = self._models.pop(model_id, None)
        if model is not None:
            model.forget()

    def has_model(self, model_id: str) -> bool:
        """Whether the model is in memory."""
        return model_id in self._models

    def forget_all(self) -> None:
        """Forgets all models and published weights; the bases stay."""
        for model_id in list(self._models):
            self.drop_model(model_id)
        for weights_id in list(self._published):
            self.drop_weights(weights_id)

    def forward(self, model_id: str, data: Sequence[TrainDatum], loss: LossSpec) -> PassResult:
        """Logprobs and loss; the model does not change."""
        return self._model(model_id).forward(data, loss)

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
        return self._model(model_id).forward_backward(data, loss, repeated=micro_batching)

    def clear_gradient(self, model_id: str) -> None:
        """Throws the accumulated gradient away."""
        self._model(model_id).clear_gradient()

    def optim_step(self, model_id: str, adam: AdamSpec) -> dict[str, float]:
        """Applies and clears the gradient; `tokens` counts the tokens that it comes from."""
        return self._model(model_id).optim_step(adam)

    def read_state(self, model_id: str) -> ModelState:
        """A copy of weights and optimizer."""
        return self._model(model_id).read_state()

    def read_weights(self, model_id: str) -> dict[str, np.ndarray]:
        """A copy of the weights."""
        return self._model(model_id).read_weights()

    def write_state(self, model_id: str, state: ModelState) -> None:
        """Replaces weights and optimizer (moments None: a fresh optimizer) and clears the gradient.

        Raises:
            CheckpointError: names or shapes differ, or one moment is missing; the model is unchanged.
        """
        self._model(model_id).write_state(state)

    def state_digest(self, model_id: str, *, like: str | None = None) -> str:
        """A hash of weights, moments and step count, bit for bit, in the form of the digest `like`."""
        return self._model(model_id).digest(like=like)

    def publish(self, model_id: str, weights_id: str) -> None:
        """Freezes a copy of the model's weights for sampling; later steps do not touch it."""
        model = self._model(model_id)
        self._add_published(weights_id, _Published(model.base, model.base.published(model.copy_weights())))

    def load_weights(self, weights_id: str, base: str, lora: LoraSpec, weights: Mapping[str, np.ndarray]) -> None:
        """Makes saved weights available for sampling.

        Raises:
            CheckpointError: names or shapes do not fit the base and `lora`.
        """
        found = self._base(base)
        layout = LoraLayout(found.sites(lora), lora)
        flat = layout.assemble(weights, f"the weights {weights_id}").to(self._device.torch)
        self._add_published(weights_id, _Published(found, found.published(LoraWeights(layout, flat))))

    def drop_weights(self, weights_id: str) -> None:
        """Forgets published weights; unknown ids are fine."""
        published = self._published.pop(weights_id, None)
        if published is not None:
            published.base.drop_weights(published.weights)

    def open_batch(self) -> MultiBaseBatch:
        """An empty batch; training between two steps changes nothing in it."""
        return MultiBaseBatch(self._base_and_lora)

    def sampling_counters(self) -> dict[str, int]:
        """Totals since the start over all bases: prompt tokens `prefilled` and `reused`, tokens `sampled`, `steps`, and
        `preemptions` of sequences and prompts."""
        return self._sum(lambda base: base.counters)

    def kv_pages(self) -> dict[str, int]:
        """Pages of the KV caches now, over all bases: `in_use` by samples or the prefix cache, `cached` by the prefix
        cache, and the `total`. May be called from any thread."""
        return self._sum(lambda base: base.kv_pages)

    def _sum(self, read: Callable[[BaseModel], Mapping[str, int]]) -> dict[str, int]:
        totals: Counter[str] = Counter()
        for base in list(self._bases.values()):  # a copy: another thread may be adding one
            totals.update(read(base))
        return dict(totals)

    def sample(self, jobs: Sequence[SampleJob]) -> list[SampleResult]:
        """Samples all jobs together; the result of each is a function of that job alone."""
        return sample_together(self.open_batch(), jobs)

    def _open(self, name: str, folder: ModelFolder) -> BaseModel:
        """Loads a base model with the implementation that computes it."""
        if self._implementation != "transformers":
            try:
                config = read_decoder_config(folder.config)
            except InvalidRequestError as error:
                if self._implementation == "mint":
                    raise
                log.info("%s is not for mint's own decoder: %s", name, error)
                config = None
            if config is not None and (self._device.runs(config) or self._implementation == "mint"):
                return DecoderBase(
                    name,
                    folder,
                    config,
                    self._device,
                    self._dtype,
                    recompute=self._recompute,
                    offload=self._offload,
                    micro_batch_rows=self._micro_batch_rows,
                    caches=self._caches,
                    quantization=self._quantize,
                    layer_source=self._peers.layer_source(),
                    chunks=self._peers.chunks if self._chunked else None,
                    most_chunks=self._most_chunks,
                )
        if self._chunked:
            raise InvalidRequestError(
                "is computed by transformers, whose layers are not cut into chunks",
                field="base_model",
                value=name,
                remedy="Leave --tensor-parallel out, or choose a family of docs/models.md",
            )
        if self._quantize is not None:
            raise InvalidRequestError(
                f"quantizes what mint's own decoder computes, and transformers computes {name}",
                field="MINT_QUANTIZE",
                value=self._quantize,
                remedy="Unset it, or choose a family of docs/models.md",
            )
        self._device.require_batch_invariance(name, None, quantized=False)
        if self._offload:
            log.warning("MINT_OFFLOAD_ACTIVATIONS is not for %s: its layers are modules of transformers", name)
        # Deferred: it loads transformers' models, which own families do not need.
        from mint.engine.transformers.base import TransformersBase

        return TransformersBase(
            name,
            folder,
            self._device,
            self._dtype,
            recompute=self._recompute,
            micro_batch_rows=self._micro_batch_rows,
            caches=self._caches,
        )

    def _base(self, name: str) -> BaseModel:
        if name not in self._bases:
            raise NotFoundError("is not loaded", field="base_model", value=name)
        return self._bases[name]

    def _add_published(self, weights_id: str, published: _Published) -> None:
        self.drop_weights(weights_id)
        self._published[weights_id] = published
        published.base.add_weights(published.weights)

    def _model(self, model_id: str) -> TrainedModel:
        if model_id not in self._models:
            raise NotFoundError("is not in memory", field="model_id", value=model_id)
        return self._models[model_id]

    def _base_and_lora(self, job: SampleJob) -> tuple[BaseModel, LoraWeights | None]:
        base = self._base(job.base)
        if job.weights_id is None:
            return base, None
        published = self._published.get(job.weights_id)
        if published is None or published.base is not base:
            raise NotFoundError(f"are no published weights of {job.base}", field="weights_id", value=job.weights_id)
        return base, published.weights
