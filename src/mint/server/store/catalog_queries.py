"""What the catalogs of runs, checkpoints and sessions share: conditions in SQL, pages of rows, and times.

The owner whose things a catalog is asked about is a name, or None for the operator, who sees everything. A condition's
parameters are `:owner` and `:now`, the time in seconds since the epoch.
"""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import accumulate
from typing import Any, TypeVar

from mint.server.store.database import Database
from mint.types.records import Cursor, PageQuery

Row = TypeVar("Row")

UNEXPIRED = "(expires_at IS NULL OR expires_at > :now)"
"""Condition on the table checkpoints: the checkpoint has not expired."""

MADE = "(base_model IS NOT NULL OR EXISTS (SELECT 1 FROM checkpoints WHERE model_id = run_id))"
"""Condition on the table runs: the run's model was created. The row is older than the model, and stays if the creation
fails, so that a repeated request finds its error. Of a run of the first schema only a checkpoint may be known."""

MAX_PAGE_BYTES = 4 << 20
"""A page ends before its metadata is larger, but has at least one row."""

METADATA_BYTES = "coalesce(length(user_metadata), 0)"
"""How many bytes the metadata of a row takes: it is stored as JSON in ASCII."""


def owned_by(owner: str | None) -> str:
    """Condition: the row belongs to the owner."""
    return "TRUE" if owner is None else "owner = :owner"


def readable_by(owner: str | None) -> str:
    """Condition on the table checkpoints: the owner may read the checkpoint, because it is theirs or public."""
    return "TRUE" if owner is None else "(owner = :owner OR public)"


def read_page(
    database: Database,
    kind: type[Row],
    table: str,
    where: str,
    order: str,
    page: PageQuery,
    *,
    row_bytes: str = METADATA_BYTES,
    **parameters: Any,
) -> tuple[list[Row], Cursor]:
    """A page of the rows of a table that fulfil a condition, and where it is among all of them.

    `row_bytes` is SQL for the size of the metadata that is shown with a row. If the page asked for has more than
    `MAX_PAGE_BYTES`, it has fewer rows, and the cursor's `limit` is their number: the next page begins behind them.
    """
    chosen = f"FROM {table} WHERE {where}"
    place = {"size": page.size, "offset": page.offset, **parameters}
    with database.transaction(write=False) as transaction:
        total = transaction.value(f"SELECT count(*) {chosen}", **parameters)
        # by an index alone: only the rows of the page are read
        ids = transaction.values(f"SELECT rowid {chosen} ORDER BY {order} LIMIT :size OFFSET :offset", **place)
        on_page = f"FROM {table} WHERE rowid IN (SELECT value FROM json_each(:ids)) ORDER BY {order}"
        so_far = list(accumulate(transaction.values(f"SELECT {row_bytes} {on_page}", ids=ids)))
        fitting = sum(size <= MAX_PAGE_BYTES for size in so_far)
        size = page.size if fitting == len(so_far) else max(1, fitting)
        rows = transaction.rows(kind, f"SELECT * {on_page} LIMIT :size", ids=ids, size=size)
    return rows, Cursor(offset=page.offset, limit=size, total_count=total)


def moment(seconds: float) -> datetime:
    """Seconds since the epoch as an aware time."""
    return datetime.fromtimestamp(seconds, UTC)
