"""The routes of the training and sampling protocol, below `/api/v1`: each names an operation of `Service`."""

from __future__ import annotations

import logging
import re

import pydantic_core
from pydantic import BaseModel
from starlette.responses import Response

import mint.wire as wire
from mint.errors import InvalidRequestError, NotFoundError, SessionEndedError
from mint.server.http.route_table import SMALL_BODY_BYTES, Call, Operation, RouteRow, respond, respond_json
from mint.server.ids import RequestId
from mint.server.queue.futures import FutureResult
from mint.types import (
    CreateSamplingSessionResponse,
    CreateSessionResponse,
    ForwardBackwardOutput,
    GetInfoResponse,
    GetServerCapabilitiesResponse,
    SampleResponse,
    SamplerInfo,
    UntypedPromise,
    WeightsInfoResponse,
)
from mint.wire import requests as messages
from mint.wire.requests import RetrieveFutureRequest
from mint.wire.responses import (
    ClientConfigResponse,
    JoinSamplingSessionResponse,
    LiveModelsResponse,
    RetrieveFuturesResponse,
    TelemetryResponse,
    UnloadModelResponse,
)

Message = type[BaseModel] | None
ResultKind = type[ForwardBackwardOutput] | type[SampleResponse]

log = logging.getLogger("mint.app")

HIDES_REDIRECTS = re.compile(r"0\.2[23]\.")
MAX_TELEMETRY_BYTES = 1024 * 1024
MAX_POLL_BYTES = 64 * 1024
"""The largest body that the event loop decodes itself. Polls have under 1 KiB, and a thread would cost them more."""

MAX_SAMPLE_BYTES = 8 * 1024 * 1024
"""A prompt of a million tokens."""

CUSTOM_LOSS = "Use forward_backward_custom, which computes the loss on the client and sends its gradient as weights"
KEYS = "Keys are made and revoked by the operator: mint keys create, mint keys revoke"


async def client_config(call: Call) -> Response:
    """The client's feature flags: all keep the client's own default, except for one transport in some SDKs, which
    follows redirects although the SDK wants to see them (the address of an archive). Chunks of one call may arrive at
    the same time, because the server puts them in order."""
    version = wire.decode(messages.ClientConfigRequest, call.body or b"{}").sdk_version
    return respond(ClientConfigResponse(use_pyqwest_transport=False if HIDES_REDIRECTS.match(version) else None))


async def telemetry(call: Call) -> Response:
    """Accepts what SDKs report about themselves, and drops it unread: it may contain traces of the user's own code."""
    size = 0
    async for part in call.request.stream():
        size += len(part)
        if size > MAX_TELEMETRY_BYTES:
            remedy = f"Send at most {MAX_TELEMETRY_BYTES} bytes at once"
            raise InvalidRequestError("is too large", field="body", value=f"over {size} bytes", remedy=remedy)
    return respond(TelemetryResponse())


def create_session(call: Call) -> Response:
    """Opens a session."""
    return respond(call.service.sessions.create(call.caller, call.body))


def session_heartbeat(call: Call) -> Response:
    """Keeps a session alive; 410 once it is over."""
    try:
        call.service.sessions.heartbeat(call.caller, call.body)
    except SessionEndedError as error:
        return respond_json(wire.encode_error(error), status=410)
    return respond_json(b"{}")


def finish_session(call: Call) -> Response:
    """Ends a session, and keeps the reason that the client gives."""
    request = wire.decode(messages.FinishSessionRequest, call.body or b"{}")
    call.service.sessions.finish(call.caller, call.request.path_params["session_id"], request)
    return respond_json(b"{}")


def submit(kind: str) -> Operation:
    """The operation that accepts training requests of a kind."""

    async def operation(call: Call) -> Response:
        media_type = call.request.headers.get("content-type", "").partition(";")[0].strip().lower()
        encoding = wire.Encoding.PROTO if media_type == wire.Encoding.PROTO.value else wire.Encoding.JSON
        promise = await call.run_blocking(call.service.training.submit, call.caller, kind, call.body, encoding)
        return await _result_or_promise(call, promise, ForwardBackwardOutput)

    operation.__doc__ = f"Accepts a request of `{kind}`; its result is fetched with `retrieve_future`."
    return operation


async def sample(call: Call) -> Response:
    """Accepts a sample request; its result is fetched with `retrieve_future`."""
    promise = await call.run_blocking(call.service.sampling.accept, call.caller, call.body)
    return await _result_or_promise(call, promise, SampleResponse)


