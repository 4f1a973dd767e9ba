"""The service in this process is asked as a server is, without what only a network needs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from mint import wire
from mint.client.connection.endpoint import Endpoint
from mint.client.connection.server_connection import ServerConnection
from mint.client.connection.transport import InProcessTransport
from mint.client.connection.transport import Request as Asked
from mint.client.connection.transport import Response as Answer
from mint.types import ForwardBackwardOutput, TensorData


async def mirror(request: Request) -> Response:
    content = await request.body() + b"|" + request.url.query.encode() + b"|" + request.path_params["name"].encode()
    headers = {name: request.headers[name] for name in ("x-own", "x-all", "content-length", "host")}
    return Response(content, status_code=203, headers={f"Seen-{name}": value for name, value in headers.items()})


async def pieces(_request: Request) -> Response:
    async def stream() -> Any:
        for piece in (b"a", b"b", b"c"):
            await asyncio.sleep(0)
            yield piece

    return StreamingResponse(stream())


async def broken(_request: Request) -> Response:
    raise ZeroDivisionError("in the application")


APP = Starlette(
    routes=[
        Route("/below/mirror/{name:path}", mirror, methods=["POST"]),
        Route("/below/pieces", pieces),
        Route("/below/broken", broken),
    ]
)


def ask(method: str, url: str, content: Any = b"", **options: Any) -> Answer:
    transport = InProcessTransport(APP, "http://mint.embedded/below/")
    headers = {"x-all": "always", **options.pop("headers", {})}
    return asyncio.run(transport.send(Asked(method, url, headers, content, **options)))


def test_a_request_arrives_whole_and_so_does_the_answer() -> None:
    response = ask("POST", "mirror/a%20b?c=d%26", b"content", headers={"x-own": "now"})
    assert (response.status_code, response.content) == (203, b"content|c=d%26|a b")
    assert response.url == "http://mint.embedded/below/mirror/a%20b?c=d%26"
    seen = {name.removeprefix("seen-"): value for name, value in response.headers.items() if name.startswith("seen-")}
    assert seen == {"x-own": "now", "x-all": "always", "content-length": "7", "host": "mint.embedded"}


def test_a_body_in_pieces_arrives_whole() -> None:
    async def content() -> AsyncIterator[bytes]:
        for piece in (b"one", b"two"):
            yield piece

    headers = {"x-own": "now", "content-length": "6"}
    assert ask("POST", "mirror/a", content(), headers=headers).content == b"onetwo||a"


def test_an_answer_in_pieces_is_put_together() -> None:
    assert ask("GET", "pieces").content == b"abc"


def test_an_answer_goes_to_its_sink_piece_by_piece_and_a_refusal_does_not() -> None:
    found: list[bytes] = []
    assert ask("GET", "pieces", sink=found.append).content == b""
    assert b"".join(found) == b"abc" and len(found) > 1
    assert ask("GET", "nothing", sink=found.append).content == b"Not Found"
    assert b"".join(found) == b"abc"


def test_an_absolute_url_is_asked_as_it_is() -> None:
    assert ask("GET", "http://mint.embedded/below/pieces").content == b"abc"


def test_an_unknown_route_is_an_answer_and_an_error_of_the_application_is_raised() -> None:
    assert ask("GET", "nothing").status_code == 404
    with pytest.raises(ZeroDivisionError):
        ask("GET", "broken")


def test_the_event_loop_goes_on_while_a_large_answer_is_decoded() -> None:
    row = {"logprobs": TensorData([0.0] * 4, "float32")}
    body = wire.encode_result(ForwardBackwardOutput(loss_fn_outputs=[row] * 60_000))

    async def large(_request: Request) -> Response:
        return Response(body, media_type=wire.Encoding.PROTO.value)

    async def turns_of_the_loop() -> int:
        app = Starlette(routes=[Route("/{path:path}", large)])
        server = ServerConnection(Endpoint(None), InProcessTransport(app, "http://mint.embedded/"))
        answer = asyncio.create_task(server.get("result", ForwardBackwardOutput))
        turns = 0
        while not answer.done():
            await asyncio.sleep(0)
            turns += 1
        assert len(answer.result().loss_fn_outputs) == 60_000
        return turns

    assert asyncio.run(turns_of_the_loop()) > 100
