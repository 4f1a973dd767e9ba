"""The metrics of a run's steps, kept as columns of numbers: 8 bytes a value, whatever the names. Knows no name."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

TOO_LARGE = 2**1023
"""Whole numbers from here on do not fit into a float."""


class MetricColumns:
    """Rows in, rows or columns out, in the order of their steps."""

    def __init__(self) -> None:
        """No rows."""
        self.steps = array("d")
        self._columns: dict[str, array[float]] = {}
        self._odd: dict[tuple[str, int], Any] = {}

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def names(self) -> list[str]:
        """Every name that a row had, in the order of their appearance."""
        return list(self._columns)

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """More rows; each has a `step`."""
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

    def _number(self, name: str, place: int, row: Mapping[str, Any]) -> float:
        """A value as a number; what is none, or is NaN, is kept aside, so that it is not taken for a missing one."""
        value = row.get(name, math.nan)
        if isinstance(value, float | int) and value == value and abs(value) < TOO_LARGE:
            return value
        if name in row:
            self._odd[name, place] = value
        return math.nan

    def rows(self, since: float = 0) -> list[dict[str, Any]]:
        """The rows whose step is above `since`, as they were added (whole numbers may have become floats)."""
        return [self.row(place) for place in range(self._after(since), len(self))]

    def row(self, place: int) -> dict[str, Any]:
        """One row; negative places count from the end."""
        place %= len(self)
        found = {}
        for name, column in self._columns.items():
            value = column[place]
            if value == value:
                found[name] = value
            elif (name, place) in self._odd:
                found[name] = self._odd[name, place]
        return found

    def column(self, name: str, since: float = 0) -> list[float | None]:
        """One value per row whose step is above `since`; None where the row has no finite number of that name."""
        first = self._after(since)
        values: Sequence[float] = self._columns.get(name, array("d"))[first:]
        if not values:
            return [None] * (len(self) - first)
        return [value if math.isfinite(value) else None for value in values]

    def _after(self, since: float) -> int:
        return bisect_right(self.steps, since)
