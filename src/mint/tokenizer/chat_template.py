"""Renders a conversation with a model's chat template, as transformers does, without transformers.

A template comes with a model, so it is a stranger's program. It runs in jinja's immutable sandbox, and sees plain
Python values only. Does not tokenize, and does not know which template belongs to a model.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from mint.errors import InvalidRequestError

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""The names that models have for the reasoning of a message; the first one that is set counts."""

_CUT = "mint-cuts-here"


def render_conversation(
    template: str,
    conversation: Sequence[Any],
    /,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
    **variables: Any,
) -> str:
    """The text of a conversation, a sequence of messages (dictionaries, dataclasses or pydantic models).

    With `continue_final_message` the text ends where the content of the last message ends, so that a model goes on with
    it. `variables` are visible to the template.

    Raises:
        InvalidRequestError: there is no message; a message is no dictionary; the last one has no text to go on with, or
            the template does not show it.
        jinja2.TemplateError: the template refuses the conversation, or is none.
    """
    messages = [_message(message) for message in conversation]
    if not messages:
        raise _refusal("holds no message", conversation, "Pass at least one message")
    if continue_final_message:
        if add_generation_prompt:
            remedy = "Pass one of them: the first begins a new message, the second goes on with the last"
            raise _refusal("is given add_generation_prompt and continue_final_message", True, remedy)
        content = messages[-1].get("content")
        if not isinstance(content, str):
            raise _refusal("ends with a message without text to go on with", messages[-1], "Give it a content")
        messages[-1]["content"] = content + _CUT
    text = _compiled(template).render(
        messages=messages,
        tools=_plain(tools),
        documents=_plain(documents),
        add_generation_prompt=add_generation_prompt,
        **_plain(variables),
    )
    if not continue_final_message:
        return text
    before, cut, _ = text.rpartition(_CUT)
    if not cut:
        raise _refusal("ends with a message that the template does not show", messages[-1]["role"], "Render it whole")
    return before


def _message(message: Any) -> dict[str, Any]:
    """A copy without keys that are None, which templates would print, and with its reasoning under every name."""
    plain = _plain(message)
    if not isinstance(plain, dict):
        raise _refusal("holds a message that is no dictionary", message, "Write {'role': …, 'content': …}")
    shown = {key: value for key, value in plain.items() if value is not None}
    reasoning = next((shown[name] for name in REASONING_FIELDS if name in shown), None)
    return shown if reasoning is None else {"thinking": reasoning, **shown, "reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    """The value in JSON's types, so that a template meets no object with methods of its own."""
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_plain, value)) if type(value) in (list, tuple) else [_plain(item) for item in value]
    for kind in (bool, str, int, float):
        if isinstance(value, kind):
            return value if type(value) is kind else kind(value)
    if value is None:
        return None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if callable(dump := getattr(value, "model_dump", None)):
        return _plain(dump())
    if hasattr(value, "dtype") and callable(item := getattr(value, "item", None)) and getattr(value, "ndim", 1) == 0:
        return _plain(item())  # a number of numpy
    return f"<{type(value).__name__}>"


@lru_cache(maxsize=64)
def _compiled(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols]
    )
    environment.filters["tojson"] = _to_json  # jinja's own escapes HTML
    visible: dict[str, Any] = environment.globals
    visible["raise_exception"] = _raise
    visible["strftime_now"] = _now
    visible["dict"] = _dictionary
    visible["namespace"] = _PublicNamespace
    return environment.from_string(template)


class _GenerationBlocks(Extension):
    """Reads `{% generation %}`, which marks what an assistant says, as if it were not there."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _PublicNamespace(Namespace):
    """jinja's namespace, without names that begin with an underscore."""

    def __init__(*arguments: Any, **named: Any) -> None:  # no `self`: a template may use that name
        self, *parts = arguments
        given = dict(*parts, **named)
        for name in given:
            _require_public(name)
        Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _require_public(name)
        super().__setitem__(name, value)


def _require_public(name: object) -> None:
    if str(name).startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace has no name like {name}")


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _dictionary(*parts: Any, **named: Any) -> dict[str, Any]:
    """`dict` without the attributes of the class."""
    return dict(*parts, **named)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refusal(message: str, value: object, remedy: str) -> InvalidRequestError:
    return InvalidRequestError(message, field="conversation", value=value, remedy=remedy)
