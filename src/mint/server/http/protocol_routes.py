"""The routes of the training and sampling protocol, below `/api/v1`: each names an operation of `Service`."""

from __future__ import annotations

import asyncio
import logging
import re

import pydantic_core
from pydantic import BaseModel
from starlette.responses import Response

import mint.wire as wire
from mint.errors import InvalidRequestError, MintError, NotFoundError, SessionEndedError
from mint.server.http.route_table import Call, Operation, RouteRow, answer, answer_json
from mint.server.ids import RequestName
from mint.server.queue.futures import Answer
from mint.server.service.results import LONG_POLL_S
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

log = logging.getLogger("mint.app")

HIDES_REDIRECTS = re.compile(r"0\.2[23]\.")
MAX_TELEMETRY_BYTES = 1024 * 1024
CUSTOM_LOSS = "Use forward_backward_custom, which computes the loss on the client and sends its gradient as weights"
KEYS = "Keys are made and revoked by the operator: mint keys create, mint keys revoke"

SLOW_ERROR_S = 1.0
"""Clients ask again at once, without a pause, where waiting for a result is answered by a server error."""


async def client_config(call: Call) -> Response:
    """The client's feature flags. Each keeps the client's own default, which every SDK that was tried works best with
    (chunks of one call may come at the same time: they are put in order here), but for a transport that follows
    redirects unasked in SDKs that want to see them (an archive's address)."""
    version = wire.decode(messages.ClientConfigRequest, call.body or b"{}").sdk_version
    return answer(ClientConfigResponse(use_pyqwest_transport=False if HIDES_REDIRECTS.match(version) else None))


async def telemetry(call: Call) -> Response:
    """Takes what SDKs report about themselves, and drops it unread: it may hold traces of the user's own code."""
    size = 0
    async for part in call.request.stream():
        size += len(part)
        if size > MAX_TELEMETRY_BYTES:
            remedy = f"Send at most {MAX_TELEMETRY_BYTES} bytes at once"
            raise InvalidRequestError("is too large", field="body", value=f"over {size} bytes", remedy=remedy)
    return answer(TelemetryResponse())


async def create_session(call: Call) -> Response:
    """Opens a session."""
    return answer(call.service.create_session(call.caller, call.body))


async def session_heartbeat(call: Call) -> Response:
    """Keeps a session alive; 410 once it is over."""
    try:
        call.service.heartbeat(call.caller, call.body)
    except SessionEndedError as error:
        return answer_json(wire.encode_error(error), status=410)
    return answer_json(b"{}")


async def finish_session(call: Call) -> Response:
    """Ends a session; why it does is noted in the log."""
    if call.body:
        request = wire.decode(messages.FinishSessionRequest, call.body)
        if request.reason is not None:
            log.info("a session ends: %s", request.reason.type)
    call.service.finish_session(call.caller, call.request.path_params["session_id"])
    return answer_json(b"{}")


def submit(kind: str) -> Operation:
    """The operation that accepts requests of a kind that is journaled."""

    async def operation(call: Call) -> Response:
        return await _result_of(call, call.service.submit(call.caller, kind, call.body, call.encoding))

    operation.__doc__ = f"Accepts a `{kind}` request; its result is fetched with `retrieve_future`."
    return operation


async def _result_of(call: Call, promise: UntypedPromise) -> Response:
    """The promise; or, to whoever prefers to wait, its result, unless that takes longer than a long poll."""
    if not call.prefers_to_wait or call.let_go is None:
        return answer(promise)
    await call.let_go()
    found = await call.service.futures.wait(promise.request_id, LONG_POLL_S)
    if found is None:
        return answer(promise)
    name = RequestName.parse(promise.request_id)
    response = _told(call, found, is_sample=name is not None and name.is_sample)
    response.headers[wire.APPLIED] = wire.WAIT
    return response


def _told(call: Call, found: Answer, *, is_sample: bool) -> Response:
    """A result, or the error that it is, in an encoding that the sender reads."""
    if found.body.startswith(b"{"):
        return answer_json(found.body)
    if call.accepts_proto:
        return Response(found.body, media_type=wire.Encoding.PROTO.value)
    return answer_json(wire.result_as_json(found.body, SampleResponse if is_sample else ForwardBackwardOutput))


async def get_info(call: Call) -> Response:
    """What a model is, and every setting that took effect."""
    return answer(call.service.get_info(call.caller, call.body))


async def create_sampling_session(call: Call) -> Response:
    """A new sampler over a base model or a checkpoint."""
    return answer(call.service.create_sampling_session(call.caller, call.body))


async def sampler_info(call: Call) -> Response:
    """What a sampler samples from."""
    return answer(call.service.sampler_info(call.caller, call.request.path_params["sampler_id"]))


