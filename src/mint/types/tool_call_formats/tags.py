"""Calls between `<tool_call>` and `</tool_call>`: JSON (Hermes, Qwen), or XML (Qwen3-Coder, GLM-4.5)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from mint.types.tool_call_formats.call import Part, ToolCall, json_call, listed_calls

CALL_OPEN = "<tool_call>"
CALL_CLOSE = "</tool_call>"

FUNCTION_OPEN, FUNCTION_CLOSE = "<function=", "</function>"
PARAMETER_OPEN, PARAMETER_CLOSE = "<parameter=", "</parameter>"
KEY_OPEN, KEY_CLOSE = "<arg_key>", "</arg_key>"
VALUE_OPEN, VALUE_CLOSE = "<arg_value>", "</arg_value>"


def tagged_calls(text: str, names: Collection[str] | None = None) -> Iterator[Part]:
    """The calls between tags; what is between them may be JSON or Qwen3-Coder's XML."""
    return _between_tags(text, _calls_in)


def glm_calls(text: str, names: Collection[str] | None = None) -> Iterator[Part]:
    """The calls between tags; what is between them may be GLM's XML, too."""
    return _between_tags(text, _glm_calls_in)


def _between_tags(text: str, read: Callable[[str], Iterator[ToolCall]]) -> Iterator[Part]:
    before, *sections = text.split(CALL_OPEN)
    yield before
    for section in sections:
        inner, closed, after = section.partition(CALL_CLOSE)
        if not closed:
            yield ToolCall(error=f"the call is not closed by {CALL_CLOSE}")
            continue
        yield from read(inner.strip())
        yield after


def _calls_in(inner: str) -> Iterator[ToolCall]:
    if inner.startswith(FUNCTION_OPEN):
        yield _function(inner)
    elif inner.startswith("["):
        yield from listed_calls(inner)
    else:
        yield json_call(inner)


def _glm_calls_in(inner: str) -> Iterator[ToolCall]:
    if KEY_OPEN in inner or _is_name(inner):
        yield _keyed(inner)
    else:
        yield from _calls_in(inner)


def _is_name(text: str) -> bool:
    return text.replace("-", "_").replace(".", "_").isidentifier()


def _function(text: str) -> ToolCall:
    """`<function=NAME><parameter=KEY>VALUE</parameter>…</function>`; a line break at each end of a value is dropped."""
    name, closed, body = text[len(FUNCTION_OPEN) :].partition(">")
    if not closed or not name.strip():
        return ToolCall(error=f"{FUNCTION_OPEN} is not closed by >")
    body = body.removesuffix(FUNCTION_CLOSE)
    arguments: dict[str, str] = {}
    rest = _Rest(body)
    while rest.find(PARAMETER_OPEN):
        key, value = rest.until(">"), rest.until(PARAMETER_CLOSE)
        if key is None or value is None:
            return ToolCall(error=f"a parameter of {name.strip()} is not closed by {PARAMETER_CLOSE}")
        arguments[key.strip()] = value.removeprefix("\n").removesuffix("\n")
    return ToolCall(name.strip(), arguments, as_texts=True)


def _keyed(text: str) -> ToolCall:
    """`NAME`, then `<arg_key>KEY</arg_key>` and `<arg_value>VALUE</arg_value>` for each argument."""
    name = text.partition(KEY_OPEN)[0].strip()
    arguments: dict[str, str] = {}
    rest = _Rest(text)
    while rest.find(KEY_OPEN):
        key = rest.until(KEY_CLOSE)
        value = rest.until(VALUE_CLOSE) if rest.find(VALUE_OPEN) else None
        if key is None or value is None:
            return ToolCall(error=f"an argument of {name} is not {KEY_OPEN}…{KEY_CLOSE}{VALUE_OPEN}…{VALUE_CLOSE}")
        arguments[key.strip()] = value
    if not _is_name(name):
        return ToolCall(error=f"the call has no name before {KEY_OPEN}")
    return ToolCall(name, arguments, as_texts=True)


class _Rest:
    """A text, and how far it was read."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._place = 0

    def find(self, mark: str) -> bool:
        """Goes behind the next `mark`, if there is one."""
        found = self._text.find(mark, self._place)
        if found >= 0:
            self._place = found + len(mark)
        return found >= 0

    def until(self, mark: str) -> str | None:
        """The text up to the next `mark`, which is passed; None if there is none."""
        begin = self._place
        return self._text[begin : self._place - len(mark)] if self.find(mark) else None
