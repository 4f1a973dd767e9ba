"""Bodies are bounded: as sent, as unpacked, in time, and all together."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import select
import socket
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zstandard
from starlette.requests import Request
from waiting import HANG_S

from mint.compose.serving import Server
from mint.errors import BodyTooLargeError, InvalidRequestError, MintError, OverloadedError, UnsupportedBodyError
from mint.server.http.bodies import Bodies, BodyLimits
from mint.server.limits import MIB
from tests.server.server_harness import API, Person, running

LIMITS = BodyLimits(body_bytes=MIB, owner_bytes=2 * MIB, total_bytes=3 * MIB, patience_s=60.0, slowest_bytes_s=MIB)
PLAIN = json.dumps({"text": "x" * 1000}).encode()


def zstd(body: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=3).compress(body)


def read(*chunks: bytes, bodies: Bodies | None = None, **headers: str) -> bytes:
    async def receive() -> dict[str, Any]:
        if not waiting:
            await asyncio.Event().wait()  # the client stays
        await asyncio.sleep(0)
        body = waiting.pop(0)
        return {"type": "http.request", "body": body, "more_body": bool(waiting)}

    async def whole() -> bytes:
        scope = {"type": "http", "method": "POST", "headers": encoded}
        body = await (bodies or Bodies(LIMITS)).read(Request(scope, receive), "ann")
        body.release()
        return body.content

    waiting = [*chunks] or [b""]
    encoded = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return asyncio.run(whole())


def refusal(read_it: Callable[[], bytes]) -> MintError:
    with pytest.raises(MintError) as caught:
        read_it()
    return caught.value


@pytest.mark.parametrize(
    ("pack", "encoding"),
    [(bytes, "identity"), (zstd, "zstd"), (gzip.compress, "gzip"), (gzip.compress, "x-gzip"), (zstd, "ZSTD")],
)
def test_a_body_arrives_as_it_was_before_it_was_packed(pack: Callable[[bytes], bytes], encoding: str) -> None:
    packed = pack(PLAIN)
    middle = len(packed) // 2
    assert read(packed[:middle], packed[middle:], content_encoding=encoding) == PLAIN


@pytest.mark.parametrize(("pack", "encoding"), [(zstd, "zstd"), (gzip.compress, "gzip")])
def test_several_packed_pieces_are_one_body(pack: Callable[[bytes], bytes], encoding: str) -> None:
    assert read(pack(PLAIN) + pack(PLAIN), content_encoding=encoding) == PLAIN * 2


@pytest.mark.parametrize(("pack", "encoding"), [(zstd, "zstd"), (gzip.compress, "gzip")])
def test_a_bomb_is_refused_and_never_unpacked(pack: Callable[[bytes], bytes], encoding: str) -> None:
    bomb = pack(bytes(80 * MIB))
    assert len(bomb) < MIB
    bodies = Bodies(LIMITS)
    error = refusal(lambda: read(bomb, bodies=bodies, content_encoding=encoding))
    assert isinstance(error, BodyTooLargeError) and error.status == 413
    assert bodies.held_bytes == 0


def test_a_stream_that_asks_for_much_memory_is_refused() -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=30, write_content_size=False)
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    error = refusal(lambda: read(packer.compress(PLAIN) + packer.flush(), content_encoding="zstd"))
    assert isinstance(error, InvalidRequestError) and "memory" in str(error)


@pytest.mark.parametrize(("pack", "encoding"), [(zstd, "zstd"), (gzip.compress, "gzip")])
@pytest.mark.parametrize("seed", range(40))
def test_damaged_packing_is_refused_with_a_sentence(pack: Callable[[bytes], bytes], encoding: str, seed: int) -> None:
    chance = random.Random(seed)
    packed = bytearray(pack(bytes(chance.randbytes(2000))))
    if seed % 2:
        del packed[chance.randrange(1, len(packed)) :]
    else:
        packed[:4] = chance.randbytes(4)
    error = refusal(lambda: read(bytes(packed), content_encoding=encoding))
    assert error.status in (400, 413) and str(error)


@pytest.mark.parametrize("encoding", ["br", "deflate", "gzip, zstd", "compress", "zstd, zstd", "\x01"])
def test_an_encoding_that_is_not_known_is_named(encoding: str) -> None:
    error = refusal(lambda: read(zlib.compress(PLAIN), content_encoding=encoding))
    assert isinstance(error, UnsupportedBodyError) and error.status == 415


def test_a_declared_length_is_refused_before_anything_is_read() -> None:
    async def nothing() -> dict[str, Any]:
        raise AssertionError("the body was read")

    async def ask() -> None:
        scope = {"type": "http", "method": "POST", "headers": [(b"content-length", b"9" * 30)]}
        await Bodies(LIMITS).read(Request(scope, nothing), "ann")

    with pytest.raises(BodyTooLargeError):
        asyncio.run(ask())


def test_a_body_without_a_length_is_refused_once_it_is_too_large() -> None:
    chunks = [bytes(MIB // 2)] * 3
    assert isinstance(refusal(lambda: read(*chunks)), BodyTooLargeError)


@pytest.mark.parametrize("chunks", [[], [b"a", b"b"]], ids=["nothing came", "some of it came"])
def test_a_body_that_does_not_arrive_in_time_is_given_up(chunks: list[bytes]) -> None:
    async def receive() -> dict[str, Any]:
        if not chunks:
            await asyncio.Event().wait()  # the rest never comes
        return {"type": "http.request", "body": chunks.pop(0), "more_body": True}

    async def ask() -> None:
        scope = {"type": "http", "method": "POST", "headers": []}
        await Bodies(replace(LIMITS, patience_s=0.05)).read(Request(scope, receive), "ann")

    error = refusal(lambda: asyncio.run(ask()))
    assert isinstance(error, OverloadedError) and "slowly" in str(error)


def test_one_owner_cannot_take_all_the_memory_and_all_of_it_comes_back() -> None:
    async def hold(owner: str) -> None:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": bytes(MIB), "more_body": False}

        body = await bodies.read(Request({"type": "http", "method": "POST", "headers": []}, receive), owner)
        await let_go.wait()
        body.release()
        body.release()  # again, and counts once

    async def five_at_once() -> list[Any]:
        under_way = [asyncio.ensure_future(hold(owner)) for owner in ("ann", "ann", "ann", "bob", "carl")]
        await asyncio.wait(under_way, return_when=asyncio.FIRST_EXCEPTION)
        while sum(one.done() for one in under_way) < 2:
            await asyncio.sleep(0)
        let_go.set()
        return await asyncio.gather(*under_way, return_exceptions=True)

    bodies, let_go = Bodies(LIMITS), asyncio.Event()
    outcomes = [type(outcome) for outcome in asyncio.run(five_at_once())]
    # two of Ann's and one of Bob's fit; Ann's third is over her share, Carl's is over everybody's
    assert outcomes == [type(None), type(None), OverloadedError, type(None), OverloadedError]
    assert bodies.held_bytes == 0


# --- through a socket --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Waits for as long as it takes, so that no other test depends on who is slow."""
    with running(tmp_path_factory.mktemp("bodies"), max_body_mb=1, body_timeout_s=3600.0) as server:
        yield server


