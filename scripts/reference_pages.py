"""Pages of the API reference that are made of the code when the site is built: the command line and the HTTP API.

Knows nothing of mkdocs: each function returns the Markdown of one page.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from mint.server.all_routes import ROUTES
from mint.server.http.openapi import document

COMMAND_LINE_INTRODUCTION = """\
# Command line

All commands, from their `--help`. `mint --install-completion` completes them in your shell. [How to](../how_to.md) says
which command reaches which goal.

`mint train` takes settings and options as `key=value`:

- settings of a run: [RLConfig](rl.md#mint.rl.RLConfig), [SFTConfig](recipes.md#mint.recipes.sft.SFTConfig),
  [DPOConfig](recipes.md#mint.recipes.dpo.DPOConfig),
  [DistillConfig](recipes.md#mint.recipes.distill.DistillConfig);
- options of a task: [Tasks by name](../tasks.md).
"""

HTTP_INTRODUCTION = """\
# HTTP API

The routes of `mint serve`. A running server shows them with all types at `/docs`, and for programs at `/openapi.json`.

- A key goes into the header `X-API-Key` or `Authorization: Bearer`.
- Training requests are accepted at once, and their results are fetched with `retrieve_future`.
- An error is JSON with `error`, `category`, `code` and `message`, and where it can `field`, `value` and `remedy`. The
  [errors](errors.md) have the codes.
- [The OpenAI-compatible endpoint](../openai.md) explains the routes below `/v1`, which exist below `/oai/api/v1`, too.

The fields of each request and response follow. One in bold is required.
"""

SECOND_NAME = "/oai/api/v1"
"""Below this, the routes below `/v1` exist once more."""

HEADING = re.compile(r"^(#+) `(.+)`$", re.MULTILINE)
ENTITIES = {"&#x27;": "'", "&gt;": ">", "&lt;": "<", "&quot;": '"', "&amp;": "&"}


def command_line() -> str:
    """The page of all commands, as typer describes them."""
    made = subprocess.run(
        [sys.executable, "-m", "typer", "mint.cli.main", "utils", "docs", "--name", "mint"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for entity, character in ENTITIES.items():
        made = made.replace(entity, character)
    commands = made[made.index("## `mint demo`") :]
    # `mint keys create` is a heading of the third level below `mint keys`; all commands are equal in the contents
    return COMMAND_LINE_INTRODUCTION + "\n" + HEADING.sub(r"## \2", commands)


def http_api() -> str:
    """The page of all routes, from the server's OpenAPI document."""
    described = json.loads(document(ROUTES))
    groups: dict[str, list[str]] = {}
    for path, methods in described["paths"].items():
        if path.startswith(SECOND_NAME):
            continue
        for method, operation in methods.items():
            lines = "\n".join(_route(method.upper(), path, operation, described["components"]["schemas"]))
            groups.setdefault(operation["tags"][0], []).append(lines)
    parts = [f"## {name[0].upper()}{name[1:]}\n\n" + "\n\n".join(routes) for name, routes in groups.items()]
    return HTTP_INTRODUCTION + "\n" + "\n\n".join(parts) + "\n"


def _route(method: str, path: str, operation: Mapping[str, Any], schemas: Mapping[str, Any]) -> Iterator[str]:
    key = "" if operation["security"] else " No key is needed."
    yield f"### {method} {path}\n\n{operation['summary']}{key}"
    schema = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    if schema is not None:
        yield f"\nRequest: {_fields(schema, schemas)}"
    answer = operation["responses"]["200"].get("content", {}).get("application/json", {}).get("schema")
    if answer is not None and answer != {"type": "object"}:
        yield f"\nResponse: {_fields(answer, schemas)}"


def _fields(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    """The names of the fields of a message; those that must be there in bold."""
    name = schema.get("$ref", "").rpartition("/")[2]
    message = schemas.get(name, schema)
    required = set(message.get("required", ()))
    fields = [f"**`{field}`**" if field in required else f"`{field}`" for field in message.get("properties", {})]
    return ", ".join(fields) or f"`{name or message.get('type', 'JSON')}`"
