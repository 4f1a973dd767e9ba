"""A run's metrics and rollouts as files to download: CSV, JSON, JSON lines. Rollouts are sent while they are read."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from mint.dashboard import api
from mint.dashboard.response_encoding import json_bytes
from mint.dashboard.state import DashboardState
from mint.runs.reader import RolloutQuery, RunReader

PAGE_ROWS = 500


def metrics_csv(dashboard: DashboardState, request: Request) -> Response:
    """The metrics as CSV, one line per step; a missing value is empty."""
    name = request.path_params["run"]
    columns = dashboard.readers.of(name).columns()
    names = ["step", *sorted(columns.keys() - {"step"})]
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(names)
    writer.writerows(zip(*(columns[column] for column in names), strict=True))
    return Response(text.getvalue(), media_type="text/csv; charset=utf-8", headers=_attachment(name, "metrics.csv"))


def metrics_json(dashboard: DashboardState, request: Request) -> Response:
    """The metrics as JSON, one object per step."""
    name = request.path_params["run"]
    body = json_bytes(dashboard.readers.of(name).metrics())
    return Response(body, media_type="application/json", headers=_attachment(name, "metrics.json"))


def rollouts_file(dashboard: DashboardState, request: Request) -> Response:
    """The rollouts that a query selects, as they were logged, one line each; without `limit`, all of them."""
    name = request.path_params["run"]
    reader = dashboard.readers.of(name)
    query = api.parse_query(dashboard, request)
    most = query.limit if request.query_params.get("limit", "") != "" else None
    # Starlette runs a plain generator in a thread, one page at a time, as fast as the client reads.
    return StreamingResponse(
        _lines(reader, query, most),
        media_type="application/x-ndjson",
        headers=_attachment(name, "rollouts.jsonl"),
    )


def _lines(reader: RunReader, query: RolloutQuery, most: int | None) -> Iterator[bytes]:
    """The rows in the order of the query; each piece is one page."""
    place: int | None = query.offset
    sent = 0
    while place is not None and (most is None or sent < most):
        limit = PAGE_ROWS if most is None else min(PAGE_ROWS, most - sent)
        page = reader.rollouts(replace(query, offset=place, limit=limit))
        yield b"".join(json_bytes(row) + b"\n" for row in _logged(reader, page.rows))
        sent += len(page.rows)
        place = page.next_offset


def _logged(reader: RunReader, found: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows as they were logged; neighbours of one step are read together."""
    for step, places in groupby(found, key=lambda row: row["step"]):
        rows = {row["row"]: row for row in reader.rows(step)}
        yield from (rows[place["row"]] for place in places if place["row"] in rows)


def _attachment(run: str, file: str) -> dict[str, str]:
    """The header that names the file, with characters that every header and file system accepts."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", run).strip("-.") or "run"
    return {"content-disposition": f'attachment; filename="{name}-{file}"', "cache-control": "no-store"}
