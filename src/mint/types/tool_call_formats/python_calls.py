"""Calls written as Python: `[f(a=1), g(b="x")]`. `ast` reads them; nothing is evaluated."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from typing import Any

from mint.types.tool_call_formats.call import MAX_CALL_DEPTH, ToolCall, require_plain

MAX_CHARACTERS = 1 << 16
"""Longer texts are not read: Python's parser takes some hundred bytes for each character."""

_WORDS = {"true": True, "false": False, "null": None}
"""JSON's words, which models write where Python has others."""


class _NoLiteralError(ValueError):
    """A value that is none of JSON's."""


def python_calls(text: str) -> Iterator[ToolCall]:
    """The calls of a list, or one call without brackets; one with an `error` for what is not Python or no call."""
    if len(text) > MAX_CHARACTERS:
        yield ToolCall(error=f"the call is longer than {MAX_CHARACTERS} characters")
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of an odd escape in a string
            body = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        yield ToolCall(error=f"the call is not Python: {error}")
        return
    yield from map(_call, body.elts if isinstance(body, ast.List | ast.Tuple) else [body])


def _call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call) or (name := _name(node.func)) is None:
        return ToolCall(error="the call is not NAME(argument=value, …)")
    arguments: dict[str, Any] = {}
    try:
        if node.args or any(keyword.arg is None for keyword in node.keywords):
            raise _NoLiteralError("every argument needs its name, as in f(a=1)")
        for keyword in node.keywords:
            arguments[str(keyword.arg)] = _value(keyword.value, MAX_CALL_DEPTH)
        require_plain(arguments)
    except (ValueError, RecursionError) as error:
        return ToolCall(error=f"the arguments of {name} are not literals: {error}")
    return ToolCall(name, arguments)


def _name(node: ast.expr) -> str | None:
    """`f`, or `a.b.f`."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None


def _value(node: ast.expr, depth: int) -> Any:
    if not depth:
        raise _NoLiteralError(f"nested deeper than {MAX_CALL_DEPTH} levels")
    match node:
        case ast.Constant(value=str() | int() | float() | bool() | None as value):
            return value
        case ast.Name(id=word) if word in _WORDS:
            return _WORDS[word]
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_value(element, depth - 1) for element in elements]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _value(value, depth - 1) for key, value in zip(keys, values, strict=True)}
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=ast.Constant(value=int() | float() as number)):
            return -number if isinstance(sign, ast.USub) else number
    raise _NoLiteralError(f"{type(node).__name__} is none")


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise _NoLiteralError("a key of a dictionary is no string")
