"""The metrics of a run's steps as columns of numbers, 8 bytes per value."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from itertools import chain
from typing import Any

from mint.errors import InvalidRequestError

TOO_LARGE = 2**1023
"""Whole numbers from here on may not fit into a float."""


def unknown_metric(name: str, known: Iterable[str]) -> InvalidRequestError:
    """The error for a metric that no step of a run has, with the names that are close to it."""
    close = get_close_matches(name, sorted(set(known) - {"step"}), n=3, cutoff=0.3)
    remedy = f"Did you mean {', '.join(close)}?" if close else "The names are those in metrics.jsonl"
    return InvalidRequestError("is not a metric of this run", field="metric", value=name, remedy=remedy)


class MetricColumns:
    """Takes rows, and returns rows or columns, in the order of the steps."""

    def __init__(self) -> None:
        """Starts empty."""
        self.steps = array("d")
        self._columns: dict[str, array[float]] = {}
        self._others: dict[tuple[str, int], Any] = {}

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def names(self) -> list[str]:
        """All names of metrics, in the order of their first appearance."""
        return list(self._columns)

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Appends rows; each has a `step`."""
        if self._add_alike(rows):
            return
        first = len(self.steps)
        self.steps.extend(float(row["step"]) for row in rows)
        for name in dict.fromkeys([*self._columns, *(name for row in rows for name in row)]):
            column = self._columns.setdefault(name, array("d", [math.nan]) * first)
            values: list[Any] = [row.get(name) for row in rows]
            try:
                column.extend(values)
                is_plain = not math.isnan(sum(values))
            except (TypeError, OverflowError):
                is_plain = False
            if not is_plain:
                del column[first:]
                column.extend(self._number(name, place, row) for place, row in enumerate(rows, first))

    def _add_alike(self, rows: Sequence[Mapping[str, Any]]) -> bool:
        """Appends rows that all have the known metrics in their order, and only numbers: nearly all rows of a long run.
        False, and nothing appended, for others."""
        names = list(self._columns)
        if not names or any(list(row) != names for row in rows):
            return False
        try:
            values = array("d", chain.from_iterable(row.values() for row in rows))
        except (TypeError, OverflowError):
            return False
        if not math.isfinite(sum(values)):
            return False
        for place, column in enumerate(self._columns.values()):
            column.extend(values[place :: len(names)])
        self.steps.extend(values[names.index("step") :: len(names)])
        return True

    def _number(self, name: str, place: int, row: Mapping[str, Any]) -> float:
        """A value as a number. NaN and values that are no numbers are stored separately: NaN in a column means
        missing."""
        value = row.get(name, math.nan)
        is_number = isinstance(value, float) or (isinstance(value, int) and abs(value) < TOO_LARGE)
        if is_number and value == value:
            return value
        if name in row:
            self._others[name, place] = value
        return math.nan

    def row(self, place: int) -> dict[str, Any]:
        """One row; a negative place counts from the end. Whole numbers may have become floats."""
        place %= len(self)
        found = {}
        for name, column in self._columns.items():
            value = column[place]
            if value == value:
                found[name] = value
            elif (name, place) in self._others:
                found[name] = self._others[name, place]
        return found

    def places(self, since: float = 0, until: float = math.inf, most: int | None = None) -> Sequence[int]:
        """The places of the steps after `since` up to `until`, in order. If there are more than `most`, every nth one,
        and the last; the same ones again when the run has grown, until n changes."""
        return thinned(self._after(since), self._after(until), most)

    def column(self, name: str, places: Sequence[int] | None = None) -> list[float | None]:
        """One value for each of `places`, all if None; None if the step has no finite number of that name."""
        chosen = range(len(self)) if places is None else places
        values = self._columns.get(name)
        if values is None:
            return [None] * len(chosen)
        return [value if math.isfinite(value) else None for value in map(values.__getitem__, chosen)]

    def columns(self, names: Sequence[str], places: Sequence[int] | None = None) -> dict[str, list[float | None]]:
        """One list per name, as `column`."""
        return {name: self.column(name, places) for name in names}

    def _after(self, since: float) -> int:
        return bisect_right(self.steps, since)


def thinned(first: int, end: int, most: int | None) -> Sequence[int]:
    """The places from `first` to before `end`. If there are more than `most`, every nth one, and the last; the same
    ones again when `end` has grown, until n changes."""
    if most is None or end - first <= most:
        return range(first, end)
    every = math.ceil((end - first) / max(1, most - 1))
    chosen = range(first + -first % every, end, every)
    return chosen if chosen[-1] == end - 1 else [*chosen, end - 1]


def finite_or_none(value: Any) -> float | None:
    """A finite number as a float; None for everything else, also for a whole number that no float can hold."""
    try:
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
    except OverflowError:
        return None
