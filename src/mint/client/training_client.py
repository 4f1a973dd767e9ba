"""Trains one model: passes, steps, saving and loading, in the order of the calls.

Each call takes its number in that order at once, and returns a future. Knows no loss and no engine.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel

import mint.wire as wire
from mint.client import chunking as chunks
from mint.client.async_twins import awaited, submitted
from mint.client.connection.request_checks import checked
from mint.client.connection.server_connection import EncodedRequest
from mint.client.custom_loss import CustomLoss, gradient, reversed_loss, reweighted, without_loss
from mint.client.futures import APIFuture, ClientFuture, wait, wait_async
from mint.client.rest_client import RestClient
from mint.client.sampling_client import SamplingClientFuture
from mint.client.session import Session
from mint.client.tokenizers import tokenizer_of
from mint.errors import InvalidRequestError
from mint.types import (
    AdamParams,
    CreateSamplingSessionResponse,
    Datum,
    ForwardBackwardOutput,
    GetInfoResponse,
    LoadWeightsResponse,
    OptimStepResponse,
    SaveWeightsExternalResponse,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
)
from mint.types.records import Checkpoint
from mint.wire.requests import (
    CreateSamplingSessionRequest,
    ForwardBackwardInput,
    ForwardBackwardRequest,
    LoadWeightsRequest,
    ModelRequest,
    OptimStepRequest,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
)

M = TypeVar("M", bound=wire.Message)
LossConfig = Mapping[str, float | str]


class TrainingClient:
    """A model in training. It may be used before the server has created it."""

    def __init__(self, session: Session, model_id: str, made: concurrent.futures.Future[Any]) -> None:
        """Made by `ServiceClient.create_lora_training_client` and its siblings."""
        self._session = session
        self._made = made
        self._lock = threading.Lock()
        self._next_number = 1
        self.model_id = model_id

    # --- passes and steps ----------------------------------------------------------------------------------------

    def forward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: LossConfig | None = None
    ) -> APIFuture[ForwardBackwardOutput]:
        """Logprobs of the targets and the loss; no gradient, and the model does not change."""
        return self._pass(data, loss_fn, loss_fn_config, forward_only=True)

    forward_async = submitted(forward)

    def forward_backward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: LossConfig | None = None
    ) -> APIFuture[ForwardBackwardOutput]:
        """Runs `forward`, and accumulates the gradient of the summed loss for the next `optim_step`."""
        return self._pass(data, loss_fn, loss_fn_config, forward_only=False)

    forward_backward_async = submitted(forward_backward)

    def forward_backward_custom(
        self,
        data: Sequence[Datum],
        fn: CustomLoss,
        *,
        loss_type_input: str | None = None,
        trained_only: bool = False,
    ) -> APIFuture[ForwardBackwardOutput]:
        """A loss of your own: `fn(data, logprobs)` returns a torch scalar and metrics, here and not on the server.

        Two passes: logprobs for `fn`, then the gradient of its loss. `fn` runs on a thread of its own. With
        `trained_only`, logprobs are computed where a datum's weight is not 0, and are 0 elsewhere. If datums have
        `advantages`, which are for `fn` alone, the `warnings` say where the loss has the wrong sign.
        """
        if loss_type_input not in (None, "logprobs"):
            raise InvalidRequestError(
                "is not an input of a custom loss",
                field="loss_type_input",
                value=loss_type_input,
                remedy="Leave it out: fn gets logprobs",
            )
        data = list(data)
        parts = chunks.split(data)
        settings = {"trained_only": 1.0} if trained_only else None
        contents = _contents([without_loss(part) for part in parts], config=settings)
        with self._lock:
            forward = self._encode_passes(contents, self._next_number, forward_only=True)
            # Both passes take their numbers now: calls made while `fn` runs come after the gradient.
            backward = self._next_number + len(parts)
            self._next_number += 2 * len(parts)
        return APIFuture(self._session.run(self._custom(data, parts, fn, settings, forward, backward)))

    forward_backward_custom_async = submitted(forward_backward_custom)

    def optim_step(
        self, optim_params: AdamParams | None = None, *, adam_params: AdamParams | None = None
    ) -> APIFuture[OptimStepResponse]:
        """Applies the accumulated gradient with AdamW and clears it; refused after a failed pass.

        `adam_params` is the older name of `optim_params`.
        """
        if optim_params is not None and adam_params is not None:
            raise InvalidRequestError(
                "was given together with optim_params",
                field="adam_params",
                value=adam_params,
                remedy="Pass optim_params alone",
            )
        params = optim_params or adam_params or AdamParams()
        if not isinstance(params, AdamParams):
            raise InvalidRequestError(
                "is not an optimizer of this SDK", field="optim_params", value=params, remedy="Pass types.AdamParams"
            )
        request = self._numbered(OptimStepRequest, adam_params=params)
        return self._send("optim_step", request, OptimStepResponse)

    optim_step_async = submitted(optim_step)

    # --- saving and loading --------------------------------------------------------------------------------------

    def save_state(
        self,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: dict[str, str] | None = None,
    ) -> APIFuture[SaveWeightsResponse]:
        """Saves weights and optimizer under `name`; `.path` is what loads them again.

        It is kept for `ttl_seconds`, or for good. A name that is taken is refused, except with `overwrite`.
        """
        request = self._numbered(
            SaveWeightsRequest, path=name, overwrite=overwrite, ttl_seconds=ttl_seconds, user_metadata=user_metadata
        )
        return self._send("save_weights", request, SaveWeightsResponse)

    save_state_async = submitted(save_state)

    def load_state(self, path: str, weights_access_token: str | None = None) -> APIFuture[LoadWeightsResponse]:
        """Loads the weights of a checkpoint; the optimizer starts afresh."""
        return self._load(path, weights_access_token, optimizer=False)

    load_state_async = submitted(load_state)

    def load_state_with_optimizer(
        self, path: str, weights_access_token: str | None = None
    ) -> APIFuture[LoadWeightsResponse]:
        """Loads the weights and the optimizer of a checkpoint."""
        return self._load(path, weights_access_token, optimizer=True)

    load_state_with_optimizer_async = submitted(load_state_with_optimizer)

    def save_weights_for_sampler(
        self, name: str, ttl_seconds: int | None = None, user_metadata: dict[str, str] | None = None
    ) -> APIFuture[SaveWeightsForSamplerResponse]:
        """Saves only the weights under `name`; `create_sampling_client` takes its `.path`."""
        request = self._numbered(
            SaveWeightsForSamplerRequest, path=name, ttl_seconds=ttl_seconds, user_metadata=user_metadata
        )
        return self._send("save_weights_for_sampler", request, SaveWeightsForSamplerResponse)

    save_weights_for_sampler_async = submitted(save_weights_for_sampler)

    def save_weights_external(
        self, name: str, ttl_seconds: int | None = None, age_encryption_recipients: list[str] | None = None
    ) -> APIFuture[SaveWeightsExternalResponse]:
        """Saves the weights as a PEFT folder; `RestClient.get_external_weights_urls` has the URLs of its files.

        PEFT does not load loras on the experts of GPT-OSS or Qwen3.5-MoE from it; `mint export` writes those for PEFT.
        """
        request = self._numbered(
            SaveWeightsExternalRequest,
            path=name,
            ttl_seconds=ttl_seconds,
            age_encryption_recipients=age_encryption_recipients,
        )
        return self._send("save_weights_external", request, SaveWeightsExternalResponse)

    save_weights_external_async = submitted(save_weights_external)

    def save_weights_and_get_sampling_client(
        self,
        name: str | None = None,
        retry_config: Any = None,
        record_stability_info: bool = False,
        kind: str = "snapshot",
    ) -> SamplingClientFuture:
        """A sampler of the weights after all calls so far. They are kept in memory for this session.

        `name` and `retry_config` are accepted for scripts of other SDKs. The weights get no name
        (`save_weights_for_sampler` names them), and this SDK has its own rules for retries.
        """
        sampler = next(self._session.sampler_numbers)
        request = self._numbered(SaveWeightsForSamplerRequest, sampling_session_seq_id=sampler, kind=kind)
        made = self._send("save_weights_for_sampler", request, SaveWeightsForSamplerResponse)
        name = f"{self._session.open()}:sample:{sampler}"
        return SamplingClientFuture(self._session, name, made.future(), record_stability_info=record_stability_info)

    save_weights_and_get_sampling_client_async = awaited(save_weights_and_get_sampling_client)

    def create_sampling_client(
        self, model_path: str, retry_config: Any = None, record_stability_info: bool = False
    ) -> SamplingClientFuture:
        """A sampler of a saved checkpoint."""
        return create_sampler(self._session, model_path, None, record_stability_info)

    create_sampling_client_async = awaited(create_sampling_client)

    # --- looking up ----------------------------------------------------------------------------------------------

    def get_info(self) -> GetInfoResponse:
        """The base model, and every setting that took effect."""
        return wait(self._session.run(self._get_info()), None)

    async def get_info_async(self) -> GetInfoResponse:
        """Same as `get_info`."""
        return await wait_async(self._session.run(self._get_info()), None)

    def get_tokenizer(self) -> Any:
        """The base model's Hugging Face tokenizer."""
        data = self.get_info().model_data
        return tokenizer_of(self._session, data.tokenizer_id, data.model_name)

    def get_checkpoint_metadata(self) -> list[Checkpoint]:
        """All checkpoints of this model, newest first."""
        wait(self._made, None)
        return RestClient(session=self._session).list_checkpoints(self.model_id).result().checkpoints

    def publish_checkpoint(self, path: str) -> None:
        """Makes a checkpoint readable by everyone on its server."""
        wait(self._made, None)
        RestClient(session=self._session).publish_checkpoint_from_tinker_path(path).result()

    # --- inside --------------------------------------------------------------------------------------------------

    def _numbered(self, message: type[BaseModel], /, **fields: Any) -> EncodedRequest:
        """The next request of this model. A field that is wrong or cannot be sent raises here, before a number is
        taken: the server would wait for a number that never comes."""
        with self._lock:
            request = checked(message, **{"model_id": self.model_id, "seq_id": self._next_number, **fields})
            encoded = self._session.server.encode(request)
            self._next_number += 1
        return encoded

    def _pass(
        self, data: Sequence[Datum], loss_fn: str, config: LossConfig | None, *, forward_only: bool
    ) -> APIFuture[ForwardBackwardOutput]:
        contents = _contents(chunks.split(data), loss_fn, config)
        with self._lock:
            bodies = self._encode_passes(contents, self._next_number, forward_only=forward_only)
            self._next_number += len(bodies)
        return APIFuture(self._session.run(self._submit_passes(bodies)))

    def _encode_passes(
        self, contents: Sequence[ForwardBackwardInput], first_number: int, *, forward_only: bool = False
    ) -> list[EncodedRequest]:
        """A request for each content, numbered from `first_number`."""
        return [
            self._session.server.encode(
                ForwardBackwardRequest(
                    model_id=self.model_id, seq_id=number, forward_backward_input=content, forward_only=forward_only
                )
            )
            for number, content in enumerate(contents, first_number)
        ]

    async def _submit_passes(self, bodies: Sequence[EncodedRequest]) -> ForwardBackwardOutput:
        await wait_async(self._made, None)
        outputs = await asyncio.gather(
            *[self._session.server.submit("forward_backward", body, ForwardBackwardOutput) for body in bodies]
        )
        return outputs[0] if len(outputs) == 1 else chunks.merge(outputs)

    async def _custom(
        self,
        data: list[Datum],
        parts: list[list[Datum]],
        fn: CustomLoss,
        settings: LossConfig | None,
        forward: Sequence[EncodedRequest],
        backward: int,
    ) -> ForwardBackwardOutput:
        """Both passes; `backward` is the first number of the second one, which has as many requests as `forward`."""
        try:
            first = await self._submit_passes(forward)
            rows = [output["logprobs"] for output in first.loss_fn_outputs]
            loss, metrics, weights = await asyncio.to_thread(gradient, fn, data, rows)
            left = iter(weights)
            weighted = [[reweighted(datum, next(left)) for datum in part] for part in parts]
            bodies = self._encode_passes(_contents(weighted, config=settings), backward)
        except BaseException:  # a cancelled call, too: the server waits for the numbers that it has taken
            await self._fail_passes(backward, len(parts))
            raise
        second = await self._submit_passes(bodies)
        surrogate = second.metrics.get("loss:sum", 0.0)
        merged = {**second.metrics, **metrics, "loss:sum": loss, "surrogate_loss:sum": surrogate}
        warning = reversed_loss(data, weights)
        merged_output = {
            "loss_fn_outputs": first.loss_fn_outputs,
            "metrics": merged,
            "warnings": [] if warning is None else [warning],
        }
        return second.model_copy(update=merged_output)

    async def _fail_passes(self, first_number: int, count: int) -> None:
        """Sends empty passes for numbers whose passes cannot be made: the server refuses them and the next step."""
        empty = self._encode_passes(_contents([[]] * count), first_number)
        await asyncio.gather(*(self._submit_passes([body]) for body in empty), return_exceptions=True)

    def _load(self, path: str, token: str | None, *, optimizer: bool) -> APIFuture[LoadWeightsResponse]:
        request = self._numbered(LoadWeightsRequest, path=path, optimizer=optimizer, weights_access_token=token)
        return self._send("load_weights", request, LoadWeightsResponse)

    def _send(self, route: str, outgoing: EncodedRequest, kind: type[M]) -> APIFuture[M]:
        return APIFuture(self._session.run(self._submit(route, outgoing, kind)))

    async def _submit(self, route: str, outgoing: EncodedRequest, kind: type[M]) -> M:
        await wait_async(self._made, None)
        return await self._session.server.submit(route, outgoing, kind)

    async def _get_info(self) -> GetInfoResponse:
        await wait_async(self._made, None)
        return await self._session.server.post("get_info", ModelRequest(model_id=self.model_id), GetInfoResponse)


