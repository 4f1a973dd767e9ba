"""A run's numbers and rollouts as files to take away: CSV, JSON, JSON lines. Rollouts leave as they are read."""

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
from mint.dashboard.dashboard import Dashboard
from mint.dashboard.json_values import json_bytes
from mint.runs.reader import RolloutQuery, RunReader

PAGE_ROWS = 500


def metrics_csv(dashboard: Dashboard, request: Request) -> Response:
    """The metrics, a line for each step; a metric that a step lacks is empty."""
    name = request.path_params["run"]
    columns = dashboard.readers.of(name).columns()
    names = ["step", *sorted(columns.keys() - {"step"})]
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(names)
    writer.writerows(zip(*(columns[column] for column in names), strict=True))
    return Response(text.getvalue(), media_type="text/csv; charset=utf-8", headers=_attached(name, "metrics.csv"))


def metrics_json(dashboard: Dashboard, request: Request) -> Response:
    """The metrics, an object for each step."""
    name = request.path_params["run"]
    body = json_bytes(dashboard.readers.of(name).metrics())
    return Response(body, media_type="application/json", headers=_attached(name, "metrics.json"))


def rollouts_file(dashboard: Dashboard, request: Request) -> Response:
    """Every rollout that fits the query, as it was logged, a line for each; without `limit`, all of them."""
    name = request.path_params["run"]
    reader = dashboard.readers.of(name)
    query = api.parse_query(dashboard, request)
    most = query.limit if request.query_params.get("limit", "") != "" else None
    # a generator that is no coroutine is run in a thread, one page after another, as fast as they are taken
    return StreamingResponse(
        _lines(reader, query, most),
        media_type="application/x-ndjson",
        headers=_attached(name, "rollouts.jsonl"),
    )


def _lines(reader: RunReader, query: RolloutQuery, most: int | None) -> Iterator[bytes]:
    """Found in pages, in the order of the query; a page is one piece."""
    place: int | None = query.offset
    sent = 0
    while place is not None and (most is None or sent < most):
        limit = PAGE_ROWS if most is None else min(PAGE_ROWS, most - sent)
        page = reader.rollouts(replace(query, offset=place, limit=limit))
        yield b"".join(json_bytes(row) + b"\n" for row in _logged(reader, page.rows))
        sent += len(page.rows)
        place = page.next_offset


def _logged(reader: RunReader, found: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows as they were logged; those of one step that follow one another are read together."""
    for step, places in groupby(found, key=lambda row: row["step"]):
        rows = {row["row"]: row for row in reader.rows(step)}
        yield from (rows[place["row"]] for place in places if place["row"] in rows)


def _attached(run: str, file: str) -> dict[str, str]:
    """A name for the file, of characters that every header and file system takes."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", run).strip("-.") or "run"
    return {"content-disposition": f'attachment; filename="{name}-{file}"', "cache-control": "no-store"}
