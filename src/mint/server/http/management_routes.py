"""The routes that list, show and change what is kept, below `/api/v1`: each names an operation of a catalog.

Objects of other owners give 404.
"""

from __future__ import annotations

import re
from typing import NoReturn

from pydantic import BaseModel, ValidationError
from starlette.responses import Response

import mint.types.records as records
import mint.wire as wire
from mint.errors import InvalidRequestError
from mint.server.http.route_table import Call, Operation, RouteRow, respond, respond_json
from mint.types import invalid_request
from mint.types.checkpoint_path import CheckpointPath
from mint.types.records import PageQuery, WholeQuery

CHECKPOINTS_PAGE = 100
IDEMPOTENCY_KEY = "x-idempotency-key"
WEIGHTS_ACCESS_TOKEN = "x-tinker-weights-access-token"
_OLD_SDK = re.compile(r"0\.(?:1?\d|2[0-7])\.")
"""Versions of the tinker SDK that know training and sampler checkpoints alone."""


def list_training_runs(call: Call) -> Response:
    """The caller's training runs, newest first: `limit`, `offset`, `access_scope`, `project_id`."""
    return respond(call.runs.runs(call.caller.owner, _page(call)))


def get_training_run(call: Call) -> Response:
    """One training run; with `access_scope=accessible` also of another owner who has published something of it."""
    accessible = _page(call).access_scope == "accessible"
    return respond(call.runs.run(call.caller.owner, _part(call, "run_id"), accessible=accessible))


def _readable_by_sdk(call: Call, found: records.CheckpointsListResponse) -> records.CheckpointsListResponse:
    """Leaves out external checkpoints for SDKs that do not know them: those refuse a list with one such row."""
    headers = call.request.headers
    version = _OLD_SDK.match(headers.get("x-stainless-package-version", ""))
    if version is None or "tinker/" not in headers.get("user-agent", "").lower():
        return found
    rows = [row for row in found.checkpoints if row.checkpoint_type != "external"]
    return found.model_copy(update={"checkpoints": rows})


def list_run_checkpoints(call: Call) -> Response:
    """The checkpoints of a run, newest first: `limit`, `offset`; of another owner's run, those that are published.

    Without a limit, up to `MAX_WHOLE`: the tinker SDK asks once, and looks for single checkpoints in the answer.
    """
    page = _page(call)
    if "limit" not in call.request.query_params:
        page = WholeQuery(offset=page.offset)
    found = call.checkpoints.checkpoints_of(call.caller.owner, _part(call, "run_id"), page)
    return respond(_readable_by_sdk(call, found))


def list_checkpoints(call: Call) -> Response:
    """The caller's checkpoints of all runs, newest first: `limit`, `offset`, `access_scope`."""
    found = call.checkpoints.checkpoints(call.caller.owner, _page(call, limit=CHECKPOINTS_PAGE))
    return respond(_readable_by_sdk(call, found))


def get_checkpoint(call: Call) -> Response:
    """One checkpoint."""
    return respond(call.checkpoints.checkpoint(call.caller.owner, _path(call)))


def get_checkpoint_by_alias(call: Call) -> Response:
    """One checkpoint by its `ckpt_…` id."""
    return respond(call.checkpoints.checkpoint(call.caller.owner, _part(call, "alias")))


def delete_checkpoint(call: Call) -> Response:
    """Deletes a checkpoint; models and samplers made from it stay."""
    call.checkpoints.delete(call.caller.owner, _path(call))
    return respond_json(b"{}")


def publish_checkpoint(call: Call) -> Response:
    """Makes a checkpoint readable by everyone who knows its path."""
    call.checkpoints.publish(call.caller.owner, _path(call), public=True)
    return respond_json(b"{}")


def unpublish_checkpoint(call: Call) -> Response:
    """Makes a checkpoint readable by its owner alone."""
    call.checkpoints.publish(call.caller.owner, _path(call), public=False)
    return respond_json(b"{}")


def set_checkpoint_ttl(call: Call) -> Response:
    """How long a checkpoint is kept from now on; null keeps it for ever."""
    ttl_seconds = wire.decode(records.SetCheckpointTtlRequest, call.body).ttl_seconds
    call.checkpoints.set_ttl(call.caller.owner, _path(call), ttl_seconds)
    return respond_json(b"{}")


def copy_weights(call: Call) -> Response:
    """Copies readable weights into a new run of the caller's; the same `X-Idempotency-Key` gives the same copy."""
    request = wire.decode(records.CopyWeightsRequest, call.body)
    headers = call.request.headers
    if WEIGHTS_ACCESS_TOKEN in headers:
        request = request.model_copy(update={"weights_access_token": headers[WEIGHTS_ACCESS_TOKEN]})
    call.service.disk.require_free_space()
    owner, quota = call.caller.owner, call.caller.quotas.max_checkpoint_bytes
    with call.service.reservations.open(owner, quota) as reservation:
        path = call.checkpoints.copy(owner, request, key=headers.get(IDEMPOTENCY_KEY), hold=reservation.hold)
    return respond(records.CopyWeightsResponse(tinker_path=path))


