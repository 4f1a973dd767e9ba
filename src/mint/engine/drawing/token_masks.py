"""Which tokens sequences may draw, as bits; those of grammars are computed by a thread while the next forward runs."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from mint.engine.protocol import Grammar, GrammarState
from mint.engine.upload import upload


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
    """The masks of sequences by slot. Between `advance` and `wait` a thread writes them.

    llguidance leaves Python to other threads while it computes, and so do the kernels of the forward. A step calls no
    Python for each sequence but in that thread: what it touches is no longer in the processor's caches.
    """

    def __init__(self) -> None:
        self._bits = np.zeros((0, 0), np.uint8)
        self._states: dict[int, GrammarState] = {}
        self._allowed: dict[int, np.ndarray] = {}
        self._pending: Future[None] | None = None

    def open(self, slot: int, allowed: np.ndarray | None, grammar: Grammar | None, width: int) -> None:
        """Starts the mask of a sequence: the tokens in `allowed`, int64 [·], that the grammar lets through."""
        self.wait()
        missing = slot + 1 - len(self._bits)
        if missing > 0:
            more = np.zeros((max(missing, len(self._bits)), _size_bytes(width)), np.uint8)
            self._bits = np.concatenate([self._bits, more]) if len(self._bits) else more
        self._bits[slot] = 255 if allowed is None else packed(allowed, width)
        if grammar is not None:
            if allowed is not None:
                self._allowed[slot] = self._bits[slot].copy()
            self._states[slot] = grammar.start()
            self._write(slot)

    def close(self, slot: int) -> None:
        """Forgets the mask of a sequence."""
        self.wait()
        self._states.pop(slot, None)
        self._allowed.pop(slot, None)

    def advance(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        """Adds a token to each of `slots`, both [N], which have grammars."""
        self.wait()
        self._pending = _thread().submit(self._advance, slots.tolist(), tokens.tolist())

    def wait(self) -> None:
        """Waits until all masks are written."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def read(self, slots: np.ndarray) -> np.ndarray:
        """The masks of `slots` [N], uint8 [N, 4 · ceil(V / 32)]."""
        self.wait()
        return self._bits[slots]

    def _advance(self, slots: list[int], tokens: list[int]) -> None:
        for slot, token in zip(slots, tokens, strict=True):
            self._states[slot].advance(token)
            self._write(slot)

    def _write(self, slot: int) -> None:
        bits = self._bits[slot]
        self._states[slot].allowed(bits)
        if slot in self._allowed:
            bits &= self._allowed[slot]


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
