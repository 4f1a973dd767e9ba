"""Draws the next tokens of sequences by `draw.c`. The kernel has no top-k or top-p; torch does those.

Letters: R rows of logits · N sequences that draw · V vocabulary.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from mint.engine.cpu.kernels import NativeKernels
from mint.engine.drawing.draw import GREEDY_BELOW, choose, rules, take
from mint.engine.drawing.random_stream import uniform_of


class NativeDraw:
    """`Draw` by the kernel."""

    def __init__(self, kernels: NativeKernels) -> None:
        self._kernel = kernels.libraries["draw"].draw_rows

    def __call__(
        self, logits: Tensor, rows: np.ndarray, table: np.ndarray, slots: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        logits = logits.contiguous()
        count = len(rows)
        tokens = np.empty(count, np.int64)
        logprobs, normalisers = np.empty(count, np.float32), np.empty(count, np.float32)
        columns = table.dtype.fields or {}
        self._kernel(
            count,
            count * logits.shape[1],
            logits=logits,
            width=logits.shape[1],
            rows=rows,
            slots=slots,
            table=table,
            stride=table.itemsize,
            stream=columns["stream"][1],
            emitted=columns["emitted"][1],
            temperature=columns["temperature"][1],
            top_k=columns["top_k"][1],
            top_p=columns["top_p"][1],
            coldest=GREEDY_BELOW,
            tokens=tokens,
            logprobs=logprobs,
            normalisers=normalisers,
        )
        restricted = np.flatnonzero(tokens < 0)
        if len(restricted):
            own, chosen = table[slots[restricted]], rows[restricted]
            uniforms = uniform_of(own["stream"], own["emitted"])
            tokens[restricted] = choose(take(logits, chosen), uniforms, *rules(own)).numpy()
            logprobs[restricted] = logits.numpy()[chosen, tokens[restricted]] - normalisers[restricted]
        return tokens, logprobs, normalisers