def _contents(
    parts: Sequence[list[Datum]], loss_fn: str = "cross_entropy", config: LossConfig | None = None
) -> list[ForwardBackwardInput]:
    """The contents of the requests of one call, one for each part."""
    settings = None
    if config is not None:
        settings = {key: float(value) if hasattr(value, "__float__") else value for key, value in config.items()}
    return [checked(ForwardBackwardInput, data=part, loss_fn=loss_fn, loss_fn_config=settings) for part in parts]


class TrainingClientFuture(ClientFuture[TrainingClient], TrainingClient):
    """A model in training that the server may still be making."""

    client_class = TrainingClient


def create_sampler(
    session: Session,
    model_path: str | None,
    base_model: str | None,
    record_stability_info: bool = False,
    *,
    find_path: Callable[[], Awaitable[str]] | None = None,
) -> SamplingClientFuture:
    """A sampler of a checkpoint or of a base model; the server may still be making it.

    `find_path` looks up the checkpoint's path on the session's thread, where the caller does not know it.
    """
    session_id = session.open()
    number = next(session.sampler_numbers)
    request = checked(
        CreateSamplingSessionRequest,
        session_id=session_id,
        sampling_session_seq_id=number,
        model_path=model_path,
        base_model=base_model,
    )

    async def make() -> CreateSamplingSessionResponse:
        known = request if find_path is None else request.model_copy(update={"model_path": await find_path()})
        return await session.server.post("create_sampling_session", known, CreateSamplingSessionResponse)

    name = f"{session_id}:sample:{number}"
    return SamplingClientFuture(session, name, session.run(make()), record_stability_info=record_stability_info)
