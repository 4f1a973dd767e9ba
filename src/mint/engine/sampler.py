"""Samples many jobs together: schedule → forward → collect, until every sequence has ended.

A job's prompt is computed once for all its samples. Rows of one lora stay together, and within it rows of like length.
What a job gets is a function of that job alone: rows are computed alike in any company, and each draw comes from the
counter (seed, sample, position). Knows nothing of requests, tenants or text.

Letters: R rows (sequences in the batch) · S all sequences of the call · V vocabulary · P prompt tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mint.engine.attention import PackedAttention
from mint.engine.choice import choose, processed_logprobs
from mint.engine.decoder import Decoder
from mint.engine.following import Following
from mint.engine.kv_cache import KvCache
from mint.engine.lora import LoraRows, LoraWeights, rows_of
from mint.engine.packing import Span, attention_blocks
from mint.engine.prompt_scoring import PromptScores, score_prompt
from mint.engine.protocol import CANCELLED, Sample, SampleJob, SampleResult, TokenTable
from mint.engine.random_stream import uniform
from mint.engine.stopping import StopWatch

MAX_ROWS = 512
"""Sequences decoded together; further jobs wait until rows are free."""

MAX_CACHE_BYTES = 4 << 30
"""Keys and values that admitted jobs may need at their longest; a single larger job runs alone."""

PREFILL_TOKENS = 4096
"""Prompt tokens per forward (a single longer prompt runs alone)."""


DIVERGED = "The weights give logits that are not finite: they have diverged. Sample from an earlier checkpoint"


@dataclass
class _Prefilled:
    """What a prompt gave: logits [V] of its next token, and what was asked about the prompt itself."""

    logits: Tensor
    finite: bool
    scores: PromptScores


class Sampler:
    """One call's worth of jobs over one base model."""

    def __init__(
        self,
        decoder: Decoder,
        jobs: Sequence[SampleJob],
        loras: Sequence[LoraWeights | None],
        following: Following | None = None,
    ) -> None:
        """`loras[j]` are the weights of `jobs[j]`; None is the base model alone."""
        self._decoder = decoder
        self._jobs = jobs
        self._loras = loras
        self._following = following
        self._waiting = deque(range(len(jobs)))
        self._prefilled: dict[int, _Prefilled] = {}
        # Sequences of all jobs, numbered through; the arrays below are indexed by that number.
        counts = [job.num_samples if job.max_tokens else 0 for job in jobs]
        self._first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self._job_of = np.repeat(np.arange(len(jobs)), counts)
        self._sample_of = np.arange(len(self._job_of)) - self._first[self._job_of]
        self._stops = StopWatch([jobs[job].stop for job in self._job_of])
        self._emitted = np.zeros(len(self._job_of), np.int64)
        self._last = np.zeros(len(self._job_of), np.int64)
        self._stopped = np.zeros(len(self._job_of), bool)
        self._broken = np.zeros(len(self._job_of), bool)
        self._seeds = np.array([job.seed % (1 << 64) for job in jobs], np.uint64)
        self._temperature = np.array([job.temperature for job in jobs], np.float64)
        self._top_k = np.array([job.top_k for job in jobs], np.int64)
        self._top_p = np.array([job.top_p for job in jobs], np.float64)
        self._processed = np.array([job.logprobs_mode == "processed" for job in jobs], bool)
        self._limits = np.array([job.max_tokens for job in jobs], np.int64)
        groups = {id(lora): index for index, lora in enumerate(dict.fromkeys(loras))}
        self._lora_group = np.array([groups[id(lora)] for lora in loras])
        # The batch: sequence per cache row; ended ones stay until it is worth moving the others.
        self._rows = np.zeros(0, np.int64)
        self._cache = KvCache(decoder.config, decoder.dtype, decoder.device)
        self._history: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._widths = np.array([job.topk_sample_logprobs for job in jobs], np.int64)
        self._best: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}  # per sequence, where asked: top-k of each step

    @torch.inference_mode()
    def run(self) -> list[SampleResult]:
        """The results, in the order of the jobs."""
        while True:
            admitted = self._schedule()
            if admitted:
                self._collect(*self._prefill(admitted))
            elif len(self._rows):
                self._collect(*self._decode())
            else:
                return self._results()

    # --- schedule ---

    def _schedule(self) -> list[int]:
        """Drops ended rows where that pays, and takes in the jobs that fit now."""
        cancelled = self._drop_cancelled()
        alive = ~self._ended(self._rows)
        if not alive.all() and (cancelled or alive.sum() <= 0.75 * len(alive)):
            self._keep(np.flatnonzero(alive))
        admitted: list[int] = []
        if not self._waiting:
            return admitted
        rows = len(self._rows)
        used = sum(self._cache_bytes(self._jobs[self._job_of[row]]) for row in self._rows)
        while self._waiting:
            job = self._jobs[self._waiting[0]]
            count = job.num_samples if job.max_tokens else 0
            size = count * self._cache_bytes(job)
            if (rows or admitted) and (rows + count > MAX_ROWS or used + size > MAX_CACHE_BYTES):
                break
            rows, used = rows + count, used + size
            admitted.append(self._waiting.popleft())
        return admitted

    def _drop_cancelled(self) -> bool:
        """Whether a job was cancelled just now; it has ended then, and waits no more."""
        if self._following is None:
            return False
        if not self._following.ask(self._finished):
            return False
        self._waiting = deque(job for job in self._waiting if not self._following.cancelled[job])
        return True

    def _finished(self) -> np.ndarray:
        """Bool [J]: the jobs whose sequences have all ended."""
        finished = np.array([job in self._prefilled for job in range(len(self._jobs))], bool)
        unended = ~self._ended(np.arange(len(self._job_of)))
        finished[self._job_of[unended]] = False
        return finished

    def _cache_bytes(self, job: SampleJob) -> int:
        config = self._decoder.config
        per_token = 2 * config.num_hidden_layers * config.key_value_size * self._decoder.dtype.itemsize
        return per_token * (len(job.prompt) + job.max_tokens)

    def _ended(self, sequences: np.ndarray) -> np.ndarray:
        jobs = self._job_of[sequences]
        ended = (self._emitted[sequences] >= self._limits[jobs]) | self._stopped[sequences] | self._broken[sequences]
        return ended if self._following is None else ended | self._following.cancelled[jobs]

    def _keep(self, order: np.ndarray) -> None:
        self._rows = self._rows[order]
        self._cache.keep(order)

    # --- forward ---

    def _prefill(self, admitted: list[int]) -> tuple[np.ndarray, Tensor]:
        """Runs the prompts; returns the new sequences and the logits [R, V] of their first tokens."""
        batch: list[int] = []
        for job in admitted:
            if batch and sum(len(self._jobs[index].prompt) for index in [*batch, job]) > PREFILL_TOKENS:
                self._prefill_batch(batch)
                batch = []
            batch.append(job)
        self._prefill_batch(batch)
        jobs = np.array(admitted)
        new = np.concatenate([np.arange(self._first[job], self._first[job + 1]) for job in jobs])
        order = np.lexsort((self._cache.lengths, self._lora_group[self._job_of[self._rows]]))
        if (np.diff(order) != 1).any():
            self._keep(order)
        place = {job: index for index, job in enumerate(admitted)}
        logits = torch.stack([self._prefilled[job].logits for job in admitted])
        return new, logits[[place[job] for job in self._job_of[new].tolist()]]

    def _prefill_batch(self, batch: list[int]) -> None:
        jobs = [self._jobs[index] for index in batch]
        lengths = np.array([len(job.prompt) for job in jobs])
        ends = np.cumsum(lengths)
        spans = [Span(int(end - length), int(end)) for end, length in zip(ends, lengths, strict=True)]
        config, device = self._decoder.config, self._decoder.device
        packed = PackedAttention(
            attention_blocks(spans), config.num_attention_heads, config.num_key_value_heads, device
        )
        sources, rows, positions = self._add_rows(batch, spans)

        def attention(layer: int, heads: Tensor) -> Tensor:
            if len(sources):
                self._cache.write(layer, heads[sources], rows, positions)
            return packed(layer, heads)

        loras = _spread([self._loras[index] for index in batch], lengths)
        tokens = torch.from_numpy(np.concatenate([job.prompt for job in jobs])).to(device)
        place = torch.from_numpy(np.concatenate([np.arange(length) for length in lengths])).to(device)
        hidden = self._decoder.forward(tokens, place, attention, loras)
        last = torch.from_numpy(ends - 1).to(device)
        logits = self._decoder.logits(hidden[last], rows_of([self._loras[index] for index in batch]))
        for index, span, row in zip(batch, spans, logits, strict=True):
            own = hidden[span.start : span.stop]
            finite = bool(own.isfinite().all() and row.isfinite().all())
            scores = score_prompt(self._decoder, self._jobs[index], own, self._loras[index])
            self._prefilled[index] = _Prefilled(row, finite, scores)

    def _add_rows(self, batch: list[int], spans: list[Span]) -> tuple[Tensor, Tensor, Tensor]:
        """Cache rows for every sequence of the batch; (prompt row, cache row, position) for each key to be stored."""
        new = np.concatenate([np.arange(self._first[job], self._first[job + 1]) for job in batch])
        span_of = dict(zip(batch, spans, strict=True))
        own = [span_of[job] for job in self._job_of[new].tolist()]
        device = self._decoder.device
        if not own:
            empty = torch.zeros(0, dtype=torch.int64, device=device)
            return empty, empty, empty
        first_row = len(self._rows)
        self._rows = np.concatenate([self._rows, new])
        lengths = np.array([span.stop - span.start for span in own])
        self._cache.add(lengths, longest=int((lengths + self._limits[self._job_of[new]]).max()))
        sources = np.concatenate([np.arange(span.start, span.stop) for span in own])
        rows = np.repeat(np.arange(first_row, first_row + len(own)), lengths)
        positions = np.concatenate([np.arange(length) for length in lengths])
        sources, rows, positions = (torch.from_numpy(array).to(device) for array in (sources, rows, positions))
        return sources, rows, positions

    def _decode(self) -> tuple[np.ndarray, Tensor]:
        """One token further in every row; returns the sequences and their logits [R, V]."""
        loras = rows_of([self._loras[job] for job in self._job_of[self._rows]])
        positions = self._cache.begin_step()
        tokens = torch.from_numpy(self._last[self._rows]).to(self._decoder.device)
        hidden = self._decoder.forward(tokens, positions, self._cache.attend, loras)
        return self._rows, self._decoder.logits(hidden, loras)

    # --- collect ---

    def _collect(self, sequences: np.ndarray, logits: Tensor) -> None:
        """Chooses each live sequence's next token and notes it, its logprob, and whether it ends the sequence."""
        live = ~self._ended(sequences)
        if not live.all():
            sequences, logits = sequences[live], logits[torch.from_numpy(np.flatnonzero(live)).to(logits.device)]
        if not len(sequences):
            return
        jobs = self._job_of[sequences]
        draws = uniform(self._seeds[jobs], self._sample_of[sequences], self._emitted[sequences])
        rule = (self._temperature[jobs], self._top_k[jobs], self._top_p[jobs])
        chosen = choose(logits, draws, *rule)
        raw = logits.gather(1, chosen[:, None]).squeeze(1) - logits.logsumexp(1)
        tokens, logprobs = chosen.cpu().numpy(), raw.cpu().numpy()
        self._broken[sequences] = ~np.isfinite(logprobs)
        processed = np.flatnonzero(self._processed[jobs])
        if len(processed):
            rows = torch.from_numpy(processed).to(logits.device)
            own = processed_logprobs(logits[rows], chosen[rows], *(array[processed] for array in rule))
            logprobs[processed] = own.cpu().numpy()
        self._history.append((sequences, tokens, logprobs))
        self._note_best(sequences, logits)
        self._last[sequences] = tokens
        self._emitted[sequences] += 1
        self._stopped[sequences] = self._stops.stopped(sequences, tokens)
        if self._following is not None and self._following.has_listeners:
            sound = ~self._broken[sequences]
            parts = (jobs, self._sample_of[sequences], tokens, logprobs)
            self._following.tell(*(part[sound] for part in parts))

    def _note_best(self, sequences: np.ndarray, logits: Tensor) -> None:
        """The most probable tokens of this step, for the jobs that asked for them; logits [R, V]."""
        if not self._widths.any():
            return
        widths = self._widths[self._job_of[sequences]]
        for width in np.unique(widths[widths > 0]).tolist():
            rows = np.flatnonzero(widths == width)
            own = logits[torch.from_numpy(rows).to(logits.device)]
            best = own.topk(min(width, own.shape[1]), dim=1)
            logprobs = (best.values - own.logsumexp(1, keepdim=True)).cpu().numpy()
            pairs = zip(best.indices.cpu().numpy(), logprobs, strict=True)
            for sequence, pair in zip(sequences[rows].tolist(), pairs, strict=True):
                self._best.setdefault(sequence, []).append(pair)

    def _results(self) -> list[SampleResult]:
        empty = np.zeros(0, np.int64)
        sequences, tokens, logprobs = (
            [np.concatenate(parts) for parts in zip(*self._history, strict=True)]
            if self._history
            else (empty, empty, empty.astype(np.float32))
        )
        order = np.argsort(sequences, kind="stable")
        ends = np.cumsum(self._emitted)[:-1]
        tokens_of, logprobs_of = np.split(tokens[order], ends), np.split(logprobs[order], ends)
        results = []
        for index in range(len(self._jobs)):
            own = range(self._first[index], self._first[index + 1])
            if self._following is not None and self._following.cancelled[index]:
                results.append(SampleResult([], error=CANCELLED))
                continue
            found = self._prefilled[index]
            if not found.finite or self._broken[self._first[index] : self._first[index + 1]].any():
                results.append(SampleResult([], error=DIVERGED))
                continue
            samples = [Sample(tokens_of[s], logprobs_of[s], bool(self._stopped[s]), self._table(s)) for s in own]
            results.append(SampleResult(samples, **vars(found.scores)))
        return results

    def _table(self, sequence: int) -> TokenTable | None:
        steps = self._best.get(sequence)
        if steps is None:
            return None
        tokens, logprobs = (np.stack(part) for part in zip(*steps, strict=True))
        return TokenTable(tokens, logprobs)


def _spread(loras: Sequence[LoraWeights | None], lengths: np.ndarray) -> list[LoraRows]:
    """Prompts' loras as runs over their tokens."""
    ends = np.cumsum(lengths)
    starts = ends - lengths
    return [LoraRows(int(starts[run.start]), int(ends[run.stop - 1]), run.weights) for run in rows_of(loras)]
