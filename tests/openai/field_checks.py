"""Whether a route honours a field, or refuses it by name: odd values in a field may not pass without a word."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import httpx

ODD: dict[str, Any] = {"odd": "value"}
"""What no field may take without a word."""


def names_of(*types: Any) -> list[str]:
    """The fields of other people's request types."""
    return sorted({name for one in types for name in one.__annotations__})


def check_field(
    http: httpx.Client,
    path: str,
    body: dict[str, Any],
    name: str,
    *,
    honoured: Collection[str],
    labels: Collection[str] = (),
) -> None:
    """A label takes anything; a field that is honoured refuses something; any other field refuses everything."""
    answers = [http.post(path, json={**body, name: odd}) for odd in (ODD, "odd", 0.37)]
    if name in labels:
        assert [answer.status_code for answer in answers] == [200, 200, 200]
        return
    refused = [answer for answer in answers if answer.status_code == 400]
    assert all(name in answer.json()["error"]["message"] for answer in refused)
    if name in honoured:
        assert refused, f"{name} takes anything"
    else:
        assert len(refused) == 3, f"{name} is ignored in silence"


def check_refused(http: httpx.Client, path: str, body: dict[str, Any], name: str) -> None:
    """A request with an odd value somewhere within is refused by the name of its field."""
    answer = http.post(path, json=body)
    assert answer.status_code == 400, f"{name} is ignored in silence"
    assert name in answer.json()["error"]["message"]
