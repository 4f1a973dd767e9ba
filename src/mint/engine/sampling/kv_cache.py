"""The KV cache of one base model: pages of `PAGE_POSITIONS` positions in one allocation, shared by reference counts.

A page is what vLLM calls a block; "block" is used here for positions that attend to equally many keys.

Letters: L layers · N pages · K kv heads · D head dimension · J kv heads side by side · X tokens.
"""

from __future__ import annotations

import mmap
import sys

import numpy as np
import torch
from torch import Tensor

from mint.engine.model.attention import MIN_QUERIES, PAGE_POSITIONS
from mint.engine.model.config import DecoderConfig
from mint.engine.sampling.counted_slots import CountedSlots

_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0
"""MAP_NORESERVE, in `mmap` from Python 3.13 on: a fork of the process then reserves no second copy of this memory."""

NARROWEST = 16
"""From this head dimension on, several heads side by side in a product give each the same bits (measured: not at 8)."""

FREE_SHARE = 4
"""The KV cache may take one part in so many of the memory that is free once the base is loaded: models in training take
a half, and a pass needs memory for its activations."""

UNKNOWN_MEMORY_BYTES = 4 << 30
"""The KV cache where the system does not tell what is free."""

WIDEST = 384
"""MKL adds up longer products in parts, whose edges would fall into a head (measured for float32 with 448 and more)."""


class KVCache(CountedSlots):
    """Keys and values of one base model, with a reference count for each page."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device, limit_bytes: int) -> None:
        """As many pages as fit into `limit_bytes`. On a CPU the system commits memory only when a page is first
        written."""
        self.query_heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.side_by_side = side_by_side(config)
        self.windows = config.windows
        self.dtype = dtype
        self.device = device
        self._width = self.side_by_side * config.head_dim
        layers = config.attention_layers
        self._places = {layer: place for place, layer in enumerate(layers)}
        shape = (len(layers), 2, self.kv_heads // self.side_by_side, PAGE_POSITIONS, self._width)
        self.page_bytes = page_bytes(config, dtype)
        super().__init__(max(1, limit_bytes // self.page_bytes))
        self._pages = zeros((*shape[:2], self.count, *shape[2:]), dtype, device)
        self._parts = shape[2]

    @property
    def layout(self) -> tuple[int, int, int, int]:
        """Positions of a page, query heads, K and J."""
        return PAGE_POSITIONS, self.query_heads, self.kv_heads, self.side_by_side

    def clear(self, slots: np.ndarray) -> None:
        """Fills pages with zeros. A masked value is multiplied by 0, which a NaN left behind would survive."""
        self._pages[:, :, torch.from_numpy(np.unique(slots)).to(self.device)] = 0

    def copy(self, source: int, targets: np.ndarray, length: int) -> None:
        """Copies the first `length` positions of a page into others."""
        if length and len(targets):
            places = torch.from_numpy(targets).to(self.device)
            self._pages[:, :, places, :, :length] = self._pages[:, :, source : source + 1, :, :length]

    def places(self, pages: np.ndarray, positions: np.ndarray) -> Tensor:
        """Where the tokens at `positions` of their sequences lie within `pages`, both [X]: row numbers for `write` and
        `read`."""
        return torch.from_numpy(self.list_places(pages, positions)).to(self.device)

    def list_places(self, pages: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """`places` as an array on the host."""
        planes = np.arange(2)[None, :, None] * self.count + pages[:, None, None]
        parts = planes * self._parts + np.arange(self._parts)
        return (parts * PAGE_POSITIONS + positions[:, None, None] % PAGE_POSITIONS).reshape(-1)

    def write(self, layer: int, heads: Tensor, places: Tensor) -> None:
        """Stores the key and value heads of `heads` [X, all heads, D]."""
        rows = heads[:, self.query_heads :].reshape(-1, self._width)
        self._pages[self._places[layer]].view(-1, self._width).index_copy_(0, places, rows)

    def read(self, layer: int, places: Tensor) -> Tensor:
        """Reads key and value heads [X, 2·K, D]."""
        rows = self._pages[self._places[layer]].view(-1, self._width).index_select(0, places)
        return rows.view(-1, 2 * self.kv_heads, self._width // self.side_by_side)

    def planes(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values, each [N, K/J, PAGE_POSITIONS, J·D]."""
        keys, values = self._pages[self._places[layer]]
        return keys, values


def page_bytes(config: DecoderConfig, dtype: torch.dtype) -> int:
    """The keys and values of `PAGE_POSITIONS` positions in all layers."""
    of_position = len(config.attention_layers) * 2 * config.num_key_value_heads * config.head_dim
    return of_position * PAGE_POSITIONS * dtype.itemsize


def fitting_bytes(config: DecoderConfig, dtype: torch.dtype, *, sequences: int, free_bytes: int | None) -> int:
    """The size of a KV cache for a base that is loaded, from the memory that is free then: a share of it, but no more
    than `sequences` of the whole context could fill. At least one page.

    The number of pages decides when sequences are preempted, and no bit of a result.
    """
    whole = sequences * -(-config.max_position_embeddings // PAGE_POSITIONS) * page_bytes(config, dtype)
    share = UNKNOWN_MEMORY_BYTES if free_bytes is None else free_bytes // FREE_SHARE
    return max(page_bytes(config, dtype), min(whole, share))


def side_by_side(config: DecoderConfig) -> int:
    """The number of kv heads whose queries together make a product of `MIN_QUERIES` rows, if that divides evenly.

    A query is extended with zeros for the keys of the other heads, which change no bit of its sums.
    """
    groups = config.num_attention_heads // config.num_key_value_heads
    heads = 1
    while (
        heads * groups < MIN_QUERIES
        and config.head_dim >= NARROWEST
        and 2 * heads * config.head_dim <= WIDEST
        and config.num_key_value_heads % (2 * heads) == 0
    ):
        heads *= 2
    return heads


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, whose memory a CPU commits when they are first written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # The system commits anonymous memory as it is written. torch.zeros would write all of it; numpy asks for huge pages
    # of 2 MiB, one for each layer at once, which take milliseconds each where memory is fragmented.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    memory = mmap.mmap(-1, int(np.prod(shape)) * dtype.itemsize, flags=flags)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
