"""Signed links lead to this server, whatever host name a request brings along."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from starlette.requests import Request

from mint.config import read_serve_settings
from mint.errors import ForeignPageError, InvalidRequestError
from mint.server.http.public_address import public_address
from tests.server.server_harness import API, Person, make_key, running


@pytest.fixture(scope="module")
def ann(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Person]:
    data_dir = tmp_path_factory.mktemp("links")
    key = make_key(data_dir, "ann")
    with running(data_dir) as server:
        yield Person(server, key)


@pytest.fixture(scope="module")
def archive(ann: Person) -> str:
    return f"{API}/training_runs/{_saved(ann)}/checkpoints/weights/ck/archive"


def _saved(person: Person) -> str:
    model_id = person.model(person.session())
    person.done("save_weights", {"model_id": model_id, "seq_id": 1, "path": "ck"})
    return model_id


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "8.8.8.8", "[::2]:1"])
def test_a_foreign_host_gets_no_link(ann: Person, archive: str, host: str) -> None:
    response = ann.send("GET", archive, None, host=host)
    assert response.status_code == 403 and "location" not in response.headers
    assert "signature" not in response.text and "--public-url" in response.json()["remedy"]


def test_a_name_of_this_machine_is_kept_because_a_tunnel_may_lead_there(ann: Person, archive: str) -> None:
    assert ann.send("GET", archive).headers["location"].startswith(f"{ann.server.url}/api")
    for host in ("localhost:1234", "[::1]:99"):
        assert ann.send("GET", archive, None, host=host).headers["location"].startswith(f"http://{host}/api")


def test_behind_a_proxy_links_begin_with_the_configured_address(tmp_path: Path) -> None:
    key = make_key(tmp_path, "ann")
    with running(tmp_path, public_url="https://mint.example.org/team/") as server:
        person = Person(server, key)
        path = f"{API}/training_runs/{_saved(person)}/checkpoints/weights/ck/archive"
        for host in ("mint.example.org", "evil.example"):
            link = person.send("GET", path, None, host=host).headers["location"]
            assert link.startswith(f"https://mint.example.org/team{API}/downloads/")
        assert httpx.get(link.replace("https://mint.example.org/team", server.url)).status_code == 200


@pytest.mark.parametrize("wrong", ["mint.example.org", "ftp://x", "https://", "https://user:pw@x", "https://x?y=1"])
def test_a_public_url_without_a_host_or_with_more_than_a_path_is_refused(wrong: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"https://mint\.example\.org"):
        read_serve_settings({"public_url": wrong})


def _request(host: str, server: tuple[str, int | None]) -> Request:
    headers = [(b"host", host.encode())]
    return Request(
        {"type": "http", "scheme": "http", "path": "/", "query_string": b"", "headers": headers, "server": server}
    )


def test_beyond_this_machine_links_lead_to_the_address_at_which_a_request_arrived() -> None:
    for host, expected in [
        ("10.0.0.5:8500", "http://10.0.0.5:8500"),
        ("gpu-box:8500", "http://10.0.0.5:8500"),
        ("evil.example", "http://10.0.0.5:8500"),
    ]:
        assert public_address(_request(host, ("10.0.0.5", 8500)), None) == expected
    assert public_address(_request("gpu-box", ("fd00::5", 8500)), None) == "http://[fd00::5]:8500"
    with pytest.raises(ForeignPageError):
        public_address(_request("evil.example", ("/run/mint.sock", None)), None)
