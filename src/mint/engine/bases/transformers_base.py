"""A base model on the modules of transformers: every causal language model that `AutoModelForCausalLM` loads.

Right before fast: training runs one sequence at a time, and the prompts of a job are not shared with other jobs. How
sampling uses the model's cache is measured at load, and how far its logits then are from those of training: both are
among the settings that `get_info` shows.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
import transformers
from torch import Tensor

from mint.engine.bases.base_model import BaseModel
from mint.engine.bases.transformers_decoder import TransformersDecoder
from mint.engine.bases.transformers_sampler import CacheUse, TransformersSampler
from mint.engine.devices import Device
from mint.engine.lora import LoraWeights
from mint.engine.protocol import BaseInfo, LoraSpec, MicroBatching
from mint.engine.sampling.sampler import COUNTERS
from mint.errors import InvalidRequestError
from mint.models.folder import ModelFolder

log = logging.getLogger(__name__)

_PROBE_PROMPT, _PROBE_TOKENS, _PROBE_SAMPLES = 20, 4, 2
"""Sizes of the test that measures the cache at load: a prompt of 20 tokens, which runs at once, then 4 tokens, one by
one, in 2 samples."""

_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""How far logits by the cache may be from those without it, in standard deviations of the logits. More is an error in
the cache, not rounding."""


class TransformersBase(BaseModel):
    """All that mint's own decoder does not compute."""

    def __init__(
        self, name: str, folder: ModelFolder, device: Device, dtype: torch.dtype, *, recompute: bool | None
    ) -> None:
        """Loads and measures the model.

        Raises:
            InvalidRequestError: transformers cannot load the folder.
        """
        self._decoder = decoder = TransformersDecoder(folder.path, dtype, device.torch)
        self._counters = dict.fromkeys(COUNTERS, 0)
        self._cache_use, difference = _measure_cache(decoder, dtype)
        settings = {
            "engine": "torch",
            "implementation": "transformers",
            "model_class": decoder.class_name,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "dtype": str(dtype).removeprefix("torch."),
            "device": str(device.torch),
            "threads": torch.get_num_threads(),
            "micro_batch_rows": 1,
            "recompute": "always" if recompute is True else "never",
            "sampling_cache": self._cache_use.value,
            "sampler_trainer_logit_difference": difference,
            "path": str(folder.path),
        }
        ends = folder.eos_token_ids
        info = BaseInfo(name, decoder.arch, decoder.vocab_size, decoder.context_length, ends, settings)
        super().__init__(decoder, info, MicroBatching(1, bool(recompute)))
        log.info(
            "%s runs on %s of transformers: cache %s, sampler's logits within %.1e of the trainer's",
            name,
            decoder.class_name,
            self._cache_use.value,
            difference,
        )

    def open_sampler(self) -> TransformersSampler:
        return TransformersSampler(self._decoder, self._cache_use, self._counters)

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


@torch.no_grad()
def _measure_cache(decoder: TransformersDecoder, dtype: torch.dtype) -> tuple[CacheUse, float]:
    """The best use of the model's cache whose logits are those of whole sequences, and the largest difference.

    Raises:
        InvalidRequestError: the model gives logits that are not finite.
    """
    size = min(_PROBE_PROMPT + _PROBE_TOKENS, decoder.context_length)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(min(2, decoder.vocab_size - 1), decoder.vocab_size, (size,), generator=generator)
    tokens = tokens.to(decoder.device)
    hidden, _ = decoder.prefill(tokens[None], None, use_cache=False)
    whole = decoder.logits(hidden[0], [])
    if not whole.isfinite().all():
        raise InvalidRequestError(
            "gives logits that are not finite", field="base_model", value=decoder.class_name, remedy="Check its files"
        )
    limit = _TOLERANCE[dtype] * float(whole.std())
    for use in (CacheUse.SHARED, CacheUse.SEPARATE):
        try:
            difference = _cache_difference(decoder, tokens, whole, use)
        except (AttributeError, TypeError, ValueError, RuntimeError, IndexError, NotImplementedError) as error:
            log.debug("%s: cache with %s: %s", decoder.class_name, use.value, error)
            continue
        if difference <= limit:
            return use, difference
    return CacheUse.NONE, 0.0


def _cache_difference(decoder: TransformersDecoder, tokens: Tensor, whole: Tensor, use: CacheUse) -> float:
    """How far the logits of samples that decode the last tokens from the cache are from those `whole` [T, V]."""
    start = len(tokens) - _PROBE_TOKENS
    copies = 1 if use is CacheUse.SHARED else _PROBE_SAMPLES
    _, cache = decoder.prefill(tokens[:start].expand(copies, -1), None, use_cache=True)
    if cache is None:
        raise ValueError("the model returns no cache")
    if use is CacheUse.SHARED:
        cache.repeat(_PROBE_SAMPLES)
    rows = _PROBE_SAMPLES
    difference = 0.0
    for place in range(start, len(tokens)):
        if use is CacheUse.SHARED and place == len(tokens) - 1:
            rows = 1
            cache.select(torch.tensor([_PROBE_SAMPLES - 1], device=decoder.device))
        hidden, cache = decoder.decode(tokens[place].expand(rows), None, cache)
        found = decoder.logits(hidden, [])
        if len(found) != rows:
            raise ValueError("the cache has another number of sequences")
        difference = max(difference, float((found - whole[place]).abs().max()))
    return difference
