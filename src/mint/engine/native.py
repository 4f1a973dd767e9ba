"""The kernels in `native.c`: compiled for this machine when first wanted, kept in a folder, called through ctypes.

Knows what the functions take and how work is split over threads; knows nothing of layers, caches or autograd.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mint.errors import MissingExtraError

SOURCE = Path(__file__).with_name("native.c")
COMPILERS = ("cc", "gcc", "clang")
FLAGS = (
    *("-O2", "-march=native", "-std=gnu11", "-shared", "-fPIC", "-Wno-psabi"),
    *("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"),
)
HEAD_DIMS = frozenset({32, 64, 128})
"""Head dimensions that the kernels are compiled for."""

LANES = 16
"""Widths are multiples of this."""

SERIAL_WORK = 1 << 20
"""Less work (elements, or products of a query and a key) than this is not worth several threads."""

_Int = ctypes.c_int64


class PackedRows(ctypes.Structure):
    """`Packed` in native.c; keeps the arrays that it points to."""

    _fields_ = (
        *((name, _Int) for name in ("rows", "total_heads", "query_heads", "kv_heads", "longest")),
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
    """`Decode` in native.c; keeps the arrays that it points to."""

    _fields_ = (
        *(
            (name, _Int)
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

    def __init__(self, folder: Path) -> None:
        """Compiles them into `folder`, unless that has been done on this machine before.

        Raises:
            MissingExtraError: there is no C compiler, or it refuses.
        """
        self._library = ctypes.CDLL(str(_compile(folder)))
        self._threads: ThreadPoolExecutor | None = None

    def attend_packed(self, rows: PackedRows, heads: Tensor, out: Tensor) -> None:
        """Attended values `out` [rows, K·G·D] of heads [T, H, D], both in one dtype."""
        dim, half = _kind(heads)
        call = partial(self._library.attend_packed, ctypes.byref(rows), dim, half, _place(heads), _place(out))
        self._split(call, rows.rows, work=rows.rows * rows.longest * rows.query_heads)

    def attend_packed_backward(self, rows: PackedRows, heads: Tensor, grad: Tensor, grads: Tensor) -> None:
        """Adds to `grads` [T, H, D] in float32 what grad [rows, K·G·D] gives for heads [T, H, D]."""
        dim, half = _kind(heads)
        call = partial(
            self._library.attend_packed_backward,
            *(ctypes.byref(rows), dim, half, _place(heads), _place(grad), _place(grads)),
        )
        self._split(call, rows.kv_heads, work=rows.rows * rows.longest * rows.query_heads)

    def attend_cells(self, rows: DecodedRows, heads: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        """Attended values `out` [rows, K·G·D] of heads [rows, H, D] over `keys` and `values` in cells."""
        dim, half = _kind(heads)
        call = partial(
            self._library.attend_cells,
            *(ctypes.byref(rows), dim, half, _place(heads), _place(keys), _place(values), _place(out)),
        )
        self._split(call, rows.rows, work=rows.rows * rows.longest * rows.query_heads)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """`x / rms(x) · weight` of x [T, E], and 1 / rms(x) [T, 1]; float32."""
        out, inverse = torch.empty_like(x), x.new_empty(len(x), 1)
        call = partial(
            self._library.rms_norm,
            *(_place(x), _place(weight), ctypes.c_double(eps), _Int(x.shape[1]), _place(out), _place(inverse)),
        )
        self._split(call, len(x), work=x.numel())
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
        call = partial(
            self._library.finish_heads,
            *(_place(qkv), _place(bias), _place(norms), _place(cos), _place(sin), ctypes.c_double(eps)),
            *(
                _Int(total),
                _Int(rotated),
                _Int(dim),
                _Int(int(dtype == torch.bfloat16)),
                _place(heads),
                _place(inverse),
            ),
        )
        self._split(call, count, work=qkv.numel())
        return heads, inverse

    def swiglu(self, wide: Tensor) -> Tensor:
        """`silu(gate) · up` [T, I] of [T, 2·I]."""
        out = wide.new_empty(len(wide), wide.shape[1] // 2)
        call = partial(self._library.swiglu, _place(wide), _Int(out.shape[1]), _place(out))
        self._split(call, len(wide), work=wide.numel())
        return out

    def pack(self, weight: Tensor) -> Tensor | None:
        """A bfloat16 matrix [O, I] in the layout of `product`; None where its widths or the processor do not fit."""
        outputs, inputs = weight.shape
        if outputs % LANES or inputs % 2:
            return None
        packed = torch.empty_like(weight)
        code = self._library.pack_halves(_place(weight), _Int(inputs), _place(packed), _Int(0), _Int(outputs // LANES))
        return packed if code == 0 else None

    def product(self, x: Tensor, packed: Tensor) -> Tensor:
        """`x @ weight.T` in float32 [T, O], of x bfloat16 [T, I] and what `pack` made of the weight."""
        (count, inputs), outputs = x.shape, len(packed)
        out = torch.empty(count, outputs)
        call = partial(
            self._library.product_halves,
            *(_place(x), _place(packed), _Int(count), _Int(inputs), _Int(outputs), _place(out)),
        )
        self._split(call, outputs // LANES, work=count * outputs * inputs)
        return out

    def _split(self, call: Callable[[ctypes.c_int64, ctypes.c_int64], int], count: int, *, work: int) -> None:
        threads = min(torch.get_num_threads(), count) if work >= SERIAL_WORK else 1
        if threads <= 1:
            _checked(call(_Int(0), _Int(count)))
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="mint-native")
        edges = np.linspace(0, count, threads + 1).astype(int).tolist()
        parts = [self._threads.submit(call, _Int(a), _Int(b)) for a, b in pairwise(edges)]
        for part in parts:
            _checked(part.result())


def _checked(code: int) -> None:
    if code:
        raise AssertionError("the kernels were not compiled for this head dimension")


def _kind(heads: Tensor) -> tuple[ctypes.c_int64, ctypes.c_int64]:
    """Head dimension, and whether the elements are bfloat16."""
    return _Int(heads.shape[-1]), _Int(int(heads.dtype == torch.bfloat16))


def _place(tensor: Tensor | None) -> ctypes.c_void_p:
    if tensor is None:
        return ctypes.c_void_p()
    if not tensor.is_contiguous():
        raise AssertionError("kernels read contiguous tensors")
    return ctypes.c_void_p(tensor.data_ptr())


def _compile(folder: Path) -> Path:
    """The library for this source, compiler and processor."""
    found = (shutil.which(name) for name in COMPILERS)
    compiler = next((path for path in found if path is not None), None)
    if compiler is None:
        raise MissingExtraError(
            "native kernels need a C compiler, and none is installed",
            remedy="Install gcc or clang, or leave MINT_NATIVE unset",
        )
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    made_of = "\n".join([SOURCE.read_text(), " ".join(FLAGS), version, _processor()])
    library = folder / f"{hashlib.blake2b(made_of.encode(), digest_size=12).hexdigest()}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        made = Path(place) / "native.so"
        command = [compiler, *FLAGS, "-o", str(made), str(SOURCE), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise MissingExtraError(
                f"the native kernels could not be compiled by {compiler}: {done.stderr.strip()[-500:]}",
                remedy="Leave MINT_NATIVE unset",
            )
        made.replace(library)  # whole or absent, also with two processes at once
    return library


def _processor() -> str:
    """What decides which instructions `-march=native` may use."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
