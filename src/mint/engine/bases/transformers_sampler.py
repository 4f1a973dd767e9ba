"""Sampling from a model of transformers: each job's samples decode together, from the model's own cache.

A job runs in a batch of its own, so its result is a function of that job alone. How the cache is used is measured when
the model is loaded (`CacheUse`). Drawing, stopping and prompt scores are those of mint's own sampler.

Letters: S samples of a job · T tokens · P prompt tokens · V vocabulary.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from mint.engine.bases.transformers_decoder import ModelCache, TransformersDecoder
from mint.engine.drawing.draw import TorchDraw
from mint.engine.lora import LoraRows, LoraWeights
from mint.engine.protocol import CANCELLED, SampleJob, SampleResult, TokenListener, is_out_of_memory
from mint.engine.sampling.admission import WaitingJobs
from mint.engine.sampling.batch_job import BatchJob, stream_tokens
from mint.engine.sampling.next_tokens import DIVERGED, next_tokens
from mint.engine.sampling.prompt_scoring import asks, score_prompt
from mint.engine.sampling.sampler import NO_MEMORY
from mint.engine.sampling.sequences import Sequences

MAX_SEQUENCES = 128
"""Sequences that are decoded in one step; further jobs wait. A single job with more samples runs alone."""

PREFILL_TOKENS = 2048
"""Prompt tokens of one step, at least one prompt."""


class CacheUse(enum.Enum):
    """How samples use the model's cache."""

    SHARED = "shared prompt"
    """The prompt runs once; its cache is repeated for all samples, and ended samples leave it."""
    SEPARATE = "separate prompts"
    """The prompt runs once for each sample: states of hybrid models cannot be repeated."""
    NONE = "none"
    """Every step runs whole sequences: the model has no cache that gives the same logits."""


@dataclass(eq=False)
class _CachedJob(BatchJob):
    """A job; `slots` [S] are those of its samples, and `rows` the samples in the cache, in its order."""

    slots: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    rows: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    cache: ModelCache | None = None


