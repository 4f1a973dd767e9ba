"""Which tokens sequences may draw, as bits; those of grammars are computed by a thread while the next forward runs."""

from __future__ import annotations

import heapq
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from mint.engine.protocol import Grammar, GrammarState
from mint.engine.transfers import upload

TURN_S = 0.01
"""So long the thread works for one table before it looks for work of another."""

MASKS_AT_ONCE = 8
"""The thread takes so many before it looks again which come first."""


@dataclass(frozen=True)
class TokenMasks:
    """`bits` uint8 [M, 4 · ceil(V / 32)] of M sequences among N: bit i % 8, from the lowest, of byte i // 8 stands for
    token i. `at` int64 [M] are their places, in order."""

    at: np.ndarray
    bits: np.ndarray

    def of(self, places: np.ndarray) -> TokenMasks:
        """Those at `places`, in order, numbered by their place among these."""
        chosen = np.isin(self.at, places)
        return TokenMasks(np.searchsorted(places, self.at[chosen]), self.bits[chosen])

    def exclude(self, logits: Tensor) -> None:
        """Sets logits float32 [N, V] of excluded tokens to -inf."""
        flags = np.unpackbits(~self.bits, axis=1, count=logits.shape[1], bitorder="little").view(np.bool_)
        (excluded,) = upload(logits.device, flags)
        if len(self.at) == len(logits):
            logits.masked_fill_(excluded, -torch.inf)
        else:
            (places,) = upload(logits.device, self.at)
            logits[places] = logits[places].masked_fill_(excluded, -torch.inf)

    def allow(self, tokens: np.ndarray) -> np.ndarray:
        """Whether each sequence may draw its token, bool [M]; tokens int64 [M]."""
        found: np.ndarray = self.bits[np.arange(len(tokens)), tokens >> 3] >> (tokens & 7) & 1
        return found.astype(bool)


class MaskTable:
    """The masks of sequences by slot. After `advance` a thread writes them, until then they are not ready.

    The thread takes those first whose sequences have taken the least time so far: a costly grammar keeps no other
    sequence waiting. llguidance leaves Python to other threads while it computes, and so do the kernels of the forward.
    A step calls no Python for each sequence but in that thread: what it touches is no longer in the processor's caches.
    """

    def __init__(self) -> None:
        self._bits = np.zeros((0, 0), np.uint8)
        self._states: dict[int, GrammarState] = {}
        self._allowed: dict[int, np.ndarray] = {}
        self._spent_s: dict[int, float] = {}
        self._is_ready = np.zeros(0, bool)
        # A heap: time so far, number, slot, token, state.
        self._queue: list[tuple[float, int, int, int, GrammarState]] = []
        self._number = 0
        self._lock = threading.Lock()  # of all above; no mask is computed under it
        self._idle = threading.Event()
        self._idle.set()
        self._error: Exception | None = None

    def open(self, slot: int, allowed: np.ndarray | None, grammar: Grammar | None, width: int) -> None:
        """Starts the mask of a sequence: the tokens in `allowed`, int64 [·], that the grammar lets through."""
        among = None if allowed is None else packed(allowed, width)
        bits = np.full(_size_bytes(width), 255, np.uint8) if among is None else among
        state = None if grammar is None else grammar.start()
        if state is not None:
            first = np.empty_like(bits)
            state.allowed(first)
            bits = bits & first
        with self._lock:
            self._make_room(slot, len(bits))
            self._bits[slot] = bits
            self._is_ready[slot] = True
            if state is not None:
                self._states[slot] = state
                self._spent_s[slot] = 0.0
                if among is not None:
                    self._allowed[slot] = among

    def close(self, slot: int) -> None:
        """Forgets the mask of a sequence."""
        with self._lock:
            self._states.pop(slot, None)
            self._allowed.pop(slot, None)
            self._spent_s.pop(slot, None)

    def advance(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        """Adds a token to each of `slots`, both [N], which have grammars and are ready."""
        if not len(slots):
            return
        with self._lock:
            self._is_ready[slots] = False
            for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
                heapq.heappush(self._queue, (self._spent_s[slot], self._number, slot, token, self._states[slot]))
                self._number += 1
            was_idle = self._idle.is_set()
            self._idle.clear()
        if was_idle:
            _thread().submit(self._work)

    def ready(self, slots: np.ndarray, patience_s: float | None) -> np.ndarray:
        """Whether the masks of `slots` [N] are written, bool [N], after waiting for them up to `patience_s`, or until
        they are."""
        if not self._is_ready[slots].all():
            self._idle.wait(patience_s)
            if self._error is not None:  # no mask that is missing will be written any more
                raise self._error
        return self._is_ready[slots]

    def read(self, slots: np.ndarray) -> np.ndarray:
        """The masks of `slots` [N], uint8 [N, 4 · ceil(V / 32)], once they are written."""
        self.ready(slots, None)
        with self._lock:
            return self._bits[slots]

    def _make_room(self, slot: int, width: int) -> None:
        missing = slot + 1 - len(self._bits)
        if missing > 0:
            count = max(missing, len(self._bits))
            more = np.zeros((count, width), np.uint8)
            self._bits = np.concatenate([self._bits, more]) if len(self._bits) else more
            self._is_ready = np.concatenate([self._is_ready, np.zeros(count, bool)])

    def _work(self) -> None:
        """Writes masks for one turn, and asks for another turn if there is more to do."""
        ends_at = time.monotonic() + TURN_S
        try:
            while self._write_next():
                if time.monotonic() > ends_at:
                    _thread().submit(self._work)
                    return
        except Exception as error:
            with self._lock:
                self._error = error  # for who waits for the masks
                self._queue.clear()
                self._idle.set()
            raise

    def _write_next(self) -> bool:
        """Writes the masks that are next in turn; False, and idle, if there is none."""
        with self._lock:
            taken = [heapq.heappop(self._queue) for _ in range(min(MASKS_AT_ONCE, len(self._queue)))]
            if not taken:
                self._idle.set()
                return False
            taken = [entry for entry in taken if self._states.get(entry[2]) is entry[4]]  # not closed since
            allowed = [self._allowed.get(entry[2]) for entry in taken]
            bits = np.empty((len(taken), self._bits.shape[1]), np.uint8)
        times_s = [time.thread_time()]
        for row, (_, _, _, token, state) in enumerate(taken):
            state.advance(token)
            state.allowed(bits[row])
            if allowed[row] is not None:
                bits[row] &= allowed[row]
            times_s.append(time.thread_time())
        with self._lock:
            for row, (_, _, slot, _, state) in enumerate(taken):
                if self._states.get(slot) is state:
                    self._bits[slot] = bits[row]
                    self._spent_s[slot] += times_s[row + 1] - times_s[row]
                    self._is_ready[slot] = True
        return True


@cache
def _thread() -> ThreadPoolExecutor:
    """One for the process: the masks of a step take less time than its forward."""
    return ThreadPoolExecutor(1, thread_name_prefix="mint-masks")


def packed(tokens: np.ndarray, width: int) -> np.ndarray:
    """Token ids as the bits of a mask, uint8 [4 · ceil(width / 32)]."""
    flags = np.zeros(8 * _size_bytes(width), bool)
    flags[tokens] = True
    return np.packbits(flags, bitorder="little")


def _size_bytes(width: int) -> int:
    return 4 * -(-width // 32)
