"""Sampling from a model of transformers: each job's samples decode together, from the model's own cache.

A job runs in batches of its own. How the cache is used is measured when the model is loaded (`CacheUse`), and what it
takes for each token (`CacheBudget`). Where the caches would take more than their budget, the latest samples are
preempted: they give their cache back and keep their tokens, and go on once there is room, from a prefill of all their
tokens. A job that is too large alone goes on in halves. So the result is a function of the job alone, up to the
rounding of a prefill beside that of decoding, and of fewer samples in one product. Drawing, stopping and prompt scores
are those of mint's own sampler.

Letters: S samples of a job · N samples of a part · T tokens · P prompt tokens · V vocabulary.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from mint.engine.drawing.draw import TorchDraw
from mint.engine.lora import LoraRows, LoraWeights
from mint.engine.memory.cache_budget import CacheBudget
from mint.engine.protocol import CANCELLED, SampleJob, SampleResult, TokenListener, is_out_of_memory
from mint.engine.sampling.admission import WaitingJobs
from mint.engine.sampling.batch_job import BatchJob, stream_tokens
from mint.engine.sampling.next_tokens import DIVERGED, next_tokens
from mint.engine.sampling.prompt_scoring import asks, score_prompt
from mint.engine.sampling.sampler import NO_MEMORY
from mint.engine.sampling.sequences import Sequences
from mint.engine.transformers.decoder import ModelCache, TransformersDecoder

MAX_SEQUENCES = 128
"""Sequences that are decoded in one step; further jobs wait. Each job has a forward of its own, so a step takes as long
as all of them together. A single job with more samples runs alone."""

PREFILL_TOKENS = 2048
"""Prompt tokens of one step, at least one prompt: samples that decode wait for them."""


class CacheUse(enum.Enum):
    """How samples use the model's cache."""

    SHARED = "shared prompt"
    """The prompt runs once; its cache is repeated for all samples, and ended samples leave it."""
    SEPARATE = "separate prompts"
    """The prompt runs once for each sample: the cache cannot be repeated."""
    NONE = "none"
    """Every step runs whole sequences: the model has no cache that gives the same logits."""


@dataclass(eq=False)
class _CachedJob(BatchJob):
    """A job; `slots` [S] are those of its samples, once its prompt has run. Its `parts` wait or run."""

    slots: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    parts: list[_Part] = field(default_factory=list)


@dataclass(eq=False)
class _Part:
    """Samples of a job that run together, all with equally many tokens: `samples` [N] are their numbers, of which those
    that have ended may still be in the cache."""

    entry: _CachedJob
    samples: np.ndarray
    cache: ModelCache | None = None

    def __post_init__(self) -> None:
        self.scope = self.entry.scope
        self.turn = self.entry.arrival, int(self.samples[0]) if len(self.samples) else 0

    @property
    def slots(self) -> np.ndarray:
        """Those of its samples [N]."""
        return self.entry.slots[self.samples]

    @property
    def count(self) -> int:
        """N."""
        return len(self.samples)


