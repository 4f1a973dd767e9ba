"""The prefix cache: keys, values and states that stay in their caches after their job, for prompts that begin alike.

There is one tree for each set of weights and each scope, so that no job learns of the prompts of another scope. A node
stands for the tokens of one page (the last of a branch may be short), its children for the pages that follow. In a
model with delta nets, a node may have the state after its last token. Evicted are the least recently used nodes, and
states, of the scope that has the most.
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
from mint.engine.sampling.state_cache import StateCache

_TOKEN_BYTES = 8


@dataclass(eq=False)
class _Node:
    tokens: np.ndarray
    page: int
    scope: str
    siblings: _Level
    state: int = -1
    children: _Level = field(default_factory=lambda: _Level())


class _Level:
    """The nodes after the same tokens, by their own tokens, and in the order of those: similar ones are neighbours."""

    def __init__(self) -> None:
        self.nodes: dict[bytes, _Node] = {}
        self._lengths: set[int] = set()
        self._order: list[bytes] = []

    def add(self, key: bytes, tokens: np.ndarray, page: int, scope: str) -> _Node:
        node = _Node(tokens.copy(), page, scope, self)
        self.nodes[key] = node
        insort(self._order, key)
        self._lengths.add(len(tokens))
        return node

    def last_state(self, tokens: np.ndarray) -> _Node | None:
        """The longest node that `tokens` begin with and that has a state."""
        for length in sorted(self._lengths, reverse=True):
            node = self.nodes.get(_key(tokens[:length])) if length <= len(tokens) else None
            if node is not None and node.state >= 0:
                return node
        return None

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
    """The longest beginning of a prompt that can be reused: whole `pages`, and then `rest` positions of the page
    `partial`. A model with delta nets can reuse as much as there is a `state` for, whose slot this is; keys and values
    are cached of `common` tokens."""

    pages: np.ndarray
    partial: int = -1
    rest: int = 0
    state: int = -1
    common: int = 0

    @property
    def length(self) -> int:
        """Tokens whose keys and values are cached."""
        return len(self.pages) * PAGE_POSITIONS + self.rest


class PrefixCache:
    """Prefixes of all weights that are open, within a number of pages."""

    def __init__(self, cache: KVCache, limit_bytes: int, states: StateCache | None = None) -> None:
        """At most `limit_bytes` of `cache`, and as much of `states`, where the model has delta nets; at first only the
        base model itself (weights None) is open."""
        self._cache = cache
        self._limit = limit_bytes // cache.page_bytes
        self._states = states
        self._state_limit = 0 if states is None else limit_bytes // states.slot_bytes
        self._roots: dict[LoraWeights | None, defaultdict[str, _Level]] = {None: defaultdict(_Level)}
        # The nodes of each scope by last use, oldest first. A path is touched from its leaf up, so the oldest node of
        # a scope is always a leaf.
        self._used: dict[str, OrderedDict[_Node, None]] = {}
        self._with_state: dict[str, OrderedDict[_Node, None]] = {}

    def __len__(self) -> int:
        """Pages that it holds. May be called from any thread: the list is copied at once."""
        return len({node.page for used in list(self._used.values()) for node in list(used)})

    def open(self, weights: LoraWeights) -> None:
        """From now on, what is computed with these weights may be cached."""
        self._roots.setdefault(weights, defaultdict(_Level))

    def close(self, weights: LoraWeights) -> None:
        """Drops all that is cached for these weights, and caches nothing more."""
        nodes = [node for level in self._roots.pop(weights, {}).values() for node in _below(level)]
        for node in nodes:
            self._drop_state(node)
            del self._used[node.scope][node]
            node.siblings.nodes.clear()  # else a node and its siblings would hold one another until a full collection
        self._cache.release(np.array([node.page for node in nodes], np.int64))

    def find(self, weights: LoraWeights | None, scope: str, tokens: np.ndarray) -> Match:
        """The longest beginning of `tokens` that jobs of this scope have cached.

        The caller must hold its pages and its state before the cache can evict them.
        """
        level = self._roots.get(weights, {}).get(scope)
        pages: list[int] = []
        path = []
        partial, rest = -1, 0
        ends: list[tuple[int, _Node]] = []
        if level is None:
            return Match(np.zeros(0, np.int64))
        for start in range(0, len(tokens), PAGE_POSITIONS):
            own = tokens[start : start + PAGE_POSITIONS]
            end = None if self._states is None else level.last_state(own)
            if end is not None:
                ends.append((len(pages), end))
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
        common = len(pages) * PAGE_POSITIONS + rest
        if self._states is None:
            return Match(np.array(pages, np.int64), partial, rest, common=common)
        if not ends:
            return Match(np.zeros(0, np.int64), common=common)
        count, end = ends[-1]
        self._touch([*path[:count], end])
        if len(end.tokens) == PAGE_POSITIONS:
            return Match(np.array([*pages[:count], end.page], np.int64), state=end.state, common=common)
        return Match(np.array(pages[:count], np.int64), end.page, len(end.tokens), end.state, common)

    def insert(
        self, weights: LoraWeights | None, scope: str, tokens: np.ndarray, pages: np.ndarray, state: int = -1
    ) -> None:
        """Caches the pages of `tokens` for jobs of this scope, in order; the last page may be short. `state` is the
        slot of the state after the last token, if that is to be kept."""
        if weights not in self._roots or not self._limit:
            return
        level = self._roots[weights][scope]
        path, held = [], []
        keys = _key(tokens)
        used = self._used.setdefault(scope, OrderedDict())
        for start, page in zip(range(0, len(tokens), PAGE_POSITIONS), pages.tolist(), strict=False):
            end = start + PAGE_POSITIONS
            key = keys[start * _TOKEN_BYTES : end * _TOKEN_BYTES]
            node = level.nodes.get(key)
            if node is None:
                node = level.add(key, tokens[start:end], page, scope)
                held.append(page)
                used[node] = None
            path.append(node)
            level = node.children
        if held:
            self._cache.hold(np.array(held))
        if state >= 0 and self._states is not None and self._state_limit and path[-1].state < 0:
            path[-1].state = state
            self._states.hold(np.array([state]))
            self._with_state.setdefault(scope, OrderedDict())[path[-1]] = None
        self._touch(path)
        self.shrink(self._count - self._limit)
        self._drop_states(sum(map(len, self._with_state.values())) - self._state_limit)

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
    def keeps_states(self) -> bool:
        """Whether there is room for any."""
        return bool(self._state_limit and self._limit)

    def evict_states(self, count: int) -> bool:
        """Evicts the oldest states until `count` slots are free; False where that is impossible."""
        while self._states is not None and self._states.free < count:
            if not self._drop_states(1):
                return False
        return True

    def _drop_states(self, count: int) -> int:
        """Drops `count` states, each time the oldest of the scope that has the most; returns how many there were."""
        for dropped in range(max(0, count)):
            largest = max(self._with_state.values(), key=len, default=OrderedDict())
            if not len(largest):
                return dropped
            self._drop_state(next(iter(largest)))
        return max(0, count)

    def _drop_state(self, node: _Node) -> None:
        if node.state >= 0 and self._states is not None:
            del self._with_state[node.scope][node]
            self._states.release(np.array([node.state]))
            node.state = -1

    @property
    def _count(self) -> int:
        return sum(map(len, self._used.values()))

    def _touch(self, path: list[_Node]) -> None:
        for node in reversed(path):
            self._used[node.scope].move_to_end(node)
            if node.state >= 0:
                self._with_state[node.scope].move_to_end(node)

    def _drop(self, node: _Node) -> None:
        self._drop_state(node)
        del self._used[node.scope][node]
        node.siblings.remove(node)
        self._cache.release(np.array([node.page]))


def _key(tokens: np.ndarray) -> bytes:
    """Bytes that sort in the order of the tokens, `_TOKEN_BYTES` for each."""
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
