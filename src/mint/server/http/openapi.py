"""The description of the API, generated from the route table: an OpenAPI 3.1 document, and a page for people."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterable, Mapping
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
:root { color-scheme: light dark; --text: light-dark(#1b211f, #dde4e0); --muted: light-dark(#5a6560, #95a29c);
  --line: light-dark(#dfe3e0, #29302d); --bg: light-dark(#f6f7f6, #111413); --panel: light-dark(#fff, #181c1a);
  --accent: light-dark(#0b6b5c, #5ec7ae); }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--bg); max-width: 62rem;
  margin: 0 auto; padding: 1rem; overflow-wrap: anywhere; }
a { color: var(--accent); } code, pre { font: 13px/1.5 ui-monospace, monospace; } h2 { margin: 2rem 0 .5rem; }
nav ul { columns: 2; padding-left: 1.2rem; } .muted { color: var(--muted); }
details { background: var(--panel); border: 1px solid var(--line); border-radius: 4px; margin: .35rem 0; }
summary { cursor: pointer; padding: .4rem .7rem; } details > div { padding: 0 .9rem .7rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .2rem .6rem .2rem 0; border-bottom: 1px solid var(--line); }
th { font-weight: 500; color: var(--muted); }
pre { padding: .5rem .7rem; border: 1px solid var(--line); border-radius: 4px; white-space: pre-wrap; }
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
    """The first paragraph of the operation's docstring."""
    return " ".join((row.operation.__doc__ or "").strip().partition("\n\n")[0].split())


def _group(row: RouteRow) -> str:
    if row.path.startswith(wire.API_PREFIX):
        return "training and sampling"
    if "/v1/messages" in row.path:
        return "Anthropic-compatible"
    return "OpenAI-compatible" if "/v1/" in row.path else "operations"


# --- the page for people ---------------------------------------------------------------------------------------------


def page(document: Mapping[str, Any]) -> str:
    """An OpenAPI document as a page to read, without scripts and without resources from other addresses."""
    groups: dict[str, list[str]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            groups.setdefault(operation["tags"][0], []).append(
                _shown_operation(document, method.upper(), path, operation)
            )
    contents = "".join(
        f'<li><a href="#{_anchor(name)}">{html.escape(name)}</a> ({len(found)})</li>' for name, found in groups.items()
    )
    body = "".join(
        f'<h2 id="{_anchor(name)}">{html.escape(name)}</h2>{"".join(found)}' for name, found in groups.items()
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>mint: the HTTP API</title><style>{STYLE}</style></head><body><main>"
        f"<h1>mint {html.escape(VERSION)}: the HTTP API</h1>"
        "<p>Open a line to see what a route takes and answers. Training requests are accepted at once, and their "
        "results are fetched with <code>retrieve_future</code>. A key goes into the header <code>X-API-Key</code> or "
        "<code>Authorization: Bearer</code>; routes marked “no key” need none. An error is "
        '<code>{"error", "field", "value", "remedy"}</code>.</p>'
        '<p>For programs: <a href="/openapi.json">openapi.json</a>. The <a href="/">dashboard</a> shows runs.</p>'
        f'<nav aria-label="Groups of routes"><ul>{contents}</ul></nav>{body}</main></body></html>'
    )


def _shown_operation(document: Mapping[str, Any], method: str, path: str, operation: Mapping[str, Any]) -> str:
    mark = "" if operation["security"] else ' <span class="muted">no key</span>'
    content = operation.get("requestBody", {}).get("content", {})
    answer = operation["responses"]["200"].get("content", {})
    parts = [
        _fields(document, "It takes", content.get(wire.MEDIA_TYPE, {}).get("schema")),
        _fields(document, "It answers", answer.get(wire.MEDIA_TYPE, {}).get("schema")),
        f"<pre>{html.escape(_curl(method, path, content, needs_key=bool(operation['security'])))}</pre>",
    ]
    return (
        f'<details id="{operation["operationId"]}"><summary><code>{method} {html.escape(path)}</code>{mark}<br>'
        f"{_with_code(operation['summary'])}</summary><div>{''.join(parts)}</div></details>"
    )


def _with_code(text: str) -> str:
    """Text as HTML; what stands between backquotes as code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", html.escape(text))


def _fields(document: Mapping[str, Any], title: str, schema: Mapping[str, Any] | None) -> str:
    """The fields of a message as a table; nothing for a message without fields."""
    found = _resolved(document, schema or {})
    fields: Mapping[str, Any] = found.get("properties", {})
    if not fields:
        return ""
    required = set(found.get("required", ()))
    rows = "".join(
        f"<tr><td><code>{html.escape(name)}</code></td><td>{html.escape(_type_in_words(field))}</td>"
        f"<td>{_need(name in required, field)}</td></tr>"
        for name, field in fields.items()
    )
    heads = "".join(f'<th scope="col">{head}</th>' for head in (title, "Type", "Default"))
    about = str(found.get("description", "")).partition("\n\n")[0]
    text = f"<p>{_with_code(about)}</p>" if about else ""
    return f"{text}<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"


def _need(is_required: bool, field: Mapping[str, Any]) -> str:
    if is_required:
        return "required"
    return f"<code>{html.escape(json.dumps(field['default']))}</code>" if "default" in field else ""


def _resolved(document: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    name = schema.get("$ref", "").rpartition("/")[2]
    return document["components"]["schemas"][name] if name else schema


def _type_in_words(field: Mapping[str, Any]) -> str:
    """The type of a field in words."""
    if "$ref" in field:
        return field["$ref"].rpartition("/")[2]
    for several in ("anyOf", "oneOf", "allOf"):
        if several in field:
            return " or ".join(dict.fromkeys(_type_in_words(one) for one in field[several]))
    if "enum" in field:
        return " or ".join(map(str, field["enum"]))
    if "const" in field:
        return str(field["const"])
    kind = field.get("type", "any")
    if kind == "array":
        return f"list of {_type_in_words(field.get('items', {}))}"
    return " or ".join(kind) if isinstance(kind, list) else str(kind)


def _curl(method: str, path: str, content: Mapping[str, Any], *, needs_key: bool) -> str:
    words = ["curl", "-s"] + (["-X", method] if method not in ("GET", "POST") else [])
    if needs_key:
        words.append('-H "X-API-Key: $MINT_API_KEY"')
    if wire.MEDIA_TYPE in content:
        words.append(f"-H 'content-type: {wire.MEDIA_TYPE}' -d @request.json")
    elif content:
        words.append("-F file=@FILE")
    elif method == "POST":
        words.append("-X POST")
    return " ".join([*words, f'"$MINT_BASE_URL{path}"'])


def _anchor(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name.lower())