async def _result_or_promise(call: Call, promise: UntypedPromise, kind: ResultKind) -> Response:
    """The result, if the client prefers to wait for it (and not longer than a long poll); otherwise the promise."""
    if call.request.headers.get(wire.PREFER) != wire.WAIT:
        return respond(promise)
    call.release_body()
    with call.use_key() as key, key.waiting():
        result = await call.service.futures.wait(promise.request_id, call.service.results.long_poll_s)
    if result is None:
        return respond(promise)
    response = await _respond_result(call, result, kind)
    response.headers[wire.APPLIED] = wire.WAIT
    return response


async def _respond_result(call: Call, result: FutureResult, kind: ResultKind) -> Response:
    """A result, or the error with which the request failed, in an encoding that the client reads."""
    if result.body.startswith(b"{"):
        return respond_json(result.body)
    if wire.Encoding.PROTO.value in call.request.headers.get("accept", ""):
        return Response(result.body, media_type=wire.Encoding.PROTO.value)
    return respond_json(await call.run_blocking(call.service.results.as_json, result, kind))


def get_info(call: Call) -> Response:
    """What a model is, and every setting that took effect."""
    return respond(call.service.training.get_info(call.caller, call.body))


def create_sampling_session(call: Call) -> Response:
    """A new sampler over a base model or a checkpoint."""
    return respond(call.service.sampling_sessions.create(call.caller, call.body))


def sampler_info(call: Call) -> Response:
    """What a sampler samples from."""
    return respond(call.service.sampling_sessions.info(call.caller, call.request.path_params["sampler_id"]))


async def retrieve_future(call: Call) -> Response:
    """Long poll: the result; the error (200 too: it is final); 408 for "ask again"; 410 for a lost sample."""
    # `allow_metadata_only` may be ignored: clients take the result itself where they asked for its size
    request_id = wire.decode(RetrieveFutureRequest, call.body).request_id
    name = RequestId.parse(request_id)
    is_sample = name is not None and name.is_sample
    try:
        with call.use_key() as key, key.waiting():
            result = await call.service.results.retrieve(call.caller, request_id)
    except NotFoundError as error:
        return respond_json(wire.encode_error(error), status=410 if is_sample else 200)
    if result is not None:
        return await _respond_result(call, result, SampleResponse if is_sample else ForwardBackwardOutput)
    position = call.service.results.queue_position(call.caller, request_id)
    body = pydantic_core.to_json(position.body(request_id))
    return respond_json(body, status=408, headers=position.headers())


async def retrieve_futures(call: Call) -> Response:
    """Long poll for whichever of a sampler's results comes next; each is then fetched with `retrieve_future`."""
    with call.use_key() as key, key.waiting():
        found = await call.service.results.retrieve_many(call.caller, call.body)
    return respond(found)


def cancel_future(call: Call) -> Response:
    """Cancels a sample request; training requests keep their place, and nothing happens to them."""
    call.service.sampling.cancel(call.caller, call.body)
    return respond_json(b"{}")


def join_sampling_session(call: Call) -> Response:
    """A number for one more client of a sampler."""
    return respond(call.service.sampling_sessions.join(call.caller, call.body))


def unload_model(call: Call) -> Response:
    """Drops a model at once, with all that waits for it; checkpoints and samplers stay."""
    model_id = wire.decode(messages.UnloadModelRequest, call.body).model_id
    return respond(call.service.sessions.unload_model(call.caller, model_id))


def list_models(call: Call) -> Response:
    """The caller's models that can be trained now."""
    return respond(call.service.training.live_models(call.caller))


def delete_model(call: Call) -> Response:
    """Same as `unload_model`, for clients that know only the model's address."""
    name = call.request.path_params["model_id"]
    call.service.sessions.unload_model(call.caller, name)
    return respond(UnloadModelResponse(model_id=name))


def weights_info(call: Call) -> Response:
    """What a checkpoint was saved from."""
    return respond(call.service.weights_info(call.caller, call.body))


def get_server_capabilities(call: Call) -> Response:
    """The base models on offer."""
    return respond(call.service.capabilities())


def _post(
    path: str,
    operation: Operation,
    request: Message = None,
    response: Message = None,
    *,
    max_body_bytes: int | None = SMALL_BODY_BYTES,
    waits_for_disk: bool = True,
) -> RouteRow:
    route = f"{wire.API_PREFIX}/{path}"
    return RouteRow(
        "POST", route, operation, request, response, max_body_bytes=max_body_bytes, waits_for_disk=waits_for_disk
    )


