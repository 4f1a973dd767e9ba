"""Tools: Python functions that the policy may call. `tool_call_formats` reads the text of a call."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, PydanticUserError, ValidationError, create_model

from mint.errors import InvalidRequestError, MintError
from mint.types.tool_call_formats import typed_arguments

MAX_COMPLAINT_CHARACTERS = 1000
"""The most that the policy reads about bad arguments, whose names it has written itself."""


class ToolError(MintError):
    """A tool call that cannot be answered; the policy reads the message as its result."""

    category = "user"


@dataclass(frozen=True)
class Tool:
    """A function with the schema that the policy reads; made by `tool`."""

    name: str
    schema: Mapping[str, Any]
    function: Callable[..., Any]
    arguments: type[BaseModel]

    def call(self, arguments: Mapping[str, Any]) -> Any:
        """Calls the function; returns its value, or an awaitable if it is `async`.

        Raises:
            ToolError: an argument is missing, unknown or of the wrong type; nothing is converted.
        """
        try:
            checked = self.arguments.model_validate_json(json.dumps(arguments))
        except ValidationError as error:
            complaints = [f"{'.'.join(map(str, each['loc'])) or self.name}: {each['msg']}" for each in error.errors()]
            raise ToolError("; ".join(complaints)[:MAX_COMPLAINT_CHARACTERS]) from error
        return self.function(**{name: getattr(checked, name) for name in type(checked).model_fields})

    def typed(self, texts: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments that were all written as texts, with the types of the schema; `call` refuses what does not fit."""
        return typed_arguments(texts, self.schema["function"]["parameters"]["properties"])


def tool(function: Callable[..., Any]) -> Tool:
    """A tool from a function (sync or async, also a bound method) with a typed signature and a docstring.

    The schema comes from the annotations; the first paragraph of the docstring describes the tool to the policy.

    Raises:
        InvalidRequestError: no docstring, or a parameter without a type that JSON can represent, `*args` or `**kwargs`.
    """
    name = getattr(function, "__name__", type(function).__name__)
    description = (inspect.getdoc(function) or "").split("\n\n")[0].replace("\n", " ")
    try:
        hints = get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as error:
        raise _not_a_tool(name, str(error)) from error
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        plain = parameter.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        if parameter.name not in hints or not plain or parameter.name.startswith("_"):
            raise _not_a_tool(name, f"its parameter `{parameter}` has no type or is no plain argument")
        default = ... if parameter.default is inspect.Parameter.empty else parameter.default
        fields[parameter.name] = (hints[parameter.name], default)
    if not description:
        raise _not_a_tool(name, "it has no docstring")
    try:
        model = create_model(name, __config__=ConfigDict(strict=True, extra="forbid"), **fields)
        schema = _schema(name, description, model)
    except (NameError, PydanticUserError) as error:
        raise _not_a_tool(name, str(error)) from error
    return Tool(name, schema, function, model)


def _not_a_tool(name: str, why: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"cannot be described to a policy: {why}",
        field="tool",
        value=name,
        remedy="Annotate each parameter with a type, and say in a docstring what the function does",
    )


def _schema(name: str, description: str, model: type[BaseModel]) -> dict[str, Any]:
    full = model.model_json_schema()
    properties = {
        key: {word: value for word, value in each.items() if word != "title"}
        for key, each in full.get("properties", {}).items()
    }
    optional = {key: full[key] for key in ("required", "$defs") if key in full}
    parameters = {"type": "object", "properties": properties, **optional}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def as_text(result: Any) -> str:
    """The result of a tool as text for the policy."""
    if isinstance(result, str):
        return result
    for write in (partial(json.dumps, default=str, ensure_ascii=False), str):
        try:
            return write(result)
        except (TypeError, ValueError, RecursionError):
            continue  # a key that JSON lacks; a number of more than 4,300 digits, or nested too deeply
    return f"a {type(result).__name__} too large to show"
