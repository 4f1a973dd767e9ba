"""Questions about what is saved, apart from any model in training."""

from __future__ import annotations

import concurrent.futures
from typing import TypeVar

from mint.client.futures import APIFuture
from mint.client.http import Session
from mint.types import GetServerCapabilitiesResponse, SamplerInfo, WeightsInfoResponse
from mint.wire.requests import WeightsInfoRequest

T = TypeVar("T")


class RestClient:
    """Each method returns a future; the `…_async` twins return the value."""

    def __init__(self, session: Session) -> None:
        """Made by `ServiceClient.create_rest_client`."""
        self._session = session

    def get_weights_info_by_tinker_path(self, tinker_path: str) -> APIFuture[WeightsInfoResponse]:
        """What a checkpoint was saved from."""
        _ = self._session.session_id
        request = WeightsInfoRequest(tinker_path=tinker_path)
        return _api(self._session.run(self._session.post("weights_info", request, WeightsInfoResponse)))

    async def get_weights_info_by_tinker_path_async(self, tinker_path: str) -> WeightsInfoResponse:
        """As `get_weights_info_by_tinker_path`."""
        return await self.get_weights_info_by_tinker_path(tinker_path)

    def get_sampler(self, sampler_id: str) -> APIFuture[SamplerInfo]:
        """What a sampler samples from."""
        _ = self._session.session_id
        return _api(self._session.run(self._session.get(f"samplers/{sampler_id}", SamplerInfo)))

    async def get_sampler_async(self, sampler_id: str) -> SamplerInfo:
        """As `get_sampler`."""
        return await self.get_sampler(sampler_id)

    def get_server_capabilities(self) -> APIFuture[GetServerCapabilitiesResponse]:
        """The base models on offer."""
        _ = self._session.session_id
        answer = self._session.get("get_server_capabilities", GetServerCapabilitiesResponse)
        return _api(self._session.run(answer))


def _api(future: concurrent.futures.Future[T]) -> APIFuture[T]:
    return APIFuture(future)
