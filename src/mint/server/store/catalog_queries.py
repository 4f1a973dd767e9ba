"""What the catalogs of runs, checkpoints and sessions share: conditions in SQL, pages of rows, and times.

The owner whose things a catalog is asked about is a name, or None for the operator, who sees everything. A condition's
parameters are `:owner` and `:now`, the time in seconds since the epoch.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, TypeVar

from mint.server.store.database import Database
from mint.types.records import Cursor, PageQuery

Row = TypeVar("Row")

UNEXPIRED = "(expires_at IS NULL OR expires_at > :now)"
"""Condition on the table checkpoints: the checkpoint has not expired."""


def owned_by(owner: str | None) -> str:
    """That a row belongs to the owner."""
    return "TRUE" if owner is None else "owner = :owner"


def readable_by(owner: str | None) -> str:
    """Condition on the table checkpoints: the owner may read the checkpoint, because it is theirs or public."""
    return "TRUE" if owner is None else "(owner = :owner OR public)"


def read_page(
    database: Database, kind: type[Row], table: str, where: str, order: str, page: PageQuery, **parameters: Any
) -> tuple[list[Row], Cursor]:
    """A page of the rows of a table that fulfil a condition, and where it is among all of them."""
    chosen = f"FROM {table} WHERE {where}"
    with database.transaction(write=False) as transaction:
        total = transaction.value(f"SELECT count(*) {chosen}", **parameters)
        rows = transaction.rows(
            kind,
            f"SELECT * {chosen} ORDER BY {order} LIMIT :size OFFSET :offset",
            size=page.size,
            offset=page.offset,
            **parameters,
        )
    return rows, Cursor(offset=page.offset, limit=page.size, total_count=total)


def moment(seconds: float) -> datetime:
    """Seconds since the epoch as an aware time."""
    return datetime.fromtimestamp(seconds, UTC)
