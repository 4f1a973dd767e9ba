"""Queries over the rollouts of a run: filter, order, page, and text search. Pure: opens no file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from mint.errors import InvalidRequestError
from mint.runs.rollout_index import FLAGS
from mint.runs.rollout_lines import row_head

SORTS = ("step", "-step", "reward", "-reward", "length", "-length", "advantage", "-advantage")
"""A minus means descending. Rollouts without a reward or an advantage come last in both directions."""


@dataclass(frozen=True)
class RolloutQuery:
    """Which rollouts, in which order, and which page of them. A field left at its default filters nothing.

    All of `flags` must be set and none of `without` (names of `FLAGS`). `text` must occur in the prompt or in the
    completion, whatever its case (for an ASCII text: the case of ASCII letters).

    Raises:
        InvalidRequestError: unknown flag or order, or negative offset or limit.
    """

    step: int | None = None
    first_step: int | None = None
    last_step: int | None = None
    group: int | None = None
    item: int | None = None
    reward_min: float | None = None
    reward_max: float | None = None
    length_min: int | None = None
    length_max: int | None = None
    flags: frozenset[str] = frozenset()
    without: frozenset[str] = frozenset()
    text: str = ""
    sort: str = "step"
    offset: int = 0
    limit: int = 50

    def __post_init__(self) -> None:
        for name in ("flags", "without"):
            unknown = sorted(getattr(self, name) - FLAGS.keys())
            if unknown:
                raise InvalidRequestError(
                    "is not a flag of a rollout", field=name, value=unknown[0], remedy=f"Choose from {', '.join(FLAGS)}"
                )
        if self.sort not in SORTS:
            raise InvalidRequestError(
                "is not an order of rollouts", field="sort", value=self.sort, remedy=f"Choose one of {', '.join(SORTS)}"
            )
        for name in ("offset", "limit"):
            if getattr(self, name) < 0:
                raise InvalidRequestError("is negative", field=name, value=getattr(self, name), remedy="Give 0 or more")


@dataclass(frozen=True)
class RolloutPage:
    """One page of the rollouts that a query selects.

    `total` counts all of them; None for a text search that has not read everything. `next_offset` is the `offset` of
    the next page, None at the end. `is_complete` is False where a text search stopped at its limit of bytes or time:
    ask again from `next_offset`, even if `rows` is empty.
    """

    total: int | None
    rows: list[dict[str, Any]]
    next_offset: int | None
    is_complete: bool = True


def select(entries: np.ndarray, query: RolloutQuery) -> np.ndarray:
    """The places in `entries` (`rollout_index.ENTRY`) that a query selects, in its order.

    `text` and the page are not applied.
    """
    mask = np.ones(len(entries), dtype=bool)
    for name, value in (("step", query.step), ("group", query.group), ("item", query.item)):
        if value is not None:
            mask &= entries[name] == value
    for name, low, high in (
        ("step", query.first_step, query.last_step),
        ("reward", query.reward_min, query.reward_max),
        ("length", query.length_min, query.length_max),
    ):
        if low is not None:
            mask &= entries[name] >= low
        if high is not None:
            mask &= entries[name] <= high
    for name in query.flags:
        mask &= (entries["flags"] & FLAGS[name]) != 0
    for name in query.without:
        mask &= (entries["flags"] & FLAGS[name]) == 0
    places = np.flatnonzero(mask)
    if query.sort == "step":
        return places
    values = entries[query.sort.removeprefix("-")][places]
    return places[np.argsort(-values if query.sort.startswith("-") else values, kind="stable")]


class TextSearch:
    """Looks for a text in lines of `rollouts.jsonl`, and decodes only those that may contain it."""

    def __init__(self, text: str) -> None:
        """`text` is not empty."""
        self._is_ascii = text.isascii()
        self._text = self._folded(text)
        self._escaped = json.dumps(text, ensure_ascii=False)[1:-1].encode().lower()

    def found_in(self, head: bytes) -> bool:
        """Whether prompt or completion contain the text; `head` is the row's line up to its tokens, or all of it."""
        # bytes.lower() folds ASCII letters alone, so this short cut is exact for an ASCII text only.
        if self._is_ascii and self._escaped not in head.lower():
            return False
        row = row_head(head)
        return any(self._text in self._folded(row.get(name) or "") for name in ("prompt", "text"))

    def _folded(self, text: str) -> bytes:
        if self._is_ascii:
            return text.encode("utf-8", "replace").lower()
        return text.lower().encode("utf-8", "replace")
