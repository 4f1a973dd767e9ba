"""`SamplingClient`: samples from one fixed set of weights, and computes logprobs under them."""

from __future__ import annotations

import base64
import concurrent.futures
import itertools
import json
import secrets
import threading
from collections.abc import Callable, Mapping
from typing import Any

from mint.client.async_twins import awaited
from mint.client.connection.endpoint import Endpoint
from mint.client.connection.request_checks import checked
from mint.client.connection.server_connection import EncodedRequest
from mint.client.futures import APIFuture, ClientFuture, wait, wait_async
from mint.client.session import Session
from mint.client.tokenizers import tokenizer_of
from mint.config import read_settings
from mint.errors import InvalidRequestError
from mint.types import ModelInput, SampleResponse, SamplerInfo, SamplingParams, TensorData
from mint.wire.requests import SampleRequest

CLONES = 1_000_000_000
"""A client in another process numbers its requests from a random multiple of this, so that numbers do not collide."""


class SamplingClient:
    """A sampler. Its weights never change: later training steps need a new sampler.

    May be pickled for another process (the pickle holds the API key; `get_sampler_handle` gives a text without it). The
    copy uses the session of the `ServiceClient`, which must stay open.
    """

    def __init__(
        self,
        session: Session,
        sampler_id: str,
        made: concurrent.futures.Future[Any],
        *,
        record_stability_info: bool = False,
        first_number: int = 0,
    ) -> None:
        """Made by `ServiceClient.create_sampling_client` and `TrainingClient.save_weights_and_get_sampling_client`."""
        self._session = session
        self._made = made
        self._info: SamplerInfo | None = None
        self._record_stability_info = record_stability_info
        self._numbers = itertools.count(first_number)
        self.sampling_session_id = sampler_id

    # --- sampling ------------------------------------------------------------------------------------------------

    def sample(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
        target_prompt_logprobs: TensorData | None = None,
        prompt_alt_tokens_k: int = 0,
        prompt_logprobs_last_n: int | None = None,
    ) -> APIFuture[SampleResponse]:
        """`num_samples` continuations of `prompt`, each with the logprob of every token (temperature 1).

        Args:
            prompt: What is continued.
            num_samples: How many continuations; they share the prompt's computation.
            sampling_params: Length, temperature, stops, seed.
            include_prompt_logprobs: Also the logprob of each prompt token (None for the first).
            topk_prompt_logprobs: Also this many most probable tokens at each place of the prompt.
            topk_sample_logprobs: Also this many most probable tokens at each sampled place.
            target_prompt_logprobs: Also the logprobs of these token ids [prompt - 1, K] at each place after the first.
            prompt_alt_tokens_k: Also this many draws from the policy at each place after the first.
            prompt_logprobs_last_n: Limits what is asked about the prompt to this many last tokens.
        """
        request = checked(
            SampleRequest,
            sampling_session_id=self.sampling_session_id,
            seq_id=next(self._numbers),
            prompt=prompt,
            sampling_params=sampling_params,
            num_samples=num_samples,
            prompt_logprobs=include_prompt_logprobs,
            topk_prompt_logprobs=topk_prompt_logprobs,
            topk_sample_logprobs=topk_sample_logprobs,
            target_prompt_logprobs=target_prompt_logprobs,
            prompt_alt_tokens_k=prompt_alt_tokens_k,
            prompt_logprobs_last_n=prompt_logprobs_last_n,
            record_stability_info=self._record_stability_info,
        )
        outgoing = self._session.server.encode(request)
        return APIFuture(self._session.run(self._sample_named(outgoing, request.seq_id), may_cancel=True))

    sample_async = awaited(sample)

    def compute_logprobs(
        self, prompt: ModelInput, prompt_logprobs_last_n: int | None = None
    ) -> APIFuture[list[float | None]]:
        """The logprob of each token of `prompt` given those before it; None for the first, and, where only the last n
        are asked for, for those before them."""
        request = checked(
            SampleRequest,
            sampling_session_id=self.sampling_session_id,
            seq_id=next(self._numbers),
            prompt=prompt,
            sampling_params=SamplingParams(max_tokens=0),
            prompt_logprobs=True,
            prompt_logprobs_last_n=prompt_logprobs_last_n,
        )
        return APIFuture(
            self._session.run(self._prompt_logprobs(self._session.server.encode(request)), may_cancel=True)
        )

    compute_logprobs_async = awaited(compute_logprobs)

    # --- looking up ----------------------------------------------------------------------------------------------

    def get_base_model(self) -> str:
        """The name of the base model."""
        return self._known_info(wait(self._session.run(self._get_info()), None)).base_model

    async def get_base_model_async(self) -> str:
        """Same as `get_base_model`."""
        return self._known_info(await wait_async(self._session.run(self._get_info()), None)).base_model

    def get_model_path(self) -> str | None:
        """The checkpoint that it samples from; None for a base model, and for weights that were not saved by name."""
        path = self._known_info(wait(self._session.run(self._get_info()), None)).model_path
        return None if path is None else str(path)

    def get_tokenizer(self) -> Any:
        """The base model's Hugging Face tokenizer."""
        info = self._known_info(wait(self._session.run(self._get_info()), None))
        return tokenizer_of(self._session, info.tokenizer_id or "", info.base_model)

    # --- in other processes --------------------------------------------------------------------------------------

    def get_sampler_handle(self) -> str:
        """A text from which `from_sampler_handle` makes this client again in any process. It holds no key.

        Raises:
            InvalidRequestError: the service runs in this process, and nowhere else.
        """
        return base64.urlsafe_b64encode(json.dumps(self._identity(), separators=(",", ":")).encode()).decode()

    @staticmethod
    def from_sampler_handle(handle: str, *, api_key: str | None = None) -> SamplingClient:
        """The client of a handle; `api_key` None reads `MINT_API_KEY`.

        Raises:
            InvalidRequestError: the text is no handle.
        """
        try:
            identity = json.loads(base64.urlsafe_b64decode(handle))
            fields = {name: identity[name] for name in ("base_url", "session_id", "sampler_id")}
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidRequestError(
                "is not a text of get_sampler_handle()", field="handle", value=handle, remedy="Pass that text unchanged"
            ) from error
        return _joined_sampler({**fields, "api_key": api_key or read_settings().api_key})

    def __reduce__(self) -> tuple[Callable[..., SamplingClient], tuple[dict[str, Any]]]:
        endpoint = self._session.endpoint
        return _joined_sampler, (
            {**self._identity(), "api_key": endpoint.api_key, "headers": dict(endpoint.extra_headers)},
        )

    def _identity(self) -> dict[str, Any]:
        if self._session.is_embedded:
            raise InvalidRequestError(
                "cannot leave this process: the service runs inside it",
                field="SamplingClient",
                value=self.sampling_session_id,
                remedy="Start a server with `mint serve`, and set MINT_BASE_URL",
            )
        wait(self._made, None)
        return {
            "base_url": self._session.endpoint.base_url,
            "session_id": self._session.open(),
            "sampler_id": self.sampling_session_id,
            "record_stability_info": self._record_stability_info,
        }

    # --- inside --------------------------------------------------------------------------------------------------

    async def _sample(self, outgoing: EncodedRequest) -> SampleResponse:
        await wait_async(self._made, None)
        return await self._session.server.submit("asample", outgoing, SampleResponse)

    async def _sample_named(self, outgoing: EncodedRequest, number: int) -> SampleResponse:
        """The samples, each with the id under which a datum's provenance names it."""
        response = await self._sample(outgoing)
        for index, sequence in enumerate(response.sequences):
            sequence.sequence_id = f"{self.sampling_session_id}:{number}-{index}"
        return response

    async def _prompt_logprobs(self, outgoing: EncodedRequest) -> list[float | None]:
        return (await self._sample(outgoing)).prompt_logprobs or []

    async def _get_info(self) -> SamplerInfo:
        await wait_async(self._made, None)
        return self._info or await self._session.server.get(f"samplers/{self.sampling_session_id}", SamplerInfo)

    def _known_info(self, info: SamplerInfo) -> SamplerInfo:
        self._info = info
        return info


class SamplingClientFuture(ClientFuture[SamplingClient], SamplingClient):
    """A sampler that the server may still be making."""

    client_class = SamplingClient


_joined: dict[tuple[str, str, str], Session] = {}
_joined_lock = threading.Lock()


def _joined_sampler(identity: Mapping[str, Any]) -> SamplingClient:
    """A client of a sampler in the session of another process; the clients of one session share a connection."""
    endpoint = Endpoint(identity["base_url"], identity.get("api_key"), identity.get("headers") or {})
    session_id = identity["session_id"]
    key = (endpoint.url, endpoint.api_key or "", session_id)
    with _joined_lock:
        if key not in _joined:
            _joined[key] = Session(endpoint, joined=session_id)
        session = _joined[key]
    session.open()
    made: concurrent.futures.Future[Any] = concurrent.futures.Future()
    made.set_result(None)
    return SamplingClient(
        session,
        identity["sampler_id"],
        made,
        record_stability_info=bool(identity.get("record_stability_info")),
        first_number=CLONES * (1 + secrets.randbelow(CLONES)),
    )