async def sample(call: Call) -> Response:
    """Accepts a sample request; its result is fetched with `retrieve_future`."""
    return await _result_of(call, call.service.sample(call.caller, call.body))


async def retrieve_future(call: Call) -> Response:
    """Long poll: the result; the error (200 too: it is final); 408 for "ask again"; 410 for a lost sample."""
    name = RequestName.parse(wire.decode(RetrieveFutureRequest, call.body).request_id)
    is_sample = name is not None and name.is_sample
    try:
        found = await call.service.retrieve(call.caller, call.body)
    except NotFoundError as error:
        return answer_json(wire.encode_error(error), status=410 if is_sample else 200)
    except MintError as error:
        if error.status >= 500:
            await asyncio.sleep(SLOW_ERROR_S)
        raise
    if found is None:
        request_id, facts = call.service.queue_facts(call.caller, call.body)
        body = pydantic_core.to_json(facts.body(request_id))
        return answer_json(body, status=408, headers=facts.headers())
    return _told(call, found, is_sample=is_sample)


async def retrieve_futures(call: Call) -> Response:
    """Long poll for whatever of a sampler's results comes next; each is then fetched with `retrieve_future`."""
    return answer(await call.service.retrieve_many(call.caller, call.body))


async def cancel_future(call: Call) -> Response:
    """Calls a sample request off; training requests keep their place, and nothing happens to them."""
    call.service.cancel(call.caller, call.body)
    return answer_json(b"{}")


async def join_sampling_session(call: Call) -> Response:
    """A number for one more client of a sampler."""
    return answer(call.service.join_sampling_session(call.caller, call.body))


async def unload_model(call: Call) -> Response:
    """Lets a model go at once, with all that waits for it; checkpoints and samplers stay."""
    return answer(call.service.unload_model(call.caller, call.body))


async def list_models(call: Call) -> Response:
    """The caller's models that can be trained now."""
    return answer(call.service.live_models(call.caller))


async def delete_model(call: Call) -> Response:
    """As `unload_model`, for clients that know the model's address alone."""
    name = call.request.path_params["model_id"]
    call.service.unload_model(call.caller, wire.encode(messages.UnloadModelRequest(model_id=name)))
    return answer(UnloadModelResponse(model_id=name))


async def weights_info(call: Call) -> Response:
    """What a checkpoint was saved from."""
    return answer(call.service.weights_info(call.caller, call.body))


async def get_server_capabilities(call: Call) -> Response:
    """The base models on offer."""
    return answer(call.service.capabilities())


def _post(path: str, operation: Operation, request: Message = None, response: Message = None) -> RouteRow:
    return RouteRow("POST", f"{wire.API_PREFIX}/{path}", operation, request, response)


def _refused(method: str, path: str, remedy: str) -> RouteRow:
    """A route of other servers of this protocol that this one has not, and what to do instead."""

    async def operation(_call: Call) -> Response:
        raise InvalidRequestError("is not offered by this server", field="route", value=path, remedy=remedy)

    operation.__doc__ = f"Not offered: always 400. {remedy}."
    return RouteRow(method, f"{wire.API_PREFIX}/{path}", operation)


def _submitted(kind: str, request: type[BaseModel]) -> RouteRow:
    return _post(kind, submit(kind), request, UntypedPromise)


ROUTES: tuple[RouteRow, ...] = (
    _post("client/config", client_config, messages.ClientConfigRequest, ClientConfigResponse),
    _post("client/dynamic_config", client_config, messages.ClientConfigRequest, ClientConfigResponse),
    RouteRow("POST", f"{wire.API_PREFIX}/telemetry", telemetry, response=TelemetryResponse, streams_body=True),
    _post("create_session", create_session, messages.CreateSessionRequest, CreateSessionResponse),
    _post("session_heartbeat", session_heartbeat, messages.SessionRequest),
    _post("sessions/{session_id}/finish", finish_session, messages.FinishSessionRequest),
    _submitted("create_model", messages.CreateModelRequest),
    _post("get_info", get_info, messages.ModelRequest, GetInfoResponse),
    _submitted("forward", messages.ForwardRequest),
    _submitted("forward_backward", messages.ForwardBackwardRequest),
    _submitted("optim_step", messages.OptimStepRequest),
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
    _post("asample", sample, messages.SampleRequest, UntypedPromise),
    _post("retrieve_future", retrieve_future, RetrieveFutureRequest),
    _post("retrieve_futures", retrieve_futures, messages.RetrieveFuturesRequest, RetrieveFuturesResponse),
    _post("cancel_future", cancel_future, messages.CancelFutureRequest),
    _post(
        "join_sampling_session",
        join_sampling_session,
        messages.JoinSamplingSessionRequest,
        JoinSamplingSessionResponse,
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
    ),
)
