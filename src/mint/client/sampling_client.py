"""Samples from one fixed set of weights, and reads logprobs under them."""

from __future__ import annotations

import concurrent.futures
import itertools
from typing import Any

import mint.wire as wire
from mint.client.futures import APIFuture, ClientFuture, wait, wait_async
from mint.client.http import Session
from mint.tokenizer import load_tokenizer
from mint.types import ModelInput, SampleResponse, SamplerInfo, SamplingParams
from mint.wire.requests import SampleRequest


class SamplingClient(ClientFuture):
    """A sampler, and the future of its making. Its weights never change: later training steps make new samplers."""

    def __init__(self, session: Session, sampler_id: str, made: concurrent.futures.Future[Any]) -> None:
        """Made by `ServiceClient.create_sampling_client` and `TrainingClient.save_weights_and_get_sampling_client`."""
        self._session = session
        self._made = made
        self._info: SamplerInfo | None = None
        self._numbers = itertools.count()
        self.sampling_session_id = sampler_id

    def sample(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
    ) -> APIFuture[SampleResponse]:
        """`num_samples` continuations of `prompt`, each with the logprob of every token (temperature 1)."""
        request = SampleRequest(
            sampling_session_id=self.sampling_session_id,
            seq_id=next(self._numbers),
            prompt=prompt,
            sampling_params=sampling_params,
            num_samples=num_samples,
            prompt_logprobs=include_prompt_logprobs,
            topk_prompt_logprobs=topk_prompt_logprobs,
        )
        return APIFuture(self._session.run(self._sample(wire.encode(request))))

    async def sample_async(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
    ) -> SampleResponse:
        """As `sample`; awaiting it gives the response itself."""
        return await self.sample(prompt, num_samples, sampling_params, include_prompt_logprobs, topk_prompt_logprobs)

    def compute_logprobs(self, prompt: ModelInput) -> APIFuture[list[float | None]]:
        """The logprob of each token of `prompt` given those before it; None for the first."""
        only_prompt = SamplingParams(max_tokens=0)
        request = SampleRequest(
            sampling_session_id=self.sampling_session_id,
            seq_id=next(self._numbers),
            prompt=prompt,
            sampling_params=only_prompt,
            prompt_logprobs=True,
        )
        return APIFuture(self._session.run(self._prompt_logprobs(wire.encode(request))))

    async def compute_logprobs_async(self, prompt: ModelInput) -> list[float | None]:
        """As `compute_logprobs`; awaiting it gives the list itself."""
        return await self.compute_logprobs(prompt)

    def get_base_model(self) -> str:
        """The name of the base model."""
        return self._known_info(wait(self._session.run(self._get_info()), None)).base_model

    async def get_base_model_async(self) -> str:
        """As `get_base_model`."""
        return self._known_info(await wait_async(self._session.run(self._get_info()), None)).base_model

    def get_tokenizer(self) -> Any:
        """The base model's Hugging Face tokenizer."""
        info = self._known_info(wait(self._session.run(self._get_info()), None))
        return load_tokenizer(info.tokenizer_id or "", info.base_model)

    async def _sample(self, body: bytes) -> SampleResponse:
        await wait_async(self._made, None)
        return await self._session.submit("asample", body, SampleResponse)

    async def _prompt_logprobs(self, body: bytes) -> list[float | None]:
        return (await self._sample(body)).prompt_logprobs or []

    async def _get_info(self) -> SamplerInfo:
        await wait_async(self._made, None)
        return self._info or await self._session.get(f"samplers/{self.sampling_session_id}", SamplerInfo)

    def _known_info(self, info: SamplerInfo) -> SamplerInfo:
        self._info = info
        return info