def talk(server: Server, *parts: bytes) -> bytes:
    """Sends parts as they are, and reads until the server closes or has answered."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=HANG_S) as connection:
        for part in parts:
            connection.sendall(part)
        answer = b""
        while b"\r\n\r\n" not in answer or not answer.partition(b"\r\n\r\n")[2]:
            received = connection.recv(65536)
            if not received:
                return answer
            answer += received
        return answer


HEAD = f"POST {API}/create_session HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode()


def test_lying_lengths_get_a_sentence(server: Server) -> None:
    assert talk(server, HEAD + b"Content-Length: 99999999\r\n\r\n").startswith(b"HTTP/1.1 413")
    assert b" 400 " in talk(server, HEAD + b"Content-Length: many\r\n\r\n").splitlines()[0]
    chunk = b"%x\r\n" % MIB + bytes(MIB) + b"\r\n"
    chunked = talk(server, HEAD + b"Transfer-Encoding: chunked\r\n\r\n", chunk, chunk)
    assert chunked.startswith(b"HTTP/1.1 413") and b"too large" in chunked


def test_a_body_that_comes_too_slowly_gets_a_sentence(tmp_path: Path) -> None:
    with running(tmp_path, body_timeout_s=1.0) as impatient:
        slow = talk(impatient, HEAD + b"Content-Length: 10\r\n\r\n{")
    assert slow.startswith(b"HTTP/1.1 429") and b"too slowly" in slow


def test_a_large_body_is_answered_although_it_is_not_read(server: Server) -> None:
    response = Person(server).send("POST", f"{API}/create_session", bytes(20 * MIB))
    assert response.status_code == 413 and "split the data" in response.json()["remedy"]


def test_heads_that_never_end_do_not_fill_the_memory(server: Server) -> None:
    line = b"X-Filler: " + b"a" * 8000 + b"\r\n"
    try:
        answer = talk(server, HEAD, *[line] * 100)
    except (ConnectionResetError, BrokenPipeError):
        return
    assert answer == b"" or b" 400 " in answer.splitlines()[0]


def test_many_slow_senders_keep_nobody_else_waiting(server: Server) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    slow = [socket.create_connection((host, int(port))) for _ in range(200)]
    try:
        for number, connection in enumerate(slow):
            connection.sendall(HEAD if number % 2 else HEAD + b"Content-Length: 100\r\n\r\n{")
        assert Person(server).session()
        assert select.select(slow, [], [], 0)[0] == []  # not one of them is done with
    finally:
        for connection in slow:
            connection.close()


def test_packed_requests_are_understood(server: Server) -> None:
    person = Person(server)
    for packed, encoding in ((zstd(b"{}"), "zstd"), (gzip.compress(b"{}"), "gzip")):
        response = person.send("POST", f"{API}/create_session", packed, content_encoding=encoding)
        assert response.status_code == 200, response.text


def test_a_refused_body_never_gets_an_empty_answer(server: Server, tmp_path: Path) -> None:
    person = Person(server)
    for body in (b"", b"{", b"[]", b"null", b"\xff\xfe", b"{}" * 3, b"[" * 100_000):
        for path in ("create_model", "optim_step", "asample", "retrieve_future", "session_heartbeat"):
            response = person.send("POST", f"{API}/{path}", body)
            assert 400 <= response.status_code < 500 and response.json()["error"], (path, body, response.text)


def test_concurrent_large_bodies_are_bounded_or_put_off(server: Server) -> None:
    statuses: list[int] = []

    def send() -> None:
        packed = zstd(b'{"tags":["' + b"x" * (900 * 1024) + b'"]}')
        statuses.append(
            Person(server).send("POST", f"{API}/create_session", packed, content_encoding="zstd").status_code
        )

    threads = [threading.Thread(target=send) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(statuses) == 20 and set(statuses) <= {200, 400, 429}
