"""Trains one model: passes, steps, saving and loading, in the order in which they are called.

Every call takes its number at once and returns a future; nothing waits unless asked to. Knows no loss and no engine.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel

import mint.wire as wire
from mint.client import chunks
from mint.client.futures import APIFuture, ClientFuture, wait, wait_async
from mint.client.http import Session
from mint.client.sampling_client import SamplingClient
from mint.errors import MissingExtraError, NotFoundError
from mint.tokenizer import load_tokenizer
from mint.types import (
    AdamParams,
    CreateSamplingSessionResponse,
    Datum,
    ForwardBackwardOutput,
    GetInfoResponse,
    LoadWeightsResponse,
    OptimStepResponse,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
    TensorData,
)
from mint.wire.requests import (
    CreateSamplingSessionRequest,
    ForwardBackwardInput,
    ForwardBackwardRequest,
    LoadWeightsRequest,
    ModelRequest,
    OptimStepRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
)

M = TypeVar("M", bound=BaseModel)

CustomLoss = Callable[[list[Datum], list[Any]], tuple[Any, Mapping[str, float]]]
"""`fn(data, logprobs)` → (loss, metrics): torch tensors, one row of logprobs per datum."""


class TrainingClient(ClientFuture):
    """A model in training, and the future of its making."""

    def __init__(self, session: Session, model_id: str, made: concurrent.futures.Future[Any]) -> None:
        """Made by `ServiceClient.create_lora_training_client` and its siblings."""
        self._session = session
        self._made = made
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self.model_id = model_id

    # --- passes and steps ----------------------------------------------------------------------------------------

    def forward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: Mapping[str, float] | None = None
    ) -> APIFuture[ForwardBackwardOutput]:
        """Logprobs of the targets and the loss; no gradient, and the model does not change."""
        return self._pass(data, loss_fn, loss_fn_config, forward_only=True)

    async def forward_async(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: Mapping[str, float] | None = None
    ) -> APIFuture[ForwardBackwardOutput]:
        """As `forward`: awaiting it gives the future."""
        return self.forward(data, loss_fn, loss_fn_config)

    def forward_backward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: Mapping[str, float] | None = None
    ) -> APIFuture[ForwardBackwardOutput]:
        """As `forward`, and adds the gradient of the summed loss to what the next `optim_step` applies."""
        return self._pass(data, loss_fn, loss_fn_config, forward_only=False)

    async def forward_backward_async(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: Mapping[str, float] | None = None
    ) -> APIFuture[ForwardBackwardOutput]:
        """As `forward_backward`: awaiting it gives the future."""
        return self.forward_backward(data, loss_fn, loss_fn_config)

    def forward_backward_custom(self, data: Sequence[Datum], fn: CustomLoss) -> APIFuture[ForwardBackwardOutput]:
        """A loss of your own: `fn(data, logprobs)` returns a torch scalar and metrics, here and not on the server.

        Two passes: logprobs for `fn`, then the gradient of its loss. `fn` runs on a thread of its own.
        """
        data = list(data)
        parts = chunks.split(data)
        forward, backward = self._take_numbers(len(parts)), self._take_numbers(len(parts))
        return APIFuture(self._session.run(self._custom(data, parts, fn, forward, backward)))

    async def forward_backward_custom_async(
        self, data: Sequence[Datum], fn: CustomLoss
    ) -> APIFuture[ForwardBackwardOutput]:
        """As `forward_backward_custom`: awaiting it gives the future."""
        return self.forward_backward_custom(data, fn)

    def optim_step(self, adam_params: AdamParams | None = None) -> APIFuture[OptimStepResponse]:
        """Applies the accumulated gradient with AdamW and clears it; refused after a pass that failed."""
        (number,) = self._take_numbers(1)
        request = OptimStepRequest(model_id=self.model_id, seq_id=number, adam_params=adam_params or AdamParams())
        return self._send("optim_step", request, OptimStepResponse)

    async def optim_step_async(self, adam_params: AdamParams | None = None) -> APIFuture[OptimStepResponse]:
        """As `optim_step`: awaiting it gives the future."""
        return self.optim_step(adam_params)

    # --- saving and loading --------------------------------------------------------------------------------------

    def save_state(self, name: str, overwrite: bool = False) -> APIFuture[SaveWeightsResponse]:
        """Saves weights and optimizer under `name`; `.path` is what loads them again."""
        (number,) = self._take_numbers(1)
        request = SaveWeightsRequest(model_id=self.model_id, seq_id=number, path=name, overwrite=overwrite)
        return self._send("save_weights", request, SaveWeightsResponse)

    async def save_state_async(self, name: str, overwrite: bool = False) -> APIFuture[SaveWeightsResponse]:
        """As `save_state`: awaiting it gives the future."""
        return self.save_state(name, overwrite)

    def load_state(self, path: str) -> APIFuture[LoadWeightsResponse]:
        """Loads the weights of a checkpoint; the optimizer starts afresh."""
        return self._load(path, optimizer=False)

    async def load_state_async(self, path: str) -> APIFuture[LoadWeightsResponse]:
        """As `load_state`: awaiting it gives the future."""
        return self.load_state(path)

    def load_state_with_optimizer(self, path: str) -> APIFuture[LoadWeightsResponse]:
        """Loads the weights and the optimizer of a checkpoint."""
        return self._load(path, optimizer=True)

    async def load_state_with_optimizer_async(self, path: str) -> APIFuture[LoadWeightsResponse]:
        """As `load_state_with_optimizer`: awaiting it gives the future."""
        return self.load_state_with_optimizer(path)

    def save_weights_for_sampler(self, name: str) -> APIFuture[SaveWeightsForSamplerResponse]:
        """Saves the weights alone under `name`; `.path` goes to `create_sampling_client`."""
        (number,) = self._take_numbers(1)
        request = SaveWeightsForSamplerRequest(model_id=self.model_id, seq_id=number, path=name)
        return self._send("save_weights_for_sampler", request, SaveWeightsForSamplerResponse)

    async def save_weights_for_sampler_async(self, name: str) -> APIFuture[SaveWeightsForSamplerResponse]:
        """As `save_weights_for_sampler`: awaiting it gives the future."""
        return self.save_weights_for_sampler(name)

    def save_weights_and_get_sampling_client(self, name: str | None = None) -> SamplingClient:
        """A sampler of the weights as they are after all calls so far, kept in memory for this session.

        `name` is accepted as MinT's is; the weights are kept without a name (`save_weights_for_sampler` names them).
        """
        (number,) = self._take_numbers(1)
        sampler = next(self._session.sampler_numbers)
        request = SaveWeightsForSamplerRequest(model_id=self.model_id, seq_id=number, sampling_session_seq_id=sampler)
        made = self._send("save_weights_for_sampler", request, SaveWeightsForSamplerResponse)
        return SamplingClient(self._session, f"{self._session.session_id}:sample:{sampler}", made.future())

    async def save_weights_and_get_sampling_client_async(self, name: str | None = None) -> SamplingClient:
        """As `save_weights_and_get_sampling_client`, once the sampler is there."""
        return await self.save_weights_and_get_sampling_client(name)

    def create_sampling_client(self, model_path: str) -> SamplingClient:
        """A sampler of a saved checkpoint."""
        return create_sampler(self._session, model_path=model_path, base_model=None)

    async def create_sampling_client_async(self, model_path: str) -> SamplingClient:
        """As `create_sampling_client`, once the sampler is there."""
        return await self.create_sampling_client(model_path)

    # --- looking up ----------------------------------------------------------------------------------------------

    def get_info(self) -> GetInfoResponse:
        """What this model is, and every setting that took effect."""
        return wait(self._session.run(self._get_info()), None)

    async def get_info_async(self) -> GetInfoResponse:
        """As `get_info`."""
        return await wait_async(self._session.run(self._get_info()), None)

    def get_tokenizer(self) -> Any:
        """The base model's Hugging Face tokenizer."""
        data = self.get_info().model_data
        return load_tokenizer(data.tokenizer_id, data.model_name)

    # --- inside --------------------------------------------------------------------------------------------------

    def _take_numbers(self, count: int) -> list[int]:
        with self._lock:
            return [next(self._numbers) for _ in range(count)]

    def _pass(
        self, data: Sequence[Datum], loss_fn: str, config: Mapping[str, float] | None, *, forward_only: bool
    ) -> APIFuture[ForwardBackwardOutput]:
        parts = chunks.split(data)
        numbers = self._take_numbers(len(parts))
        bodies = [
            self._pass_body(part, number, loss_fn, config, forward_only=forward_only)
            for part, number in zip(parts, numbers, strict=True)
        ]
        return APIFuture(self._session.run(self._submit_passes(bodies)))

    def _pass_body(
        self,
        data: list[Datum],
        number: int,
        loss_fn: str,
        config: Mapping[str, float] | None = None,
        *,
        forward_only: bool = False,
    ) -> bytes:
        # not checked here: a wrong value has used its number up, and the server answers it in its turn
        content = ForwardBackwardInput.model_construct(
            data=data, loss_fn=loss_fn, loss_fn_config=dict(config) if config is not None else None
        )
        request = ForwardBackwardRequest.model_construct(
            model_id=self.model_id, seq_id=number, forward_backward_input=content, forward_only=forward_only
        )
        return wire.encode(request)

    async def _submit_passes(self, bodies: Sequence[bytes]) -> ForwardBackwardOutput:
        await wait_async(self._made, None)
        outputs = [self._session.submit("forward_backward", body, ForwardBackwardOutput) for body in bodies]
        return chunks.merge(await asyncio.gather(*outputs))

    async def _custom(
        self, data: list[Datum], parts: list[list[Datum]], fn: CustomLoss, forward: list[int], backward: list[int]
    ) -> ForwardBackwardOutput:
        numbered = list(zip(parts, forward, strict=True))
        try:
            bodies = [
                self._pass_body(_without_loss(part), n, "cross_entropy", forward_only=True) for part, n in numbered
            ]
            first = await self._submit_passes(bodies)
            rows = [output["logprobs"] for output in first.loss_fn_outputs]
            loss, metrics, weights = await asyncio.to_thread(_gradient, fn, data, rows)
        except BaseException:
            await self._fail_numbers(backward)
            raise
        weighted = iter(weights)
        bodies = [
            self._pass_body([_reweighted(datum, next(weighted)) for datum in part], number, "cross_entropy")
            for part, number in zip(parts, backward, strict=True)
        ]
        second = await self._submit_passes(bodies)
        surrogate = second.metrics.get("loss:sum", 0.0)
        merged = {**second.metrics, **metrics, "loss:sum": loss, "surrogate_loss:sum": surrogate}
        return second.model_copy(update={"loss_fn_outputs": first.loss_fn_outputs, "metrics": merged, "warnings": []})

    async def _fail_numbers(self, numbers: Sequence[int]) -> None:
        """Uses up numbers that were taken for passes that cannot be made, so that the next step is refused."""
        empty = [self._pass_body([], number, "cross_entropy") for number in numbers]
        await asyncio.gather(*(self._submit_passes([body]) for body in empty), return_exceptions=True)

    def _load(self, path: str, *, optimizer: bool) -> APIFuture[LoadWeightsResponse]:
        (number,) = self._take_numbers(1)
        request = LoadWeightsRequest(model_id=self.model_id, seq_id=number, path=path, optimizer=optimizer)
        return self._send("load_weights", request, LoadWeightsResponse)

    def _send(self, route: str, request: BaseModel, kind: type[M]) -> APIFuture[M]:
        return APIFuture(self._session.run(self._submit(route, wire.encode(request), kind)))

    async def _submit(self, route: str, body: bytes, kind: type[M]) -> M:
        await wait_async(self._made, None)
        return await self._session.submit(route, body, kind)

    async def _get_info(self) -> GetInfoResponse:
        await wait_async(self._made, None)
        return await self._session.post("get_info", ModelRequest(model_id=self.model_id), GetInfoResponse)


