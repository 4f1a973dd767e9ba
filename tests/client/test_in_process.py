"""The service in this process is asked as a server is, without what only a network needs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from mint.client.transport import InProcess


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


def ask(method: str, path: str, content: bytes | None = None, **headers: str) -> Any:
    caller = InProcess(APP, "http://mint.embedded/below/", {"X-All": "always", "x-own": "usually"})
    return asyncio.run(caller.request(method, path, content=content, headers=headers))


def test_a_request_arrives_whole_and_so_does_the_answer() -> None:
    reply = ask("POST", "mirror/a%20b?c=d%26", b"content", **{"x-own": "now"})
    assert (reply.status_code, reply.content) == (203, b"content|c=d%26|a b")
    assert reply.url == "http://mint.embedded/below/mirror/a%20b?c=d%26"
    seen = {name.removeprefix("seen-"): value for name, value in reply.headers.items() if name.startswith("seen-")}
    assert seen == {"x-own": "now", "x-all": "always", "content-length": "7", "host": "mint.embedded"}


def test_an_answer_in_pieces_is_put_together() -> None:
    assert ask("GET", "pieces").content == b"abc"


def test_an_unknown_route_is_an_answer_and_an_error_of_the_application_is_raised() -> None:
    assert ask("GET", "nothing").status_code == 404
    with pytest.raises(ZeroDivisionError):
        ask("GET", "broken")
