"""Where keys are asked for: a browser shows one once, gets a cookie that is worth nothing elsewhere, and runs are seen
by who runs the server.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from starlette.requests import Request

from mint.compose.serving import Server
from mint.dashboard import login as login_module
from mint.dashboard.app import ROUTES, DashboardRoute
from mint.dashboard.login import Login
from mint.dashboard.pages import safe_place
from mint.errors import AuthenticationError
from mint.server.callers import Caller
from mint.server.store.database import Database
from mint.server.store.journal import JOURNAL_FILE
from mint.server.store.keys import ApiKeys
from tests.dashboard.dashboard_harness import API, showing, write_run
from tests.server.server_harness import BASE, make_key, running

RUN = "math-1"
CLOSED = ["/", "/service", f"/runs/{RUN}", f"/runs/{RUN}/rollouts", f"/compare?run={RUN}"]
CLOSED_JSON = [f"{API}/{path}" for path in ("runs", "runs/events", f"runs/{RUN}", f"runs/{RUN}/rollouts", "service")]


class Place:
    """A server that asks for keys, of which the operator has one."""

    def __init__(self, server: Server, key: str, folder: Path) -> None:
        self.server, self.key, self.folder = server, key, folder

    def browser(self) -> httpx.Client:
        return httpx.Client(base_url=self.server.url, timeout=30)

    def enter(self, browser: httpx.Client, key: str, *, then: str = "/", **headers: str) -> httpx.Response:
        named = {"origin": self.server.url, **headers}
        return browser.post("/login", params={"next": then}, data={"key": key}, headers=named)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("home")
    write_run(folder / "runs" / RUN, 2)
    key = make_key(folder, "ann")
    with running(folder, operators=["ann"]) as server:
        yield Place(server, key, folder)


@pytest.fixture
def inside(place: Place) -> Iterator[httpx.Client]:
    with place.browser() as browser:
        assert place.enter(browser, place.key).status_code == 303
        yield browser


@pytest.mark.parametrize("row", [row for row in ROUTES if not row.is_open], ids=lambda row: f"{row.method} {row.path}")
def test_no_route_answers_without_a_key_or_to_one_that_is_none(place: Place, row: DashboardRoute) -> None:
    path = re.sub(r"\{run\}", RUN, row.path)
    path = re.sub(r"\{\w+:int\}", "1", path)
    with place.browser() as stranger:
        for headers in (
            {},
            {"x-api-key": "tml-mint-wrong"},
            {"cookie": f"mint_session_{stranger.base_url.port}=guess"},
        ):
            answer = stranger.request(row.method, path, headers=headers)
            assert answer.status_code == (303 if row.kind == "page" else 401), answer.text
            assert "math-1" not in answer.text.replace(path, "")


@pytest.mark.parametrize("path", CLOSED)
def test_a_page_asks_for_a_key_and_leads_back(place: Place, path: str) -> None:
    with place.browser() as browser:
        asked = browser.get(path)
        assert asked.status_code == 303 and asked.headers["location"].startswith("/login?next=%2F")
        entered = place.enter(browser, place.key, then=path)
        assert entered.status_code == 303 and entered.headers["location"] == path
        assert browser.get(path).status_code == 200


@pytest.mark.parametrize("path", CLOSED_JSON)
def test_the_api_asks_for_a_key_and_takes_it_as_programs_send_it(place: Place, path: str) -> None:
    with place.browser() as program:
        refused = program.get(path)
        assert refused.status_code == 401 and refused.headers["www-authenticate"] == "Bearer"
        if not path.endswith("events"):
            for headers in ({"authorization": f"Bearer {place.key}"}, {"x-api-key": place.key}):
                assert program.get(path, headers=headers).status_code == 200
        assert program.get(path, headers={"authorization": "Bearer tml-mint-wrong"}).status_code == 401


def test_the_cookie_is_not_the_key_and_no_script_reads_it(place: Place) -> None:
    with place.browser() as browser:
        cookie = place.enter(browser, place.key).headers["set-cookie"]
        assert place.key not in cookie and "HttpOnly" in cookie and "SameSite=strict" in cookie and "Path=/" in cookie
        assert "Secure" not in cookie
        secure = place.enter(browser, place.key, **{"x-forwarded-proto": "https"}).headers["set-cookie"]
        assert "Secure" in secure


def test_a_wrong_key_opens_nothing_and_is_not_repeated(place: Place) -> None:
    with place.browser() as browser:
        for wrong in ("", "tml-mint-wrong-key-of-somebody", "ß" * 40):
            answer = place.enter(browser, wrong)
            assert answer.status_code == 401 and "API key" in answer.text and "set-cookie" not in answer.headers
            assert not wrong or wrong not in answer.text


@pytest.mark.parametrize(
    "headers", [{"origin": "http://evil.org"}, {"origin": "null"}, {"sec-fetch-site": "same-site"}]
)
def test_a_foreign_page_can_neither_log_in_nor_out(place: Place, inside: httpx.Client, headers: dict[str, str]) -> None:
    with place.browser() as browser:
        assert place.enter(browser, place.key, **headers).status_code == 403
    assert inside.post("/logout", headers={"origin": place.server.url, **headers}).status_code == 403
    assert inside.get("/").status_code == 200


def test_leaving_ends_the_session_on_the_server_too(place: Place, inside: httpx.Client) -> None:
    cookies = dict(inside.cookies)
    left = inside.post("/logout", headers={"origin": place.server.url})
    assert left.status_code == 303 and left.headers["location"] == "/login"
    with httpx.Client(base_url=place.server.url, cookies=cookies) as kept:
        assert kept.get("/").status_code == 303


def test_a_session_samples_from_the_servers_own_pages_and_from_no_other(place: Place, inside: httpx.Client) -> None:
    body = {"model": BASE, "prompt": [5, 6], "max_tokens": 3}
    own = {"origin": place.server.url}
    assert inside.post("/v1/completions", json=body, headers=own).status_code == 200
    assert inside.get("/v1/models").status_code == 200
    for headers in ({}, {"origin": "http://evil.org"}, {**own, "sec-fetch-site": "cross-site"}):
        assert inside.post("/v1/completions", json=body, headers=headers).status_code in (401, 403)
    # for all else that a key can do, it must be shown
    assert inside.post("/api/v1/create_session", json={}, headers=own).status_code == 401


def test_what_a_session_samples_is_its_owners(place: Place) -> None:
    with place.browser() as browser:
        assert browser.post("/v1/completions", json={}, headers={"origin": place.server.url}).status_code == 401


def test_runs_are_not_shown_to_other_owners(place: Place) -> None:
    key = make_key(place.folder, "bob")
    with place.browser() as browser:
        refused = place.enter(browser, key)
        assert refused.status_code == 403 and "--operator bob" in refused.text and "set-cookie" not in refused.headers
        answer = browser.get(f"{API}/runs", headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == 403 and RUN not in answer.text


def test_a_revoked_key_ends_its_sessions(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    key = make_key(place.folder, "ann")
    with place.browser() as browser:
        assert place.enter(browser, key).status_code == 303
        assert browser.get("/").status_code == 200
        newest = max(place.server.keys.list(), key=lambda row: row.created_at)
        place.server.keys.revoke(newest.key_id)
        assert browser.get("/").status_code == 303


def test_without_named_operators_the_owner_of_all_keys_is_one(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / RUN, 1)
    ann = {"authorization": f"Bearer {make_key(tmp_path, 'ann')}"}
    with running(tmp_path) as server, httpx.Client(base_url=server.url) as client:
        assert client.get(f"{API}/runs", headers=ann).status_code == 200
        bob = {"authorization": f"Bearer {make_key(tmp_path, 'bob')}"}
        assert [client.get(f"{API}/runs", headers=headers).status_code for headers in (ann, bob)] == [403, 403]


def test_without_keys_nobody_is_asked(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / RUN, 1)
    with running(tmp_path) as server, httpx.Client(base_url=server.url) as client:
        assert client.get("/").status_code == 200
        (summary,) = client.get(f"{API}/runs").json()["runs"]
        assert summary["name"] == RUN
        numbers = client.get(f"{API}/service").json()
        assert numbers["available"] and numbers["is_working"] and numbers["base_models"]
        assert numbers["memory"]["resident_bytes"] > 1 << 20 and numbers["queue"] == {
            "training": 0,
            "samples": 0,
            "sampled_rows": 0,
        }
        # what the API had before is there as before
        assert client.get("/healthz").json() == {"status": "ok"}
        assert client.get("/docs").status_code == 200
        assert client.get("/api/v1/create_session").status_code == 405
        assert client.get("/nothing").json()["error"]


def test_the_service_names_what_computes_each_loaded_model(place: Place, inside: httpx.Client) -> None:
    sample = {"model": BASE, "prompt": [5, 6], "max_tokens": 1}
    inside.post("/v1/completions", json=sample, headers={"origin": place.server.url}).raise_for_status()
    assert inside.get(f"{API}/service").json()["implementations"][BASE] == "fake"
    assert f"{BASE} on fake" in inside.get("/service").text


def test_the_service_is_seen_by_owner(place: Place, inside: httpx.Client) -> None:
    headers = {"x-api-key": place.key}
    inside.post("/api/v1/create_session", json={}, headers=headers).raise_for_status()
    sample = {"model": BASE, "prompt": [5, 6], "max_tokens": 3}
    before = inside.get(f"{API}/service").json()
    inside.post("/v1/completions", json=sample, headers={"origin": place.server.url}).raise_for_status()
    after = inside.get(f"{API}/service").json()
    (ann,) = [row for row in after["tenants"] if row["owner"] == "ann"]
    assert ann["sessions"] >= 1 and ann["models"] == 0 and ann["waiting_samples"] == 0
    assert after["tokens"]["sampled"] - before["tokens"]["sampled"] == 3


def test_exchanges_of_pages_are_counted_by_route_and_not_by_run(place: Place, inside: httpx.Client) -> None:
    inside.get(f"/runs/{RUN}/rollouts?step=1")
    numbers = inside.get("/metrics", headers={"x-api-key": place.key}).text
    assert 'route="/runs/{run}/rollouts"' in numbers and RUN not in numbers


def test_beyond_this_machine_the_keys_of_the_data_directory_open_it(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / RUN, 1)
    key = make_key(tmp_path, "ann")
    with showing(tmp_path, host="0.0.0.0") as (server, client):
        assert client.get(f"{API}/runs").status_code == 401 and "keys asked for" in server.line
        assert client.get("/v1/models").status_code == 401
        assert client.get(f"{API}/runs", headers={"authorization": f"Bearer {key}"}).status_code == 200
    with showing(tmp_path) as (server, client):
        assert client.get(f"{API}/runs").status_code == 200 and "no keys asked for" in server.line


@pytest.mark.parametrize(
    ("place", "leads_to"),
    [
        ("/runs/a?step=3&flag=used", "/runs/a?step=3&flag=used"),
        ("", "/"),
        ("//evil.org", "/"),
        ("/\\evil.org", "/"),
        ("https://evil.org/", "/"),
        ("javascript:alert(1)", "/"),
        ("/login?next=/login", "/"),
        ("/a\r\nset-cookie: x=y", "/"),
        ("runs", "/"),
    ],
)
def test_the_login_leads_to_pages_of_this_server_only(place: str, leads_to: str) -> None:
    assert safe_place(place) == leads_to


def request(token: str, method: str = "GET") -> Request:
    headers = [(b"host", b"127.0.0.1"), (b"cookie", f"mint_session_0={token}".encode())]
    scope = {"type": "http", "method": method, "headers": headers, "path": "/", "query_string": b"", "scheme": "http"}
    return Request(scope)


class Book:
    """One key."""

    def verify(self, key: str, address: str) -> Caller | None:
        return Caller("ann", "k1") if key == "right" else None

    def holder(self, key_id: str) -> Caller | None:
        return Caller("ann", key_id) if key_id == "k1" else None


def test_a_session_that_is_not_used_ends_and_their_number_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    login = Login(Book(), admits=lambda visitor: visitor.owner == "ann", clock=lambda: now[0])
    token = login.enter("right", "127.0.0.1")
    for _ in range(3):
        now[0] += login_module.IDLE_S - 1
        assert login.visitor_of(request(token)).owner == "ann"
    now[0] += login_module.IDLE_S + 1
    with pytest.raises(AuthenticationError):
        login.visitor_of(request(token))
    monkeypatch.setattr(login_module, "MAX_SESSIONS", 2)
    tokens = [login.enter("right", "127.0.0.1") for _ in range(3)]
    assert [login.session_of(request(one)) is None for one in tokens] == [True, False, False]


def test_keys_are_known_by_their_names_until_they_are_revoked(tmp_path: Path) -> None:
    database = Database(tmp_path / JOURNAL_FILE)
    keys = ApiKeys(database)
    _, row = keys.create("ann")
    keys.create("bob")
    assert keys.holder(row.key_id) == Caller("ann", row.key_id) and keys.holder("none") is None
    assert keys.active_owners() == {"ann", "bob"}
    keys.revoke(row.key_id)
    assert keys.holder(row.key_id) is None and keys.active_owners() == {"bob"}
    database.close()
