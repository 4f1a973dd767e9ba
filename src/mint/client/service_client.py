"""`ServiceClient`: a session with a server, and the clients that it makes."""

from __future__ import annotations

import asyncio
import concurrent.futures
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import BaseModel

from mint.client.async_twins import awaited
from mint.client.connection.endpoint import Endpoint
from mint.client.connection.request_checks import checked
from mint.client.embedded_service import open_embedded_service
from mint.client.futures import ClientFuture, wait, wait_async
from mint.client.rest_client import RestClient, all_checkpoints
from mint.client.sampling_client import SamplingClientFuture
from mint.client.session import EmbeddedServer, Session
from mint.client.training_client import TrainingClientFuture, create_sampler
from mint.config import read_settings
from mint.errors import InvalidRequestError, NotFoundError
from mint.types import (
    CreateModelResponse,
    GetServerCapabilitiesResponse,
    LoadWeightsResponse,
    LoraConfig,
)
from mint.types.records import SessionOutcome
from mint.version import VERSION
from mint.wire.requests import CreateModelRequest, CreateSessionRequest, LoadWeightsRequest

F = TypeVar("F", bound=ClientFuture[Any])


class ServiceClient:
    """A session with a server, or with the service inside this process where no address is given.

    Nothing happens until the first use. Closing it (also by `with`, or at the end of the program) ends the session: its
    models are dropped, named checkpoints stay.

    In plain code, a method that makes a client waits for it, so that a wrong argument raises on its own line. In async
    code it does not block: `await` (or `.result()`) raises instead.
    """

    def __init__(
        self,
        user_metadata: dict[str, Any] | None = None,
        project_id: str | None = None,
        *,
        display_name: str | None = None,
        base_url: str | None = None,
        api_key: str | None = None,
        default_headers_overrides: Mapping[str, str] | None = None,
        data_dir: str | Path | None = None,
        open_embedded: Callable[[], EmbeddedServer] | None = None,
        **unknown: Any,
    ) -> None:
        """`base_url` and `api_key` None are read from the environment; `data_dir` is for the embedded service only.

        Args:
            user_metadata: Stored with the session.
            project_id: A label, stored with the session; `MINT_PROJECT_ID` if None.
            display_name: What lists of sessions show.
            base_url: The server; `MINT_BASE_URL` if None, and the service in this process if that is unset too.
            api_key: The key for that server; `MINT_API_KEY` if None.
            default_headers_overrides: Headers of every request, for example for a proxy in front of the server.
            data_dir: The folder of the embedded service, for journal and checkpoints; `MINT_HOME` if None.
            open_embedded: Opens another service in this process, for example with your own engine.
            **unknown: Settings of other SDKs of this protocol; each is named in a warning, and has no effect.
        """
        settings = read_settings()
        for name in unknown:
            warnings.warn(f"ServiceClient has no setting {name!r}; it has no effect", stacklevel=2)
        url = base_url or settings.base_url or None
        if url is not None and data_dir is not None and base_url is None:
            url = None  # a data directory asks for the embedded service, whatever the environment says
        if base_url is not None and data_dir is not None:
            remedy = "Give one of them: a server keeps its own data directory"
            raise InvalidRequestError(
                "was given together with base_url", field="data_dir", value=data_dir, remedy=remedy
            )
        folder = None if data_dir is None else Path(data_dir)
        request = checked(
            CreateSessionRequest,
            tags=settings.tag_list,
            user_metadata=user_metadata,
            sdk_version=VERSION,
            project_id=project_id or settings.project_id,
            display_name=display_name,
        )
        headers = dict(default_headers_overrides or {})
        self._session = Session(
            Endpoint(None if open_embedded is not None else url, api_key or settings.api_key, headers),
            request=request,
            open_embedded=open_embedded or (lambda: open_embedded_service(folder)),
        )

    @property
    def session_id(self) -> str:
        """The session's id; opens the session."""
        return self._session.open()

    def close(self, status: SessionOutcome = "success", detail: str | None = None) -> None:
        """Ends the session with its outcome; takes a few seconds where the server is gone. A second call does
        nothing."""
        self._session.close(status, detail)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_exception: object) -> None:
        if kind is None:
            self.close()
        else:
            self.close("interrupted" if issubclass(kind, KeyboardInterrupt) else "errored", kind.__name__)

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
        optimizer: Any = None,
    ) -> TrainingClientFuture:
        """A new model: a lora over `base_model`. With a `seed`, the same calls give the same bits.

        `optimizer` None is AdamW, the only one; any other is refused.
        """
        lora = LoraConfig(rank=rank, seed=seed, train_mlp=train_mlp, train_attn=train_attn, train_unembed=train_unembed)
        return _made(self._new_model(base_model, lora, user_metadata, optimizer))

    create_lora_training_client_async = awaited(create_lora_training_client)

    def create_training_client_from_state(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, Any] | None = None,
        weights_access_token: str | None = None,
        optimizer: Any = None,
    ) -> TrainingClientFuture:
        """A new model with the weights of a checkpoint and a fresh optimizer.

        `base_model`, where it is given, must be the one that the checkpoint was saved from.
        """
        return _made(
            self._loaded_model(path, base_model, user_metadata, weights_access_token, optimizer, with_moments=False)
        )

    create_training_client_from_state_async = awaited(create_training_client_from_state)

    def create_training_client_from_state_with_optimizer(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, Any] | None = None,
        weights_access_token: str | None = None,
    ) -> TrainingClientFuture:
        """A new model with the weights and the optimizer of a checkpoint."""
        return _made(self._loaded_model(path, base_model, user_metadata, weights_access_token, None, with_moments=True))

    create_training_client_from_state_with_optimizer_async = awaited(create_training_client_from_state_with_optimizer)

    # --- sampling and looking up ---------------------------------------------------------------------------------

    def create_sampling_client(
        self,
        model_path: str | None = None,
        base_model: str | None = None,
        retry_config: Any = None,
        record_stability_info: bool = False,
    ) -> SamplingClientFuture:
        """A sampler of a checkpoint (`model_path`), or of a base model as it is.

        `retry_config` is accepted and has no effect: this SDK has its own rules.
        """
        return _made(create_sampler(self._session, model_path, base_model, record_stability_info))

    create_sampling_client_async = awaited(create_sampling_client)

    def create_sampling_client_from_checkpoint(self, checkpoint_name: str) -> SamplingClientFuture:
        """A sampler of your own checkpoint, by its path, its `ckpt_…` id, or the name that it was saved under.

        With a name, it is the newest of that name; weights for samplers come before training states.

        Raises:
            NotFoundError: no checkpoint has that name.
        """
        if "://" in checkpoint_name or checkpoint_name.startswith("ckpt_"):
            return self.create_sampling_client(model_path=checkpoint_name)
        find_path = partial(self._find_path, checkpoint_name)
        return _made(create_sampler(self._session, None, None, find_path=find_path))

    def create_rest_client(self) -> RestClient:
        """A client for checkpoints, training runs and sessions; it shares this session."""
        return RestClient(session=self._session)

    def get_server_capabilities(self) -> GetServerCapabilitiesResponse:
        """The base models on offer."""
        return wait(self._get_capabilities(), None)

    async def get_server_capabilities_async(self) -> GetServerCapabilitiesResponse:
        """Same as `get_server_capabilities`."""
        await self._session.open_async()
        return await wait_async(self._get_capabilities(), None)

    # --- inside --------------------------------------------------------------------------------------------------

    async def _find_path(self, checkpoint_name: str) -> str:
        """The path of the owner's newest checkpoint of that name; weights for samplers come first."""
        other = None
        async for checkpoint in all_checkpoints(self._session, "checkpoints"):
            if checkpoint.checkpoint_id.partition("/")[2] == checkpoint_name:
                if checkpoint.checkpoint_type == "sampler":
                    return checkpoint.tinker_path
                other = other or checkpoint
        if other is None:
            raise NotFoundError(
                "is not a checkpoint of yours",
                field="checkpoint_name",
                value=checkpoint_name,
                remedy="`mint checkpoints list` shows their names. Give the path of another owner's",
            )
        return other.tinker_path

    def _get_capabilities(self) -> concurrent.futures.Future[GetServerCapabilitiesResponse]:
        self._session.open()
        return self._session.run(self._session.server.get("get_server_capabilities", GetServerCapabilitiesResponse))

    def _new_model(
        self, base_model: str, lora: LoraConfig, user_metadata: dict[str, Any] | None, optimizer: Any
    ) -> TrainingClientFuture:
        fields = {
            "base_model": base_model,
            "lora_config": lora,
            "user_metadata": user_metadata,
            "optimizer_config": _optimizer(optimizer),
        }
        return self._model("create_model", CreateModelRequest, CreateModelResponse, fields)

    def _loaded_model(
        self,
        path: str,
        base_model: str | None,
        user_metadata: dict[str, Any] | None,
        weights_access_token: str | None,
        optimizer: Any,
        *,
        with_moments: bool,
    ) -> TrainingClientFuture:
        fields = {
            "path": path,
            "optimizer": with_moments,
            "base_model": base_model,
            "user_metadata": user_metadata,
            "weights_access_token": weights_access_token,
            "optimizer_config": _optimizer(optimizer),
        }
        return self._model("load_weights", LoadWeightsRequest, LoadWeightsResponse, fields)

    def _model(
        self, route: str, kind: type[BaseModel], answer: type[BaseModel], fields: dict[str, Any]
    ) -> TrainingClientFuture:
        session_id = self._session.open()
        number = next(self._session.model_numbers)
        request = checked(kind, session_id=session_id, model_seq_id=number, **fields)
        made = self._session.run(self._session.server.submit(route, self._session.server.encode(request), answer))
        return TrainingClientFuture(self._session, f"{session_id}:train:{number}", made)


def _optimizer(optimizer: Any) -> dict[str, Any] | None:
    """The optimizer as the wire has it; the server refuses one that it does not have."""
    if optimizer is None or isinstance(optimizer, dict):
        return optimizer
    if isinstance(optimizer, str):
        return {"type": optimizer}
    if isinstance(optimizer, BaseModel):
        return optimizer.model_dump()
    raise InvalidRequestError("is not an optimizer", field="optimizer", value=optimizer, remedy="Leave it out: AdamW")


def _made(future: F) -> F:
    """The future, waited for unless that would block an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        future.result()
    return future
