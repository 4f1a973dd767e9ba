"""The prefix cache: keys and values that stay in the KV cache after their job, for prompts that begin alike.

There is one tree for each set of weights and each scope, so that no job learns of the prompts of another scope. A node
stands for the tokens of one page (the last of a branch may be short), its children for the pages that follow. Evicted
are the least recently used nodes of the scope that has the most.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from mint.engine.lora import LoraWeights
from mint.engine.model.attention import PAGE_POSITIONS
from mint.engine.sampling.kv_cache import KVCache


@dataclass(eq=False)
class _Node:
    tokens: np.ndarray
    page: int
    scope: str
    siblings: _Level
    children: _Level = field(default_factory=lambda: _Level())


class _Level:
    """The nodes after the same tokens, by their own tokens, and in the order of those: similar ones are neighbours."""

    def __init__(self) -> None:
        self.nodes: dict[bytes, _Node] = {}
        self._order: list[bytes] = []

    def add(self, tokens: np.ndarray, page: int, scope: str) -> _Node:
        node = _Node(tokens.copy(), page, scope, self)
        self.nodes[_key(tokens)] = node
        insort(self._order, _key(tokens))
        return node

    def remove(self, node: _Node) -> None:
        key = _key(node.tokens)
        if self.nodes.pop(key, None) is not None:
            del self._order[bisect_left(self._order, key)]

    def nearest(self, tokens: np.ndarray) -> tuple[_Node | None, int]:
        """The node that shares the longest beginning with `tokens`, and the length of that beginning."""
        place = bisect_left(self._order, _key(tokens))
        best, most = None, 0
        for key in self._order[max(0, place - 1) : place + 1]:
            count = _common(self.nodes[key].tokens, tokens)
            if count > most:
                best = self.nodes[key]
                most = count
        return best, most


@dataclass(frozen=True)
class Match:
    """The longest cached beginning of a prompt: whole `pages`, and then `rest` positions of the page `partial`."""

    pages: np.ndarray
    partial: int = -1
    rest: int = 0

    @property
    def length(self) -> int:
        """Tokens whose keys and values are cached."""
        return len(self.pages) * PAGE_POSITIONS + self.rest


class PrefixCache:
    """Prefixes of all weights that are open, within a number of pages."""

    def __init__(self, cache: KVCache, limit_bytes: int) -> None:
        """At most `limit_bytes` of `cache`; at first only the base model itself (weights None) is open."""
        self._cache = cache
        self._limit = limit_bytes // cache.page_bytes
        self._roots: dict[LoraWeights | None, defaultdict[str, _Level]] = {None: defaultdict(_Level)}
        # The nodes of each scope by last use, oldest first. A path is touched from its leaf up, so the oldest node of
        # a scope is always a leaf.
        self._used: dict[str, OrderedDict[_Node, None]] = {}

    def __len__(self) -> int:
        """Pages that it holds. May be called from any thread: the list is copied at once."""
        return len({node.page for used in list(self._used.values()) for node in list(used)})

    def open(self, weights: LoraWeights) -> None:
        """From now on, what is computed with these weights may be cached."""
        self._roots.setdefault(weights, defaultdict(_Level))

    def close(self, weights: LoraWeights) -> None:
        """Drops all that is cached for these weights, and caches nothing more."""
        for level in self._roots.pop(weights, {}).values():
            for node in list(_below(level)):
                self._drop(node)

    def find(self, weights: LoraWeights | None, scope: str, tokens: np.ndarray) -> Match:
        """The longest beginning of `tokens` that jobs of this scope have cached.

        The caller must hold its pages before the cache can evict them.
        """
        level = self._roots.get(weights, {}).get(scope)
        pages = []
        path = []
        partial, rest = -1, 0
        if level is None:
            return Match(np.zeros(0, np.int64))
        for start in range(0, len(tokens), PAGE_POSITIONS):
            own = tokens[start : start + PAGE_POSITIONS]
            node = level.nodes.get(_key(own)) if len(own) == PAGE_POSITIONS else None
            if node is None:
                nearest, rest = level.nearest(own)
                if nearest is not None:
                    partial = nearest.page
                    path.append(nearest)
                break
            pages.append(node.page)
            path.append(node)
            level = node.children
        self._touch(path)
        return Match(np.array(pages, np.int64), partial, rest)

    def insert(self, weights: LoraWeights | None, scope: str, tokens: np.ndarray, pages: np.ndarray) -> None:
        """Caches the pages of `tokens` for jobs of this scope, in order; the last page may be short."""
        if weights not in self._roots or not self._limit:
            return
        level = self._roots[weights][scope]
        path = []
        used = self._used.setdefault(scope, OrderedDict())
        for start, page in zip(range(0, len(tokens), PAGE_POSITIONS), pages.tolist(), strict=False):
            own = tokens[start : start + PAGE_POSITIONS]
            node = level.nodes.get(_key(own))
            if node is None:
                node = level.add(own, page, scope)
                self._cache.hold(np.array([page]))
                used[node] = None
            path.append(node)
            level = node.children
        self._touch(path)
        self.shrink(self._count - self._limit)

    def shrink(self, count: int) -> None:
        """Evicts `count` nodes, each time the oldest of the scope that has the most."""
        for _ in range(min(count, self._count)):
            largest = max(self._used.values(), key=len)
            self._drop(next(iter(largest)))

    def evict_pages(self, count: int) -> bool:
        """Evicts the oldest nodes until `count` pages are free; False where that is impossible."""
        while self._cache.free < count:
            if not self._count:
                return False
            self.shrink(1 + self._count // 8)  # more than is missing: the next requests find free pages, too
        return True

    @property
    def _count(self) -> int:
        return sum(map(len, self._used.values()))

    def _touch(self, path: list[_Node]) -> None:
        for node in reversed(path):
            self._used[node.scope].move_to_end(node)

    def _drop(self, node: _Node) -> None:
        del self._used[node.scope][node]
        node.siblings.remove(node)
        self._cache.release(np.array([node.page]))


def _key(tokens: np.ndarray) -> bytes:
    """Bytes that sort in the order of the tokens."""
    return tokens.astype(">i8").tobytes()


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """The length of the common beginning."""
    length = min(len(one), len(other))
    differs = np.flatnonzero(one[:length] != other[:length])
    return int(differs[0]) if len(differs) else length


def _below(level: _Level) -> Iterator[_Node]:
    for node in list(level.nodes.values()):
        yield from _below(node.children)
        yield node
