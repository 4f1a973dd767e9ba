"""Continuous batching over one base model. A step admits jobs, runs prompts, and decodes one token for every sequence.

A job's prompt is computed once for all its samples, and only as far as the prefix cache does not have it. Rows of one
lora are neighbours, and among them rows of similar length. The result of a job is a function of that job alone: a row
has the same bits whatever other rows are in the batch, and each draw comes from the counter (seed, sample, position).
So a job that was preempted starts again and draws the same tokens. Knows nothing of requests, tenants or text.

Letters: R rows (sequences in the batch) · S samples of a job · V vocabulary · P prompt tokens · X known tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from mint.engine.drawing.draw import Draw
from mint.engine.lora import LoraRows, LoraWeights, rows_of
from mint.engine.model.attention import BLOCK, PAGE_POSITIONS
from mint.engine.model.decoder import Decoder
from mint.engine.protocol import CANCELLED, Sample, SampleJob, SampleResult, TokenListener, is_out_of_memory
from mint.engine.sampling.admission import SPARE_ROWS, WaitingJobs, fair_shares, may_begin
from mint.engine.sampling.batch_job import BatchJob, stream_tokens
from mint.engine.sampling.counted_slots import Lease
from mint.engine.sampling.decode_step import DecodeStep, DecodeSteps
from mint.engine.sampling.kv_cache import KVCache
from mint.engine.sampling.next_tokens import DIVERGED, next_tokens
from mint.engine.sampling.prefill import PartStates, PromptPart, run_prompts
from mint.engine.sampling.prefix_cache import Match, PrefixCache
from mint.engine.sampling.prompt_scoring import PromptScores, asks, score_prompt, unasked_tokens
from mint.engine.sampling.sequences import Sequences
from mint.engine.sampling.state_cache import StateCache

MAX_ROWS = 512
"""Sequences that are decoded together; further jobs wait. A job with more samples runs once no other has rows.
`admission` has the exception for scopes that have less than their share."""

PREFILL_TOKENS, PREFILL_TOKENS_BESIDE = 2048, 512
"""Prompt tokens of one step: without sequences to decode, and with some, which would wait for them."""

LEAST_PREFILL = 16
"""A shorter prompt counts as so many tokens, for what it costs beside the forward. So a flood of short prompts joins in
slices, too, and its samples do not all end in one step."""

COUNTERS = ("prefilled", "reused", "sampled", "steps", "restarts")
"""Totals of a base model's samplers: prompt tokens computed and reused, tokens drawn, steps, preempted jobs."""

NO_ROOM = (
    "The samples of this request do not fit into memory at once. Ask for fewer samples or tokens per request, or give "
    "the engine a larger kv_cache_bytes"
)


@dataclass
class SamplerMemory:
    """What all samplers of one base model share: its caches, how its device decodes and draws, and totals since the
    start."""

    kv_cache: KVCache
    prefix_cache: PrefixCache
    steps: DecodeSteps
    draw: Draw
    states: StateCache | None = None
    """Where the model has delta nets."""
    counters: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0))


@dataclass(eq=False)
class _PagedJob(BatchJob):
    """A job. Its prompt fills the `pages`; the rest of it is in the first of `own`, which has one page for each
    sample.

    In a model with delta nets, `states` are the slots of its samples, of which the first is the prompt's until it is
    computed. The prompt starts from the state `loaded` of the prefix cache (-1: from nothing). States after the first
    `cuts` tokens are worth keeping there."""

    pages: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    own: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    states: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    loaded: int = -1
    cuts: list[int] = field(default_factory=list)
    done: int = 0
    beginning: bytes = b""
    hidden: list[Tensor] = field(default_factory=list)
    samples: dict[int, Sample] = field(default_factory=dict)
    left: int = 0
    rows: int = 0
    closed: bool = False
    is_finite: bool = True
    reused: int | None = None

    @property
    def prompt_pages(self) -> np.ndarray:
        """The pages that hold the prompt."""
        return np.append(self.pages, self.own[:1]) if len(self.job.prompt) % PAGE_POSITIONS else self.pages


class _OutOfPages(MemoryError):
    """No page is left for the next token of a sequence."""


