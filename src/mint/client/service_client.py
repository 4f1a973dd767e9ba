"""Where everything starts: one session, and the clients it makes."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import BaseModel

import mint.wire as wire
from mint.client.futures import ClientFuture, wait, wait_async
from mint.client.http import EmbeddedServer, Session
from mint.client.rest_client import RestClient
from mint.client.sampling_client import SamplingClient
from mint.client.training_client import TrainingClient, create_sampler
from mint.config import read_settings
from mint.errors import InvalidRequestError
from mint.types import CreateModelResponse, GetServerCapabilitiesResponse, LoadWeightsResponse, LoraConfig
from mint.wire.requests import CreateModelRequest, LoadWeightsRequest

C = TypeVar("C", bound=ClientFuture)


class ServiceClient:
    """A session with a server, or with the service inside this process where no address is given.

    Nothing happens until the first use. Closing it (also by `with`, or at the end of the program) ends the session:
    its models go, named checkpoints stay.

    A client that is made from plain code is waited for, so that a wrong argument raises on its own line; from async
    code nothing blocks, and `await` (or `.result()`) raises instead.
    """

    def __init__(
        self,
        user_metadata: dict[str, Any] | None = None,
        project_id: str | None = None,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        data_dir: str | Path | None = None,
        open_embedded: Callable[[], EmbeddedServer] | None = None,
    ) -> None:
        """`base_url` and `api_key` None are read from the environment; `data_dir` is for the embedded service only.

        Args:
            user_metadata: Stored with the session.
            project_id: A label, stored with the session.
            base_url: The server; `MINT_BASE_URL` if None, and the service in this process if that is unset too.
            api_key: The key for that server; `MINT_API_KEY` if None.
            data_dir: Where the embedded service keeps journal and checkpoints; `MINT_HOME` if None.
            open_embedded: Opens another service in this process, with an engine of your own.
        """
        settings = read_settings()
        url = base_url or settings.base_url or None
        if url is not None and data_dir is not None and base_url is None:
            url = None  # a data directory asks for the embedded service, whatever the environment says
        if base_url is not None and data_dir is not None:
            remedy = "Give one of them: a server keeps its own data directory"
            raise InvalidRequestError(
                "was given together with base_url", field="data_dir", value=data_dir, remedy=remedy
            )
        folder = None if data_dir is None else Path(data_dir)
        metadata = {**(user_metadata or {}), **({"project_id": project_id} if project_id is not None else {})}
        self._session = Session(
            base_url=None if open_embedded is not None else url,
            api_key=api_key or settings.api_key,
            user_metadata=metadata or None,
            open_embedded=open_embedded or (lambda: _open_embedded(folder)),
        )

    @property
    def session_id(self) -> str:
        """The session's id."""
        return self._session.session_id

    def close(self) -> None:
        """Ends the session. Again is fine."""
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    # --- training ------------------------------------------------------------------------------------------------

    def create_lora_training_client(
        self,
        base_model: str,
        rank: int = 16,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: dict[str, Any] | None = None,
    ) -> TrainingClient:
        """A new model: a lora over `base_model`. With a `seed`, the same calls give the same bits."""
        return _made(self._new_model(base_model, rank, seed, train_mlp, train_attn, train_unembed, user_metadata))

    async def create_lora_training_client_async(
        self,
        base_model: str,
        rank: int = 16,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: dict[str, Any] | None = None,
    ) -> TrainingClient:
        """As `create_lora_training_client`, once the model is there."""
        await self._opened()
        return await self._new_model(base_model, rank, seed, train_mlp, train_attn, train_unembed, user_metadata)

    def create_training_client_from_state(self, path: str) -> TrainingClient:
        """A new model with the weights of a checkpoint and a fresh optimizer."""
        return _made(self._loaded_model(path, optimizer=False))

    async def create_training_client_from_state_async(self, path: str) -> TrainingClient:
        """As `create_training_client_from_state`, once the model is there."""
        await self._opened()
        return await self._loaded_model(path, optimizer=False)

    def create_training_client_from_state_with_optimizer(self, path: str) -> TrainingClient:
        """A new model that goes on where a checkpoint was saved, optimizer and all."""
        return _made(self._loaded_model(path, optimizer=True))

    async def create_training_client_from_state_with_optimizer_async(self, path: str) -> TrainingClient:
        """As `create_training_client_from_state_with_optimizer`, once the model is there."""
        await self._opened()
        return await self._loaded_model(path, optimizer=True)

    # --- sampling and looking up ---------------------------------------------------------------------------------

    def create_sampling_client(self, model_path: str | None = None, base_model: str | None = None) -> SamplingClient:
        """A sampler of a checkpoint (`model_path`), or of a base model as it is."""
        return _made(create_sampler(self._session, model_path=model_path, base_model=base_model))

    async def create_sampling_client_async(
        self, model_path: str | None = None, base_model: str | None = None
    ) -> SamplingClient:
        """As `create_sampling_client`, once the sampler is there."""
        await self._opened()
        return await create_sampler(self._session, model_path=model_path, base_model=base_model)

    def create_rest_client(self) -> RestClient:
        """Questions about saved weights and samplers."""
        return RestClient(self._session)

    def get_server_capabilities(self) -> GetServerCapabilitiesResponse:
        """The base models on offer."""
        return wait(self._get_capabilities(), None)

    async def get_server_capabilities_async(self) -> GetServerCapabilitiesResponse:
        """As `get_server_capabilities`."""
        await self._opened()
        return await wait_async(self._get_capabilities(), None)

    # --- inside --------------------------------------------------------------------------------------------------

    async def _opened(self) -> None:
        """Opens the session without blocking the caller's event loop."""
        await asyncio.to_thread(lambda: self._session.session_id)

    def _get_capabilities(self) -> concurrent.futures.Future[GetServerCapabilitiesResponse]:
        _ = self._session.session_id
        return self._session.run(self._session.get("get_server_capabilities", GetServerCapabilitiesResponse))

    def _new_model(
        self,
        base_model: str,
        rank: int,
        seed: int | None,
        train_mlp: bool,
        train_attn: bool,
        train_unembed: bool,
        user_metadata: dict[str, Any] | None,
    ) -> TrainingClient:
        lora = LoraConfig(rank=rank, seed=seed, train_mlp=train_mlp, train_attn=train_attn, train_unembed=train_unembed)
        number = next(self._session.model_numbers)
        request = CreateModelRequest(
            session_id=self._session.session_id,
            model_seq_id=number,
            base_model=base_model,
            lora_config=lora,
            user_metadata=user_metadata,
        )
        return self._model("create_model", request, CreateModelResponse, number)

    def _loaded_model(self, path: str, *, optimizer: bool) -> TrainingClient:
        number = next(self._session.model_numbers)
        request = LoadWeightsRequest(
            session_id=self._session.session_id, model_seq_id=number, path=path, optimizer=optimizer
        )
        return self._model("load_weights", request, LoadWeightsResponse, number)

    def _model(self, route: str, request: BaseModel, kind: type[BaseModel], number: int) -> TrainingClient:
        made = self._session.run(self._session.submit(route, wire.encode(request), kind))
        return TrainingClient(self._session, f"{self._session.session_id}:train:{number}", made)


def _made(client: C) -> C:
    """The client, waited for unless that would block an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return client.result()
    return client


def _open_embedded(data_dir: Path | None) -> EmbeddedServer:
    from mint.embedded import open_embedded  # deferred: the one door to the service in this process

    return open_embedded(data_dir=data_dir)
