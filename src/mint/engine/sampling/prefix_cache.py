"""Keys and values that outlive their job: a later prompt that begins with the same tokens need not compute them again.

A tree per set of weights: each node is the tokens of one cell (the last of a branch may be short), below the tokens
before it. The least recently used are thrown out first. Knows nothing of jobs, and what is in the cells only by tokens.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from mint.engine.lora import LoraWeights
from mint.engine.model.attention import CHUNK
from mint.engine.sampling.kv_cache import KVCache


@dataclass(eq=False)
class _Node:
    tokens: np.ndarray
    cell: int
    siblings: _Level
    children: _Level = field(default_factory=lambda: _Level())


class _Level:
    """Nodes behind the same tokens: by their own, and in order of those, where like ones lie side by side."""

    def __init__(self) -> None:
        self.nodes: dict[bytes, _Node] = {}
        self._order: list[bytes] = []

    def add(self, tokens: np.ndarray, cell: int) -> _Node:
        """A node more."""
        node = _Node(tokens.copy(), cell, self)
        self.nodes[_key(tokens)] = node
        insort(self._order, _key(tokens))
        return node

    def remove(self, node: _Node) -> None:
        """Without this one."""
        key = _key(node.tokens)
        if self.nodes.pop(key, None) is not None:
            del self._order[bisect_left(self._order, key)]

    def nearest(self, tokens: np.ndarray) -> tuple[_Node | None, int]:
        """A node that begins with as many of `tokens` as any, and with how many."""
        place = bisect_left(self._order, _key(tokens))
        beside = [self.nodes[key] for key in self._order[max(0, place - 1) : place + 1]]
        counts = [_common(node.tokens, tokens) for node in beside]
        most = max(counts, default=0)
        return (beside[counts.index(most)], most) if most else (None, 0)


@dataclass(frozen=True)
class Match:
    """The longest known beginning of a prompt: whole `cells`, and `rest` positions more in the cell `partial`."""

    cells: np.ndarray
    partial: int = -1
    rest: int = 0

    @property
    def length(self) -> int:
        """Tokens that are known."""
        return len(self.cells) * CHUNK + self.rest


class PrefixCache:
    """Prefixes under the weights that were opened for it, in at most so many cells."""

    def __init__(self, cache: KVCache, limit_bytes: int) -> None:
        """Empty; open for the base model alone (weights None)."""
        self._cache = cache
        self._limit = limit_bytes // cache.cell_bytes
        self._roots: dict[LoraWeights | None, _Level] = {None: _Level()}
        # By last use, oldest first; a node is always used later than what is below it, so the oldest is a leaf.
        self._used: OrderedDict[_Node, None] = OrderedDict()

    def __len__(self) -> int:
        """Cells that it holds. May be called from any thread: the list is copied at once."""
        return len({node.cell for node in list(self._used)})

    def open(self, weights: LoraWeights) -> None:
        """What is computed with these weights may be kept from now on."""
        self._roots.setdefault(weights, _Level())

    def close(self, weights: LoraWeights) -> None:
        """Forgets all of these weights, for good."""
        for node in list(_below(self._roots.pop(weights, _Level()))):
            self._drop(node)

    def find(self, weights: LoraWeights | None, tokens: np.ndarray) -> Match:
        """The longest beginning of `tokens` that is known; the caller takes hold of its cells before anything else."""
        level, cells, path = self._roots.get(weights, _Level()), [], []
        partial, rest = -1, 0
        for start in range(0, len(tokens), CHUNK):
            own = tokens[start : start + CHUNK]
            node = level.nodes.get(_key(own)) if len(own) == CHUNK else None
            if node is None:
                nearest, rest = level.nearest(own)
                if nearest is not None:
                    partial = nearest.cell
                    path.append(nearest)
                break
            cells.append(node.cell)
            path.append(node)
            level = node.children
        self._touch(path)
        return Match(np.array(cells, np.int64), partial, rest)

    def insert(self, weights: LoraWeights | None, tokens: np.ndarray, cells: np.ndarray) -> None:
        """Keeps the cells of `tokens`, in order; the last one may be short."""
        if weights not in self._roots or not self._limit:
            return
        level, path = self._roots[weights], []
        for start, cell in zip(range(0, len(tokens), CHUNK), cells.tolist(), strict=False):
            own = tokens[start : start + CHUNK]
            node = level.nodes.get(_key(own))
            if node is None:
                node = level.add(own, cell)
                self._cache.hold(np.array([cell]))
                self._used[node] = None
            path.append(node)
            level = node.children
        self._touch(path)
        self.shrink(len(self._used) - self._limit)

    def shrink(self, count: int) -> None:
        """Throws out the `count` oldest nodes."""
        for _ in range(min(count, len(self._used))):
            self._drop(next(iter(self._used)))

    def make_room(self, count: int) -> bool:
        """Throws out the oldest until `count` cells are free, if that can be."""
        while self._cache.free < count:
            if not self._used:
                return False
            self.shrink(1 + len(self._used) // 8)
        return True

    def _touch(self, path: list[_Node]) -> None:
        for node in reversed(path):
            self._used.move_to_end(node)

    def _drop(self, node: _Node) -> None:
        del self._used[node]
        node.siblings.remove(node)
        self._cache.release(np.array([node.cell]))


def _key(tokens: np.ndarray) -> bytes:
    """Compares as the tokens do, one after the other."""
    return tokens.astype(">i8").tobytes()


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """How many tokens both begin with."""
    length = min(len(one), len(other))
    differs = np.flatnonzero(one[:length] != other[:length])
    return int(differs[0]) if len(differs) else length


def _below(level: _Level) -> Iterator[_Node]:
    for node in list(level.nodes.values()):
        yield from _below(node.children)
        yield node
