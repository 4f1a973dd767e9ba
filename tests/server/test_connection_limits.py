"""What a client without a key can make the event loop do is limited: headers, requests at once, pieces of a body."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator

import pytest
from server_harness import API, Person, running
from waiting import HANG_S

from mint.compose.http_connection import MAX_HEADERS, MAX_PIPELINED, PIECE_BYTES, SMALL_PIECES
from mint.compose.serving import Server

GET = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
POST = f"POST {API}/create_session HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode()
LAST = b"OPTIONS / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("connections"), body_timeout_s=3600.0) as server:
        yield server


def talk(server: Server, sent: bytes) -> bytes:
    """Sends requests, and another one that ends the connection, and reads until the server closes it."""
    host, port = server.url.removeprefix("http://").split(":")
    received = b""
    with socket.create_connection((host, int(port)), timeout=HANG_S) as connection:
        try:
            connection.sendall(sent + LAST)
            while chunk := connection.recv(65536):
                received += chunk
        except ConnectionError:
            pass  # the server closed before it had read everything
    return received


def statuses(received: bytes) -> list[int]:
    """Those of the responses, without the one to `LAST`."""
    found = [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+) ", received)]
    return found[:-1] if found[-1:] == [405] else found


def test_too_many_headers_are_refused(server: Server) -> None:
    assert statuses(talk(server, GET + b"a: b\r\n" * (MAX_HEADERS - 1) + b"\r\n")) == [200]
    refused = talk(server, GET + b"a: b\r\n" * MAX_HEADERS + b"\r\n")
    assert statuses(refused) == [431] and b"at most 128" in refused


def test_too_many_headers_behind_a_body_are_refused(server: Server) -> None:
    assert statuses(talk(server, CHUNKED + b"2\r\n{}\r\n0\r\n" + b"a: b\r\n" * MAX_HEADERS + b"\r\n")) == [431]


def test_a_few_requests_at_once_are_answered_in_turn(server: Server) -> None:
    assert statuses(talk(server, (GET + b"\r\n") * MAX_PIPELINED)) == [200] * MAX_PIPELINED


def test_many_requests_at_once_end_the_connection(server: Server) -> None:
    """Nobody takes the refusal for the response to the first request, which may have been accepted."""
    assert len(statuses(talk(server, (GET + b"\r\n") * 5000))) <= MAX_PIPELINED + 1
    assert 400 not in statuses(talk(server, (GET + b"\r\n") * 5000))


def test_a_client_that_reads_may_send_any_number_of_requests(server: Server) -> None:
    person = Person(server)
    assert {person.send("GET", "/healthz").status_code for _ in range(3 * MAX_PIPELINED)} == {200}


def test_a_body_in_tiny_pieces_is_refused(server: Server) -> None:
    refused = talk(server, CHUNKED + b"1\r\n \r\n" * (SMALL_PIECES + PIECE_BYTES))
    assert statuses(refused) == [400] and b"too many pieces" in refused
    many = CHUNKED + (b"%x\r\n" % PIECE_BYTES + b" " * PIECE_BYTES + b"\r\n") * 5000 + b"2\r\n{}\r\n0\r\n\r\n"
    taken = talk(server, many)
    assert len(statuses(taken)) == 1 and b"pieces" not in taken, taken


def test_a_refusal_follows_no_response_to_the_same_request(server: Server) -> None:
    """A request without a route is answered before its body is there."""
    sent = CHUNKED.replace(b"create_session", b"nothing") + b"1\r\n \r\n" * 5000
    assert statuses(talk(server, sent)) in ([404], [400])


def test_a_broken_request_behind_another_one_is_not_answered_before_it(server: Server) -> None:
    assert statuses(talk(server, b"no request\r\n\r\n")) == [400]
    assert statuses(talk(server, GET + b"\r\nno request\r\n\r\n")) in ([200], [])
