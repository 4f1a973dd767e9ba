"""Continuous batching over one base model. A step admits jobs, runs prompts, and decodes one token for every sequence.

A job's prompt is computed once for all its samples, and only as far as the prefix cache does not have it. Rows of one
lora are neighbours, and among them rows of similar length. The result of a job is a function of that job alone: a row
has the same bits whatever other rows are in the batch, and each draw comes from the counter (seed, sample, position).

Where the KV cache is full, the latest sequences are preempted: they give their pages back and keep their tokens. Once
there is room, a sequence goes on: its prompt and its tokens are computed like a prompt, as far as the prefix cache does
not have them any more. A prompt's keys and values have the bits that decoding gave them, so nothing of the result
depends on the size of the cache. How many sequences decode together is in `SamplingLimits`: further jobs wait, and a
job with more samples runs once no other has rows (`admission` has the exception for scopes with less than their share).

Where a step draws on the device, the next one is started before the tokens of the last one are read, so that the
device does not wait for the host. So a stop is seen one step late: the token behind it is thrown away. Whatever changes
the rows of the batch reads the pending tokens first. Knows nothing of requests, tenants or text.

Letters: R rows (sequences in the batch) · S samples of a job · V vocabulary · P prompt tokens · X known tokens.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from operator import itemgetter

import numpy as np
import torch
from torch import Tensor

from mint.engine.drawing.device_draw import DrawRules
from mint.engine.drawing.draw import Draw
from mint.engine.lora import LoraRows, LoraWeights, rows_of
from mint.engine.memory.sampling_limits import SamplingLimits
from mint.engine.model.attention import BLOCK, PAGE_POSITIONS
from mint.engine.model.decoder import Decoder
from mint.engine.protocol import CANCELLED, SampleJob, SampleResult, TokenListener, is_out_of_memory
from mint.engine.sampling.admission import WaitingJobs, fair_shares, may_begin
from mint.engine.sampling.batch_job import stream_tokens
from mint.engine.sampling.counted_slots import Lease
from mint.engine.sampling.decode_step import DecodeStep, DecodeSteps, DrawingStep, PendingDraw
from mint.engine.sampling.kv_cache import KVCache
from mint.engine.sampling.next_tokens import DIVERGED, NextTokens, finite_rows, next_tokens, record_drawn
from mint.engine.sampling.paged_job import PagedJob, Prompt
from mint.engine.sampling.prefill import PartStates, PromptPart, run_prompts
from mint.engine.sampling.prefix_cache import Match, PrefixCache
from mint.engine.sampling.prompt_scoring import asks, score_prompt, unasked_tokens
from mint.engine.sampling.sequences import Sequences
from mint.engine.sampling.state_cache import StateCache

LEAST_PREFILL = 16
"""A shorter prompt counts as so many tokens, for what it costs beside the forward. So a flood of short prompts joins in
slices, too, and its samples do not all end in one step."""

COUNTERS = ("prefilled", "reused", "sampled", "steps", "preemptions")
"""Totals of a base model's samplers: prompt tokens computed and reused, tokens drawn, steps, and how often a sequence,
or a prompt, had to give its memory back."""

MASKS_S, MASKS_BESIDE_S = 0.1, 0.01
"""How long a step waits for the masks of grammars, where all sequences are of one scope, and where others wait beside
them. A sequence without its mask sits out the step."""

NO_MEMORY = "Memory does not suffice to sample one sequence. Ask for fewer tokens, or give the server more memory"


@dataclass
class SamplerMemory:
    """What all samplers of one base model share: its caches, how its device decodes and draws, how much runs in one
    step, and totals since the start."""

    kv_cache: KVCache
    prefix_cache: PrefixCache
    steps: DecodeSteps
    draw: Draw
    limits: SamplingLimits
    states: StateCache | None = None
    """Where the model has delta nets."""
    counters: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0))


class Sampler:
    """The jobs of one batch on one base model."""

    def __init__(self, decoder: Decoder, memory: SamplerMemory) -> None:
        self._decoder = decoder
        self._memory = memory
        self._lease = Lease(memory.kv_cache)
        self._state_lease = None if memory.states is None else Lease(memory.states)
        self._interrupted = False  # some layers may have gone on to the next state, and others not
        self._sequences = Sequences()
        self._entries: dict[int, PagedJob] = {}
        self._keys: dict[str, PagedJob] = {}
        self._listening: dict[int, PagedJob] = {}
        self._waiting = WaitingJobs[Prompt]()
        self._prefilling: list[Prompt] = []
        self._arrivals = 0
        self._cancelled: list[PagedJob] = []
        self._row_limit = self._memory.limits.rows
        # Slots in the order of the batch's rows. Ended ones stay until it pays to move the others.
        self._order = np.zeros(0, np.int64)
        self._ended = False  # whether the order has ended rows
        self._step: DecodeStep | None = None
        self._drawing: DrawingStep | None = None  # the step, if it draws: to ask what it is takes long for one token
        self._pending: PendingDraw | None = None  # one more token of each row that has not ended
        self._loras: list[LoraRows] = []
        self._results: dict[str, SampleResult] = {}

    @property
    def keys(self) -> Collection[str]:
        """The jobs without a result yet."""
        return self._keys.keys()

    def add(self, key: str, job: SampleJob, lora: LoraWeights | None, listener: TokenListener | None) -> None:
        """Adds a job; it joins at the next step."""
        entry = PagedJob(key, job, lora, listener, self._arrivals)
        if listener is not None:
            self._listening[entry.arrival] = entry
        self._arrivals += 1
        self._keys[key] = self._entries[entry.arrival] = entry
        self._wait(Prompt(entry, job.prompt, entry.count, job.max_tokens))

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
            self._preempt_half(error)
        results = self._results
        self._results = {}
        return results

    def _advance(self) -> None:
        self._memory.counters["steps"] += 1
        self._compact_rows()
        self._admit()
        decoding = len(self._order) > 0
        if self._prefilling:
            limits = self._memory.limits
            self._prefill(limits.prefill_tokens_beside if decoding else limits.prefill_tokens)
        if decoding:
            self._decode()
        if self._ended and self._sequences.of["ended"][self._order].all():
            self._compact_rows(now=True)

    # --- admission ---

    def _admit(self) -> None:
        """Admits what waits as long as it fits, in the order of `admission`."""
        if not self._waiting:
            return
        later: list[Prompt] = []
        rows = self._rows_by_scope()
        scopes = len(rows.keys() | self._waiting.scopes)
        limits = self._memory.limits
        spare = 0 if self._row_limit < limits.rows else limits.spare_rows  # memory was short: no more than before
        beginnings = {(prompt.entry.lora, prompt.scope, prompt.beginning) for prompt in self._prefilling}
        while self._waiting:
            prompt = self._waiting.first(rows)
            entry = prompt.entry
            if not may_begin(prompt.scope, prompt.count, rows, scopes=scopes, limit=self._row_limit, spare=spare):
                break  # smaller jobs behind it wait, too: otherwise it could wait for ever
            known = self._find(prompt)
            ahead = prompt.tokens[known.length : known.length + BLOCK]
            prompt.beginning = ahead.tobytes() if len(ahead) == BLOCK else b""
            if prompt.beginning and (entry.lora, prompt.scope, prompt.beginning) in beginnings:
                # A prompt ahead has the same tokens and is computed in this step; in the next one they are cached.
                self._waiting.remove(prompt)
                later.append(prompt)
                continue
            fits = self._begin(prompt, known, spare=rows.total())
            if not fits and (rows.total() or self._prefilling):
                break
            fits = fits or self._begin_in_part(prompt)
            self._waiting.remove(prompt)
            if fits:
                self._prefilling.append(prompt)
                rows[prompt.scope] += prompt.count
                beginnings.add((entry.lora, prompt.scope, prompt.beginning))
            else:
                self._close(entry, SampleResult([], error=self._no_room))
        for prompt in later:
            self._waiting.add(prompt)

    def _wait(self, prompt: Prompt) -> None:
        prompt.entry.prompts.append(prompt)
        self._waiting.add(prompt)

    def _find(self, prompt: Prompt) -> Match:
        """Finds the cached beginning of a prompt. It ends before the tokens whose hidden states the job needs."""
        needed_from = unasked_tokens(prompt.entry.job) if prompt.is_of_job else len(prompt.tokens) - 1
        return self._memory.prefix_cache.find(prompt.entry.lora, prompt.scope, prompt.tokens[:needed_from])

    @property
    def _no_room(self) -> str:
        positions = self._memory.kv_cache.count * PAGE_POSITIONS
        return (
            f"One sequence of this request does not fit into the KV cache, which holds {positions} tokens. Ask for a "
            "shorter prompt or fewer tokens, or give the server more memory for it (MINT_KV_CACHE_MIB)"
        )

    def _rows_by_scope(self) -> Counter[str]:
        """The rows that jobs have or get once their prompts are computed."""
        rows: Counter[str] = Counter()
        numbers, counts = np.unique(self._sequences.of["entry"][self._order], return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            rows[self._entries[number].scope] += count
        for prompt in self._prefilling:
            rows[prompt.scope] += prompt.count
        return rows

    def _begin_in_part(self, prompt: Prompt) -> bool:
        """Begins with as many of a job's samples as there is room for, nothing else being in the batch. The others wait
        for their turn, as preempted sequences do."""
        known = self._find(prompt)  # nothing more is cached by now, but what another sampler holds
        free = self._memory.kv_cache.free - (len(prompt.tokens) // PAGE_POSITIONS - len(known.pages))
        fitting = free // 2  # each goes on into a second page
        if self._memory.states is not None:
            fitting = min(fitting, self._memory.states.free)
        prompt.count = min(prompt.count, max(1, fitting))
        return self._begin(prompt, known, spare=0)

    def _begin(self, prompt: Prompt, known: Match, spare: int) -> bool:
        """Takes pages for the part of a prompt that is not `known`; False where these and `spare` more are not free."""
        memory = self._memory
        entry = prompt.entry
        held = np.append(known.pages, known.partial) if known.rest else known.pages
        self._lease.hold(held)  # before `evict_pages`, which may evict them from the prefix cache
        whole, rest = divmod(len(prompt.tokens), PAGE_POSITIONS)
        new = whole - len(known.pages)
        needed = new + (prompt.count if prompt.left > 1 else int(rest > 0))
        taken = None
        if self._take_states(prompt, known):
            taken = self._lease.take(needed) if memory.prefix_cache.evict_pages(needed + spare) else None
        if taken is None:
            self._release_states(prompt)
            self._lease.release(held)
            return False
        prompt.pages = np.concatenate([known.pages, taken[:new]])
        prompt.own = taken[new:]
        if known.rest:  # a copy, because this job writes on in the page
            memory.kv_cache.copy(known.partial, taken[:1], known.rest)
            self._lease.release(held[-1:])
        prompt.done = known.length
        memory.counters["reused"] += known.length
        if entry.reused is None:  # what was preempted finds what it has computed itself
            entry.reused = known.length
        return True

    def _take_states(self, prompt: Prompt, known: Match) -> bool:
        """Takes slots for the states of a prompt, where the model has any; False where too few are free."""
        if self._state_lease is None:
            return True
        cache = self._memory.prefix_cache
        if known.state >= 0:
            self._state_lease.hold(np.array([known.state]))  # before `evict_states`, which may evict it
            prompt.loaded = known.state
        needed = prompt.count if prompt.left > 1 and prompt.count else 1
        taken = self._state_lease.take(needed) if cache.evict_states(needed) else None
        if taken is None:
            return False
        prompt.states = taken
        # The same prompt may come again, and computes its last token anew; others begin alike up to `common`.
        ends = {known.common, len(prompt.entry.job.prompt) - 1} if cache.keeps_states else ()
        prompt.cuts = sorted(end for end in ends if end > known.length)
        return True

    def _release_states(self, prompt: Prompt) -> None:
        if self._state_lease is not None:
            self._release_start(prompt)
            self._state_lease.release(prompt.states)
            prompt.states = prompt.states[:0]

    def _release_start(self, prompt: Prompt) -> None:
        """Releases the state of the prefix cache that a prompt starts from."""
        if self._state_lease is not None and prompt.loaded >= 0:
            self._state_lease.release(np.array([prompt.loaded]))
            prompt.loaded = -1

    def _drop_cancelled(self) -> None:
        self._read_pending()
        for entry in self._cancelled:
            if not entry.closed:
                self._close(entry, SampleResult([], error=CANCELLED))
        self._cancelled = []
        self._compact_rows(now=True)

    def _close(self, entry: PagedJob, result: SampleResult) -> None:
        """Records a job's result; its rows leave the batch at the next tidying."""
        entry.closed = True
        self._results[entry.key] = result
        del self._keys[entry.key]
        self._listening.pop(entry.arrival, None)
        self._row_limit = self._memory.limits.rows
        self._leave(entry)
        if not entry.rows:
            del self._entries[entry.arrival]

    def _leave(self, entry: PagedJob) -> None:
        """Removes a job's prompts and its preempted sequences, and ends the others."""
        for prompt in entry.prompts:
            self._waiting.remove(prompt)
            if prompt in self._prefilling:
                self._prefilling.remove(prompt)
                self._release_prompt(prompt)
            if not prompt.is_of_job:
                self._sequences.remove(np.array([prompt.slot]))
        entry.prompts = []
        if entry.rows:
            own = self._order[self._sequences.of["entry"][self._order] == entry.arrival]
            self._sequences.of["ended"][own] = self._ended = True

    def _release_prompt(self, prompt: Prompt) -> None:
        self._lease.release(np.concatenate([prompt.pages, prompt.own]), is_finite=prompt.entry.is_finite)
        self._release_states(prompt)
        prompt.pages = prompt.own = prompt.pages[:0]
        prompt.hidden = []
        prompt.done = 0

    # --- preemption ---

    def _make_room(self) -> None:
        """Frees pages for the next tokens: those of ended rows, or those of the latest sequence or prompt. A job fails
        whose sequence is alone, so that it has all pages."""
        self._read_pending()
        count = len(self._order)
        self._compact_rows(now=True)
        if len(self._order) < count:
            return
        if len(self._order) + len(self._prefilling) > 1:
            self._preempt(*self._latest(1))
            return
        self._close(
            self._entries[int(self._sequences.of["entry"][self._order[0]])], SampleResult([], error=self._no_room)
        )
        self._compact_rows(now=True)

    def _preempt_half(self, error: Exception) -> None:
        """Preempts the latest half of the batch, after the memory of the device, or of the system, ran out.

        Raises:
            MemoryError: one sequence or prompt is alone; there may be more memory later.
        """
        self._read_pending()
        self._interrupted = self._state_lease is not None
        self._compact_rows(now=True)
        count = len(self._order) + len(self._prefilling)
        if count <= 1:
            raise MemoryError(NO_MEMORY) from error
        prompts, slots = self._latest(count // 2)
        kept = self._rows_by_scope().total() - sum(prompt.count for prompt in prompts) - len(slots)
        emitted = self._sequences.of["emitted"]
        # Their logits are lost: they were interrupted between their last prompt token and the first draw.
        prompts += [prompt for prompt in self._prefilling if prompt.is_computed and prompt not in prompts]
        slots = np.union1d(slots, self._order[emitted[self._order] == 0])
        if self._interrupted:
            prompts, slots = list(self._prefilling), self._order
        self._preempt(prompts, slots)
        self._row_limit = max(1, kept)
        self._interrupted = False

    def _latest(self, count: int) -> tuple[list[Prompt], np.ndarray]:
        """The `count` prompts and slots that give way first: each time the latest of the scope with the most rows."""
        rows = self._rows_by_scope()
        inside: dict[str, list[tuple[tuple[int, int], Prompt | int]]] = defaultdict(list)
        for prompt in self._prefilling:
            inside[prompt.scope].append((prompt.turn, prompt))
        own = self._sequences.of[self._order]
        for slot, number, sample in zip(
            self._order.tolist(), own["entry"].tolist(), own["sample"].tolist(), strict=True
        ):
            inside[self._entries[number].scope].append(((number, sample), slot))
        for members in inside.values():
            members.sort(key=itemgetter(0))
        prompts: list[Prompt] = []
        slots: list[int] = []
        for _ in range(count):
            scope = max(
                (scope for scope in inside if inside[scope]), key=lambda scope: (rows[scope], inside[scope][-1][0])
            )
            _, latest = inside[scope].pop()
            if isinstance(latest, Prompt):
                prompts.append(latest)
                rows[scope] -= latest.count
            else:
                slots.append(latest)
                rows[scope] -= 1
        return prompts, np.array(slots, np.int64)

    def _preempt(self, prompts: list[Prompt], slots: np.ndarray) -> None:
        """Takes the pages of prompts and sequences, which wait for their turn again. Until a sequence ends there are no
        more rows than now: they would be admitted and preempted again and again."""
        for prompt in prompts:
            self._prefilling.remove(prompt)
            self._release_prompt(prompt)
            self._waiting.add(prompt)
        if len(slots):
            self._release_rows(slots)
            self._sequences.take_pages(slots)
            self._set_order(self._order[~np.isin(self._order, slots)])
            for slot in slots.tolist():
                self._wait_for_pages(slot)
        self._memory.counters["preemptions"] += len(prompts) + len(slots)
        self._row_limit = max(1, self._rows_by_scope().total())

    def _wait_for_pages(self, slot: int) -> None:
        """A sequence without pages waits for its turn."""
        own = self._sequences.of[slot]
        entry = self._entries[int(own["entry"])]
        tokens = np.concatenate([entry.job.prompt, self._sequences.tokens(slot)])
        left = entry.job.max_tokens - int(own["emitted"])
        self._wait(Prompt(entry, tokens, 1, left, slot, int(own["sample"])))

    # --- rows ---

    def _compact_rows(self, *, now: bool = False) -> None:
        """Removes ended rows where that pays, or `now`."""
        if not self._ended:
            return
        ended = self._sequences.of["ended"][self._order]
        gone = int(ended.sum())
        # A new order means a new decode step, which costs more than a few idle rows.
        if gone and (now or self._waiting or gone >= 0.25 * len(ended)):
            self._read_pending()
            ended = self._sequences.of["ended"][self._order]
            self._remove(self._order[ended])
            self._set_order(self._order[~ended])
            self._ended = False

    def _remove(self, slots: np.ndarray) -> None:
        """Frees ended sequences; their keys and values go to the prefix cache."""
        sequences = self._sequences
        self._release_rows(slots)
        for slot, number in zip(slots.tolist(), sequences.of["entry"][slots].tolist(), strict=True):
            entry = self._entries.get(number)
            if entry is not None and not entry.closed:
                entry.samples[int(sequences.of["sample"][slot])] = sequences.sample(slot)
            elif entry is not None and not entry.rows:
                del self._entries[number]
        sequences.remove(slots)

    def _release_rows(self, slots: np.ndarray) -> None:
        """Releases the pages of sequences in the batch; the prefix cache may keep some."""
        sequences = self._sequences
        own = sequences.of[slots]
        entries = [self._entries[number] for number in own["entry"].tolist()]
        for slot, entry in zip(slots.tolist(), entries, strict=True):
            if entry.is_finite:
                # Without the last token: it was drawn, but never run, so it has no keys and values.
                known = np.concatenate([entry.job.prompt, sequences.tokens(slot)[:-1]])
                state = -1 if self._interrupted else int(sequences.of["state"][slot])
                self._memory.prefix_cache.insert(entry.lora, entry.scope, known, sequences.pages_of(slot), state)
            entry.rows -= 1
        are_finite = np.array([entry.is_finite for entry in entries])
        for is_finite in (True, False):
            ended = slots[are_finite == is_finite]
            if len(ended):
                pages = [sequences.pages_of(slot) for slot in ended.tolist()]
                self._lease.release(np.concatenate([*pages, sequences.fronts_of(ended)]), is_finite=is_finite)
        if self._state_lease is not None:
            self._state_lease.release(own["state"][own["state"] >= 0])

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
        """Computes up to `budget` prompt tokens, of each scope the earliest first; sequences go on from complete
        prompts."""
        self._read_pending()
        wanted: Counter[str] = Counter()
        for prompt in self._prefilling:
            wanted[prompt.scope] += max(len(prompt.tokens) - prompt.done, LEAST_PREFILL)
        shares = fair_shares(wanted, budget)
        batch: list[tuple[Prompt, int]] = []
        for prompt in self._prefilling:
            size = min(len(prompt.tokens) - prompt.done, shares[prompt.scope])
            if size > 0:
                batch.append((prompt, size))
                shares[prompt.scope] -= max(size, LEAST_PREFILL)
        batch.sort(key=lambda pair: id(pair[0].entry.lora))  # one run for each lora
        parts = [
            PromptPart(
                prompt.tokens[: prompt.done + size],
                prompt.done,
                prompt.table,
                prompt.entry.lora,
                self._part_states(prompt, size),
            )
            for prompt, size in batch
        ]
        hidden = run_prompts(self._decoder, self._memory.kv_cache, parts, self._memory.states)
        finite = finite_rows(hidden)
        end = 0
        complete = []
        last = []
        for prompt, size in batch:
            end += size
            prompt.done += size
            prompt.entry.is_finite &= bool(finite[end - size : end].all())
            self._release_start(prompt)
            if prompt.is_of_job and asks(prompt.entry.job):
                prompt.hidden.append(hidden[end - size : end])
            if prompt.is_computed:
                complete.append(prompt)
                last.append(end - 1)
        for (prompt, _), part in zip(batch, parts, strict=True):
            self._keep_states(prompt, part)
        self._memory.counters["prefilled"] += end
        if complete:
            self._start(complete, hidden[torch.tensor(last, device=hidden.device)])

    def _part_states(self, prompt: Prompt, size: int) -> PartStates | None:
        """Where the states of the next `size` tokens of a prompt lie, with slots for those that are worth keeping."""
        if self._state_lease is None:
            return None
        cuts = []
        for length in prompt.cuts:
            if prompt.done < length < prompt.done + size and self._memory.prefix_cache.evict_states(1):
                taken = self._state_lease.take(1)
                cuts += [] if taken is None else [(length, int(taken[0]))]
        own = int(prompt.states[0])
        loaded = own if prompt.done and prompt.loaded < 0 else prompt.loaded
        return PartStates(loaded, own, cuts)

    def _keep_states(self, prompt: Prompt, part: PromptPart) -> None:
        """Gives the states within a part that was computed to the prefix cache."""
        if self._state_lease is None or part.states is None:
            return
        entry = prompt.entry
        for length, slot in part.states.cuts:
            if entry.is_finite:
                known = prompt.tokens[:length]
                self._memory.prefix_cache.insert(entry.lora, entry.scope, known, part.pages, slot)
            self._state_lease.release(np.array([slot]))

    def _start(self, prompts: list[Prompt], hidden: Tensor) -> None:
        """Adds rows for prompts that are computed, and draws their next tokens from hidden [prompts, E]."""
        logits = self._decoder.logits(hidden, rows_of([prompt.entry.lora for prompt in prompts]))
        finite = finite_rows(logits)
        started, rows = [], []
        for index, prompt in enumerate(prompts):
            entry, job = prompt.entry, prompt.entry.job
            if entry.closed:  # by another of its prompts
                continue
            entry.is_finite &= bool(finite[index])
            if not entry.is_finite:  # not cached either: another prompt that begins alike would read the same numbers
                self._close(entry, SampleResult([], error=DIVERGED))
                continue
            self._memory.prefix_cache.insert(entry.lora, entry.scope, job.prompt, prompt.table)
            if prompt.is_of_job and asks(job):
                unknown = [part for part in prompt.hidden if len(part)]
                front = hidden.new_zeros(len(job.prompt) - sum(map(len, unknown)), hidden.shape[1])
                entry.scores = score_prompt(self._decoder, job, torch.cat([front, *unknown]), entry.lora)
            if not entry.count:
                self._close(entry, SampleResult([], reused=entry.reused or 0, **vars(entry.scores)))
                continue
            started.append(self._open_rows(prompt))
            rows += [index] * prompt.count
        if started:
            slots = np.concatenate(started)
            self._set_order(np.concatenate([self._order, slots]))
            self._collect(np.arange(len(slots)), slots, logits[torch.tensor(rows, device=logits.device)])

    def _open_rows(self, prompt: Prompt) -> np.ndarray:
        """Slots for the sequences of a prompt. They share its whole pages; the rest of it is copied for each."""
        entry, count, own = prompt.entry, prompt.count, prompt.own
        self._prefilling.remove(prompt)
        entry.prompts.remove(prompt)
        self._lease.hold(np.tile(prompt.pages, count - 1))
        if prompt.left > 1:
            self._memory.kv_cache.copy(int(own[0]), own[1:], len(prompt.tokens) % PAGE_POSITIONS)
            table = np.column_stack([np.tile(prompt.pages, (count, 1)), own])
        else:  # the only token is drawn from the prompt's logits and never run, so nothing is written
            self._lease.release(own)
            table = np.tile(prompt.pages, (count, 1))
        states = None
        if self._memory.states is not None and prompt.left > 1:
            self._memory.states.copy(int(prompt.states[0]), prompt.states[1:])
            states, prompt.states = prompt.states, prompt.states[:0]
        self._release_states(prompt)
        later = prompt.states[:0]
        if prompt.is_of_job:
            entry.left = entry.count
            slots = self._sequences.add(entry.arrival, entry.job)
            slots, later = slots[:count], slots[count:]
        else:
            slots = np.array([prompt.slot])
        entry.rows += count
        self._sequences.give_pages(slots, table, states)
        self._lease.hold(self._sequences.fronts_of(slots))
        for slot in later.tolist():
            self._wait_for_pages(slot)
        return slots

    def _decode(self) -> None:
        """Decodes one token in every row."""
        sequences, positions = self._sequences, self._positions()
        if self._step is None or not self._step.fits(positions):
            self._extend_rows()
            slots = self._order
            if not len(slots):
                return
            own = sequences.of[slots]
            table, fronts = sequences.pages[slots], own["front"]
            fronts = np.where(fronts < 0, table[:, 0], fronts)
            states = np.where(own["ended"], -1, own["state"])
            positions = self._positions()
            self._step = self._memory.steps.open(
                table, fronts, positions, self._loras, earlier=self._step, states=states
            )
            self._drawing = self._step if isinstance(self._step, DrawingStep) else None
        slots = self._order
        if self._drawing is not None and _draws_alone(sequences.of[slots]):
            self._draw_ahead(self._drawing)
            return
        logits = self._step.run(sequences.of["last"][slots], positions)
        self._collect(self._with_masks(np.flatnonzero(~sequences.of["ended"][slots])), slots, logits)

    def _draw_ahead(self, step: DrawingStep) -> None:
        """Starts a step, and reads the tokens of the one before it while the device computes."""
        own, before = self._sequences.of[self._order], self._pending
        tokens = own["last"] if before is None else None
        emitted = own["emitted"] + self._unread()
        self._pending = step.draw(tokens, self._positions(), DrawRules.of(own, emitted))
        if before is not None:
            self._record_drawn(before)
        own = self._sequences.of[self._order]
        if (own["ended"] | (own["emitted"] + 1 >= own["limit"])).all():  # there is no next step to start
            self._read_pending()

    def _unread(self) -> np.ndarray:
        """How many tokens of each row are pending: 0 or 1."""
        if self._pending is None:
            return np.zeros(len(self._order), np.int64)
        return (~self._sequences.of["ended"][self._order]).astype(np.int64)

    def _read_pending(self) -> None:
        """Waits for the pending tokens, if there are any, and records them."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._record_drawn(pending)

    def _record_drawn(self, drawn: PendingDraw) -> None:
        """Records the tokens of a step of the same rows, but not those behind the end of a sequence."""
        tokens, logprobs, _ = drawn.wait()
        rows = np.flatnonzero(~self._sequences.of["ended"][self._order])
        if len(rows):
            slots = self._order[rows]
            self._record(
                rows,
                slots,
                self._sequences.of[slots],
                record_drawn(self._sequences, slots, tokens[rows], logprobs[rows]),
            )

    def _with_masks(self, rows: np.ndarray) -> np.ndarray:
        """Those of the `rows` whose masks are written. The next step runs the others once more, at the same place."""
        slots = self._order[rows]
        ruled = self._sequences.of["ruled"][slots]
        if not ruled.any():
            return rows
        rules, asked = self._sequences.rules, slots[ruled]
        is_ready = np.ones(len(rows), bool)
        is_ready[ruled] = rules.ready(asked, 0.0)
        if not is_ready.all():
            patience_s: float | None = None
            if self._memory.states is None:  # a state would go on twice
                scopes = self._rows_by_scope().keys() | self._waiting.scopes
                patience_s = MASKS_S if len(scopes) == 1 else MASKS_BESIDE_S
            is_ready[ruled] = rules.ready(asked, patience_s)
        return rows[is_ready]

    def _positions(self) -> np.ndarray:
        """The position of each row's last token, which is run next."""
        own = self._sequences.of[self._order]
        found: np.ndarray = own["prompt"] + own["emitted"] - 1 + self._unread()
        return found

    def _extend_rows(self) -> None:
        """Gives each row the page of its next position."""
        while True:
            missing = self._order[self._positions() // PAGE_POSITIONS >= self._sequences.of["pages"][self._order]]
            if not len(missing):
                return
            if self._memory.prefix_cache.evict_pages(len(missing)):
                taken = self._lease.take(len(missing))
                if taken is not None:
                    self._sequences.extend(missing, taken)
                    return
            self._make_room()

    # --- collect ---

    def _collect(self, rows: np.ndarray, slots: np.ndarray, logits: Tensor) -> None:
        """Draws the next token of the sequences in `rows` of `slots`, from these rows of the logits, and records token,
        logprob and whether the sequence ends. Ended rows are computed, too, until the next tidying, but not drawn."""
        sequences = self._sequences
        if not len(rows):
            return
        slots = slots[rows]
        own = sequences.of[slots]
        self._record(rows, slots, own, next_tokens(self._memory.draw, sequences, slots, rows, logits))

    def _record(self, rows: np.ndarray, slots: np.ndarray, own: np.ndarray, drawn: NextTokens) -> None:
        """Sends the tokens of `slots`, whose rows are `rows` and which were `own` before them, and closes the jobs that
        have ended or failed."""
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
            self._row_limit = self._memory.limits.rows
            if self._step is not None:
                self._step.freeze(rows[ended])
            numbers, counts = np.unique(own["entry"][ended], return_counts=True)
            for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
                self._entries[number].left -= count
                if not self._entries[number].left and not self._entries[number].closed:
                    self._finish(self._entries[number])

    def _finish(self, entry: PagedJob) -> None:
        """Records the result of a job whose sequences have all ended."""
        sequences = self._sequences
        for slot in self._order[sequences.of["entry"][self._order] == entry.arrival].tolist():
            entry.samples[int(sequences.of["sample"][slot])] = sequences.sample(slot)
        samples = [entry.samples[index] for index in range(entry.count)]
        self._close(entry, SampleResult(samples, reused=entry.reused or 0, **vars(entry.scores)))


def _draws_alone(own: np.ndarray) -> bool:
    """Whether no sequence of `own` [R] needs more of the logits than a token and its logprob."""
    return not (own["ruled"] | own["processed"] | own["both"] | (own["width"] > 0)).any()
