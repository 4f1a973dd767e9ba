"""The routes that operators and probes ask: whether the process lives, and whether it works."""

from __future__ import annotations

from starlette.responses import Response

import mint.wire as wire
from mint.server.calls import Call, RouteRow, answer_json


async def healthz(call: Call) -> Response:
    """Whether requests are being worked on."""
    return (
        answer_json(b'{"status":"ok"}') if call.service.is_working else answer_json(b'{"status":"stopped"}', status=503)
    )


ROUTES: tuple[RouteRow, ...] = (
    RouteRow("GET", f"{wire.API_PREFIX}/healthz", healthz, is_open=True),
    RouteRow("GET", "/healthz", healthz, is_open=True),
    RouteRow("GET", "/health", healthz, is_open=True),
)
