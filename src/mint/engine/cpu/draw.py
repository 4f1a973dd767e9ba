"""Draws the next tokens of sequences by `draw.c`. The kernel has no top-k or top-p; torch does those.

Letters: R rows of logits · N sequences that draw · V vocabulary.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from mint.engine.cpu.kernels import NativeKernels
from mint.engine.drawing.draw import GREEDY_BELOW, choose, rules, take
from mint.engine.drawing.random_stream import uniform_of
from mint.engine.drawing.token_masks import TokenMasks


class NativeDraw:
    """`Draw` by the kernel."""

    def __init__(self, kernels: NativeKernels) -> None:
        self._kernel = kernels.libraries["draw"].draw_rows

    def __call__(
        self,
        logits: Tensor,
        rows: np.ndarray,
        table: np.ndarray,
        slots: np.ndarray,
        masks: TokenMasks | None = None,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        logits = logits.contiguous()
        count = len(rows)
        mask_of: np.ndarray | None = None
        if masks is not None:
            mask_of = np.full(count, -1, np.int64)
            mask_of[masks.at] = np.arange(len(masks.at))
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
            mask_of=mask_of,
            masks=None if masks is None else masks.bits,
            words=0 if masks is None else masks.bits.shape[1] // 4,
            tokens=tokens,
            logprobs=logprobs,
            normalisers=normalisers,
        )
        restricted = np.flatnonzero(tokens < 0)
        if len(restricted):
            own, chosen = table[slots[restricted]], rows[restricted]
            uniforms = uniform_of(own["stream"], own["emitted"])
            allowed = take(logits, chosen)
            own_masks = None if masks is None else masks.of(restricted)
            if own_masks is not None and len(own_masks.at):
                allowed = allowed.clone()
                own_masks.exclude(allowed)
            tokens[restricted] = choose(allowed, uniforms, *rules(own)).numpy()
            logprobs[restricted] = logits.numpy()[chosen, tokens[restricted]] - normalisers[restricted]
        return tokens, logprobs, normalisers