class TransformersSampler:
    """The jobs of one batch on one model."""

    def __init__(
        self, decoder: TransformersDecoder, use: CacheUse, budget: CacheBudget, counters: dict[str, int]
    ) -> None:
        self._decoder = decoder
        self._use = use
        self._budget = budget
        self._counters = counters
        self._draw = TorchDraw(decoder.operations)
        self._sequences = Sequences()
        self._entries: dict[str, _CachedJob] = {}
        self._waiting = WaitingJobs[_Part]()
        self._running: list[_Part] = []
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
        self._wait(_Part(entry, np.arange(entry.count)))

    def cancel(self, key: str) -> None:
        """Removes the job at the next step; unknown keys are ignored."""
        self._cancelled.append(key)

    @torch.inference_mode()
    def step(self) -> dict[str, SampleResult]:
        """Runs prompts and draws one token for every sequence; returns the results of the jobs that ended.

        Raises:
            MemoryError: memory does not suffice for one sequence alone; there may be more later.
        """
        for key in self._cancelled:
            if key in self._entries:
                self._close(self._entries[key], SampleResult([], error=CANCELLED))
        self._cancelled = []
        self._counters["steps"] += 1
        self._make_room()
        for part in list(self._running):
            self._run(part, self._advance)
        for part in self._admitted():
            self._run(part, self._start)
        results = self._results
        self._results = {}
        return results

    # --- admission ---

    def _wait(self, part: _Part) -> None:
        part.entry.parts.append(part)
        self._waiting.add(part)

    def _admitted(self) -> list[_Part]:
        """Waiting parts, those of the scope with the fewest sequences first, as long as they fit into this step."""
        sequences = Counter[str]()
        for part in self._running:
            sequences[part.scope] += part.count
        prompts = 0
        found: list[_Part] = []
        taken = self._cache_bytes()
        while self._waiting:
            part = self._waiting.first(sequences)
            size = self._length(part)
            is_alone = not (self._running or found)
            if is_alone:
                part = self._fitting(part)
            cost = self._next_bytes(part)
            fits = sequences.total() + part.count <= self._sequence_limit and prompts + size <= PREFILL_TOKENS
            if not (is_alone or (fits and taken + cost <= self._budget.limit_bytes)):
                break
            self._waiting.remove(part)
            if cost > self._budget.limit_bytes:  # one sample
                self._close(part.entry, SampleResult([], error=self._no_room))
                continue
            found.append(part)
            sequences[part.scope] += part.count
            prompts += size
            taken += cost
        self._running += found
        return found

    def _fitting(self, part: _Part) -> _Part:
        """The first samples of a part that waits, as many as may run alone; the others wait as another part."""
        count = part.count
        while count > 1 and self._next_bytes(part, count) > self._budget.limit_bytes:
            count = -(-count // 2)
        return part if count == part.count else self._split(part, count)

    def _split(self, part: _Part, count: int) -> _Part:
        """A part that waits, cut after `count` samples; returns the first of the two."""
        self._forget(part)
        first, rest = _Part(part.entry, part.samples[:count]), _Part(part.entry, part.samples[count:])
        self._wait(first)
        self._wait(rest)
        return first

    def _length(self, part: _Part) -> int:
        """The tokens of each sample so far."""
        emitted = 0
        if len(part.entry.slots) and part.count:
            emitted = int(self._sequences.of["emitted"][part.slots].max())  # ended ones may have fewer
        return len(part.entry.job.prompt) + emitted

    # --- memory ---

    def _next_bytes(self, part: _Part, count: int | None = None) -> int:
        """The bytes of the cache at its largest: after all samples, or `count` of them, have run their last token."""
        if part.entry.job.max_tokens <= 1:  # no cache is made
            return 0
        return self._budget.cost.of(part.count if count is None else count, self._length(part))

    def _cache_bytes(self) -> int:
        return sum(self._next_bytes(part) for part in self._running)

    def _make_room(self) -> None:
        """Preempts the latest parts until the caches of the others have room for one token more."""
        if self._cache_bytes() > self._budget.limit_bytes:
            for part in self._running:
                self._drop_ended(part, now=True)
        while self._running and self._cache_bytes() > self._budget.limit_bytes:
            latest = max(self._running, key=lambda part: part.turn)
            live = self._live(latest)
            if len(self._running) == 1 and latest.count == 1:
                self._close(latest.entry, SampleResult([], error=self._no_room))
            elif len(self._running) == 1 and len(live) == latest.count:
                self._halve(latest)
            else:
                self._preempt(latest, live)

    def _halve(self, part: _Part) -> None:
        """Preempts a part that runs alone, and lets the first half of its samples go on by themselves."""
        live = self._live(part)
        middle = -(-len(live) // 2)
        self._preempt(part, live[:middle], live[middle:])

    def _preempt(self, part: _Part, *groups: np.ndarray) -> None:
        """Frees the cache of a part; `groups` of its samples wait for their turn again. Until samples end there are no
        more sequences than now: they would be admitted and preempted again and again."""
        self._forget(part)
        for samples in groups:
            if len(samples) or not part.entry.count:
                self._wait(_Part(part.entry, samples))
        running = sum(other.count for other in self._running)
        self._sequence_limit = max(1, running or len(groups[0]))
        self._counters["preemptions"] += max(1, sum(map(len, groups)))

    def _live(self, part: _Part) -> np.ndarray:
        """The samples of a part that have not ended."""
        if not len(part.entry.slots):
            return part.samples
        return part.samples[~self._sequences.of["ended"][part.slots]]

    @property
    def _no_room(self) -> str:
        return (
            f"One sequence of this request does not fit into the cache, which holds {self._budget.most_tokens} tokens. "
            "Ask for a shorter prompt or fewer tokens, or give the server more memory for it (MINT_KV_CACHE_MIB)"
        )

    def _run(self, part: _Part, work: Callable[[_Part], None]) -> None:
        """Runs a part, unless it has left the step. If the device has no memory for it, it goes on when others have
        ended, or in halves.

        Raises:
            MemoryError: one sequence is alone.
        """
        if part not in self._running:
            return
        try:
            work(part)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            live = self._live(part)
            is_alone = len(self._running) == 1
            if is_alone and len(live) > 1:
                self._halve(part)
            else:
                self._preempt(part, live)
            if is_alone and len(live) <= 1:
                raise MemoryError(NO_MEMORY) from error

    # --- forward ---

    def _start(self, part: _Part) -> None:
        """Runs the tokens that the samples of a part have, and draws their next ones."""
        entry, decoder = part.entry, self._decoder
        job = entry.job
        has_begun = len(entry.slots) > 0 and self._length(part) > len(job.prompt)
        if has_begun and self._use is CacheUse.NONE:
            self._advance(part)
            return
        if has_begun:
            tokens = self._known_tokens(part)
        else:
            prompt = torch.from_numpy(job.prompt).to(decoder.device)
            tokens = prompt.expand(max(1, part.count) if self._use is CacheUse.SEPARATE else 1, -1)
        has_cache = self._use is not CacheUse.NONE and job.max_tokens > 1
        hidden, cache = decoder.prefill(tokens, entry.lora, use_cache=has_cache)
        self._counters["prefilled"] += tokens.numel()
        last = hidden[:, -1] if has_begun else hidden[:1, -1]
        logits = decoder.logits(last, [LoraRows(0, len(last), entry.lora)])
        if not (logits.isfinite().all() and hidden.isfinite().all()):
            self._close(entry, SampleResult([], error=DIVERGED))
            return
        if not len(entry.slots):
            if asks(job):
                entry.scores = score_prompt(decoder, job, hidden[0], entry.lora)
            if not entry.count:
                self._close(entry, SampleResult([], **vars(entry.scores)))
                return
            entry.slots = self._sequences.add(entry.arrival, job)
        if cache is not None and self._use is CacheUse.SHARED and not has_begun:
            cache.repeat(part.count)
        part.cache = cache
        self._collect(part, logits if has_begun else logits.expand(part.count, -1))

    def _advance(self, part: _Part) -> None:
        """Decodes one token for each sample of a part."""
        decoder, lora = self._decoder, part.entry.lora
        if part.cache is not None and self._length(part) - 1 == decoder.rotation_switch:
            part.samples, part.cache = self._live(part), None  # its keys are rotated as those of shorter sequences
            hidden, part.cache = decoder.prefill(self._known_tokens(part), lora, use_cache=True)
            self._counters["prefilled"] += hidden.shape[0] * hidden.shape[1]
            last = hidden[:, -1]
        elif part.cache is None:
            hidden, _ = decoder.prefill(self._known_tokens(part), lora, use_cache=False)
            last = hidden[:, -1]
        else:
            tokens = self._sequences.of["last"][part.slots].copy()
            last, part.cache = decoder.decode(torch.from_numpy(tokens).to(decoder.device), lora, part.cache)
        self._collect(part, decoder.logits(last, [LoraRows(0, len(last), lora)]))

    def _known_tokens(self, part: _Part) -> Tensor:
        """Prompt and drawn tokens of each sample [N, T]; all have drawn equally many."""
        prompt = part.entry.job.prompt
        rows = [np.concatenate([prompt, self._sequences.tokens(slot)]) for slot in part.slots.tolist()]
        return torch.from_numpy(np.stack(rows)).to(self._decoder.device)

    # --- collect ---

    def _collect(self, part: _Part, logits: Tensor) -> None:
        """Draws a token for each sample that has not ended; logits [N, V]. Ends the job with its last sample."""
        sequences, entry = self._sequences, part.entry
        rows = np.flatnonzero(~sequences.of["ended"][part.slots])
        slots = part.slots[rows]
        own = sequences.of[slots]
        drawn = next_tokens(self._draw, sequences, slots, rows, logits)
        if not drawn.is_sound:
            self._close(entry, SampleResult([], error=drawn.error(np.arange(len(slots)))))
            return
        ended = drawn.ended
        self._counters["sampled"] += len(slots)
        if entry.listener is not None:
            stream_tokens({entry.arrival: entry}, own, drawn.tokens, drawn.logprobs)
        if not ended.any():
            return
        self._sequence_limit = MAX_SEQUENCES
        if sequences.of["ended"][entry.slots].all():
            samples = [sequences.sample(slot) for slot in entry.slots.tolist()]
            self._close(entry, SampleResult(samples, **vars(entry.scores)))
        elif ended.all():
            self._forget(part)
        else:
            self._drop_ended(part)

    def _drop_ended(self, part: _Part, *, now: bool = False) -> None:
        """Ended samples leave the cache where it allows that, once most of its rows have ended or `now`."""
        live = np.flatnonzero(~self._sequences.of["ended"][part.slots])
        if part.cache is None:  # whole sequences run, of one length: those that live on
            part.samples = part.samples[live]
        elif self._use is CacheUse.SHARED and (now or 2 * len(live) <= part.count):
            part.cache.select(torch.from_numpy(live).to(self._decoder.device))
            part.samples = part.samples[live]

    def _close(self, entry: _CachedJob, result: SampleResult) -> None:
        self._results[entry.key] = result
        del self._entries[entry.key]
        for part in list(entry.parts):
            self._forget(part)
        if len(entry.slots):
            self._sequences.remove(entry.slots)
        self._sequence_limit = MAX_SEQUENCES

    def _forget(self, part: _Part) -> None:
        """Takes a part out of the step or of those that wait, and frees its cache."""
        part.entry.parts.remove(part)
        self._waiting.remove(part)
        if part in self._running:
            self._running.remove(part)
        part.cache = None
