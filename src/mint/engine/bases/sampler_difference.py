"""Measures how far a sampler's logprobs are from those of a training pass over the same tokens, when a model is loaded.

Both run as they do for a user: samples of prompts of several lengths under a random lora, then one pass over all of
them, in the micro-batches of a training pass. The largest difference is that of these tokens; others may differ more.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import torch

from mint.engine.bases.base_model import BaseModel, BaseSampler
from mint.engine.lora import LoraLayout, LoraWeights
from mint.engine.protocol import LoraSpec, SampleJob, StopRule, TrainDatum, resolve_loss
from mint.errors import MintError

log = logging.getLogger(__name__)

_SEED = 0
_LORA = LoraSpec(rank=4, seed=_SEED, train_attn=True, train_mlp=True, train_unembed=True)
_B_STD = 0.01
"""The standard deviation of the entries of B, about as after some steps. If they were zero, the lora would add nothing
that could be rounded."""


@dataclass(frozen=True)
class _Extent:
    """How much is measured: `samples` of each prompt, of `tokens` each; the longer prompt has `prompt` tokens."""

    samples: int
    tokens: int
    prompt: int


_SMALL, _LARGE = _Extent(12, 20, prompt=21), _Extent(4, 6, prompt=12)
"""480 and 48 logprobs, of 40 and 12 steps. Rare differences, such as another expert for one token, are seen among many
places alone; but a step of a large model may take seconds on a CPU."""

_LARGE_BYTES = 2 << 30
"""From so many bytes of weights on a model is large."""


def largest_logprob_difference(
    base: BaseModel, sampler: BaseSampler, *, weight_bytes: int, longest: int
) -> float | None:
    """The largest |Δ logprob| of tokens that `sampler`, an empty one of `base`, draws; sequences of at most `longest`
    tokens. None where the model's code fails, memory is short or logits are not finite, which the log says."""
    try:
        return _measure(base, sampler, _LARGE if weight_bytes >= _LARGE_BYTES else _SMALL, longest)
    except (ArithmeticError, AttributeError, LookupError, MemoryError, MintError, RuntimeError, TypeError, ValueError):
        log.warning("the difference of sampler and trainer could not be measured", exc_info=True)
        return None


def _measure(base: BaseModel, sampler: BaseSampler, extent: _Extent, longest: int) -> float:
    lora = _random_lora(base)
    jobs = _jobs(base.info.name, base.info.vocab_size, extent, longest)
    for key, job in jobs.items():
        sampler.add(key, job, lora, None)
    data: list[TrainDatum] = []
    drawn: list[np.ndarray] = []
    while sampler.keys:
        for key, result in sampler.step().items():
            if result.error is not None:
                raise ValueError(result.error)
            for sample in result.samples:
                whole = np.concatenate([jobs[key].prompt, sample.tokens])
                data.append(TrainDatum(whole[:-1], whole[1:], np.ones(len(whole) - 1, np.float32)))
                drawn.append(sample.logprobs)
    trained = base.run_pass(lora, data, resolve_loss("cross_entropy"), gradient=None, repeated=None).logprobs
    return max(
        float(np.abs(whole[-len(own) :] - own).max()) for whole, own in zip(trained, drawn, strict=True) if len(own)
    )


def _random_lora(base: BaseModel) -> LoraWeights:
    lora = LoraWeights.zeros(LoraLayout(base.sites(_LORA), _LORA), base.device)
    lora.initialise()
    generator = torch.Generator().manual_seed(_SEED)
    for site in lora.sites.values():
        for b in site.bs:
            # Drawn on the CPU: the same lora on every device.
            b.copy_(torch.empty(b.shape).normal_(0, _B_STD, generator=generator))
    return lora


def _jobs(base: str, vocab_size: int, extent: _Extent, longest: int) -> dict[str, SampleJob]:
    """A job of a short prompt, and one of a longer prompt, of random tokens."""
    room = min(longest, extent.prompt + extent.tokens)
    tokens = max(1, min(extent.tokens, room // 2))
    rng = np.random.default_rng(_SEED)
    jobs = {}
    for seed, length in enumerate((room // 7, room - tokens)):
        jobs[str(seed)] = SampleJob(
            base=base,
            weights_id=None,
            prompt=rng.integers(min(2, vocab_size - 1), vocab_size, max(1, length)),
            num_samples=extent.samples,
            max_tokens=tokens,
            temperature=1.0,
            top_k=-1,
            top_p=1.0,
            seed=seed,
            stop=StopRule(),
        )
    return jobs
