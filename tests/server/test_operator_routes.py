"""Every route that is for operators says 401 to who is not known, and 403 to who is known and is no operator.

The routes are those of the tables, so that a new one is covered by itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import pytest
from waiting import HANG_S

from mint.dashboard import app as dashboard
from mint.server.all_routes import ROUTES
from tests.server.server_harness import make_key, running

OPERATORS_ROUTES = [
    *((row.method, row.path, False) for row in ROUTES if row.for_operators),
    *((row.method, row.path, row.kind == "page") for row in dashboard.ROUTES if not row.is_open),
]


@pytest.fixture(scope="module")
def callers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, httpx.Client]]:
    """A client without a key, with a made-up key, with an owner's and with an operator's."""
    folder = tmp_path_factory.mktemp("data")
    keys = {"tenant": make_key(folder, "ann"), "operator": make_key(folder, "olga"), "stranger": "tml-mint-made-up"}
    with running(folder, operators=("olga",)) as server:
        headers = {"nobody": {}, **{who: {"authorization": f"Bearer {key}"} for who, key in keys.items()}}
        clients = {
            who: httpx.Client(base_url=server.url, headers=sent, timeout=HANG_S) for who, sent in headers.items()
        }
        yield clients
        for client in clients.values():
            client.close()


@pytest.mark.parametrize(
    ("method", "path", "is_page"), OPERATORS_ROUTES, ids=[f"{method} {path}" for method, path, _ in OPERATORS_ROUTES]
)
def test_an_operators_route_tells_who_is_unknown_from_who_may_not(
    callers: dict[str, httpx.Client], method: str, path: str, is_page: bool
) -> None:
    path = re.sub(r"\{\w+\}", "none", re.sub(r"\{\w+:int\}", "1", path))

    def ask(who: str) -> httpx.Response:
        return callers[who].request(method, path)

    for unknown in ("nobody", "stranger"):
        answer = ask(unknown)
        assert answer.status_code == (303 if is_page else 401)  # a page leads to the login
        assert is_page or answer.headers["www-authenticate"] == "Bearer"
    refused = ask("tenant")
    assert refused.status_code == 403 and "--operator ann" in refused.text
    assert "www-authenticate" not in refused.headers  # to log in again would not help
    if not path.endswith("events"):
        assert ask("operator").status_code not in (303, 401, 403)
