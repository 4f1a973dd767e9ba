"""Calls of Llama 3 and 4: JSON as the whole reply or behind a tag, `<function=NAME>{…}`, or a Python list of calls."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator

from mint.types.tool_call_formats.call import Part, ToolCall, json_call, json_calls, listed_calls, named_call
from mint.types.tool_call_formats.python_calls import python_calls
from mint.types.tool_call_formats.tags import FUNCTION_CLOSE, FUNCTION_OPEN

PYTHON_TAG = "<|python_tag|>"
PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"

_ENDS = ("<|eom_id|>", "<|eot_id|>", "<|eot|>", "<|end_of_text|>")
MAX_OBJECTS = 16
"""In a text before a call, so many objects are tried: a text of nothing but opening braces takes no longer."""


def llama_calls(text: str, names: Collection[str] | None = None) -> Iterator[Part]:
    """The calls of a reply. JSON and Python without a tag are calls if `names` has their names; without `names`, if
    they have a call's form."""
    body = text.strip()
    for end in _ENDS:
        body = body.removesuffix(end).rstrip()
    before, tagged, calls = body.partition(PYTHON_TAG)
    if tagged:
        yield before
        yield from _python_or_json(calls)
    elif PYTHON_START in body:
        yield from _between_tags(body, names)
    elif FUNCTION_OPEN in body:
        yield from _functions(body)
    else:
        yield from _untagged(body, names)


def _python_or_json(text: str) -> Iterator[ToolCall]:
    body = text.strip()
    if not body.startswith("["):
        return json_calls(body)
    return listed_calls(body) if body[1:].lstrip().startswith("{") else python_calls(body)


def _between_tags(body: str, names: Collection[str] | None) -> Iterator[Part]:
    """Llama 4: the calls are between its tags, or text is, and the calls follow."""
    before, _, rest = body.partition(PYTHON_START)
    inside, _, after = rest.partition(PYTHON_END)
    yield before
    if after.strip():
        yield inside
        yield from _untagged(after.strip(), names)
    else:
        yield from _python_or_json(inside)


def _functions(body: str) -> Iterator[Part]:
    before, *sections = body.split(FUNCTION_OPEN)
    yield before
    for section in sections:
        name, closed, rest = section.partition(">")
        arguments, _, after = rest.partition(FUNCTION_CLOSE)
        if not closed:
            yield ToolCall(error=f"{FUNCTION_OPEN} is not closed by >")
            continue
        yield named_call(name.strip(), arguments)
        yield after


def _untagged(body: str, names: Collection[str] | None) -> Iterator[Part]:
    if body.startswith("{"):
        calls = list(json_calls(body))
        if all(call.error is None for call in calls) and _are_declared(calls, names):
            yield from calls
            return
    elif body.startswith("["):
        called = body[1:].partition("(")[0].strip()
        declared = called.replace(".", "_").isidentifier() if names is None else called in names
        calls = list(_python_or_json(body)) if declared or body[1:].lstrip().startswith("{") else []
        if calls and (declared or (all(call.error is None for call in calls) and _are_declared(calls, names))):
            yield from calls
            return
    elif names is not None:
        found = _json_in_text(body, names)
        if found is not None:
            yield from found
            return
    yield body


def _are_declared(calls: Collection[ToolCall], names: Collection[str] | None) -> bool:
    return names is None or not calls or any(call.name in names for call in calls)


def _json_in_text(body: str, names: Collection[str]) -> list[Part] | None:
    """A text, and then calls of declared tools."""
    place = -1
    for _ in range(MAX_OBJECTS):
        place = body.find("{", place + 1)
        if place < 0:
            return None
        try:
            _, end = json.JSONDecoder().raw_decode(body, place)
        except (ValueError, RecursionError):
            continue
        first = json_call(body[place:end])
        if first.error is None and first.name in names:
            more = list(json_calls(body[end:].lstrip(" \t\r\n;,"))) if body[end:].strip() else []
            if all(call.error is None for call in more) and _are_declared(more, names):
                return [body[:place], first, *more]
            return [body[:place], first, body[end:]]
        place = end - 1
    return None
