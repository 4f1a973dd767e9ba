"""Answers what a job asks about its prompt, from the hidden states of the prefill.

Logits are computed for the places that were asked about, a chunk at a time.

Letters: P prompt tokens · E hidden size · Q tokens asked about · K draws per place.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mint.engine.drawing.draw import draw_many
from mint.engine.drawing.random_stream import uniform
from mint.engine.lora import LoraRows, LoraWeights
from mint.engine.protocol import SampleJob, TokenTable
from mint.engine.target_logprobs import TargetLogprobs, Unembedding, row_slices, top_logprobs
from mint.engine.transfers import for_float64

DRAWS_FROM = 1 << 32
"""Draws within the prompt use the random streams of sample numbers from here on, which no sample has."""


@dataclass(frozen=True)
class PromptScores:
    """The fields of `SampleResult` of the same names."""

    prompt_logprobs: np.ndarray | None = None
    topk_prompt_logprobs: list[list[tuple[int, float]] | None] | None = None
    target_prompt_logprobs: np.ndarray | None = None
    prompt_alt_tokens: TokenTable | None = None


def unasked_tokens(job: SampleJob) -> int:
    """The number of tokens at the prompt's beginning whose hidden states no answer needs."""
    size = len(job.prompt)
    asked = [size - 1]
    if job.prompt_logprobs or job.topk_prompt_logprobs:
        asked.append(0 if job.prompt_logprobs_last_n is None else size - 1 - job.prompt_logprobs_last_n)
    if job.target_prompt_logprobs is not None and len(job.target_prompt_logprobs):
        asked.append(int(job.target_prompt_logprobs[:, 0].min()) - 1)
    if job.prompt_alt_tokens_k:
        asked.append(0)
    return max(0, min(asked))


def asks(job: SampleJob) -> bool:
    """Whether anything is asked about the prompt."""
    return bool(
        job.prompt_logprobs
        or job.topk_prompt_logprobs
        or job.prompt_alt_tokens_k
        or job.target_prompt_logprobs is not None
    )


def score_prompt(decoder: Unembedding, job: SampleJob, hidden: Tensor, lora: LoraWeights | None) -> PromptScores:
    """The answers for `job` from hidden [P, E]; row i predicts token i + 1.

    The first `unasked_tokens` rows may hold anything finite.
    """
    last_n = job.prompt_logprobs_last_n
    first = 0 if last_n is None else len(job.prompt) - 1 - last_n
    before = hidden[:-1]
    loras = [LoraRows(0, len(hidden), lora)]
    own = top = None
    if job.prompt_logprobs:
        rows = np.arange(len(before) - first)
        found = TargetLogprobs(decoder, before[first:], rows, job.prompt[1 + first :], loras).logprobs
        own = np.concatenate([np.full(1 + first, np.nan, np.float32), found.cpu().numpy()])
    if job.topk_prompt_logprobs:
        best = top_logprobs(decoder, before[first:], job.topk_prompt_logprobs, loras)
        top = [*[None] * (1 + first), *best]
    targets = None
    if job.target_prompt_logprobs is not None:
        targets = _score_targets(decoder, job.target_prompt_logprobs, before, loras)
    draws = _draw(decoder, job, before, loras) if job.prompt_alt_tokens_k else None
    return PromptScores(own, top, targets, draws)


def _score_targets(decoder: Unembedding, pairs: np.ndarray, before: Tensor, loras: list[LoraRows]) -> np.ndarray:
    """Logprobs float32 [Q] of pairs (place, token) [Q, 2], in any order and with repetitions."""
    distinct, pair_of = np.unique(pairs, axis=0, return_inverse=True)
    places, rows = np.unique(distinct[:, 0], return_inverse=True)
    asked = before[torch.from_numpy(places - 1).to(before.device)]
    found = TargetLogprobs(decoder, asked, rows, np.ascontiguousarray(distinct[:, 1]), loras)
    return found.logprobs.cpu().numpy()[pair_of.reshape(-1)]


def _draw(decoder: Unembedding, job: SampleJob, before: Tensor, loras: list[LoraRows]) -> TokenTable:
    """`prompt_alt_tokens_k` tokens at every place after the first, and the policy's own logprobs of them."""
    count = len(before)
    draws = job.prompt_alt_tokens_k
    seeds = np.full(count * draws, job.seed % (1 << 64), np.uint64)
    streams = np.tile(np.arange(DRAWS_FROM, DRAWS_FROM + draws), count)
    uniforms = uniform(seeds, streams, np.repeat(np.arange(1, count + 1), draws)).reshape(count, draws)
    tokens, logprobs = np.zeros((count, draws), np.int64), np.zeros((count, draws), np.float32)
    for rows in row_slices(count, decoder.vocab_size, decoder.operations.logits_at_once):
        logits = for_float64(decoder.logits(before[rows], loras))
        chosen = draw_many(logits, uniforms[rows], job.temperature)
        tokens[rows] = chosen.cpu().numpy()
        logprobs[rows] = (logits.gather(1, chosen) - logits.logsumexp(1, keepdim=True)).cpu().numpy()
    return TokenTable(tokens, logprobs)
