"""Questions about the rollouts of a run: which rows, in which order; and whether a row says a text. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mint.errors import InvalidRequestError
from mint.runs.index import FLAGS

SORTS = ("step", "-step", "reward", "-reward", "length", "-length", "advantage", "-advantage")
"""A minus means the largest first. Rollouts without a reward or an advantage come last in either direction."""


@dataclass(frozen=True)
class RolloutQuery:
    """Which rollouts, in which order, and which of them from `offset` on. What is left out asks for nothing.

    `flags` must all be set, those of `without` must all be unset (names of `FLAGS`). `text` must occur in what the
    policy read or said; upper and lower case are the same (for a text in ASCII: of ASCII letters).

    Raises:
        InvalidRequestError: an unknown flag or order, or a negative offset or limit.
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
                    "is not a flag of a rollout", field=name, value=unknown[0], remedy=f"Choose of {', '.join(FLAGS)}"
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
    """Some of the rollouts that a query asks for.

    `total` is how many there are, None where a text would have to be looked for in more rows to know. `next_offset` is
    the query's offset for what comes next, None at the end. `is_complete` is False where a search for a text stopped
    because it had read enough for one answer: ask again from `next_offset`, even if `rows` is empty.
    """

    total: int | None
    rows: list[dict[str, Any]]
    next_offset: int | None
    is_complete: bool = True


_EQUAL = {"step": "step", "group": "group", "item": "item"}
_AT_LEAST = {"first_step": "step", "reward_min": "reward", "length_min": "length"}
_AT_MOST = {"last_step": "step", "reward_max": "reward", "length_max": "length"}


def select(table: np.ndarray, query: RolloutQuery) -> np.ndarray:
    """The places in a table (`TABLE_ROW`) of the rows that a query asks for, in its order, whatever they say."""
    kept = np.ones(len(table), dtype=bool)
    for names, compare in ((_EQUAL, np.equal), (_AT_LEAST, np.greater_equal), (_AT_MOST, np.less_equal)):
        for name, column in names.items():
            bound = getattr(query, name)
            if bound is not None:
                kept &= compare(table[column], bound)
    wanted, unwanted = (sum(FLAGS[name] for name in names) for names in (query.flags, query.without))
    if wanted or unwanted:
        kept &= (table["flags"] & (wanted | unwanted)) == wanted
    if wanted & unwanted:
        kept[:] = False
    places = np.flatnonzero(kept)
    if query.sort == "step":
        return places
    name = query.sort.removeprefix("-")
    values = table[name][places]
    return places[np.argsort(-values if query.sort.startswith("-") else values, kind="stable")]


class TextSearch:
    """Looks for a text in rows as they stand in `rollouts.jsonl`, and parses only those that may have it."""

    def __init__(self, text: str) -> None:
        """`text` is not empty."""
        self.is_ascii = text.isascii()
        self.needle = text.encode().lower() if self.is_ascii else text.lower().encode()
        self.written = json.dumps(text, ensure_ascii=False)[1:-1].encode().lower() if self.is_ascii else None

    def found_in(self, opening: bytes) -> bool:
        """Whether what was read or said has the text; `opening` is the row's line up to its tokens, or all of it."""
        if self.written is not None and self.written not in opening.lower():
            return False
        row = parse_opening(opening)
        return any(self._has(row.get(name) or "") for name in ("prompt", "text"))

    def _has(self, text: str) -> bool:
        said = text.encode("utf-8", "replace").lower() if self.is_ascii else text.lower().encode("utf-8", "replace")
        return self.needle in said


OPENING_END = b', "tokens": ['
"""Where the long part of a row begins. Within a JSON string its quotes would be escaped."""


def parse_opening(opening: bytes) -> Mapping[str, Any]:
    """A row of which the line may have been cut at its tokens; empty if it is not JSON."""
    cut = opening.find(OPENING_END)
    try:
        row = json.loads(opening if cut < 0 else opening[:cut] + b"}")
    except ValueError:
        return {}
    return row if isinstance(row, dict) else {}
