"""The routes of a sampler in vLLM's protocol, over a `SamplingThread`. Each request carries the worker's own key."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from mint.cluster.external.lora_archive import read_archive
from mint.cluster.external.vllm_protocol import GENERATE, HEALTH, LOAD_LORA, MODELS, UNLOAD_LORA
from mint.cluster.worker.requests import answer_of, end_parts, job_of, token_part
from mint.cluster.worker.sampling_thread import SamplingThread
from mint.engine.protocol import BaseInfo, SampleJob
from mint.errors import MintError, NotFoundError

log = logging.getLogger(__name__)

Fetch = Callable[[str], Awaitable[bytes]]
"""Fetches the archive of a lora from the server, by the path that the server has named."""


class WorkerRoutes:
    """The application of one worker, which has one base model."""

    def __init__(
        self, thread: SamplingThread, base: BaseInfo, root: str, *, vocabulary: Sequence[bytes], key: str, fetch: Fetch
    ) -> None:
        """`root` is the folder of the base; `key` is what requests must carry."""
        self._thread = thread
        self._base = base
        self._root = root
        self._vocabulary = vocabulary
        self._key = key.encode()
        self._fetch = fetch
        self._loras: set[str] = set()

    def app(self) -> Starlette:
        """The application."""
        rows = {
            ("GET", HEALTH): self._health,
            ("GET", MODELS): self._models,
            ("POST", LOAD_LORA): self._load,
            ("POST", UNLOAD_LORA): self._unload,
            ("POST", GENERATE): self._generate,
        }
        return Starlette(
            routes=[Route(path, self._guarded(answer), methods=[method]) for (method, path), answer in rows.items()]
        )

    def _guarded(self, answer: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def guarded(request: Request) -> Response:
            given = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
            if not hmac.compare_digest(given, self._key):
                return _error(401, "the key is not that of this worker")
            try:
                return await answer(request)
            except NotFoundError as error:
                return _error(404, str(error))
            except MintError as error:
                return _error(400, str(error))
            except Exception as error:  # the boundary: the server tries again, here or elsewhere
                log.exception("%s failed", request.url.path)
                return _error(500, f"{type(error).__name__}: {error}")

        return guarded

    async def _health(self, _request: Request) -> Response:
        return Response()

    async def _models(self, _request: Request) -> Response:
        base: dict[str, Any] = {"id": self._base.name, "root": self._root, "parent": None}
        base["max_model_len"] = self._base.context_length
        loras = [{"id": name, "root": name, "parent": self._base.name} for name in sorted(self._loras)]
        return JSONResponse({"data": [base, *loras]})

    async def _load(self, request: Request) -> Response:
        body = await request.json()
        name = body["lora_name"]
        if name not in self._loras:
            lora, weights = read_archive(await self._fetch(body["lora_path"]))
            load = self._thread.call(lambda engine: engine.load_weights(name, self._base.name, lora, weights))
            await asyncio.wrap_future(load)
            self._loras.add(name)
        return Response(f"LoRA {name} is loaded")

    async def _unload(self, request: Request) -> Response:
        name = (await request.json())["lora_name"]
        if name not in self._loras:
            raise NotFoundError("is not loaded", field="lora_name", value=name)
        self._loras.discard(name)
        await asyncio.wrap_future(self._thread.call(lambda engine: engine.drop_weights(name)))
        return Response(f"LoRA {name} is removed")

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        name = body.get("model") or self._base.name
        if name not in (self._base.name, *self._loras):
            raise NotFoundError("does not exist", field="model", value=name)
        weights_id = None if name == self._base.name else name
        job = job_of(body, self._base.name, weights_id, self._vocabulary)
        if body.get("stream"):
            return StreamingResponse(self._stream(job, name), media_type="text/event-stream")
        key, future = self._thread.add(job)
        result = asyncio.wrap_future(future)
        gone = asyncio.ensure_future(_gone(request))
        try:
            await asyncio.wait({result, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not result.done():
                return _error(499, "nobody waits for the answer")
            if result.result().error is not None:
                return _error(500, str(result.result().error))
            return JSONResponse(answer_of(job, result.result(), name))
        finally:
            gone.cancel()
            if not result.done():
                self._thread.cancel(key)

    async def _stream(self, job: SampleJob, name: str) -> AsyncIterator[str]:
        loop = asyncio.get_running_loop()
        parts: asyncio.Queue[Mapping[str, Any] | None] = asyncio.Queue()
        tell = loop.call_soon_threadsafe

        def hear(sample: int, token: int, logprob: float) -> None:
            tell(parts.put_nowait, token_part(sample, token, logprob))

        key, future = self._thread.add(job, hear)
        future.add_done_callback(lambda _ended: tell(parts.put_nowait, None))
        try:
            while (part := await parts.get()) is not None:
                yield _event(part)
            failure = future.exception()
            error = f"{type(failure).__name__}: {failure}" if failure is not None else future.result().error
            if error is not None:
                yield _event({"error": {"code": 500, "message": error}})
                return
            yield _event(end_parts(future.result(), name))
            yield "data: [DONE]\n\n"
        finally:
            self._thread.cancel(key)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _event(content: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "code": status}}, status_code=status)