def create_sampler(session: Session, *, model_path: str | None, base_model: str | None) -> SamplingClient:
    """A sampler of a checkpoint or of a base model, under way."""
    number = next(session.sampler_numbers)
    request = CreateSamplingSessionRequest(
        session_id=session.session_id, sampling_session_seq_id=number, model_path=model_path, base_model=base_model
    )
    made = session.run(session.post("create_sampling_session", request, CreateSamplingSessionResponse))
    return SamplingClient(session, f"{session.session_id}:sample:{number}", made)


def _without_loss(data: Sequence[Datum]) -> list[Datum]:
    """The same inputs and targets, with weight 0 where none was given."""
    return [
        _reweighted(datum, datum.loss_fn_inputs["weights"].data)
        if "weights" in datum.loss_fn_inputs
        else _reweighted(datum, [0.0] * len(_targets(datum).data))
        for datum in data
    ]


def _reweighted(datum: Datum, weights: Sequence[float]) -> Datum:
    tensor = TensorData.model_construct(data=list(weights), dtype="float32", shape=None)
    inputs = {"target_tokens": _targets(datum), "weights": tensor}
    return Datum.model_construct(model_input=datum.model_input, loss_fn_inputs=inputs)


def _targets(datum: Datum) -> TensorData:
    if "target_tokens" not in datum.loss_fn_inputs:
        raise NotFoundError("is missing", field="loss_fn_inputs.target_tokens", value="(missing)")
    return datum.loss_fn_inputs["target_tokens"]


def _gradient(
    fn: CustomLoss, data: list[Datum], rows: Sequence[TensorData]
) -> tuple[float, dict[str, float], list[list[float]]]:
    """The user's loss and metrics, and per datum the weights whose cross-entropy has the same gradient."""
    try:
        import torch  # deferred: only this function of the SDK needs it
    except ImportError as error:
        raise MissingExtraError("a custom loss needs torch on this machine", remedy="pip install torch") from error
    logprobs = [torch.from_numpy(row.to_numpy()).requires_grad_() for row in rows]
    loss, metrics = fn(data, logprobs)
    loss.backward()
    weights: list[list[float]] = [[0.0] * len(row) if row.grad is None else (-row.grad).tolist() for row in logprobs]
    return float(loss.detach()), dict(metrics), weights