def list_sessions(call: Call) -> Response:
    """The caller's sessions, live or ended, newest first: `limit`, `offset`."""
    return respond(call.sessions.sessions(call.caller.owner, _page(call)))


def get_session(call: Call) -> Response:
    """The runs and samplers of a session."""
    return respond(call.sessions.session(call.caller.owner, _part(call, "session_id")))


def search_sessions(call: Call) -> Response:
    """The caller's sessions that match a search, newest first."""
    request = wire.decode(records.SessionSearchRequest, call.body)
    return respond(call.sessions.search_sessions(call.caller.owner, request))


def assign_session_project(call: Call) -> Response:
    """Puts a session, and with it its runs, into a project: a name to list them by."""
    project_id = wire.decode(records.AssignSessionProjectRequest, call.body).project_id
    call.sessions.assign_project(call.caller.owner, _part(call, "session_id"), project_id)
    return respond_json(b"{}")


def export_session_trace(call: Call) -> Response:
    """Answers that no traces are kept, in the form that clients poll for."""
    call.sessions.session(call.caller.owner, _part(call, "session_id"))
    reason = "this server keeps no traces of sessions; the server's log and /metrics say what ran"
    return respond(records.SessionTraceExportResponse(status="failed", error=reason))


def audit(_call: Call) -> Response:
    """Refused: no audit log is kept."""
    _refuse("the audit log", "The server's own log names every request and its owner")


def billing_usage(_call: Call) -> Response:
    """Refused: nothing is billed."""
    _refuse("billing", "Nothing is billed here; /metrics counts what was used, `mint checkpoints list` what is stored")


def _refuse(what: str, remedy: str) -> NoReturn:
    raise InvalidRequestError("is not kept by this server", field="route", value=what, remedy=remedy)


def _page(call: Call, *, limit: int = 20) -> PageQuery:
    """The query parameters of a listing."""
    try:
        return PageQuery.model_validate({"limit": limit, **call.request.query_params})
    except ValidationError as error:
        raise invalid_request(error, "query") from error


def _part(call: Call, name: str) -> str:
    return call.request.path_params[name]


def _path(call: Call) -> str:
    """The path of the checkpoint that a route names."""
    return CheckpointPath(_part(call, "run_id"), _part(call, "kind"), _part(call, "name")).uri


def _row(
    method: str,
    path: str,
    operation: Operation,
    response: type[BaseModel] | None = None,
    request: type[BaseModel] | None = None,
) -> RouteRow:
    return RouteRow(method, f"{wire.API_PREFIX}/{path}", operation, request, response)


_RUN = "training_runs/{run_id}"
_CHECKPOINT = f"{_RUN}/checkpoints/{{kind}}/{{name}}"

ROUTES: tuple[RouteRow, ...] = (
    _row("GET", "training_runs", list_training_runs, records.TrainingRunsResponse),
    _row("GET", _RUN, get_training_run, records.TrainingRun),
    _row("GET", f"{_RUN}/checkpoints", list_run_checkpoints, records.CheckpointsListResponse),
    _row("GET", "checkpoints", list_checkpoints, records.CheckpointsListResponse),
    _row("GET", "checkpoints/{alias}", get_checkpoint_by_alias, records.Checkpoint),
    _row("GET", _CHECKPOINT, get_checkpoint, records.Checkpoint),
    _row("DELETE", _CHECKPOINT, delete_checkpoint),
    _row("POST", f"{_CHECKPOINT}/publish", publish_checkpoint),
    _row("DELETE", f"{_CHECKPOINT}/publish", unpublish_checkpoint),
    _row("PUT", f"{_CHECKPOINT}/ttl", set_checkpoint_ttl, request=records.SetCheckpointTtlRequest),
    _row("POST", "copy_weights", copy_weights, records.CopyWeightsResponse, records.CopyWeightsRequest),
    _row("GET", "sessions", list_sessions, records.ListSessionsResponse),
    _row("POST", "sessions/search", search_sessions, records.SessionSearchResponse, records.SessionSearchRequest),
    _row("GET", "sessions/{session_id}", get_session, records.GetSessionResponse),
    _row("PUT", "sessions/{session_id}/project", assign_session_project, request=records.AssignSessionProjectRequest),
    _row("GET", "sessions/{session_id}/trace_export", export_session_trace, records.SessionTraceExportResponse),
    _row("GET", "audit", audit),
    _row("GET", "billing/usage/events", billing_usage),
    _row("GET", "billing/usage/checkpoints/current", billing_usage),
)
