"""Measures a model of transformers when it is loaded: how its cache can be used, and whether it trains in batches.

Both are compared with sequences that run whole and alone, on random tokens.

Letters: T tokens · V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from torch import Tensor

from mint.engine.lora import LoraLayout, LoraRows, LoraWeights
from mint.engine.memory.cache_budget import CacheCost
from mint.engine.memory.micro_batches import fit_rows
from mint.engine.protocol import LoraSpec, TrainDatum, is_out_of_memory
from mint.engine.transformers.decoder import TransformersDecoder
from mint.engine.transformers.sampler import CacheUse
from mint.errors import InvalidRequestError

log = logging.getLogger(__name__)

_PROMPT, _DECODED, _SAMPLES = 20, 4, 2
"""The test of the cache: a prompt of 20 tokens, which runs at once, then 4 tokens, one by one, in 2 samples."""

_SHORTER = 13
"""The test of a batch: a sequence of all the tokens, and one of so many, which is padded."""

_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""How far numbers may be from those of whole sequences: logits in standard deviations of the logits, gradients in parts
of the largest one. More is an error of the model's code, not rounding."""

_CPU_ROWS = 256
"""Rows of a training batch on a CPU at most: so many take 0.7 to 0.9 of the time that sequences of 50 to 90 tokens take
one by one. The intermediate results of 1024 rows leave the caches, and nothing is left of that."""

_FAILURES = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors by which the code of a model says that it cannot do something."""


@dataclass(frozen=True)
class Measurements:
    """`micro_batch_rows` is 1 where sequences must be trained one at a time. `cache_cost` is 0 without a cache."""

    cache_use: CacheUse
    cache_cost: CacheCost
    micro_batch_rows: int


@torch.no_grad()
def measure(decoder: TransformersDecoder, dtype: torch.dtype, budget: int) -> Measurements:
    """Measures a loaded model, which may keep `budget` bytes of activations.

    Raises:
        InvalidRequestError: the model's code fails, it gives logits that are not finite, or it is an encoder.
    """
    size = min(_PROMPT + _DECODED, decoder.context_length)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(min(2, decoder.vocab_size - 1), decoder.vocab_size, (size,), generator=generator)
    whole = _whole_logits(decoder, tokens.to(decoder.device))
    if not whole.isfinite().all():
        raise InvalidRequestError(
            f"gives logits that are not finite on {decoder.class_name} of transformers, although its weights are",
            field="base_model",
            value=str(decoder.path),
            remedy="Check the numbers in its config.json, such as those of norms and rotations"
            + (f". In {dtype} numbers may be too large: try MINT_DTYPE=float32" if dtype != torch.float32 else ""),
        )
    cache_use = _measure_cache(decoder, tokens.to(decoder.device), whole, _TOLERANCE[dtype])
    cost = CacheCost(0, 0) if cache_use is CacheUse.NONE else _measure_cost(decoder, tokens.to(decoder.device))
    return Measurements(cache_use, cost, _measure_batch(decoder, tokens.numpy(), _TOLERANCE[dtype], budget))


def _whole_logits(decoder: TransformersDecoder, tokens: Tensor) -> Tensor:
    """The logits [T, V] of a sequence that runs whole and alone.

    Raises:
        InvalidRequestError: the model's code fails.
    """
    try:
        hidden, _ = decoder.prefill(tokens[None], None, use_cache=False)
        return decoder.logits(hidden[0], [])
    except _FAILURES as error:
        if is_out_of_memory(error):
            raise
        first = str(error).strip().split("\n")[0]
        raise InvalidRequestError(
            f"{decoder.class_name} of transformers cannot run {len(tokens)} tokens: {first}",
            field="base_model",
            remedy="Check its config.json, or try another version of transformers",
        ) from error


def _measure_cache(decoder: TransformersDecoder, tokens: Tensor, whole: Tensor, tolerance: float) -> CacheUse:
    """The best use of the model's cache whose logits are those of whole sequences, up to rounding. Positions are told
    where the model's code loses them, or where none is right otherwise."""
    loses = _loses_positions(decoder, tokens)
    for tells_positions, use in product((loses, not loses), (CacheUse.SHARED, CacheUse.SEPARATE)):
        decoder.tells_positions = tells_positions
        try:
            difference = _cache_difference(decoder, tokens, whole, use)
        except _FAILURES as error:
            log.debug("%s: cache with %s: %s", decoder.class_name, use.value, error)
            continue
        if difference <= tolerance * float(whole.std()):
            return use
    decoder.tells_positions = False
    _check_growth(decoder, tokens, whole, tolerance)
    return CacheUse.NONE


def _loses_positions(decoder: TransformersDecoder, tokens: Tensor) -> bool:
    """Whether the model's code takes the position of a token behind a cache for 0: it gives the same bits if it is told
    so, and others if it is told the right one. In so few tokens that may make less difference than bfloat16 rounds."""
    last = len(tokens) - 1
    found = []
    try:
        for tells_positions, position in ((False, last), (True, 0), (True, last)):
            decoder.tells_positions = tells_positions
            _, cache = decoder.prefill(tokens[None, :last], None, use_cache=True)
            if cache is None:
                return False
            cache.length = position
            found.append(decoder.decode(tokens[last:], None, cache)[0])
    except _FAILURES:  # most often it takes no positions
        return False
    own, first, right = found
    return torch.equal(own, first) and not torch.equal(own, right)