def _polled(path: str, operation: Operation, request: Message, response: Message = None) -> RouteRow:
    return _post(path, operation, request, response, max_body_bytes=MAX_POLL_BYTES, waits_for_disk=False)


def _refused(method: str, path: str, remedy: str) -> RouteRow:
    """A route that other servers of this protocol have, and this one has not; says what to do instead."""

    def operation(_call: Call) -> Response:
        raise InvalidRequestError("is not offered by this server", field="route", value=path, remedy=remedy)

    operation.__doc__ = f"Not offered: always 400. {remedy}."
    return RouteRow(method, f"{wire.API_PREFIX}/{path}", operation)


def _submitted(kind: str, request: type[BaseModel], *, max_body_bytes: int | None = SMALL_BODY_BYTES) -> RouteRow:
    return _post(kind, submit(kind), request, UntypedPromise, max_body_bytes=max_body_bytes)


ROUTES: tuple[RouteRow, ...] = (
    # the router tries one row after another, so those of every training step come first
    _submitted("forward_backward", messages.ForwardBackwardRequest, max_body_bytes=None),
    _submitted("optim_step", messages.OptimStepRequest),
    _post(
        "asample", sample, messages.SampleRequest, UntypedPromise, max_body_bytes=MAX_SAMPLE_BYTES, waits_for_disk=False
    ),
    _polled("retrieve_future", retrieve_future, RetrieveFutureRequest),
    _polled("client/config", client_config, messages.ClientConfigRequest, ClientConfigResponse),
    _polled("client/dynamic_config", client_config, messages.ClientConfigRequest, ClientConfigResponse),
    RouteRow("POST", f"{wire.API_PREFIX}/telemetry", telemetry, response=TelemetryResponse, streams_body=True),
    _post("create_session", create_session, messages.CreateSessionRequest, CreateSessionResponse),
    _post("session_heartbeat", session_heartbeat, messages.SessionRequest, waits_for_disk=False),
    _post("sessions/{session_id}/finish", finish_session, messages.FinishSessionRequest),
    _submitted("create_model", messages.CreateModelRequest),
    _post("get_info", get_info, messages.ModelRequest, GetInfoResponse, waits_for_disk=False),
    _submitted("forward", messages.ForwardRequest, max_body_bytes=None),
    _submitted("save_weights", messages.SaveWeightsRequest),
    _submitted("save_weights_for_sampler", messages.SaveWeightsForSamplerRequest),
    _submitted("save_weights_external", messages.SaveWeightsExternalRequest),
    _submitted("load_weights", messages.LoadWeightsRequest),
    _post(
        "create_sampling_session",
        create_sampling_session,
        messages.CreateSamplingSessionRequest,
        CreateSamplingSessionResponse,
    ),
    RouteRow("GET", f"{wire.API_PREFIX}/samplers/{{sampler_id}}", sampler_info, response=SamplerInfo),
    _polled("retrieve_futures", retrieve_futures, messages.RetrieveFuturesRequest, RetrieveFuturesResponse),
    _post("cancel_future", cancel_future, messages.CancelFutureRequest, waits_for_disk=False),
    _post(
        "join_sampling_session",
        join_sampling_session,
        messages.JoinSamplingSessionRequest,
        JoinSamplingSessionResponse,
        waits_for_disk=False,
    ),
    _post("unload_model", unload_model, messages.UnloadModelRequest, UntypedPromise),
    RouteRow("GET", f"{wire.API_PREFIX}/models", list_models, response=LiveModelsResponse),
    RouteRow("DELETE", f"{wire.API_PREFIX}/models/{{model_id}}", delete_model, response=UnloadModelResponse),
    _refused("POST", "train_step", "Call forward_backward, then optim_step"),
    _refused("POST", "mint/forward_backward_reverse_kl", CUSTOM_LOSS),
    _refused("POST", "mint/checkpoints/interpolate", "Export the checkpoints and average their weights"),
    _refused("POST", "create_custom_loss", CUSTOM_LOSS),
    _refused("POST", "auth/token", "Send the API key itself, in the header X-API-Key"),
    _refused("GET", "auth/apikey/me", KEYS),
    _refused("DELETE", "auth/apikey/me", KEYS),
    _post("weights_info", weights_info, messages.WeightsInfoRequest, WeightsInfoResponse),
    RouteRow(
        "GET",
        f"{wire.API_PREFIX}/get_server_capabilities",
        get_server_capabilities,
        response=GetServerCapabilitiesResponse,
        waits_for_disk=False,
    ),
)
