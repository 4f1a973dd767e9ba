"""A base model on mint's own decoder: packed training with shared prefixes, continuous batching, paged KV cache."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import torch
from typing_extensions import override  # a dependency of torch; in typing from Python 3.12 on

from mint.engine.bases.base_model import RECOMPUTE, BaseModel, in_mib, log_limits, log_micro_batches
from mint.engine.bases.cache_sizes import CacheSizes
from mint.engine.chunked.chunk_loras import ChunkedLoras
from mint.engine.chunked.chunk_shapes import MOST_CHUNKS, chunk_count
from mint.engine.chunked.chunked_decoder import ChunkedDecoder
from mint.engine.devices import Device
from mint.engine.lora import LoraWeights
from mint.engine.memory.activation_offload import offloaded
from mint.engine.memory.base_bytes import base_bytes
from mint.engine.memory.micro_batches import MIN_ROWS, activation_budget, bytes_per_row, fit_recompute, fit_rows
from mint.engine.memory.sampling_limits import SamplingLimits, fit_limits, prompt_token_bytes
from mint.engine.model.config import DecoderConfig
from mint.engine.model.decoder import Decoder
from mint.engine.model.weights import LayerSource
from mint.engine.protocol import BaseInfo, LoraSpec, MicroBatching
from mint.engine.quantized.number_formats import Quantization
from mint.engine.reductions.chunk_sums import Chunks
from mint.engine.sampling.kv_cache import KVCache, fitting_bytes
from mint.engine.sampling.prefix_cache import PrefixCache
from mint.engine.sampling.sampler import COUNTERS, Sampler, SamplerMemory
from mint.engine.sampling.state_cache import StateCache
from mint.models.folder import ModelFolder

log = logging.getLogger(__name__)

PREFIX_SHARE, LEAST_PREFIX_BYTES = 8, 512 << 20
"""Unless it is set, the prefix cache keeps one part in so many of the KV cache, and at least so many bytes."""


class DecoderBase(BaseModel):
    """A base model of a family that `engine/model` computes."""

    def __init__(
        self,
        name: str,
        folder: ModelFolder,
        config: DecoderConfig,
        device: Device,
        dtype: torch.dtype,
        *,
        recompute: bool | None,
        offload: bool,
        micro_batch_rows: int | None,
        caches: CacheSizes,
        quantization: Quantization | None,
        layer_source: LayerSource | None = None,
        chunks: Callable[[int], Chunks] | None = None,
        most_chunks: int = MOST_CHUNKS,
    ) -> None:
        """Reads the weights; the caches are made at the first sample. If given, `chunks` divides the layers, which are
        cut into that many chunks, at most `most_chunks`.

        Raises:
            InvalidRequestError: the folder lacks or adds tensors, or the batch-invariant mode is not for this model.
            CheckpointError: a weight file is damaged.
        """
        device.check(config, dtype, quantization)
        device.require_batch_invariance(name, config, quantized=quantization is not None)
        operations = device.operations(config, dtype)
        tensors = folder.tensors()
        saving = offloaded if offload else None
        divided = None if chunks is None else chunks(chunk_count(config, most_chunks))
        if divided is None:
            self._decoder = Decoder(config, tensors, operations, quantization, saving, layer_source)
        else:
            self._decoder = ChunkedDecoder(config, tensors, operations, divided, saving, layer_source)
        self._device = device
        budget = activation_budget(
            operations,
            memory_bytes=device.memory_bytes,
            base_bytes=base_bytes(config, tensors, operations, quantization),
        )
        row_bytes = bytes_per_row(config, dtype)
        rows = micro_batch_rows or fit_rows(row_bytes, budget, least=MIN_ROWS, most=operations.max_rows)
        if recompute is None:
            recompute = fit_recompute(rows, row_bytes, budget)
        micro_batching = MicroBatching(rows, recompute)
        log_micro_batches(name, micro_batching, budget)
        free = device.free_bytes
        self._limits = fit_limits(config.vocab_size, prompt_token_bytes(config, dtype), operations, free_bytes=free)
        log_limits(name, self._limits, free)
        self._kv_cache_bytes = _kv_cache_bytes(name, config, dtype, caches, self._limits, free)
        kept = max(self._kv_cache_bytes // PREFIX_SHARE, LEAST_PREFIX_BYTES)
        self._prefix_cache_bytes = kept if caches.prefix_cache is None else caches.prefix_cache
        self._published: list[LoraWeights] = []
        self._memory: SamplerMemory | None = None
        settings = {
            "engine": "torch",
            "implementation": "mint",
            "attention": operations.attention_name,
            "instructions": operations.instructions,
            "kernels": operations.kernels_digest,
            "switched_off": dict(device.switched_off),
            "gpu_off": device.paths_off,
            "batch_invariant": device.is_batch_invariant,
            "torch": torch.__version__,
            "dtype": str(dtype).removeprefix("torch."),
            "quantization": quantization,
            "tensor_chunks": None if divided is None else divided.count,
            "unembedding_dtype": "float32",
            "device": str(device.torch),
            "threads": torch.get_num_threads(),
            "micro_batch_rows": micro_batching.rows,
            "activation_mib": budget >> 20,
            "recompute": RECOMPUTE[micro_batching.recompute],
            "offload_activations": offload,
            "sampling_rows": self._limits.rows,
            "prefill_tokens": self._limits.prefill_tokens,
            "kv_cache_mib": self._kv_cache_bytes >> 20,
            "path": str(folder.path),
        }
        context = config.max_position_embeddings
        info = BaseInfo(name, config.model_type, config.vocab_size, context, folder.eos_token_ids, settings)
        super().__init__(self._decoder, info, micro_batching)

    def open_sampler(self) -> Sampler:
        if self._memory is None:
            self._memory = self._new_memory()
        return Sampler(self._decoder, self._memory)

    def kept_bytes(self, lora: LoraSpec, *, with_gradient: bool) -> int:
        sites, loras = self.sites(lora), self._decoder.loras
        parts = 0
        if isinstance(loras, ChunkedLoras):
            parts = loras.part_bytes(sites, lora.rank, with_gradient=with_gradient)
        return parts + loras.kept_bytes(sites, with_gradient=with_gradient)

    def forget(self, lora: LoraWeights) -> None:
        self._decoder.loras.forget(lora)

    @override
    def published(self, lora: LoraWeights) -> LoraWeights:
        # Chunks copy float32 weights, and the kernels of experts read them.
        if isinstance(self._decoder.loras, ChunkedLoras) or self._decoder.config.experts is not None:
            return lora
        return self._decoder.operations.published_lora(lora)

    def add_weights(self, lora: LoraWeights) -> None:
        self._published.append(lora)
        if self._memory is not None:
            self._memory.prefix_cache.open(lora)

    def drop_weights(self, lora: LoraWeights) -> None:
        self._published.remove(lora)
        self.forget(lora)
        if self._memory is not None:
            self._memory.prefix_cache.close(lora)

    @property
    def counters(self) -> Mapping[str, int]:
        return dict.fromkeys(COUNTERS, 0) if self._memory is None else self._memory.counters

    @property
    def kv_pages(self) -> Mapping[str, int]:
        memory = self._memory
        if memory is None:
            return {"in_use": 0, "cached": 0, "total": 0}
        cache = memory.kv_cache
        return {"in_use": cache.count - cache.free, "cached": len(memory.prefix_cache), "total": cache.count}

    def _new_memory(self) -> SamplerMemory:
        decoder = self._decoder
        net = decoder.delta_net
        # A state is as large as the keys and values of hundreds of tokens, so each kind of layer gets one half.
        size = self._kv_cache_bytes if net is None else self._kv_cache_bytes // 2
        cache = KVCache(decoder.config, decoder.dtype, decoder.device, size)
        states = None if net is None else StateCache(net, decoder.device, size)
        prefixes = PrefixCache(cache, min(self._prefix_cache_bytes, size // 2), states)
        for lora in self._published:
            prefixes.open(lora)
        steps = self._device.decode_steps(decoder, cache, states)
        return SamplerMemory(cache, prefixes, steps, self._device.draw(decoder.operations), self._limits, states)


def _kv_cache_bytes(
    name: str,
    config: DecoderConfig,
    dtype: torch.dtype,
    caches: CacheSizes,
    limits: SamplingLimits,
    free: int | None,
) -> int:
    """The size of the KV cache of a base that is loaded: as it was chosen, or by the memory that is free."""
    if caches.kv_cache is not None:
        return caches.kv_cache
    free = caches.part_of(free)
    sequences = limits.rows if config.delta_net is None else 2 * limits.rows  # states take one half
    size = fitting_bytes(config, dtype, sequences=sequences, free_bytes=free)
    log.info("%s: KV cache of at most %d MiB, of %s that is free (MINT_KV_CACHE_MIB)", name, size >> 20, in_mib(free))
    return size