def _check_growth(decoder: TransformersDecoder, tokens: Tensor, whole: Tensor, tolerance: float) -> None:
    """Compares logits at the end of shorter sequences with those at the same places of the whole one, and warns where
    they differ.

    Raises:
        InvalidRequestError: they do, and the model is an encoder.
    """
    difference = 0.0
    for size in range(max(1, len(tokens) - _DECODED), len(tokens)):
        found = _whole_logits(decoder, tokens[:size])
        difference = max(difference, float((found[-1] - whole[size - 1]).abs().max()))
    if difference <= tolerance * float(whole.std()):
        return
    if decoder.is_encoder:
        raise InvalidRequestError(
            f"{decoder.class_name} sees the tokens behind the one whose successor it predicts: it is an encoder",
            field="base_model",
            remedy='Choose a decoder. If it was trained as one, say "is_decoder": true in config.json',
        )
    log.warning(
        "%s: logits of a token depend on the tokens behind it, by up to %.1e; so the sampler's are not the trainer's",
        decoder.class_name,
        difference,
    )


def _measure_cost(decoder: TransformersDecoder, tokens: Tensor) -> CacheCost:
    """The bytes of a cache for each sequence and each token, from caches of two lengths: the line through both."""
    sizes = []
    lengths = (len(tokens) // 2, len(tokens))
    for length in lengths:
        _, cache = decoder.prefill(tokens[None, :length], None, use_cache=True)
        sizes.append(0 if cache is None else cache.size_bytes)
    of_token = max(0, sizes[1] - sizes[0]) // (lengths[1] - lengths[0])
    return CacheCost(max(0, sizes[0] - of_token * lengths[0]), of_token)


def _cache_difference(decoder: TransformersDecoder, tokens: Tensor, whole: Tensor, use: CacheUse) -> float:
    """How far the logits of samples that decode the last tokens from the cache are from those `whole` [T, V]."""
    start = len(tokens) - _DECODED
    copies = 1 if use is CacheUse.SHARED else _SAMPLES
    _, cache = decoder.prefill(tokens[:start].expand(copies, -1), None, use_cache=True)
    if cache is None:
        raise ValueError("the model returns no cache")
    if use is CacheUse.SHARED:
        cache.repeat(_SAMPLES)
    rows = _SAMPLES
    difference = 0.0
    for place in range(start, len(tokens)):
        if use is CacheUse.SHARED and place == len(tokens) - 1:
            rows = 1
            cache.select(torch.tensor([_SAMPLES - 1], device=decoder.device))
        hidden, cache = decoder.decode(tokens[place].expand(rows), None, cache)
        found = decoder.logits(hidden, [])
        if len(found) != rows:
            raise ValueError("the cache has another number of sequences")
        difference = max(difference, float((found - whole[place]).abs().max()))
    return difference


def _measure_batch(decoder: TransformersDecoder, tokens: np.ndarray, tolerance: float, budget: int) -> int:
    """The rows of a micro-batch in which padded sequences have the logits and gradients of single ones; else 1."""
    spec = LoraSpec(rank=1, seed=0, train_attn=True, train_mlp=True, train_unembed=True)
    lora = LoraWeights.zeros(LoraLayout(decoder.sites(spec), spec), decoder.device)
    gradient = lora.enable_gradient()
    data = [TrainDatum(own, own, np.ones(len(own), np.float32)) for own in (tokens[::-1][:_SHORTER].copy(), tokens)]
    found: list[tuple[Tensor, Tensor]] = []
    kept_bytes = 0
    try:
        for rows in (1, len(data) * len(tokens)):
            gradient.zero_()
            logits, kept_bytes = _logits_and_gradient(decoder, lora, data, rows)
            found.append((logits, gradient.clone()))
    except _FAILURES as error:
        log.debug("%s: a batch of sequences: %s", decoder.class_name, error)
        return 1
    (alone, alone_gradient), (batched, batched_gradient) = found
    is_same = (batched - alone).abs().max() <= tolerance * alone.std()
    has_same_gradient = (batched_gradient - alone_gradient).abs().max() <= tolerance * alone_gradient.abs().max()
    if not (is_same and has_same_gradient):  # also where one is not a number
        return 1
    limit = _CPU_ROWS if decoder.device.type == "cpu" else decoder.operations.max_rows
    return fit_rows(max(1, kept_bytes // len(batched)), budget, least=1, most=limit)


def _logits_and_gradient(
    decoder: TransformersDecoder, lora: LoraWeights, data: Sequence[TrainDatum], rows: int
) -> tuple[Tensor, int]:
    """Logits of all rows, in the order of the data's lengths, and the bytes that the last micro-batch kept for its
    backward. A gradient is added to the lora's, that of Σ hidden² / 2."""
    logits = []
    kept = 0
    for batch in sorted(decoder.pack(data, rows), key=lambda batch: len(batch.tokens)):
        with torch.enable_grad(), decoder.kept_tensors() as storages:
            hidden = decoder.forward_packed(batch, lora, recompute=False)
        kept = sum(storages.values())
        hidden.backward(hidden.detach())
        logits.append(decoder.logits(hidden.detach(), [LoraRows(0, len(hidden), lora)]))
    return torch.cat(logits), kept
