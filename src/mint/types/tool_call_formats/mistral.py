"""Calls of Mistral's models: `[TOOL_CALLS]` and a JSON list (v3), or `NAME[ARGS]{…}` for each (v11 and later)."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator

from mint.types.tool_call_formats.call import Part, ToolCall, listed_calls, named_call

MISTRAL_OPEN = "[TOOL_CALLS]"
MISTRAL_ARGUMENTS = "[ARGS]"
MISTRAL_ID = "[CALL_ID]"
MISTRAL_ID_LENGTH = 9
"""Letters and digits of an id: Mistral's chat templates refuse others."""


def mistral_calls(text: str, names: Collection[str] | None = None) -> Iterator[Part]:
    """The calls of a reply; an id that Mistral's templates would refuse is dropped."""
    before, *sections = text.removesuffix("</s>").split(MISTRAL_OPEN)
    yield before
    for section in sections:
        for call in _section(section):
            yield call if is_mistral_id(call.id) else dataclasses.replace(call, id="")


def is_mistral_id(call_id: str) -> bool:
    """Whether Mistral's templates take an id."""
    return len(call_id) == MISTRAL_ID_LENGTH and call_id.isascii() and call_id.isalnum()


def _section(section: str) -> Iterator[ToolCall]:
    head, brace, body = section.partition("{")
    head = head.strip().removesuffix(MISTRAL_ARGUMENTS).strip()
    name, _, written_id = head.partition(MISTRAL_ID)
    if brace and name.replace("-", "_").replace(".", "_").isidentifier():
        yield named_call(name, brace + body, written_id.strip())
    else:
        yield from listed_calls(section)
