"""Tools: Python functions that the policy may call, the text of a call, and two that are built in.

Knows nothing of tokens, episodes or rewards.
"""

from __future__ import annotations

import ast
import inspect
import json
import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, PydanticUserError, ValidationError, create_model

from mint.errors import InvalidRequestError, MintError

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
_CALL = re.compile(rf"{CALL_OPEN}(.*?)(?:{CALL_CLOSE}|(?={CALL_OPEN})|\Z)", re.DOTALL)


class ToolError(MintError):
    """A call that cannot be answered; the policy reads the message as the result."""

    category = "user"


@dataclass(frozen=True)
class ToolCall:
    """What the policy asked for. `error` says what is wrong with the text of the call; then the rest may be empty."""

    name: str = ""
    arguments: Mapping[str, Any] | None = None
    error: str | None = None

    def to_message(self) -> dict[str, Any]:
        """As `tool_calls` of an assistant's message lists it."""
        return {"type": "function", "function": {"name": self.name, "arguments": dict(self.arguments or {})}}


def parse_tool_calls(content: str) -> list[ToolCall]:
    """The calls in a reply, written `<tool_call>{"name": …, "arguments": {…}}</tool_call>` (Qwen, Hermes), in order.

    Calls that the policy only considers in its reasoning do not count.
    """
    text = without_reasoning(content)
    return [_parse_call(match[1], closed=match[0].endswith(CALL_CLOSE)) for match in _CALL.finditer(text)]


def without_reasoning(content: str) -> str:
    """What a reply says after its reasoning block, if it has one."""
    return content.rpartition("</think>")[2].lstrip() if "</think>" in content else content


def _parse_call(text: str, *, closed: bool) -> ToolCall:
    if not closed:
        return ToolCall(error=f"the call is not closed by {CALL_CLOSE}")
    try:
        call = json.loads(text)
        json.dumps(call, ensure_ascii=False).encode()  # refuses half characters ("\\ud800"), which no prompt can hold
        name, arguments = call["name"], call.get("arguments", {})
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError) as error:
        return ToolCall(error=f"the call is not JSON: {error}")
    except (KeyError, TypeError, AttributeError):
        return ToolCall(error='the call is not {"name": …, "arguments": {…}}')
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return ToolCall(error="`name` is not a string or `arguments` is not an object")
    return ToolCall(name, arguments)


@dataclass(frozen=True)
class Tool:
    """A function with the schema that the policy reads; made by `tool`."""

    name: str
    schema: Mapping[str, Any]
    function: Callable[..., Any]
    arguments: type[BaseModel]

    def call(self, arguments: Mapping[str, Any]) -> Any:
        """The function's own answer: a value, or an awaitable where it is `async`.

        Raises:
            ToolError: an argument is missing, unknown or of the wrong type; nothing is converted.
        """
        try:
            checked = self.arguments.model_validate_json(json.dumps(arguments))
        except ValidationError as error:
            complaints = [f"{'.'.join(map(str, each['loc'])) or self.name}: {each['msg']}" for each in error.errors()]
            raise ToolError("; ".join(complaints)) from error
        return self.function(**{name: getattr(checked, name) for name in type(checked).model_fields})


def tool(function: Callable[..., Any]) -> Tool:
    """A tool from a function (sync or async, also a bound method) with a typed signature and a docstring.

    The schema comes from the annotations; the first paragraph of the docstring tells the policy what it is for.

    Raises:
        InvalidRequestError: no docstring, or a parameter without a type that JSON can carry, `*args` or `**kwargs`.
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
    kept = {key: full[key] for key in ("required", "$defs") if key in full}
    parameters = {"type": "object", "properties": properties, **kept}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def as_text(result: Any) -> str:
    """A tool's answer as the policy reads it."""
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, default=str, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(result)


# --- the calculator ----------------------------------------------------------------------------------------------

MAX_EXPRESSION, MAX_EXPONENT, MAX_MAGNITUDE = 200, 64, 1e100

_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: Mapping[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


@tool
def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression."""
    if len(expression) > MAX_EXPRESSION:
        raise ToolError(f"the expression is longer than {MAX_EXPRESSION} characters")
    try:
        value = _evaluate(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError) as error:
        raise ToolError("not an arithmetic expression") from error
    except ZeroDivisionError as error:
        raise ToolError("division by zero") from error
    return str(int(value)) if value == int(value) and abs(value) < 2**53 else str(value)


def _evaluate(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _bounded(value)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_evaluate(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            one, other = _evaluate(left), _evaluate(right)
            if isinstance(op, ast.Pow) and (abs(other) > MAX_EXPONENT or (one < 0 and other != int(other))):
                raise ToolError(f"exponents go to {MAX_EXPONENT}, and are whole for negative numbers")
            return _bounded(_BINARY[type(op)](one, other))
    raise ToolError("only numbers, parentheses and + - * / // % ** are understood")


def _bounded(value: float) -> float:
    if not abs(value) <= MAX_MAGNITUDE:
        raise ToolError(f"the value is beyond {MAX_MAGNITUDE:g}")
    return value


# --- search ------------------------------------------------------------------------------------------------------


class Search:
    """Ranks local documents by Okapi BM25 (Robertson & Zaragoza 2009; k1 = 1.5, b = 0.75).

    `tool(Search(documents).search)` hands it to a policy.
    """

    def __init__(self, documents: Path | Sequence[str], *, snippet_chars: int = 400) -> None:
        """A folder of `*.txt` and `*.md` files, or the texts themselves."""
        texts = _read_folder(documents) if isinstance(documents, Path) else list(documents)
        self._texts = [text[:snippet_chars] for text in texts]
        self._counts = [Counter(_words(text)) for text in texts]
        self._lengths = [counts.total() for counts in self._counts]
        self._mean_length = sum(self._lengths) / max(1, len(texts)) or 1.0
        self._having = Counter(word for counts in self._counts for word in counts)

    def search(self, query: str, limit: int = 1) -> str:
        """Search the documents for words and return the best matches."""
        words = set(_words(query))
        scores = [self._score(words, place) for place in range(len(self._texts))]
        best = sorted(range(len(scores)), key=lambda place: -scores[place])[: max(1, min(limit, 10))]
        return "\n\n".join(self._texts[place] for place in best if scores[place] > 0) or "nothing found"

    def _score(self, words: set[str], place: int) -> float:
        counts, length = self._counts[place], self._lengths[place] / self._mean_length
        total = 0.0
        for word in words & counts.keys():
            having = self._having[word]
            rarity = math.log(1 + (len(self._texts) - having + 0.5) / (having + 0.5))
            total += rarity * counts[word] * 2.5 / (counts[word] + 1.5 * (0.25 + 0.75 * length))
        return total


def _read_folder(folder: Path) -> list[str]:
    texts = [path.read_text() for path in sorted(folder.rglob("*")) if path.suffix in (".txt", ".md")]
    if not texts:
        raise InvalidRequestError(
            "holds no *.txt or *.md file", field="documents", value=str(folder), remedy="Name another folder"
        )
    return texts


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())
