"""The kernels in C that compute what lies between a decoder's products, called through ctypes.

Knows what the functions take and how work is split over threads; knows nothing of layers, caches or autograd.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mint.engine.cpu.build import NativeBuild
from mint.engine.cpu.threads import Int64, NativeThreads

HEAD_DIMS = frozenset({32, 64, 128})
"""Head dimensions that the kernels are compiled for."""

LANES = 16
"""Widths are multiples of this."""


class PackedRows(ctypes.Structure):
    """`Packed` in lanes.h; keeps the arrays that it points to."""

    _fields_ = (
        *((name, Int64) for name in ("rows", "total_heads", "query_heads", "kv_heads", "longest")),
        *((name, ctypes.c_void_p) for name in ("row", "prefix", "prefix_count", "own")),
    )

    def __init__(
        self, query_heads: int, kv_heads: int, row: np.ndarray, prefix: np.ndarray, count: np.ndarray, own: np.ndarray
    ) -> None:
        """Row `row[r]` attends to `count[r]` rows from `prefix[r]` on, and from `own[r]` to itself; int64 [rows]."""
        self.arrays = [np.ascontiguousarray(array, np.int64) for array in (row, prefix, count, own)]
        longest = int((count + row - own + 1).max(initial=1))
        places = (array.ctypes.data for array in self.arrays)
        super().__init__(len(row), query_heads + 2 * kv_heads, query_heads, kv_heads, longest, *places)


class DecodedRows(ctypes.Structure):
    """`Decode` in attention.c; keeps the arrays that it points to."""

    _fields_ = (
        *(
            (name, Int64)
            for name in ("rows", "total_heads", "query_heads", "kv_heads", "side", "chunk", "columns", "longest")
        ),
        *((name, ctypes.c_void_p) for name in ("table", "positions")),
    )

    def __init__(
        self, query_heads: int, kv_heads: int, side: int, chunk: int, table: np.ndarray, positions: np.ndarray
    ) -> None:
        """Row r is the token at `positions[r]` of a sequence in the cells `table[r]`, each of `chunk` keys with `side`
        kv heads side by side; int64 [rows, columns] and [rows]."""
        self.arrays = [np.ascontiguousarray(array, np.int64) for array in (table, positions)]
        longest = int(positions.max(initial=0)) + 1
        places = (array.ctypes.data for array in self.arrays)
        heads = (query_heads + 2 * kv_heads, query_heads, kv_heads)
        super().__init__(len(positions), *heads, side, chunk, table.shape[1], longest, *places)


class NativeKernels:
    """The compiled functions. Their results do not depend on the number of threads."""

    def __init__(self, build: NativeBuild | Path) -> None:
        """Waits for `build`, or compiles into a folder.

        Raises:
            MissingExtraError: there is no C compiler, or it refuses.
        """
        self._libraries = (NativeBuild(build) if isinstance(build, Path) else build).libraries()
        self._attention, self._gradients, self._rows, self._choice = map(
            self.load, ("attention", "gradients", "rows", "choice")
        )
        self.threads = NativeThreads(self.load("threads"))

    def load(self, source: str) -> ctypes.CDLL:
        """The functions of a file in C, by its name without suffix."""
        return ctypes.CDLL(str(self._libraries[source]))

    def attend_packed(self, rows: PackedRows, heads: Tensor, out: Tensor) -> None:
        """Attended values `out` [rows, K·G·D] of heads [T, H, D], both in one dtype."""
        dim, half = _kind(heads)
        self.threads.run(
            self._attention.attend_packed,
            rows.rows,
            *(rows, dim, half, heads, out),
            work=rows.rows * rows.longest * rows.query_heads,
        )

    def attend_packed_backward(self, rows: PackedRows, heads: Tensor, grad: Tensor, grads: Tensor) -> None:
        """Adds to `grads` [T, H, D] in float32 what grad [rows, K·G·D] gives for heads [T, H, D]."""
        dim, half = _kind(heads)
        self.threads.run(
            self._gradients.attend_packed_backward,
            rows.kv_heads,
            *(rows, dim, half, heads, grad, grads),
            work=rows.rows * rows.longest * rows.query_heads,
        )

    def attend_cells(self, rows: DecodedRows, heads: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        """Attended values `out` [rows, K·G·D] of heads [rows, H, D] over `keys` and `values` in cells."""
        dim, half = _kind(heads)
        self.threads.run(
            self._attention.attend_cells,
            rows.rows,
            *(rows, dim, half, heads, keys, values, out),
            work=rows.rows * rows.longest * rows.query_heads,
        )

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """`x / rms(x) · weight` of x [T, E], and 1 / rms(x) [T, 1]; float32."""
        out, inverse = torch.empty_like(x), x.new_empty(len(x), 1)
        self.threads.run(self._rows.rms_norm, len(x), *(x, weight, eps, x.shape[1], out, inverse), work=x.numel())
        return out, inverse

    def finish_heads(
        self, qkv: Tensor, bias: Tensor | None, norms: Tensor | None, cos: Tensor, sin: Tensor, *,
        eps: float, rotated: int, dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Heads [T, H, D] in `dtype` of qkv [T, H, D], to which the bias is added in place; the first `rotated` are
        normed, if there are `norms` [rotated, D], and turned by cos and sin [T, 1, D / 2]. And 1 / rms [T, rotated, 1]
        of those."""
        count, total, dim = qkv.shape
        heads = torch.empty(qkv.shape, dtype=dtype)
        inverse = None if norms is None else qkv.new_empty(count, rotated, 1)
        self.threads.run(
            self._rows.finish_heads,
            count,
            *(qkv, bias, norms, cos, sin, eps),
            *(total, rotated, dim, dtype == torch.bfloat16, heads, inverse),
            work=qkv.numel(),
        )
        return heads, inverse

    def swiglu(self, wide: Tensor) -> Tensor:
        """`silu(gate) · up` [T, I] of [T, 2·I]."""
        out = wide.new_empty(len(wide), wide.shape[1] // 2)
        self.threads.run(self._rows.swiglu, len(wide), wide, out.shape[1], out, work=wide.numel())
        return out

    def rms_norm_again(self, x: Tensor, inverse: Tensor, weight: Tensor) -> Tensor:
        """`rms_norm` of x [T, E] whose 1 / rms [T, 1] is known."""
        out = torch.empty_like(x)
        self.threads.run(self._rows.rms_norm_again, len(x), x, inverse, weight, x.shape[1], out, work=x.numel())
        return out

    def rms_norm_backward(
        self, grad: Tensor, x: Tensor, inverse: Tensor, weight: Tensor, residual: Tensor | None = None
    ) -> Tensor:
        """What x [T, E] gets from grad [T, E] for `rms_norm`, plus `residual` [T, E]."""
        out = torch.empty_like(x)
        self.threads.run(
            self._rows.rms_norm_backward, len(x), *(grad, x, inverse, weight, residual, x.shape[1], out), work=x.numel()
        )
        return out

    def swiglu_backward(self, grad: Tensor, wide: Tensor) -> Tensor:
        """What `wide` [T, 2·I] gets from grad [T, I] for `swiglu`."""
        out = torch.empty_like(wide)
        self.threads.run(self._rows.swiglu_backward, len(wide), grad, wide, grad.shape[1], out, work=wide.numel())
        return out

    def finish_heads_backward(
        self, grad: Tensor, qkv: Tensor, inverse: Tensor | None, norms: Tensor | None, cos: Tensor, sin: Tensor, *,
        rotated: int,
    ) -> Tensor:  # fmt: skip
        """What qkv [T, H, D] in float32 gets from grad [T, H, D] for `finish_heads`, which gave `inverse`."""
        count, total, _ = qkv.shape
        out = torch.empty_like(qkv)
        dim, half = _kind(grad)
        self.threads.run(
            self._rows.finish_heads_backward,
            count,
            *(grad, qkv, inverse, norms, cos, sin),
            *(total, rotated, dim, half, out),
            work=qkv.numel(),
        )
        return out

    def weigh_rows(self, logits: Tensor, pulled: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """logsumexp and entropy, both [R], of logits [R, V]. Rows that are `pulled` (int64 [R], 0: not) are overwritten
        by their negative softmax in `dtype`, from the row's beginning on."""
        (count, width), normalisers = logits.shape, logits.new_empty(len(logits))
        entropies = torch.empty_like(normalisers)
        self.threads.run(
            self._choice.weigh_rows,
            count,
            *(logits, width, dtype == torch.bfloat16, pulled, normalisers, entropies),
            work=logits.numel(),
        )
        return normalisers, entropies


def _kind(heads: Tensor) -> tuple[int, bool]:
    """Head dimension, and whether the elements are bfloat16."""
    return heads.shape[-1], heads.dtype == torch.bfloat16
