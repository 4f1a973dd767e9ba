"""The next tokens of sequences in a table: drawn by the kernel in C where there is one, else by `choice` in torch.

Knows which columns say how a sequence draws; knows nothing of jobs. Letters: R rows of logits · N sequences that draw ·
V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mint.engine.cpu.kernels import NativeKernels
from mint.engine.sampling.choice import GREEDY_BELOW, choose, draw, processed_logprobs
from mint.engine.sampling.random_stream import uniform_of

COLUMNS = ("stream", "emitted", "temperature", "top_k", "top_p")
"""Of the table: uint64, int64, float64, int64 and float64; a draw is `uniform_of(stream, emitted)`."""


class Draws:
    """What a sequence gets is a function of its own row alone."""

    def __init__(self, kernels: NativeKernels | None) -> None:
        """The kernel goes with `kernels`, whose threads it shares."""
        self._threads = None if kernels is None else kernels.threads
        self._library = None if kernels is None else kernels.load("choice")

    def draw(
        self, logits: Tensor, rows: np.ndarray, table: np.ndarray, slots: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """A token, int64 [N], for each of `slots` [N] of the structured `table`, from `rows` [N] of logits float32
        [R, V]; and its logprob under the logits as they are, float32 [N], not finite where the logits are not."""
        if self._threads is not None and self._library is not None:
            return self._draw_natively(logits, rows, table, slots)
        own = table[slots]
        found = draw(_take(logits, rows), uniform_of(own["stream"], own["emitted"]), *_rule(own))
        # Both in one transfer; a float64 holds either exactly.
        columns = torch.stack([column.double() for column in found]).cpu().numpy()
        return columns[0].astype(np.int64), columns[1].astype(np.float32)

    def _draw_natively(
        self, logits: Tensor, rows: np.ndarray, table: np.ndarray, slots: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        if self._threads is None or self._library is None:
            raise AssertionError("there is no kernel")
        logits, count = logits.contiguous(), len(rows)
        tokens, (logprobs, normalisers) = np.empty(count, np.int64), np.empty((2, count), np.float32)
        places = (array.ctypes.data for array in (rows, slots, table))
        offsets = ((table.dtype.fields or {})[name][1] for name in COLUMNS)
        self._threads.run(
            self._library.draw_rows, count, logits, logits.shape[1], *places, table.itemsize, *offsets, GREEDY_BELOW,
            *(array.ctypes.data for array in (tokens, logprobs, normalisers)), work=count * logits.shape[1],
        )  # fmt: skip
        left = np.flatnonzero(tokens < 0)  # the kernel knows neither top-k nor top-p
        if len(left):
            own, chosen = table[slots[left]], rows[left]
            draws = uniform_of(own["stream"], own["emitted"])
            tokens[left] = choose(_take(logits, chosen), draws, *_rule(own)).numpy()
            logprobs[left] = logits.numpy()[chosen, tokens[left]] - normalisers[left]
        return tokens, logprobs


def processed(logits: Tensor, rows: np.ndarray, own: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Logprobs, float32 [N], of tokens [N] under the distributions that they were drawn from, by `rows` [N] of logits
    [R, V] and the rules in the structured `own` [N]."""
    chosen = torch.from_numpy(tokens).to(logits.device)
    found: np.ndarray = processed_logprobs(_take(logits, rows), chosen, *_rule(own)).cpu().numpy()
    return found


def _take(logits: Tensor, rows: np.ndarray) -> Tensor:
    return logits if len(rows) == len(logits) else logits[torch.from_numpy(rows).to(logits.device)]


def _rule(own: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return own["temperature"].copy(), own["top_k"].copy(), own["top_p"].copy()  # torch takes no columns with gaps
