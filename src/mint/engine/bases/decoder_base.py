"""A base model on mint's own decoder: packed training with shared prefixes, continuous batching, paged KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from mint.engine.bases.base_model import BaseModel
from mint.engine.devices import Device
from mint.engine.lora import LoraWeights
from mint.engine.memory_budget import rows_at_once
from mint.engine.model.config import DecoderConfig
from mint.engine.model.decoder import Decoder
from mint.engine.protocol import BaseInfo, LoraSpec, MicroBatching
from mint.engine.quantized.number_formats import Quantization
from mint.engine.sampling.kv_cache import KVCache
from mint.engine.sampling.prefix_cache import PrefixCache
from mint.engine.sampling.sampler import COUNTERS, Sampler, SamplerMemory
from mint.engine.sampling.state_cache import StateCache
from mint.models.folder import ModelFolder

_RECOMPUTE = {None: "long sequences", True: "always", False: "never"}


@dataclass(frozen=True)
class CacheSizes:
    """The KV cache of a base model, and the part of it that is kept for later prompts that begin alike; bytes."""

    kv_cache: int
    prefix_cache: int


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
        caches: CacheSizes,
        quantization: Quantization | None,
    ) -> None:
        """Reads the weights; the caches are made at the first sample.

        Raises:
            InvalidRequestError: the folder lacks or adds tensors.
            CheckpointError: a weight file is damaged.
        """
        operations = device.operations(config, dtype)
        self._decoder = Decoder(config, folder.tensors(), operations, quantization)
        self._device = device
        micro_batching = MicroBatching(rows_at_once(config, operations), recompute)
        self._caches = caches
        self._published: list[LoraWeights] = []
        self._memory: SamplerMemory | None = None
        settings = {
            "engine": "torch",
            "implementation": "mint",
            "attention": operations.attention_name,
            "torch": torch.__version__,
            "dtype": str(dtype).removeprefix("torch."),
            "quantization": quantization,
            "unembedding_dtype": "float32",
            "device": str(device.torch),
            "threads": torch.get_num_threads(),
            "micro_batch_rows": micro_batching.rows,
            "recompute": _RECOMPUTE[recompute],
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
        return self._decoder.loras.kept_bytes(self.sites(lora), with_gradient=with_gradient)

    def forget(self, lora: LoraWeights) -> None:
        self._decoder.loras.forget(lora)

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
        decoder, sizes = self._decoder, self._caches
        net = decoder.config.delta_net
        # A state is as large as the keys and values of hundreds of tokens, so each kind of layer gets one half.
        size = sizes.kv_cache if net is None else sizes.kv_cache // 2
        cache = KVCache(decoder.config, decoder.dtype, decoder.device, size)
        states = None if net is None else StateCache(net, decoder.device, size)
        prefixes = PrefixCache(cache, min(sizes.prefix_cache, size // 2), states)
        for lora in self._published:
            prefixes.open(lora)
        steps = self._device.decode_steps(decoder, cache, states)
        return SamplerMemory(cache, prefixes, steps, self._device.draw(decoder.operations), states)
