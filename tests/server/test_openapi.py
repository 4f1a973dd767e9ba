"""The description is made from the routes: all of them are in it, it is sound, and its page runs no script."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mint.server.all_routes import ROUTES
from mint.server.http import openapi
from tests.server.server_harness import Person, make_key, running

DOCUMENT: dict[str, Any] = json.loads(openapi.document(ROUTES))


def every(node: Any, key: str) -> Iterator[Any]:
    if isinstance(node, dict):
        for name, value in node.items():
            if name == key:
                yield value
            yield from every(value, key)
    elif isinstance(node, list):
        for value in node:
            yield from every(value, key)


def test_the_document_has_the_shape_of_openapi() -> None:
    assert DOCUMENT["openapi"] == "3.1.0" and DOCUMENT["info"]["title"] and DOCUMENT["info"]["version"]
    for path, operations in DOCUMENT["paths"].items():
        assert path.startswith("/") and set(operations) <= {"get", "post", "put", "delete"}
        for operation in operations.values():
            assert set(operation["security"][0] if operation["security"] else {}) <= set(SCHEMES)
            assert all(
                re.fullmatch("[1-5][0-9]{2}", code) and found["description"]
                for code, found in operation["responses"].items()
            )
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+", name) for name in DOCUMENT["components"]["schemas"])


SCHEMES = DOCUMENT["components"]["securitySchemes"]


@pytest.mark.parametrize("row", ROUTES, ids=lambda row: f"{row.method} {row.path}")
def test_every_route_is_described(row: Any) -> None:
    found = DOCUMENT["paths"][re.sub(r"\{(\w+)(:\w+)?\}", r"{\1}", row.path)][row.method.lower()]
    assert found["summary"], "the operation's docstring says what it is for"
    assert (found["security"] == []) is row.is_open
    assert ("requestBody" in found) is (row.request is not None or row.path in openapi.UPLOADS)
    assert {name["name"] for name in found.get("parameters", ())} == set(re.findall(r"\{(\w+)", row.path))
    assert "400" in found["responses"] and ("401" in found["responses"]) is not row.is_open
    if row.response is not None:
        assert found["responses"]["200"]["content"]["application/json"]["schema"]


def test_operations_have_names_of_their_own() -> None:
    names = list(every(DOCUMENT["paths"], "operationId"))
    assert len(names) == len(set(names)) == len(ROUTES)


def test_references_lead_somewhere() -> None:
    wanted = {name for name in every(DOCUMENT, "$ref") if isinstance(name, str)}
    assert wanted and wanted <= {f"#/components/schemas/{name}" for name in DOCUMENT["components"]["schemas"]}


def test_protobuf_is_offered_where_it_is_read() -> None:
    body = DOCUMENT["paths"]["/api/v1/forward_backward"]["post"]["requestBody"]["content"]
    answer = DOCUMENT["paths"]["/api/v1/retrieve_future"]["post"]["responses"]["200"]["content"]
    assert set(body) == set(answer) == {"application/json", "application/x-protobuf"}


def test_the_page_names_every_route_and_runs_nothing(tmp_path: Path) -> None:
    make_key(tmp_path, "ann")
    with running(tmp_path) as server:
        response = Person(server).send("GET", "/docs")
        assert Person(server).send("GET", "/openapi.json").json() == DOCUMENT
    page, policy = response.text, response.headers["content-security-policy"]
    shown = html.unescape(re.sub("</?code>", "`", page))
    paths = [re.sub(r"\{(\w+)(?::\w+)?\}", r"{\1}", row.path) for row in ROUTES]
    assert all(f"{row.method} {path}" in shown for row, path in zip(ROUTES, paths, strict=True))
    schemas = DOCUMENT["components"]["schemas"]
    for operation in (operation for methods in DOCUMENT["paths"].values() for operation in methods.values()):
        assert f'id="{operation["operationId"]}"' in page and operation["summary"] in shown
        content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
        name = content.get("schema", {}).get("$ref", "").rpartition("/")[2]
        assert all(f"<code>{field}</code>" in page for field in schemas.get(name, {}).get("properties", ())), name
    assert "<script" not in page and "http://" not in page and "https://" not in page
    assert "default-src 'none'" in policy and "unsafe" not in policy and "script-src" not in policy
