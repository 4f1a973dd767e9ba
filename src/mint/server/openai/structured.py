"""The formats that a request allows for a reply (JSON, a grammar, tool calls), as one grammar over the model's tokens.

Knows how each family writes a call (`types/tool_call_formats`); llguidance's dialect of Lark describes it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from mint.errors import InvalidRequestError
from mint.server.openai.detokenizer import Vocabulary
from mint.server.openai.schemas import ChatRequest, ChatTool, CompletionRequest
from mint.server.openai.tool_parser import THINK_CLOSE
from mint.types import StructuredOutputs
from mint.types.tool_call_formats import (
    CALL_CLOSE,
    CALL_OPEN,
    MARKUP,
    NUMBER,
    SYNTAX,
    CallSyntax,
    ToolCallFormat,
)

_LINE_BREAK = "\n"

_AS_PYTHON_WRITES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def structured_outputs(request: CompletionRequest | ChatRequest) -> StructuredOutputs | None:
    """The format in `response_format`, `structured_outputs` or one of the `guided_…` fields; None if there is none.

    Raises:
        InvalidRequestError: two of them ask for something, or one cannot be read.
    """
    found: dict[str, StructuredOutputs] = {}
    form = request.response_format
    if form is not None and form.type == "json_object":
        found["response_format"] = StructuredOutputs(json_object=True)
    if form is not None and form.type == "json_schema":
        schema = None if form.json_schema is None else form.json_schema.schema_
        if schema is None:
            remedy = 'Pass {"type": "json_schema", "json_schema": {"name": …, "schema": {…}}}'
            raise InvalidRequestError("is missing", field="response_format.json_schema.schema", remedy=remedy)
        found["response_format"] = StructuredOutputs(json_schema=schema)
    options = request.structured_outputs
    if options is not None:
        found["structured_outputs"] = StructuredOutputs(
            json_schema=None if options.json_ is None else _schema(options.json_, "structured_outputs.json"),
            json_object=options.json_object,
            regex=options.regex,
            choice=options.choice,
            grammar=options.grammar,
        )
    if request.guided_json is not None:
        found["guided_json"] = StructuredOutputs(json_schema=_schema(request.guided_json, "guided_json"))
    if request.guided_regex is not None:
        found["guided_regex"] = StructuredOutputs(regex=request.guided_regex)
    if request.guided_choice is not None:
        found["guided_choice"] = StructuredOutputs(choice=request.guided_choice)
    if request.guided_grammar is not None:
        found["guided_grammar"] = StructuredOutputs(grammar=request.guided_grammar)
    if len(found) > 1:
        raise InvalidRequestError("cannot be combined", field=" and ".join(found), remedy="Pass one of them")
    return next(iter(found.values()), None)


def format_field(request: CompletionRequest | ChatRequest, format_name: str = "response_format") -> str:
    """The field that asks for the format of a reply: errors of the grammar name it. `format_name` is what the protocol
    of the request calls `response_format`."""
    if isinstance(request, ChatRequest) and request.forced_tools:
        return "tool_choice"
    fields = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
    return next((name for name in fields if getattr(request, name) is not None), format_name)


def chat_grammar(
    request: ChatRequest, vocabulary: Vocabulary, written_as: ToolCallFormat, *, is_thinking: bool
) -> StructuredOutputs | None:
    """The format of a chat's reply; None if everything is allowed. If `tool_choice` forces calls, the reply is calls.
    Else it has the format of the request, or is a call if tools are offered. Reasoning that the prompt has opened may
    come first.

    Raises:
        InvalidRequestError: as `structured_outputs`, or a forced call and a format are asked for together.
    """
    answer = structured_outputs(request)
    forced = request.forced_tools
    if answer is not None and forced:
        remedy = "Leave out one of them: a forced call is no text in a format"
        value = request.tool_choice if isinstance(request.tool_choice, str) else request.tool_choice.function.name
        problem = "cannot be combined with a format of the reply"
        raise InvalidRequestError(problem, field="tool_choice", value=value, remedy=remedy)
    tools = forced or request.offered_tools
    if not forced and (answer is None or not (tools or is_thinking)):
        return answer
    rules = _Rules(vocabulary)
    bodies = [] if answer is None else [rules.answer(answer)]
    if tools:
        bodies.append(rules.calls(tools, written_as, many=request.parallel_tool_calls))
    start = f"({' | '.join(bodies)})"
    if is_thinking:
        start = f"{rules.reasoning()} /\\n+/? {start}"
    return StructuredOutputs(grammar=f"start: {start}\n{rules.text}")


class _Rules:
    """Rules in llguidance's Lark, and the names of those that were added."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.text = ""

    def answer(self, wanted: StructuredOutputs) -> str:
        """A text in the format that is asked for."""
        if wanted.choice is not None:
            return self._add("answer", " | ".join(map(json.dumps, wanted.choice)))
        if wanted.regex is not None:
            return self._add("ANSWER", f"/{wanted.regex.replace('/', chr(92) + '/')}/")
        if wanted.grammar is not None:
            problem = "cannot be combined with tools or reasoning"
            raise InvalidRequestError(
                problem, field="grammar", value=wanted.grammar, remedy="Leave out the tools, or pass a schema"
            )
        return self._add("answer", f"%json {json.dumps(wanted.json_schema or {'type': 'object'})}")

    def reasoning(self) -> str:
        """The rest of a reasoning block."""
        mark = self._mark(THINK_CLOSE)
        if mark.startswith("<"):
            return self._add("reasoning", f"/(.|\\n)*/ {mark}")
        return self._add("reasoning[lazy]", f"/(.|\\n)*{THINK_CLOSE.replace('/', chr(92) + '/')}/")

    def calls(self, tools: Sequence[ChatTool], written_as: ToolCallFormat, *, many: bool) -> str:
        """One call, or with `many` one or more, as models of this format write them in JSON."""
        syntax = SYNTAX[written_as]
        call = self._add("call", " | ".join(self._call(number, tool, syntax) for number, tool in enumerate(tools)))
        begin, end = self._literal(syntax.begin), self._literal(syntax.end)
        more = "" if not many or syntax.between is None else f" ({self._between(syntax)} {call})*"
        return self._add("calls", f"{begin} {call}{more} {end}")

    def _call(self, number: int, tool: ChatTool, syntax: CallSyntax) -> str:
        schema = {"type": "object", **(tool.function.parameters or {}), "x-guidance": _AS_PYTHON_WRITES}
        arguments = self._add(f"arguments_{number}", f"%json {json.dumps(schema)}")
        name = json.dumps(tool.function.name)[1:-1]
        opening = self._literal(f"{syntax.before_name}{name}{syntax.before_arguments}")
        return self._add(f"call_{number}", f"{opening} {arguments} {self._literal(syntax.after_arguments)}")

    def _between(self, syntax: CallSyntax) -> str:
        """What is between two calls; white space may be left out."""
        text = syntax.between or ""
        return f"{json.dumps(text)}?" if text and not text.strip() else self._literal(text)

    def _literal(self, text: str) -> str:
        """A text, with marks as their special tokens, and any number for `NUMBER`. A line break beside the tags of
        `<tool_call>` may be left out."""
        marks = sorted({*MARKUP, NUMBER}, key=len, reverse=True)
        is_tagged = CALL_OPEN in text or CALL_CLOSE in text
        parts = re.split(f"({'|'.join(map(re.escape, [*marks, *(_LINE_BREAK if is_tagged else '')]))})", text)
        return " ".join(self._part(part, is_tagged) for part in parts if part)

    def _part(self, text: str, is_tagged: bool) -> str:
        if text == NUMBER:
            return "/[0-9]+/"
        return f"{json.dumps(text)}?" if is_tagged and text == _LINE_BREAK else self._mark(text)

    def _mark(self, text: str) -> str:
        """A mark as its special token, if it is one, or else as text."""
        special = (
            token for token in sorted(self._vocabulary.special) if self._vocabulary.piece(token).decode() == text
        )
        token = next(special, None)
        return json.dumps(text) if token is None else f"<[{token}]>"

    def _add(self, name: str, body: str) -> str:
        self.text += f"{name}: {body}\n"
        return name.partition("[")[0]


def _schema(value: Any, field: str) -> dict[str, Any]:
    """A schema that may be given as JSON text."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(
            f"is no JSON: {error}", field=field, value=value, remedy="Pass a JSON schema"
        ) from error
    if not isinstance(found, dict):
        raise InvalidRequestError("is no schema", field=field, value=value, remedy="Pass an object")
    return found
