"""The routes of the training and sampling protocol, below `/api/v1`: each names an operation of `Service`."""

from __future__ import annotations

import asyncio

from pydantic import BaseModel
from starlette.responses import Response

import mint.wire as wire
from mint.errors import MintError, NotFoundError, SessionEndedError
from mint.server.calls import Call, Operation, RouteRow, answer, answer_json
from mint.server.identities import RequestName
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

Message = type[BaseModel] | None

SLOW_ERROR_S = 1.0
"""Clients ask again at once, without a pause, where waiting for a result is answered by a server error."""


async def client_config(_call: Call) -> Response:
    """The client's feature flags: every flag keeps the client's default."""
    return answer_json(b"{}")


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
    """Ends a session."""
    call.service.finish_session(call.caller, call.request.path_params["session_id"])
    return answer_json(b"{}")


def submit(kind: str) -> Operation:
    """The operation that accepts requests of a kind that is journaled."""

    async def operation(call: Call) -> Response:
        return answer(call.service.submit(call.caller, kind, call.body, call.encoding))

    operation.__doc__ = f"Accepts a `{kind}` request; its result is fetched with `retrieve_future`."
    return operation


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
    return answer(call.service.sample(call.caller, call.body))


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
        return answer_json(b'{"type":"try_again","queue_state":"active"}', status=408)
    if found.body.startswith(b"{"):
        return answer_json(found.body)
    if call.accepts_proto:
        return Response(found.body, media_type=wire.Encoding.PROTO.value)
    return answer_json(wire.result_as_json(found.body, SampleResponse if is_sample else ForwardBackwardOutput))


async def weights_info(call: Call) -> Response:
    """What a checkpoint was saved from."""
    return answer(call.service.weights_info(call.caller, call.body))


async def get_server_capabilities(call: Call) -> Response:
    """The base models on offer."""
    return answer(call.service.capabilities())


def _post(path: str, operation: Operation, request: Message = None, response: Message = None) -> RouteRow:
    return RouteRow("POST", f"{wire.API_PREFIX}/{path}", operation, request, response)


def _submitted(kind: str, request: type[BaseModel]) -> RouteRow:
    return _post(kind, submit(kind), request, UntypedPromise)


ROUTES: tuple[RouteRow, ...] = (
    _post("client/config", client_config),
    _post("create_session", create_session, messages.CreateSessionRequest, CreateSessionResponse),
    _post("session_heartbeat", session_heartbeat, messages.SessionRequest),
    _post("sessions/{session_id}/finish", finish_session),
    _submitted("create_model", messages.CreateModelRequest),
    _post("get_info", get_info, messages.ModelRequest, GetInfoResponse),
    _submitted("forward", messages.ForwardRequest),
    _submitted("forward_backward", messages.ForwardBackwardRequest),
    _submitted("optim_step", messages.OptimStepRequest),
    _submitted("save_weights", messages.SaveWeightsRequest),
    _submitted("save_weights_for_sampler", messages.SaveWeightsForSamplerRequest),
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
    _post("weights_info", weights_info, messages.WeightsInfoRequest, WeightsInfoResponse),
    RouteRow(
        "GET",
        f"{wire.API_PREFIX}/get_server_capabilities",
        get_server_capabilities,
        response=GetServerCapabilitiesResponse,
    ),
)
