"""Packs examples into micro-batches without padding: which row is which token, and which rows attend to which.

Everything here is a pure function of the examples, so that the same request always runs the same arithmetic. Examples
with a common prefix (the samples of one prompt) share its rows: the prefix is computed once, which is exact, because
its hidden states depend on nothing that follows. Knows nothing of torch, losses or weights.

Letters: T rows of a micro-batch · N positions of its examples · C their cells (a position and one of its targets) ·
U distinct (row, target) pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.ma  # `np.unique` imports it at its first call, which fails where no file can be opened

from mint.engine.protocol import TrainDatum

MIN_SHARED = 8
"""A shorter common prefix is not worth an attention call of its own."""


@dataclass(frozen=True)
class Span:
    """Consecutive rows `start:stop` that attend causally to themselves, and to all of `prefix` before that."""

    start: int
    stop: int
    prefix: tuple[int, int] = (0, 0)

    @property
    def prefix_length(self) -> int:
        """Rows of the prefix; 0 for a span that stands alone."""
        return self.prefix[1] - self.prefix[0]


@dataclass(frozen=True)
class StateSpans:
    """Spans of rows through which a state is carried, each from row `starts` to `stops`; all int64 [n].

    A span starts from the state in the slot `loaded` (-1: from nothing), and leaves its last one in `kept` (-1:
    nowhere). Groups are independent of one another: group g has the spans `groups[g]` to `groups[g + 1]`, which run in
    order, for they may load what others of the group have kept.
    """

    starts: np.ndarray
    stops: np.ndarray
    loaded: np.ndarray
    kept: np.ndarray
    groups: np.ndarray

    @property
    def slots(self) -> int:
        """The number of slots."""
        return int(max(self.loaded.max(initial=-1), self.kept.max(initial=-1))) + 1

    def levels(self) -> list[list[int]]:
        """Spans that may run at once, in order: each is behind the span of its group whose state it loads."""
        found: list[list[int]] = []
        for first, last in pairwise(self.groups.tolist()):
            depth_of_slot: dict[int, int] = {}
            for span in range(first, last):
                depth = depth_of_slot.get(int(self.loaded[span]), -1) + 1
                if depth == len(found):
                    found.append([])
                found[depth].append(span)
                if self.kept[span] >= 0:
                    depth_of_slot[int(self.kept[span])] = depth
        return found


@dataclass(frozen=True)
class AttentionBlock:
    """Spans of similar length, attended in one call.

    `queries` [n, Lq] and `keys` [n, Lk] are row numbers, padded on the right; query i sees the keys up to `offset + i`,
    which hides all padding. `rows` and `cells` say where results go: row `rows[j]` of the output is cell `cells[j]` of
    the flattened [n·Lq].
    """

    queries: np.ndarray
    keys: np.ndarray
    offset: int
    rows: np.ndarray
    cells: np.ndarray


@dataclass(frozen=True)
class MicroBatch:
    """What runs in one forward: `tokens`, `positions` int64 [T] and how they attend.

    The examples `datum_ids` have their N positions, one after the other, at the rows `row_of_position` [N], and their C
    cells at the pairs `pair_of_cell` [C]. Pair u is target `pair_targets[u]` predicted from row `pair_rows[u]`; rows
    ascend, and every row has a pair.
    """

    datum_ids: list[int]
    tokens: np.ndarray
    positions: np.ndarray
    spans: list[Span]
    blocks: list[AttentionBlock]
    row_of_position: np.ndarray
    pair_rows: np.ndarray
    pair_targets: np.ndarray
    pair_of_cell: np.ndarray


@dataclass(frozen=True)
class _PrefixGroup:
    """Examples whose first `shared` tokens are equal and computed once; `total` counts their tokens."""

    datum_ids: list[int]
    shared: int
    total: int

    @property
    def rows(self) -> int:
        return self.total - self.saved

    @property
    def saved(self) -> int:
        return (len(self.datum_ids) - 1) * self.shared


def pack(data: Sequence[TrainDatum], token_budget: int) -> list[MicroBatch]:
    """Micro-batches of about `token_budget` rows (one group that is larger stays whole if it shares a prefix)."""
    batches: list[list[_PrefixGroup]] = [[]]
    used = 0
    for group in _group(data, token_budget):
        if batches[-1] and used + group.rows > token_budget:
            batches.append([])
            used = 0
        batches[-1].append(group)
        used += group.rows
    return [_lay_out(groups, data) for groups in batches if groups]


def pack_padded(data: Sequence[TrainDatum], token_budget: int) -> list[MicroBatch]:
    """Micro-batches of whole examples that share nothing, for a decoder that pads its sequences on the right: examples
    of similar length are together, and their number times the longest is at most `token_budget`, or it is one example.
    """
    batches: list[list[_PrefixGroup]] = [[]]
    for index in sorted(range(len(data)), key=lambda index: len(data[index].tokens)):
        length = len(data[index].tokens)
        if batches[-1] and (len(batches[-1]) + 1) * length > token_budget:
            batches.append([])
        batches[-1].append(_PrefixGroup([index], length, length))
    return [_lay_out(groups, data) for groups in batches if groups]


def attention_blocks(spans: Sequence[Span]) -> list[AttentionBlock]:
    """Spans grouped by padded length (a function of a span's own length) and prefix length."""
    groups: dict[tuple[int, int], list[Span]] = {}
    for span in spans:
        groups.setdefault((span.prefix_length, padded_length(span.stop - span.start)), []).append(span)
    return [_block(prefix, length, members) for (prefix, length), members in sorted(groups.items())]


def state_spans(spans: Sequence[Span]) -> StateSpans:
    """The same spans, each behind the one that is its prefix, with a slot for each prefix. A prefix stands before the
    spans that begin with it, and no other between them."""
    starts, stops = (np.array([getattr(span, side) for span in spans], np.int64) for side in ("start", "stop"))
    loaded, kept = np.full(len(spans), -1), np.full(len(spans), -1)
    groups = []
    place_of_row: dict[int, int] = {}
    for place, span in enumerate(spans):
        place_of_row[span.start] = place
        if not span.prefix_length:
            groups.append(place)
            continue
        before = place_of_row[span.prefix[0]]
        if kept[before] < 0:
            kept[before] = kept.max() + 1
        loaded[place] = kept[before]
    return StateSpans(starts, stops, loaded, kept, np.array([*groups, len(spans)]))


def padded_length(length: int) -> int:
    """`length` rounded up to a multiple of 8, or of about an eighth of it: few distinct shapes, little waste."""
    step = max(8, 1 << max(0, length.bit_length() - 4))
    return -(-length // step) * step


def _block(prefix: int, length: int, spans: list[Span]) -> AttentionBlock:
    bounds = np.array([(span.start, span.stop, span.prefix[0]) for span in spans])
    starts, stops, prefixes = bounds[:, :1], bounds[:, 1:2], bounds[:, 2:]
    queries = starts + np.arange(length)
    real = queries < stops
    # Padded with a row of the same span: a row of another could be NaN, and 0 · NaN is NaN.
    queries = np.where(real, queries, starts)
    keys = np.concatenate([prefixes + np.arange(prefix), queries], axis=1)
    return AttentionBlock(queries, keys, prefix, queries[real], np.flatnonzero(real))


def _group(data: Sequence[TrainDatum], token_budget: int) -> list[_PrefixGroup]:
    """Sorts examples by their tokens, and joins neighbours wherever sharing a prefix saves the most rows."""
    # Big-endian bytes sort as the tokens do, so equal prefixes become neighbours.
    order = sorted(range(len(data)), key=lambda index: data[index].tokens.astype(">i8").tobytes())
    groups: list[_PrefixGroup] = []
    for index in order:
        joined = _join(groups[-1], index, data) if groups else None
        if joined is not None and joined.rows <= token_budget:
            groups[-1] = joined
        else:
            length = len(data[index].tokens)
            groups.append(_PrefixGroup([index], length, length))
    return groups


def _join(group: _PrefixGroup, index: int, data: Sequence[TrainDatum]) -> _PrefixGroup | None:
    """The group with one more example; None where it would save fewer rows."""
    tokens = data[index].tokens
    first = data[group.datum_ids[0]].tokens
    limit = min(len(tokens), group.shared)
    differs = np.flatnonzero(tokens[:limit] != first[:limit])
    shared = int(differs[0]) if len(differs) else limit
    joined = _PrefixGroup([*group.datum_ids, index], shared, group.total + len(tokens))
    return joined if shared >= MIN_SHARED and joined.saved >= group.saved else None


def _lay_out(groups: list[_PrefixGroup], data: Sequence[TrainDatum]) -> MicroBatch:
    datum_ids: list[int] = []
    spans: list[Span] = []
    tokens: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    rows: list[np.ndarray] = []  # of each position
    cell_rows: list[np.ndarray] = []  # of each cell
    targets: list[np.ndarray] = []  # of each cell
    start = 0
    for group in groups:
        prefix = (start, start + group.shared)
        tokens.append(data[group.datum_ids[0]].tokens[: group.shared])
        positions.append(np.arange(group.shared))
        spans.append(Span(*prefix))
        start += group.shared
        for index in group.datum_ids:
            datum = data[index]
            own = datum.tokens[group.shared :]
            if len(own):
                tokens.append(own)
                positions.append(np.arange(group.shared, group.shared + len(own)))
                spans.append(Span(start, start + len(own), prefix))
            datum_ids.append(index)
            rows.append(np.concatenate([np.arange(*prefix), np.arange(start, start + len(own))]))
            cell_rows.append(np.repeat(rows[-1], datum.targets.shape[1]) if datum.targets.ndim == 2 else rows[-1])
            targets.append(datum.targets.reshape(-1))
            start += len(own)
    # Positions of a shared prefix have equal targets, too, except its last: each distinct pair is computed once.
    all_targets = np.concatenate(targets)
    height = int(all_targets.max()) + 1
    pairs, pair_of_cell = np.unique(np.concatenate(cell_rows) * height + all_targets, return_inverse=True)
    return MicroBatch(
        datum_ids=datum_ids,
        tokens=np.concatenate(tokens),
        positions=np.concatenate(positions),
        spans=spans,
        blocks=attention_blocks(spans),
        row_of_position=np.concatenate(rows),
        pair_rows=pairs // height,
        pair_targets=pairs % height,
        pair_of_cell=pair_of_cell,
    )