class TransformersSampler:
    """The jobs of one batch on one model."""

    def __init__(self, decoder: TransformersDecoder, use: CacheUse, counters: dict[str, int]) -> None:
        self._decoder = decoder
        self._use = use
        self._counters = counters
        self._draw = TorchDraw(decoder.operations)
        self._sequences = Sequences()
        self._entries: dict[str, _CachedJob] = {}
        self._waiting = WaitingJobs[_CachedJob]()
        self._running: list[_CachedJob] = []
        self._cancelled: list[str] = []
        self._results: dict[str, SampleResult] = {}
        self._arrivals = 0
        self._sequence_limit = MAX_SEQUENCES

    @property
    def keys(self) -> Collection[str]:
        """The jobs without a result yet."""
        return self._entries.keys()

    def add(self, key: str, job: SampleJob, lora: LoraWeights | None, listener: TokenListener | None) -> None:
        """Adds a job; it joins at the next step."""
        entry = _CachedJob(key, job, lora, listener, self._arrivals)
        self._arrivals += 1
        self._entries[key] = entry
        self._waiting.add(entry)

    def cancel(self, key: str) -> None:
        """Removes the job at the next step; unknown keys are ignored."""
        self._cancelled.append(key)

    @torch.inference_mode()
    def step(self) -> dict[str, SampleResult]:
        """Runs prompts and draws one token for every sequence; returns the results of the jobs that ended."""
        for key in self._cancelled:
            if key in self._entries:
                self._close(self._entries[key], SampleResult([], error=CANCELLED))
        self._cancelled = []
        self._counters["steps"] += 1
        running = list(self._running)
        for entry in running:
            self._run(entry, self._advance)
        for entry in self._admitted():
            self._running.append(entry)
            self._run(entry, self._start)
        results = self._results
        self._results = {}
        return results

    def _admitted(self) -> list[_CachedJob]:
        """Waiting jobs, those of the scope with the fewest sequences first, as long as they fit into this step."""
        sequences = Counter[str]()
        for entry in self._running:
            sequences[entry.scope] += entry.count
        prompts = 0
        found: list[_CachedJob] = []
        while self._waiting:
            entry = self._waiting.first(sequences)
            size = len(entry.job.prompt)
            fits = sequences.total() + entry.count <= self._sequence_limit and prompts + size <= PREFILL_TOKENS
            if not fits and (self._running or found):
                break
            self._waiting.remove(entry)
            found.append(entry)
            sequences[entry.scope] += entry.count
            prompts += size
        return found

    def _run(self, entry: _CachedJob, work: Callable[[_CachedJob], None]) -> None:
        """Runs a part of a job. If memory does not suffice, the job starts again when others have ended."""
        try:
            work(entry)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if len(self._running) == 1:
                self._close(entry, SampleResult([], error=NO_MEMORY))
                return
            self._leave(entry)
            self._waiting.add(entry)
            self._sequence_limit = max(1, sum(other.count for other in self._running))
            self._counters["preemptions"] += 1

    def _start(self, entry: _CachedJob) -> None:
        """Runs the prompt, answers what is asked about it, and draws the first tokens."""
        job, decoder = entry.job, self._decoder
        prompt = torch.from_numpy(job.prompt).to(decoder.device)
        copies = max(1, entry.count) if self._use is CacheUse.SEPARATE else 1
        has_cache = self._use is not CacheUse.NONE and job.max_tokens > 1
        hidden, cache = decoder.prefill(prompt.expand(copies, -1), entry.lora, use_cache=has_cache)
        self._counters["prefilled"] += copies * len(prompt)
        loras = [LoraRows(0, len(prompt), entry.lora)]
        logits = decoder.logits(hidden[0, -1:], loras)
        if not (logits.isfinite().all() and hidden.isfinite().all()):
            self._close(entry, SampleResult([], error=DIVERGED))
            return
        if asks(job):
            entry.scores = score_prompt(decoder, job, hidden[0], entry.lora)
        if not entry.count:
            self._close(entry, SampleResult([], **vars(entry.scores)))
            return
        if cache is not None and self._use is CacheUse.SHARED:
            cache.repeat(entry.count)
        entry.cache = cache
        entry.slots = self._sequences.add(entry.arrival, job)
        entry.rows = np.arange(entry.count)
        self._collect(entry, logits.expand(entry.count, -1))

    def _advance(self, entry: _CachedJob) -> None:
        """Decodes one token for each of a job's samples."""
        decoder, sequences = self._decoder, self._sequences
        slots = entry.slots[entry.rows]
        if entry.cache is None:
            tokens = np.stack([np.concatenate([entry.job.prompt, sequences.tokens(slot)]) for slot in slots.tolist()])
            hidden, _ = decoder.prefill(torch.from_numpy(tokens).to(decoder.device), entry.lora, use_cache=False)
            last = hidden[:, -1]
        else:
            tokens = sequences.of["last"][slots].copy()
            last, entry.cache = decoder.decode(torch.from_numpy(tokens).to(decoder.device), entry.lora, entry.cache)
        self._collect(entry, decoder.logits(last, [LoraRows(0, len(last), entry.lora)]))

    def _collect(self, entry: _CachedJob, logits: Tensor) -> None:
        """Draws a token for each sample that has not ended; logits [rows, V]. Ends the job with its last sample."""
        sequences, slots = self._sequences, entry.slots[entry.rows]
        rows = np.flatnonzero(~sequences.of["ended"][slots])
        slots = slots[rows]
        own = sequences.of[slots]
        drawn = next_tokens(self._draw, sequences, slots, rows, logits)
        if not drawn.is_sound:
            self._close(entry, SampleResult([], error=drawn.error(np.arange(len(slots)))))
            return
        ended = drawn.ended
        self._counters["sampled"] += len(slots)
        if entry.listener is not None:
            stream_tokens({entry.arrival: entry}, own, drawn.tokens, drawn.logprobs)
        if ended.all():
            samples = [sequences.sample(slot) for slot in entry.slots.tolist()]
            self._close(entry, SampleResult(samples, **vars(entry.scores)))
        elif ended.any():
            self._drop_ended(entry)

    def _drop_ended(self, entry: _CachedJob) -> None:
        """Ended samples leave the cache where it allows that and most of its rows have ended."""
        live = np.flatnonzero(~self._sequences.of["ended"][entry.slots[entry.rows]])
        if entry.cache is None:  # whole sequences run, of one length: those that live on
            entry.rows = entry.rows[live]
        elif self._use is CacheUse.SHARED and 2 * len(live) <= len(entry.rows):
            entry.cache.select(torch.from_numpy(live).to(self._decoder.device))
            entry.rows = entry.rows[live]

    def _close(self, entry: _CachedJob, result: SampleResult) -> None:
        self._results[entry.key] = result
        del self._entries[entry.key]
        self._waiting.remove(entry)
        self._leave(entry)
        self._sequence_limit = MAX_SEQUENCES

    def _leave(self, entry: _CachedJob) -> None:
        """Takes a job out of the step, and frees its cache and its slots."""
        if entry in self._running:
            self._running.remove(entry)
        entry.cache = None
        if len(entry.slots):
            self._sequences.remove(entry.slots)
            entry.slots = entry.rows = entry.slots[:0]