class Sampler:
    """The jobs of one batch on one base model."""

    def __init__(self, decoder: Decoder, memory: SamplerMemory) -> None:
        self._decoder = decoder
        self._memory = memory
        self._lease = Lease(memory.kv_cache)
        self._state_lease = None if memory.states is None else Lease(memory.states)
        self._interrupted = False  # some layers may have gone on to the next state, and others not
        self._sequences = Sequences()
        self._entries: dict[int, _PagedJob] = {}
        self._keys: dict[str, _PagedJob] = {}
        self._listening: dict[int, _PagedJob] = {}
        self._waiting = WaitingJobs[_PagedJob]()
        self._prefilling: list[_PagedJob] = []
        self._arrivals = 0
        self._cancelled: list[_PagedJob] = []
        self._row_limit = MAX_ROWS
        # Slots in the order of the batch's rows. Ended ones stay until it pays to move the others.
        self._order = np.zeros(0, np.int64)
        self._ended = False  # whether the order has ended rows
        self._step: DecodeStep | None = None
        self._loras: list[LoraRows] = []
        self._results: dict[str, SampleResult] = {}

    @property
    def keys(self) -> Collection[str]:
        """The jobs without a result yet."""
        return self._keys.keys()

    def add(self, key: str, job: SampleJob, lora: LoraWeights | None, listener: TokenListener | None) -> None:
        """Adds a job; it joins at the next step."""
        entry = _PagedJob(key, job, lora, listener, self._arrivals)
        if listener is not None:
            self._listening[entry.arrival] = entry
        self._arrivals += 1
        self._keys[key] = self._entries[entry.arrival] = entry
        self._waiting.add(entry)

    def cancel(self, key: str) -> None:
        """Removes the job at the next step; unknown keys are ignored."""
        if key in self._keys:
            self._cancelled.append(self._keys[key])

    @torch.inference_mode()
    def step(self) -> dict[str, SampleResult]:
        """Runs prompts and decodes one token for every sequence; returns the results of the jobs that ended."""
        if self._cancelled:
            self._drop_cancelled()
        try:
            self._advance()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self._interrupted = self._state_lease is not None and not isinstance(error, _OutOfPages)
            self._preempt_latest(error)
            self._interrupted = False
        results = self._results
        self._results = {}
        return results

    def _advance(self) -> None:
        self._memory.counters["steps"] += 1
        self._compact_rows()
        self._admit()
        decoding = len(self._order) > 0
        if self._prefilling:
            self._prefill(PREFILL_TOKENS_BESIDE if decoding else PREFILL_TOKENS)
        if decoding:
            self._decode()
        if self._ended and self._sequences.of["ended"][self._order].all():
            self._compact_rows(now=True)

    # --- admission ---

    def _admit(self) -> None:
        """Admits waiting jobs as long as they fit, in the order of `admission`."""
        if not self._waiting:
            return
        later: list[_PagedJob] = []
        rows = self._rows_by_scope()
        scopes = len(rows.keys() | self._waiting.scopes)
        spare = 0 if self._row_limit < MAX_ROWS else SPARE_ROWS  # memory was short: no more rows than before
        beginnings = {(entry.lora, entry.scope, entry.beginning) for entry in self._prefilling}
        while self._waiting:
            entry = self._waiting.first(rows)
            if not may_begin(entry.scope, entry.count, rows, scopes=scopes, limit=self._row_limit, spare=spare):
                break  # smaller jobs behind it wait, too: otherwise it could wait for ever
            reusable = entry.job.prompt[: unasked_tokens(entry.job)]
            known = self._memory.prefix_cache.find(entry.lora, entry.scope, reusable)
            ahead = entry.job.prompt[known.length : known.length + BLOCK]
            entry.beginning = ahead.tobytes() if len(ahead) == BLOCK else b""
            if entry.beginning and (entry.lora, entry.scope, entry.beginning) in beginnings:
                # A job ahead computes the same tokens in this step; in the next one they are cached.
                self._waiting.remove(entry)
                later.append(entry)
                continue
            fits = self._begin(entry, known, spare=rows.total())
            if not fits and (rows.total() or self._prefilling):
                break
            self._waiting.remove(entry)
            if fits:
                self._prefilling.append(entry)
                rows[entry.scope] += entry.count
                beginnings.add((entry.lora, entry.scope, entry.beginning))
            else:
                self._close(entry, SampleResult([], error=NO_ROOM))
        for entry in later:
            self._waiting.add(entry)

    def _rows_by_scope(self) -> Counter[str]:
        """The rows that jobs have or get once their prompts are computed."""
        rows: Counter[str] = Counter()
        numbers, counts = np.unique(self._sequences.of["entry"][self._order], return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            rows[self._entries[number].scope] += count
        for entry in self._prefilling:
            rows[entry.scope] += entry.count
        return rows

    def _begin(self, entry: _PagedJob, known: Match, spare: int) -> bool:
        """Takes pages for the part of a prompt that is not `known`; False where these and `spare` more are not free."""
        memory = self._memory
        job = entry.job
        held = np.append(known.pages, known.partial) if known.rest else known.pages
        self._lease.hold(held)  # before `evict_pages`, which may evict them from the prefix cache
        whole, rest = divmod(len(job.prompt), PAGE_POSITIONS)
        new = whole - len(known.pages)
        needed = new + (entry.count if job.max_tokens > 1 else int(rest > 0))
        taken = None
        if self._take_states(entry, known):
            taken = self._lease.take(needed) if memory.prefix_cache.evict_pages(needed + spare) else None
        if taken is None:
            self._release_states(entry)
            self._lease.release(held)
            return False
        entry.pages = np.concatenate([known.pages, taken[:new]])
        entry.own = taken[new:]
        if known.rest:  # a copy, because this job writes on in the page
            memory.kv_cache.copy(known.partial, taken[:1], known.rest)
            self._lease.release(held[-1:])
        entry.done = known.length
        memory.counters["reused"] += known.length
        if entry.reused is None:  # a job that begins anew finds what it has computed itself
            entry.reused = known.length
        return True

    def _take_states(self, entry: _PagedJob, known: Match) -> bool:
        """Takes slots for a job's states, where the model has any; False where too few are free."""
        if self._state_lease is None:
            return True
        cache = self._memory.prefix_cache
        if known.state >= 0:
            self._state_lease.hold(np.array([known.state]))  # before `evict_states`, which may evict it
            entry.loaded = known.state
        needed = entry.count if entry.job.max_tokens > 1 and entry.count else 1
        taken = self._state_lease.take(needed) if cache.evict_states(needed) else None
        if taken is None:
            return False
        entry.states = taken
        # The same prompt may come again, and computes its last token anew; others begin alike up to `common`.
        ends = {known.common, len(entry.job.prompt) - 1} if cache.keeps_states else ()
        entry.cuts = sorted(end for end in ends if end > known.length)
        return True

    def _release_states(self, entry: _PagedJob) -> None:
        if self._state_lease is not None:
            self._release_start(entry)
            self._state_lease.release(entry.states)
            entry.states = entry.states[:0]

    def _release_start(self, entry: _PagedJob) -> None:
        """Releases the state of the prefix cache that a prompt starts from."""
        if self._state_lease is not None and entry.loaded >= 0:
            self._state_lease.release(np.array([entry.loaded]))
            entry.loaded = -1

    def _drop_cancelled(self) -> None:
        for entry in self._cancelled:
            if not entry.closed:
                self._close(entry, SampleResult([], error=CANCELLED))
        self._cancelled = []
        self._compact_rows(now=True)

    def _close(self, entry: _PagedJob, result: SampleResult) -> None:
        """Records a job's result; its rows leave the batch at the next tidying."""
        entry.closed = True
        self._results[entry.key] = result
        del self._keys[entry.key]
        self._listening.pop(entry.arrival, None)
        self._row_limit = MAX_ROWS
        self._leave(entry)
        if not entry.rows:
            del self._entries[entry.arrival]

    def _leave(self, entry: _PagedJob) -> None:
        """Removes a job from the queues and ends its sequences."""
        self._waiting.remove(entry)
        if entry in self._prefilling:
            self._prefilling.remove(entry)
            self._release_prompt(entry)
        if entry.rows:
            own = self._order[self._sequences.of["entry"][self._order] == entry.arrival]
            self._sequences.of["ended"][own] = self._ended = True

    def _release_prompt(self, entry: _PagedJob) -> None:
        self._lease.release(np.concatenate([entry.pages, entry.own]), is_finite=entry.is_finite)
        self._release_states(entry)
        entry.pages = entry.own = entry.pages[:0]
        entry.hidden = []
        entry.done = 0

    def _preempt_latest(self, error: Exception) -> None:
        """Preempts a job after memory ran out, the latest of the scope with the most rows: it starts again once there
        is room. A job that is alone fails if the pages are too few for it.

        Raises:
            MemoryError: it is alone, and the system's memory was short; that may be over later.
        """
        of = self._sequences.of[self._order]
        inside = {entry.arrival for entry in self._prefilling} | set(of["entry"].tolist())
        inside = {number for number in inside if not self._entries[number].closed}
        if not inside:
            raise MemoryError(NO_ROOM)
        if len(inside) == 1:
            if not isinstance(error, _OutOfPages):
                if self._interrupted:
                    self._restart(inside)
                raise MemoryError(NO_ROOM) from error
            self._close(self._entries[inside.pop()], SampleResult([], error=NO_ROOM))
            self._compact_rows(now=True)
            return
        # Jobs that were interrupted between their prompt and the first token start again, too.
        between = {entry.arrival for entry in self._prefilling if entry.done == len(entry.job.prompt)}
        rows = self._rows_by_scope()
        victim = max(inside, key=lambda number: (rows[self._entries[number].scope], number))
        again = {victim} | between | (set(of["entry"][of["emitted"] == 0].tolist()) & inside)
        if self._interrupted:
            again = inside
        self._restart(again)
        # Until a job ends, no more rows than now: the preempted job would be admitted and preempted again and again.
        self._row_limit = max(1, len(self._order) + sum(other.count for other in self._prefilling))

    def _restart(self, numbers: set[int]) -> None:
        """Jobs leave the batch, and wait for their turn again."""
        for number in numbers:
            self._leave(self._entries[number])
        self._compact_rows(now=True)
        for number in numbers:
            entry = self._entries[number]
            entry.samples = {}
            entry.scores = PromptScores()
            self._waiting.add(entry)
            self._memory.counters["restarts"] += 1

    def _compact_rows(self, *, now: bool = False) -> None:
        """Removes ended rows where that pays, or `now`."""
        if not self._ended:
            return
        ended = self._sequences.of["ended"][self._order]
        gone = int(ended.sum())
        # A new order means a new decode step, which costs more than a few idle rows.
        if gone and (now or self._waiting or gone >= 0.25 * len(ended)):
            self._remove(self._order[ended])
            self._set_order(self._order[~ended])
            self._ended = False

    def _remove(self, slots: np.ndarray) -> None:
        """Frees ended sequences; their keys and values go to the prefix cache."""
        sequences = self._sequences
        for slot, number in zip(slots.tolist(), sequences.of["entry"][slots].tolist(), strict=True):
            entry = self._entries[number]
            own = sequences.pages_of(slot)
            if entry.is_finite:
                # Without the last token: it was drawn, but never run, so it has no keys and values.
                known = np.concatenate([entry.job.prompt, sequences.tokens(slot)[:-1]])
                state = -1 if self._interrupted else int(sequences.of["state"][slot])
                self._memory.prefix_cache.insert(entry.lora, entry.scope, known, own, state)
            if not entry.closed:
                entry.samples[int(sequences.of["sample"][slot])] = sequences.sample(slot)
            entry.rows -= 1
            if not entry.rows and entry.closed:
                del self._entries[number]
            self._lease.release(np.append(own, sequences.fronts_of([slot])), is_finite=entry.is_finite)
            if self._state_lease is not None and sequences.of["state"][slot] >= 0:
                self._state_lease.release(sequences.of["state"][[slot]])
        sequences.remove(slots)

    def _set_order(self, slots: np.ndarray) -> None:
        """Sorts the batch's rows by lora, so that each lora has one run, and then by length."""
        of = self._sequences.of[slots]
        loras: dict[LoraWeights | None, int] = {}
        ranks = np.empty(len(slots), np.int64)
        for row, number in enumerate(of["entry"].tolist()):
            ranks[row] = loras.setdefault(self._entries[number].lora, len(loras))
        order = np.lexsort((of["sample"], of["entry"], of["prompt"] + of["emitted"], ranks))
        self._order = slots[order]
        self._loras = rows_of(list(loras), np.bincount(ranks).tolist())
        self._step = None

    # --- forward ---

    def _prefill(self, budget: int) -> None:
        """Computes up to `budget` prompt tokens, of each scope the earliest jobs first; complete prompts get rows in
        the batch."""
        wanted: Counter[str] = Counter()
        for entry in self._prefilling:
            wanted[entry.scope] += max(len(entry.job.prompt) - entry.done, LEAST_PREFILL)
        shares = fair_shares(wanted, budget)
        batch: list[tuple[_PagedJob, int]] = []
        for entry in self._prefilling:
            size = min(len(entry.job.prompt) - entry.done, shares[entry.scope])
            if size > 0:
                batch.append((entry, size))
                shares[entry.scope] -= max(size, LEAST_PREFILL)
        batch.sort(key=lambda pair: id(pair[0].lora))  # one run for each lora
        parts = [
            PromptPart(
                entry.job.prompt[: entry.done + size],
                entry.done,
                entry.prompt_pages,
                entry.lora,
                self._part_states(entry, size),
            )
            for entry, size in batch
        ]
        hidden = run_prompts(self._decoder, self._memory.kv_cache, parts, self._memory.states)
        finite = hidden.isfinite().all(1).cpu().numpy()
        end = 0
        complete = []
        last = []
        for entry, size in batch:
            end += size
            entry.done += size
            entry.is_finite &= bool(finite[end - size : end].all())
            self._release_start(entry)
            if asks(entry.job):
                entry.hidden.append(hidden[end - size : end])
            if entry.done == len(entry.job.prompt):
                complete.append(entry)
                last.append(end - 1)
        for (entry, _), part in zip(batch, parts, strict=True):
            self._keep_states(entry, part)
        self._memory.counters["prefilled"] += end
        if complete:
            self._start(complete, hidden[torch.tensor(last, device=hidden.device)])

    def _part_states(self, entry: _PagedJob, size: int) -> PartStates | None:
        """Where the states of the next `size` tokens of a prompt lie, with slots for those that are worth keeping."""
        if self._state_lease is None:
            return None
        cuts = []
        for length in entry.cuts:
            if entry.done < length < entry.done + size and self._memory.prefix_cache.evict_states(1):
                taken = self._state_lease.take(1)
                cuts += [] if taken is None else [(length, int(taken[0]))]
        own = int(entry.states[0])
        loaded = own if entry.done and entry.loaded < 0 else entry.loaded
        return PartStates(loaded, own, cuts)

    def _keep_states(self, entry: _PagedJob, part: PromptPart) -> None:
        """Gives the states within a part that was computed to the prefix cache."""
        if self._state_lease is None or part.states is None:
            return
        for length, slot in part.states.cuts:
            if entry.is_finite:
                known = entry.job.prompt[:length]
                self._memory.prefix_cache.insert(entry.lora, entry.scope, known, part.pages, slot)
            self._state_lease.release(np.array([slot]))

    def _start(self, entries: list[_PagedJob], hidden: Tensor) -> None:
        """Adds rows for jobs whose prompts are computed, and draws their first tokens from hidden [jobs, E]."""
        logits = self._decoder.logits(hidden, rows_of([entry.lora for entry in entries]))
        finite = logits.isfinite().all(1).cpu().numpy()
        started, rows = [], []
        for index, entry in enumerate(entries):
            entry.is_finite &= bool(finite[index])
            if not entry.is_finite:  # not cached either: another prompt that begins alike would read the same numbers
                self._close(entry, SampleResult([], error=DIVERGED))
                continue
            self._memory.prefix_cache.insert(entry.lora, entry.scope, entry.job.prompt, entry.prompt_pages)
            if asks(entry.job):
                unknown = [part for part in entry.hidden if len(part)]
                front = hidden.new_zeros(len(entry.job.prompt) - sum(map(len, unknown)), hidden.shape[1])
                entry.scores = score_prompt(self._decoder, entry.job, torch.cat([front, *unknown]), entry.lora)
            if not entry.count:
                self._close(entry, SampleResult([], reused=entry.reused or 0, **vars(entry.scores)))
                continue
            started.append(self._open_rows(entry))
            rows += [index] * entry.count
        if started:
            slots = np.concatenate(started)
            self._set_order(np.concatenate([self._order, slots]))
            self._collect(slots, logits[torch.tensor(rows, device=logits.device)])

    def _open_rows(self, entry: _PagedJob) -> np.ndarray:
        """Slots for a job's samples. They share the prompt's whole pages; its rest is copied for each."""
        count, own = entry.count, entry.own
        self._prefilling.remove(entry)
        self._lease.hold(np.tile(entry.pages, count - 1))
        if entry.job.max_tokens > 1:
            self._memory.kv_cache.copy(int(own[0]), own[1:], len(entry.job.prompt) % PAGE_POSITIONS)
            table = np.column_stack([np.tile(entry.pages, (count, 1)), own])
        else:  # the only token is drawn from the prompt's logits and never run, so nothing is written
            self._lease.release(own)
            table = np.tile(entry.pages, (count, 1))
        states = None
        if self._memory.states is not None and entry.job.max_tokens > 1:
            self._memory.states.copy(int(entry.states[0]), entry.states[1:])
            states, entry.states = entry.states, entry.states[:0]
        self._release_states(entry)
        entry.rows = entry.left = count
        entry.pages = entry.own = entry.pages[:0]
        entry.hidden = []
        entry.done = 0
        slots = self._sequences.add(entry.arrival, entry.job, table, states)
        self._lease.hold(self._sequences.fronts_of(slots))
        return slots

    def _decode(self) -> None:
        """Decodes one token in every row."""
        sequences, slots = self._sequences, self._order
        own = sequences.of[slots]
        positions = own["prompt"] + own["emitted"] - 1
        if self._step is None or not self._step.fits(positions):
            missing = slots[positions // PAGE_POSITIONS >= own["pages"]]
            if len(missing):
                taken = self._lease.take(len(missing)) if self._memory.prefix_cache.evict_pages(len(missing)) else None
                if taken is None:
                    raise _OutOfPages(NO_ROOM)
                sequences.extend(missing, taken)
            table, fronts = sequences.pages[slots], own["front"]
            fronts = np.where(fronts < 0, table[:, 0], fronts)
            states = np.where(own["ended"], -1, own["state"])
            self._step = self._memory.steps.open(
                table, fronts, positions, self._loras, earlier=self._step, states=states
            )
        self._collect(slots, self._step.run(own["last"].copy(), positions))

    # --- collect ---

    def _collect(self, slots: np.ndarray, logits: Tensor) -> None:
        """Draws the next token of each live sequence, and records token, logprob and whether the sequence ends."""
        sequences = self._sequences
        rows = np.flatnonzero(~sequences.of["ended"][slots])  # ended rows are computed, too, until the next tidying
        if not len(rows):
            return
        slots = slots[rows]
        own = sequences.of[slots]
        drawn = next_tokens(self._memory.draw, sequences, slots, rows, logits)
        ended = drawn.ended
        self._memory.counters["sampled"] += len(slots)
        for number in [] if drawn.is_sound else np.unique(own["entry"][~(drawn.finite & drawn.possible)]).tolist():
            failed = own["entry"] == number
            self._entries[number].is_finite &= bool(drawn.finite[failed].all())
            self._close(self._entries[number], SampleResult([], error=drawn.error(failed)))
        if self._listening:
            stream_tokens(self._listening, own, drawn.tokens, drawn.logprobs)
        if ended.any():
            self._ended = True
            if self._step is not None:
                self._step.freeze(rows[ended])
            numbers, counts = np.unique(own["entry"][ended], return_counts=True)
            for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
                self._entries[number].left -= count
                if not self._entries[number].left and not self._entries[number].closed:
                    self._finish(self._entries[number])

    def _finish(self, entry: _PagedJob) -> None:
        """Records the result of a job whose sequences have all ended."""
        sequences = self._sequences
        for slot in self._order[sequences.of["entry"][self._order] == entry.arrival].tolist():
            entry.samples[int(sequences.of["sample"][slot])] = sequences.sample(slot)
        samples = [entry.samples[index] for index in range(entry.count)]
        self._close(entry, SampleResult(samples, reused=entry.reused or 0, **vars(entry.scores)))
