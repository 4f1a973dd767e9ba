"""Nobody gets in by mistake: loopback unless there are keys, and no web page where there are none."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mint.cli.main import app
from mint.errors import InvalidRequestError
from mint.server.http.auth import is_loopback
from mint.server.ops.preflight import decide_access
from mint.server.store.keys import KeyCount, count_keys
from tests.server.server_harness import API, Person, make_key, running

NONE, REVOKED, ONE = KeyCount(), KeyCount(1, 0), KeyCount(2, 1)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_is_this_machine(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.168.1.4", "8.8.8.8", "::ffff:8.8.8.8", "no.such.invalid"])
def test_everything_else_is_not(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize(
    ("host", "api_keys", "insecure", "keys", "asks"),
    [
        ("127.0.0.1", None, False, NONE, False),
        ("127.0.0.1", None, False, ONE, True),
        ("127.0.0.1", None, False, REVOKED, True),
        ("127.0.0.1", False, False, ONE, False),
        ("127.0.0.1", True, False, NONE, True),
        ("0.0.0.0", None, False, ONE, True),
        ("0.0.0.0", True, False, ONE, True),
        ("0.0.0.0", None, True, NONE, False),
        ("0.0.0.0", False, True, ONE, False),
        ("0.0.0.0", None, False, NONE, None),
        ("0.0.0.0", None, False, REVOKED, None),
        ("0.0.0.0", True, False, NONE, None),
        ("0.0.0.0", False, False, ONE, None),
        ("", None, False, NONE, None),
        ("::", None, False, NONE, None),
        ("192.168.1.4", False, False, ONE, None),
    ],
)
def test_who_is_asked_for_a_key_and_what_does_not_start(
    host: str, api_keys: bool | None, insecure: bool, keys: KeyCount, asks: bool | None
) -> None:
    if asks is None:
        with pytest.raises(InvalidRequestError, match="reach this address"):
            decide_access(host, api_keys=api_keys, insecure=insecure, keys=keys)
    else:
        assert decide_access(host, api_keys=api_keys, insecure=insecure, keys=keys).asks_keys is asks


def test_keys_are_counted_without_touching_the_database(tmp_path: Path) -> None:
    assert count_keys(tmp_path) == KeyCount() and list(tmp_path.iterdir()) == []
    make_key(tmp_path, "ann")
    assert count_keys(tmp_path) == KeyCount(1, 1)


@pytest.mark.parametrize("more", [[], ["--no-api-keys"], ["--api-keys"]], ids=str)
def test_the_command_refuses_an_address_that_others_reach_and_says_why(tmp_path: Path, more: list[str]) -> None:
    folder = tmp_path / "data"
    arguments = ["serve", "--host", "0.0.0.0", "--port", "0", "--data-dir", str(folder), *more]
    refused = CliRunner().invoke(app, arguments)
    assert refused.exit_code == 1 and "reach this address" in refused.output
    assert not folder.exists()


def listening(server_url: str) -> list[str]:
    """The addresses that the server's port is listened on, as the kernel has them."""
    port = int(server_url.rpartition(":")[2])
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            address, _, hexport = line.split()[1].partition(":")
            if line.split()[3] == "0A" and int(hexport, 16) == port:
                found.append(address)
    return found


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads the kernel's table")
def test_the_default_address_is_loopback_in_the_kernels_own_table(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        (address,) = listening(server.url)
        assert ipaddress.ip_address(bytes.fromhex(address)[::-1]).is_loopback


def test_beyond_loopback_keys_are_asked_for(tmp_path: Path) -> None:
    key = make_key(tmp_path, "ann")
    with running(tmp_path, host="0.0.0.0") as server:
        server.url = server.url.replace("0.0.0.0", "127.0.0.1")
        assert Person(server).send("POST", f"{API}/create_session", {}).status_code == 401
        assert Person(server, key).session()
        # with keys, the name under which a server is called is its own affair
        response = Person(server, key).send("POST", f"{API}/create_session", {}, host="mint.example.org")
        assert response.status_code == 200


def test_insecure_lets_programs_in_and_still_no_foreign_page(tmp_path: Path) -> None:
    with running(tmp_path, host="0.0.0.0", insecure=True) as server:
        server.url = server.url.replace("0.0.0.0", "127.0.0.1")
        person = Person(server)
        assert person.send("POST", f"{API}/create_session", {}, host="box:8500").status_code == 200
        assert person.send("POST", f"{API}/create_session", {}, origin="http://evil.org").status_code == 403


@pytest.fixture(scope="module")
def keyless(tmp_path_factory: pytest.TempPathFactory):
    with running(tmp_path_factory.mktemp("keyless")) as server:
        yield Person(server)


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.org"},
        {"host": "evil.org:8500"},
        {"host": "localhost.evil.org"},
        {"host": "127.0.0.1.evil.org"},
        {"host": "8.8.8.8"},
        {"host": "[::2]"},
        {"host": "[broken"},
        {"host": "0.0.0.0:8500"},
        {"origin": "http://evil.org"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1"},
        {"origin": "http://localhost:3000"},
        {"origin": "http://[broken"},
    ],
    ids=str,
)
@pytest.mark.parametrize("path", [f"{API}/create_session", "/openapi.json"])
def test_a_foreign_page_gets_nothing_from_a_server_without_keys(
    keyless: Person, headers: dict[str, str], path: str
) -> None:
    method, body = ("POST", {}) if path.startswith(API) else ("GET", None)
    response = keyless.send(method, path, body, **headers)
    assert response.status_code == 403 and response.json()["error"], response.text


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:1", "127.0.0.1:99", "[::1]:8500", "mint.localhost", "LOCALHOST"]
)
def test_programs_on_this_machine_are_let_through(keyless: Person, host: str) -> None:
    assert keyless.send("POST", f"{API}/create_session", {}, host=host).status_code == 200


def test_a_page_of_the_servers_own_is_let_through(keyless: Person) -> None:
    origin = keyless.server.url
    assert keyless.send("POST", f"{API}/create_session", {}, origin=origin).status_code == 200


def test_without_a_host_nothing_is_answered(keyless: Person) -> None:
    host, port = keyless.server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(b"GET /openapi.json HTTP/1.0\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 403")
