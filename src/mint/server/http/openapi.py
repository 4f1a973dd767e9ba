"""The description of the API, generated from the route table: an OpenAPI 3.1 document, and a page for people."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Iterable
from functools import cache
from typing import Any

import pydantic_core
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

import mint.wire as wire
from mint.server.http.route_table import RouteRow
from mint.version import VERSION

PROTO_REQUESTS = frozenset({f"{wire.API_PREFIX}/forward_backward"})
PROTO_ANSWERS = frozenset({f"{wire.API_PREFIX}/retrieve_future"})
"""The routes whose body, or answer, may also be protobuf."""

UPLOADS = frozenset({f"{wire.API_PREFIX}/checkpoints/upload"})
"""The routes that take a file."""

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h2 { margin-top: 2rem; } li { margin: .4rem 0; } code { font-size: .9em; } .open { color: #667; }
"""
_STYLE_HASH = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
PAGE_HEADERS = {
    "content-security-policy": f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
}

_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")
_ERRORS = {
    "400": "The request is wrong: the error names field, value and remedy.",
    "401": "No API key, or not a valid one.",
    "404": "No such object, or not yours.",
    "413": "The body is too large.",
    "415": "The body's encoding is not read here.",
    "429": "Too much waits already: the same request may be sent again later.",
    "500": "The server's fault.",
    "503": "The journal cannot be written, or nothing is being worked on.",
}
_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error", "category", "code", "message"],
    "properties": {
        "error": {"type": "string", "description": "The whole sentence."},
        "category": {"type": "string", "enum": ["user", "server", "unknown"]},
        "code": {"type": "string", "description": "The class of the error, as in mint.errors."},
        "message": {"type": "string"},
        "field": {"type": "string"},
        "value": {"type": "string"},
        "remedy": {"type": "string"},
        "request_id": {"type": "string"},
    },
}

_NULLABLE = {"type": ["string", "null"]}
_OPENAI_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message"],
            "properties": {"message": {"type": "string"}, "type": _NULLABLE, "param": _NULLABLE, "code": _NULLABLE},
        }
    },
}


@cache
def document(rows: tuple[RouteRow, ...], *, asks_keys: bool = True) -> bytes:
    """The OpenAPI 3.1 document of some routes, as JSON; without `asks_keys`, a key is allowed and not needed."""
    schemas, references = _schemas(rows)
    paths: dict[str, dict[str, Any]] = {}
    for row in rows:
        paths.setdefault(_PARAMETER.sub(r"{\1}", row.path), {})[row.method.lower()] = _operation(
            row, references, asks_keys=asks_keys
        )
    return pydantic_core.to_json(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "mint",
                "version": VERSION,
                "description": "Fine-tuning and reinforcement learning of language models. What a request is accepted "
                "for is fetched with retrieve_future.",
            },
            "paths": paths,
            "components": {
                "schemas": {**schemas, "Error": _ERROR_SCHEMA, "OpenAIError": _OPENAI_ERROR_SCHEMA},
                "securitySchemes": {
                    "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
                    "bearer": {"type": "http", "scheme": "bearer"},
                },
            },
        }
    )


def _schemas(rows: Iterable[RouteRow]) -> tuple[dict[str, Any], dict[tuple[type[BaseModel], str], dict[str, Any]]]:
    """The schemas of all messages by name, and the reference to each message as request or response."""
    coming = {(row.request, "validation") for row in rows if row.request is not None}
    answers = [answer for row in rows for answer in (row.response, row.refusal)]
    going = {(answer, "serialization") for answer in answers if answer is not None}
    wanted: Any = sorted(coming | going, key=lambda pair: (pair[0].__name__, pair[1]))
    made: Any = models_json_schema(wanted, ref_template="#/components/schemas/{model}")
    references, top = made
    return top.get("$defs", {}), references


def _operation(
    row: RouteRow, references: dict[tuple[type[BaseModel], str], dict[str, Any]], *, asks_keys: bool
) -> dict[str, Any]:
    keys: list[dict[str, list[str]]] = [{"key": []}, {"bearer": []}]
    answers = {code: text for code, text in _ERRORS.items() if not (row.is_open and code == "401")}
    if row.for_operators:
        answers["403"] = "A valid key, but not an operator's."
    error = {"$ref": "#/components/schemas/Error"} if row.refusal is None else references[row.refusal, "serialization"]
    refused = {
        code: {"description": text, "content": {wire.MEDIA_TYPE: {"schema": error}}} for code, text in answers.items()
    }
    described: dict[str, Any] = {
        "operationId": _operation_id(row),
        "summary": _sentence(row),
        "tags": [_group(row)],
        "security": [] if row.is_open else keys if asks_keys else [*keys, {}],
        "responses": {"200": _answer(row, references), **refused},
    }
    names = _PARAMETER.findall(row.path)
    if names:
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if row.request is not None:
        content: dict[str, Any] = {wire.MEDIA_TYPE: {"schema": references[row.request, "validation"]}}
        if row.path in PROTO_REQUESTS:
            content[wire.Encoding.PROTO.value] = {"schema": {"type": "string", "format": "binary"}}
        described["requestBody"] = {"required": True, "content": content}
    elif row.path in UPLOADS:
        upload = {"type": "object", "properties": {"file": {"type": "string", "format": "binary"}}}
        described["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": upload}}}
    return described


def _answer(row: RouteRow, references: dict[tuple[type[BaseModel], str], dict[str, Any]]) -> dict[str, Any]:
    if row.response is None and row.path not in PROTO_ANSWERS:
        return {"description": "Done."}
    schema = {"type": "object"} if row.response is None else references[row.response, "serialization"]
    content: dict[str, Any] = {wire.MEDIA_TYPE: {"schema": schema}}
    if row.path in PROTO_ANSWERS:
        content[wire.Encoding.PROTO.value] = {"schema": {"type": "string", "format": "binary"}}
    if row.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {"description": "The answer.", "content": content}


def _operation_id(row: RouteRow) -> str:
    words = re.sub(r"\W+", "_", _PARAMETER.sub(r"\1", row.path)).strip("_")
    return f"{row.method.lower()}_{words}"


def _sentence(row: RouteRow) -> str:
    return (row.operation.__doc__ or "").strip().partition("\n")[0]


def _group(row: RouteRow) -> str:
    if row.path.startswith(wire.API_PREFIX):
        return "training and sampling"
    if "/v1/messages" in row.path:
        return "Anthropic-compatible"
    return "OpenAI-compatible" if "/v1/" in row.path else "operations"


@cache
def page(rows: tuple[RouteRow, ...]) -> str:
    """The same as a page, without scripts and without resources from other addresses."""
    groups: dict[str, list[str]] = {}
    for row in rows:
        open_mark = ' <span class="open">(no key)</span>' if row.is_open else ""
        line = f"<li><code>{row.method} {html.escape(row.path)}</code>{open_mark}<br>{html.escape(_sentence(row))}</li>"
        groups.setdefault(_group(row), []).append(line)
    body = "".join(f"<h2>{name}</h2><ul>{''.join(lines)}</ul>" for name, lines in groups.items())
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>mint: the API</title>'
        f"<style>{STYLE}</style></head><body><h1>mint {html.escape(VERSION)}: the API</h1>"
        f'<p>All of it, for programs: <a href="/openapi.json">openapi.json</a>. A key goes into the header '
        f"<code>X-API-Key</code> or <code>Authorization: Bearer</code>.</p>{body}</body></html>"
    )
