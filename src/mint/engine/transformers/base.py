"""A base model on the modules of transformers: every causal language model that `AutoModelForCausalLM` loads.

Correctness comes before speed: what a model's cache and its batches can do is measured when it is loaded
(`transformers_measurements`), and so is how far sampler and trainer differ (`sampler_difference`). The settings of
`get_info` have both. No prompt is shared with other jobs.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
import transformers

from mint.engine.bases.base_model import RECOMPUTE, BaseModel, in_mib, log_micro_batches
from mint.engine.bases.cache_sizes import CacheSizes
from mint.engine.bases.sampler_difference import largest_logprob_difference
from mint.engine.devices import Device
from mint.engine.lora import LoraWeights
from mint.engine.memory.cache_budget import fit_budget
from mint.engine.memory.micro_batches import activation_budget
from mint.engine.protocol import BaseInfo, LoraSpec, MicroBatching
from mint.engine.sampling.sampler import COUNTERS
from mint.engine.transformers.decoder import TransformersDecoder
from mint.engine.transformers.measurements import measure
from mint.engine.transformers.sampler import TransformersSampler
from mint.models.folder import ModelFolder

log = logging.getLogger(__name__)


class TransformersBase(BaseModel):
    """A base model whose layers are modules of transformers."""

    def __init__(
        self,
        name: str,
        folder: ModelFolder,
        device: Device,
        dtype: torch.dtype,
        *,
        recompute: bool | None,
        micro_batch_rows: int | None,
        caches: CacheSizes,
    ) -> None:
        """Loads and measures the model. `micro_batch_rows` are ignored where it trains one sequence at a time.
        `caches` bounds the caches of all samples; by default a share of the memory that is free.

        Raises:
            InvalidRequestError: transformers cannot load the folder.
        """
        device.check(None, dtype)
        operations = device.operations_beside_modules(dtype)
        self._decoder = decoder = TransformersDecoder(folder, operations)
        self._counters = dict.fromkeys(COUNTERS, 0)
        memory = device.memory_bytes
        budget = activation_budget(operations, memory_bytes=memory, base_bytes=decoder.weight_bytes)
        measured = measure(decoder, dtype, budget)
        rows = measured.micro_batch_rows
        if micro_batch_rows is not None and rows > 1:
            rows = micro_batch_rows
        if decoder.rotation_switch is not None:  # a sequence that is padded to more would be rotated otherwise
            rows = min(rows, decoder.rotation_switch)
        micro_batching = MicroBatching(rows, bool(recompute))
        log_micro_batches(name, micro_batching, budget)
        self._cache_use = measured.cache_use
        free = caches.part_of(device.free_bytes)
        self._cache_budget = fit_budget(measured.cache_cost, chosen_bytes=caches.kv_cache, free_bytes=free)
        limit_mib = self._cache_budget.limit_bytes >> 20
        log.info("%s: caches of at most %d MiB, of %s that is free (MINT_KV_CACHE_MIB)", name, limit_mib, in_mib(free))
        settings: dict[str, Any] = {
            "engine": "torch",
            "implementation": "transformers",
            "model_class": decoder.class_name,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "dtype": str(dtype).removeprefix("torch."),
            "device": str(device.torch),
            "switched_off": dict(device.switched_off),
            "gpu_off": device.paths_off,
            "threads": torch.get_num_threads(),
            "micro_batch_rows": micro_batching.rows,
            "activation_mib": budget >> 20,
            "recompute": RECOMPUTE[micro_batching.recompute],
            "sampling_cache": self._cache_use.value,
            "kv_cache_mib": limit_mib,
            "path": str(folder.path),
        }
        ends = folder.eos_token_ids
        info = BaseInfo(name, decoder.arch, decoder.vocab_size, decoder.context_length, ends, settings)
        super().__init__(decoder, info, micro_batching)
        longest = decoder.context_length
        if decoder.rotation_switch is not None:  # a sequence that grows beyond it differs in its earlier tokens
            longest = min(longest, decoder.rotation_switch)
        # A sampler of its own: its tokens are not among the counters.
        sampler = TransformersSampler(decoder, self._cache_use, self._cache_budget, dict.fromkeys(COUNTERS, 0))
        difference = largest_logprob_difference(self, sampler, weight_bytes=decoder.weight_bytes, longest=longest)
        settings["sampler_trainer_logit_difference"] = difference
        log.info(
            "%s runs on %s of transformers: cache %s, sampler's logprobs %s",
            name,
            decoder.class_name,
            self._cache_use.value,
            "not compared" if difference is None else f"up to {difference:.1e} from the trainer's, as measured",
        )

    def open_sampler(self) -> TransformersSampler:
        return TransformersSampler(self._decoder, self._cache_use, self._cache_budget, self._counters)

    def kept_bytes(self, lora: LoraSpec, *, with_gradient: bool) -> int:
        return 0

    def forget(self, lora: LoraWeights) -> None:
        """Nothing is kept for it."""

    def add_weights(self, lora: LoraWeights) -> None:
        """Nothing is cached under weights."""

    def drop_weights(self, lora: LoraWeights) -> None:
        """Nothing is cached under weights."""

    @property
    def counters(self) -> Mapping[str, int]:
        return self._counters

    @property
    def kv_pages(self) -> Mapping[str, int]:
        return {"in_use": 0, "cached": 0, "total": 0}
