"""The routes for operators: liveness, readiness, metrics, and the description of the API."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel
from starlette.responses import Response

import mint.wire as wire
import mint.wire.requests as messages
from mint.errors import NotFoundError
from mint.server.http import openapi
from mint.server.http.route_table import Call, Operation, RouteRow, respond

PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"


class Health(BaseModel):
    """`status` is ok or not ready; `problems` say why. `warnings` are what an operator should see to; work goes on.

    `cluster` says how many `trainers` there are, how many of them are `running`, how often they were `lost`, and the
    processes of the `ranks`; with `samplers`, also how many are `sampling`, how often one was lost, and what each has.
    To a worker that leaves it says how many `jobs` it has yet.
    `mirror` says how many seconds behind it is (`lag_s`), whether it `works`, how many `states` and bytes were sent.
    """

    status: str
    problems: list[str] | None = None
    warnings: list[str] | None = None
    cluster: dict[str, Any] | None = None
    mirror: dict[str, Any] | None = None


async def healthz(_call: Call) -> Response:
    """Answers as long as the process lives."""
    return respond(Health(status="ok"))


async def readyz(call: Call) -> Response:
    """Whether requests are being worked on: the journal can be written, and the engine is not stuck. 503 if not."""
    readiness = call.request.app.state.readiness
    if readiness is None:
        raise NotFoundError("is not checked in this process", remedy="Use mint serve")
    problems = await readiness.problems()
    warnings = list(await readiness.warnings()) or None
    more: dict[str, Any] = {
        "warnings": warnings,
        "cluster": dict(readiness.cluster) or None,
        "mirror": dict(readiness.mirror) or None,
    }
    if not problems:
        return respond(Health(status="ok", **more))
    return respond(Health(status="not ready", problems=list(problems), **more), status=503)


def resize_cluster(call: Call) -> Response:
    """Sets how many processes train and sample; what they are then. Results do not depend on it.

    From the next training request on, so many ranks train; from the next sample on, so many replicas sample. A replica
    that is not wanted any more ends after the requests that it has.
    """
    wanted = wire.decode(messages.ResizeClusterRequest, call.body)
    call.service.resize_cluster(trainers=wanted.trainers, samplers=wanted.samplers)
    return respond(Health(status="ok", cluster=dict(call.service.cluster_state)))


def join_sampler(call: Call) -> Response:
    """A worker (`mint worker --join URL`) joins, to sample for this server, or leaves. Workers repeat it every few
    seconds. One that computes other numbers than this server is refused. One that leaves gets no more jobs, learns how
    many it has yet, and asks again until it has none."""
    wanted = wire.decode(messages.JoinSamplerRequest, call.body)
    if wanted.leaves:
        return respond(Health(status="ok", cluster={"jobs": call.service.dismiss_sampler(wanted.address, wanted.key)}))
    call.service.join_sampler(wanted.address, wanted.key)
    return respond(Health(status="ok"))


def lora_archive(call: Call) -> Response:
    """The weights of a LoRA that a worker was told to load: a line of JSON, then float32."""
    content = call.service.lora_archive(call.request.path_params["name"])
    return Response(content, media_type="application/octet-stream")


def metrics(call: Call) -> Response:
    """Metrics for Prometheus: requests, times, queues, the engine's work. No owners, no keys, no texts.

    They are sums over all owners, and so tell one owner what the others do: a server with keys shows them to operators.
    """
    exposition = call.request.app.state.metrics
    if exposition is None:
        raise NotFoundError("no numbers are kept in this process", remedy="Use mint serve")
    return Response(exposition.render(), media_type=PROMETHEUS_TEXT)


def describe(call: Call) -> Response:
    """This description, as OpenAPI 3.1."""
    state = call.request.app.state
    return Response(openapi.document(state.rows, asks_keys=state.asks_keys), media_type="application/json")


def docs(call: Call) -> Response:
    """This description, as a page to read."""
    state = call.request.app.state
    page = openapi.page(json.loads(openapi.document(state.rows, asks_keys=state.asks_keys)))
    return Response(page, media_type="text/html; charset=utf-8", headers=openapi.PAGE_HEADERS)


def _open(path: str, operation: Operation, response: type[BaseModel] | None = None) -> RouteRow:
    return RouteRow("GET", path, operation, response=response, is_open=True, waits_for_disk=False)


ROUTES: tuple[RouteRow, ...] = (
    _open("/healthz", healthz, Health),
    _open("/health", healthz, Health),
    _open(f"{wire.API_PREFIX}/healthz", healthz, Health),
    _open("/readyz", readyz, Health),
    RouteRow(
        "POST",
        f"{wire.API_PREFIX}/cluster",
        resize_cluster,
        request=messages.ResizeClusterRequest,
        response=Health,
        for_operators=True,
        waits_for_disk=False,
    ),
    RouteRow(
        "POST",
        f"{wire.API_PREFIX}/samplers",
        join_sampler,
        request=messages.JoinSamplerRequest,
        response=Health,
        for_operators=True,
        waits_for_disk=False,
    ),
    RouteRow(
        "GET", f"{wire.API_PREFIX}/samplers/loras/{{name}}", lora_archive, for_operators=True, waits_for_disk=False
    ),
    RouteRow("GET", "/metrics", metrics, for_operators=True, waits_for_disk=False),
    _open("/openapi.json", describe),
    _open("/docs", docs),
)
