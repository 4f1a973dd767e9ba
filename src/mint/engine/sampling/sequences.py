"""A table of the sequences that are being sampled: what each has drawn so far, how it draws, and when it ends.

Letters: S slots (a sequence keeps its slot until it is removed) · R sequences of one step · T tokens ·
V vocabulary.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from mint.engine.drawing.draw import take
from mint.engine.drawing.logit_rules import LogitRuleTable
from mint.engine.drawing.random_stream import streams
from mint.engine.model.attention import BLOCK
from mint.engine.protocol import Sample, SampleJob, TokenTable
from mint.engine.sampling.stop_checker import StopChecker
from mint.engine.target_logprobs import most_probable

_COLUMNS = np.dtype(
    [
        ("entry", np.int64),
        ("sample", np.int64),
        ("prompt", np.int64),
        ("emitted", np.int64),
        ("pages", np.int64),
        ("front", np.int64),
        ("state", np.int64),
        ("limit", np.int64),
        ("last", np.int64),
        ("stream", np.uint64),
        ("temperature", np.float64),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("processed", np.bool_),
        ("both", np.bool_),
        ("ruled", np.bool_),
        ("width", np.int64),
        ("stopped", np.bool_),
        ("ended", np.bool_),
    ],
    align=True,
)
"""`prompt`: its length · `pages`: how many it has · `front`: the page of its first `BLOCK` positions · `state`: the
slot of its state, or -1 · `limit`: tokens at most · `last`: the last token · `stream`: of its random numbers · `width`:
of the top-k table it asked for · `processed`: whether its logprobs are the processed ones · `both`: whether it has
these, too · `ruled`: whether it has logit rules · `stopped`: at a stop token or string, or by its grammar · `ended`:
also by its limit or a cancellation."""


_FEWEST = 64
"""The table grows by at least so many slots."""


class Sequences:
    """The table, by slot."""

    def __init__(self) -> None:
        self.of: np.ndarray = np.zeros(0, _COLUMNS)
        """Structured [S]; others read it, and set `ended`."""
        self.pages = np.zeros((0, 0), np.int64)
        """[S, C]: the pages of each, in order."""
        self._tokens = np.zeros((0, 0), np.int64)
        self._logprobs = np.zeros((0, 0), np.float32)
        self._free: list[int] = []
        self._processed = np.zeros((0, 0), np.float32)
        self._stops = StopChecker()
        self.rules = LogitRuleTable()
        self._best: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}

    def add(self, entry: int, job: SampleJob) -> np.ndarray:
        """Adds all samples of a job, without pages; returns their slots in the table."""
        count = job.num_samples
        slots = self._take(count)
        own: np.ndarray = np.zeros(count, _COLUMNS)
        own["entry"] = entry
        own["sample"] = np.arange(count)
        own["prompt"] = len(job.prompt)
        own["limit"] = job.max_tokens
        own["temperature"] = job.temperature
        own["stream"] = streams(np.full(count, job.seed % (1 << 64), np.uint64), np.arange(count))
        own["top_k"] = job.top_k
        own["top_p"] = job.top_p
        own["width"] = job.topk_sample_logprobs
        own["front"] = own["state"] = -1
        own["processed"] = job.logprobs_mode == "processed"
        own["both"] = job.logprobs_mode == "both"
        own["ruled"] = job.rules is not None
        self.of[slots] = own
        self._stops.add(slots, job.stop, min_tokens=0 if job.rules is None else job.rules.min_tokens)
        self.rules.add(slots, job)
        return slots

    def give_pages(self, slots: np.ndarray, pages: np.ndarray, states: np.ndarray | None = None) -> None:
        """Gives `slots` [R], samples of one job, their pages [R, C], and the slots of their `states` [R], if they have
        any."""
        self.pages = _wide(self.pages, pages.shape[1])
        self.pages[slots, : pages.shape[1]] = pages
        own = self.of[slots]
        own["pages"] = pages.shape[1]
        own["state"] = -1 if states is None else states
        if pages.shape[1]:  # samples of one prompt read its first block in one page, and so in one product
            own["front"] = np.where(own["prompt"] >= BLOCK, pages[0, 0], pages[:, 0])
        self.of[slots] = own

    def take_pages(self, slots: np.ndarray) -> None:
        """Takes pages and states from `slots`, which keep all else."""
        own = self.of[slots]
        own["pages"] = 0
        own["front"] = own["state"] = -1
        self.of[slots] = own

    def extend(self, slots: np.ndarray, pages: np.ndarray) -> None:
        """Adds one page to each of `slots`, both [R]."""
        places = self.of["pages"][slots]
        self.pages = _wide(self.pages, int(places.max()) + 1)
        self.pages[slots, places] = pages
        self.of["pages"][slots] = places + 1

    def pages_of(self, slot: int) -> np.ndarray:
        """The pages of a sequence in order."""
        return self.pages[slot, : self.of["pages"][slot]]

    def fronts_of(self, slots: np.ndarray | list[int]) -> np.ndarray:
        """The pages in which `slots` read their first `BLOCK` positions; none for sequences without pages."""
        fronts = self.of["front"][slots]
        return fronts[fronts >= 0]

    def remove(self, slots: np.ndarray) -> None:
        """Frees `slots`."""
        self._free += sorted(slots.tolist(), reverse=True)
        self._stops.remove(slots)
        self.rules.remove(slots)
        for slot in slots.tolist():
            self._best.pop(slot, None)

    def note(
        self, slots: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray, processed: np.ndarray | None = None
    ) -> np.ndarray:
        """Adds one token to each of `slots` [R], with its logprob and, for those that want both, the processed one;
        returns whether it was the last, bool [R]."""
        own = self.of[slots]  # read and written as a whole: one column of a structured array costs as much as all
        emitted = own["emitted"].copy()
        width = int(emitted.max()) + 1
        if width > self._tokens.shape[1]:  # doubled, so that long samples are not copied at every token
            self._tokens = _wide(self._tokens, 2 * width)
            self._logprobs = _wide(self._logprobs, 2 * width)
        self._tokens[slots, emitted] = tokens
        self._logprobs[slots, emitted] = logprobs
        if processed is not None:
            self._processed = _wide(_tall(self._processed, len(self.of) - len(self._processed)), self._tokens.shape[1])
            self._processed[slots, emitted] = processed
        stopped = self._stops.stopped(slots, tokens)
        if own["ruled"].any():
            stopped[own["ruled"]] |= self.rules.note(slots[own["ruled"]], tokens[own["ruled"]])
        emitted += 1
        ended = stopped | (emitted >= own["limit"])
        own["emitted"] = emitted
        own["last"] = tokens
        own["stopped"] = stopped
        own["ended"] = ended
        self.of[slots] = own
        return ended

    def note_best(self, slots: np.ndarray, rows: np.ndarray, logits: Tensor) -> None:
        """Records the most probable tokens of this step for those of `slots` [R] that asked for them, from their `rows`
        [R] of the logits [·, V]."""
        widths = self.of["width"][slots]
        for width in np.unique(widths[widths > 0]).tolist():
            asked = np.flatnonzero(widths == width)
            best = most_probable(take(logits, rows[asked]), width)
            columns = (column.cpu().numpy() for column in best)
            for slot, tokens, logprobs in zip(slots[asked].tolist(), *columns, strict=True):
                self._best.setdefault(slot, []).append((tokens, logprobs))

    def tokens(self, slot: int) -> np.ndarray:
        """The tokens that a sequence has drawn, int64 [T]."""
        return self._tokens[slot, : self.of["emitted"][slot]].copy()

    def sample(self, slot: int) -> Sample:
        """The result of a sequence that has ended."""
        steps = self._best.get(slot)
        table = None
        if steps is not None:
            ids, logprobs = (np.stack(part) for part in zip(*steps, strict=True))
            table = TokenTable(ids, logprobs)
        count = self.of["emitted"][slot]
        logprobs = self._logprobs[slot, :count].copy()
        processed = self._processed[slot, :count].copy() if self.of["both"][slot] else None
        return Sample(self.tokens(slot), logprobs, bool(self.of["stopped"][slot]), table, processed)

    def _take(self, count: int) -> np.ndarray:
        missing = count - len(self._free)
        if missing > 0:
            size = len(self.of)
            grown = max(missing, size // 2, _FEWEST)
            self.of = np.concatenate([self.of, np.zeros(grown, _COLUMNS)])
            self._tokens = _tall(self._tokens, grown)
            self._logprobs = _tall(self._logprobs, grown)
            self.pages = _tall(self.pages, grown)
            self._free = [*reversed(range(size, size + grown)), *self._free]
        taken = self._free[len(self._free) - count :]
        self._free = self._free[: len(self._free) - count]
        return np.array(taken[::-1], np.int64)


def _tall(rows: np.ndarray, count: int) -> np.ndarray:
    """`count` rows more, which are zero."""
    return np.concatenate([rows, np.zeros((count, rows.shape[1]), rows.dtype)])


def _wide(rows: np.ndarray, width: int) -> np.ndarray:
    """At least `width` columns; the new ones are zero."""
    missing = width - rows.shape[1]
    return rows if missing <= 0 else np.pad(rows, ((0, 0), (0, missing)))
