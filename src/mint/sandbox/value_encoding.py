"""The values that cross the border of a sandbox, encoded as text: a closed set of plain types.

A value is a flat JSON list of tokens; a container stands before its items and says how many follow: `{1: [True]}` is
`[["dict", 1], ["int", "0x1"], ["list", 1], true]`. Both directions use loops instead of recursion, so their time and
memory are linear in the text, and their limits do not depend on the caller's stack.

`encode` runs on both sides: here, in the zygote's child, and, from its source text, inside Monty. It therefore uses
only Python that Monty supports, and needs nothing from outside its own body. The code under test never sees an
expected answer.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any, NoReturn

SEQUENCES: dict[str, Callable[..., Any]] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
HEXADECIMAL = re.compile(r"-?0x[0-9a-f]+", re.ASCII)
FLOAT = re.compile(r"-?(?:inf|nan|\d{1,20}(?:\.\d{0,20})?(?:e[+-]?\d{1,3})?)", re.ASCII)
BYTES = re.compile(r"[0-9a-f]*", re.ASCII)
MAX_EQUAL_HASHES = 16
"""The most keys of one set or dict that may share a hash. Numbers can be chosen to share one, and building a set of
such numbers takes quadratic time."""
MAX_COUNT_DIGITS = 18


class ValueLimitError(ValueError):
    """A value is nested too deeply, has too many items, or keys that share a hash."""


def encode(value: object, max_depth: int, max_items: int) -> str:
    """The value as text with its exact types; TypeError if it, or a part of it, is not plain.

    `max_depth` limits how deeply containers are nested, `max_items` how many values there are at all depths together.
    The text of a value beyond a limit is `"too deep"` or `"too many items"`, in quotes.
    """
    import json  # deferred: the sandbox runs this source without the module around it

    tokens = []
    waiting: list[Any] = [(value, 0)]  # last in, first out
    while waiting:
        item, depth = waiting.pop()
        kind = type(item)
        if item is None or kind is bool or kind is str:
            tokens.append(item)
        elif kind is int:
            tokens.append(["int", hex(item)])  # decimal text is limited to 4,300 digits
        elif kind is float:
            tokens.append(["float", repr(item)])
        elif kind is bytes:
            tokens.append(["bytes", item.hex()])
        elif kind in (list, tuple, set, frozenset, dict):
            if depth == max_depth:
                return '"too deep"'
            count = len(item) * 2 if kind is dict else len(item)
            if len(tokens) + 1 + len(waiting) + count > max_items:
                return '"too many items"'
            parts = []
            if kind is dict:
                for key, part in item.items():
                    parts.append(key)
                    parts.append(part)
            else:
                parts = list(item)
            tokens.append([kind.__name__, len(item)])
            waiting.extend([(part, depth + 1) for part in parts[::-1]])
        else:
            raise TypeError(f"{kind.__name__} is not a plain value")
    return json.dumps(tokens)


ENCODE_SOURCE = inspect.getsource(encode)


def decode(text: str, max_depth: int, max_items: int) -> Any:
    """The value that `encode` wrote.

    Raises:
        ValueLimitError: the value is beyond a limit, or too many of its keys share a hash.
        ValueError: any other text, however nested or long.
    """
    try:
        tokens = _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not an encoded value: {type(error).__name__}") from None
    if tokens == "too deep":
        raise _too_deep(max_depth)
    if tokens == "too many items" or (type(tokens) is list and len(tokens) > max_items):
        raise ValueLimitError(f"the value has more than {max_items} items")
    if type(tokens) is not list:
        raise ValueError("not an encoded value: no list of tokens")
    return _value(tokens, max_depth)


def encode_input(arguments: tuple[Any, ...], max_depth: int) -> str:
    """The arguments of a call as text. The caller wrote them, so their number is not limited.

    Raises:
        TypeError: an argument is not plain.
        ValueLimitError: an argument is nested deeper than `max_depth`.
    """
    text = encode(arguments, max_depth + 1, sys.maxsize)
    if text == '"too deep"':
        raise _too_deep(max_depth)
    return text


def decode_input(text: str) -> tuple[Any, ...]:
    """The arguments that `encode_input` wrote."""
    return decode(text, sys.maxsize, sys.maxsize)


def _value(tokens: list[Any], max_depth: int) -> Any:
    whole: list[Any] = []
    unfinished: list[tuple[str, int, list[Any]]] = [("list", 1, whole)]
    """Kind, number of parts, and the parts so far. The first entry holds the whole value."""
    for token in tokens:
        if not unfinished:
            raise ValueError("not an encoded value: tokens after its end")
        if type(token) is list:
            name, body = _named(token)
            if type(body) is int:
                if len(unfinished) > max_depth:
                    raise _too_deep(max_depth)
                unfinished.append((name, _part_count(name, body, len(tokens)), []))
            else:
                unfinished[-1][2].append(_scalar(name, body))
        elif token is None or type(token) in (bool, str):
            unfinished[-1][2].append(token)
        else:
            raise ValueError(f"not an encoded value: a token of type {type(token).__name__}")
        while unfinished and len(unfinished[-1][2]) == unfinished[-1][1]:
            name, _, parts = unfinished.pop()
            if unfinished:
                unfinished[-1][2].append(_container(name, parts))
    if unfinished:
        raise ValueError("not an encoded value: tokens are missing")
    return whole[0]


def _named(token: list[Any]) -> tuple[str, Any]:
    if len(token) == 2 and type(token[0]) is str and type(token[1]) in (str, int):
        return token[0], token[1]
    raise ValueError("not an encoded value: a token without name and content")


def _part_count(name: str, count: int, most: int) -> int:
    if not (name == "dict" or name in SEQUENCES) or not 0 <= count <= most:
        raise ValueError("not an encoded value: no such container")
    return 2 * count if name == "dict" else count


def _scalar(name: str, body: str) -> Any:
    if name == "int" and HEXADECIMAL.fullmatch(body):
        return int(body, 16)  # linear, unlike decimal text
    if name == "float" and FLOAT.fullmatch(body):
        return float(body)
    if name == "bytes" and BYTES.fullmatch(body) and len(body) % 2 == 0:
        return bytes.fromhex(body)
    raise ValueError("not an encoded value: unknown or malformed content")


def _container(name: str, parts: list[Any]) -> Any:
    if name in ("list", "tuple"):
        return SEQUENCES[name](parts)
    keys = parts[::2] if name == "dict" else parts
    try:
        shared = max(Counter(map(hash, keys)).values(), default=0)
    except TypeError:
        raise ValueError("not an encoded value: a key that has no hash") from None
    if shared > MAX_EQUAL_HASHES:
        raise ValueLimitError(f"more than {MAX_EQUAL_HASHES} keys of a set or dict share a hash")
    value = dict(zip(keys, parts[1::2], strict=True)) if name == "dict" else SEQUENCES[name](keys)
    if len(value) < len(keys):
        raise ValueError("not an encoded value: a key stands twice")
    return value


def _too_deep(max_depth: int) -> ValueLimitError:
    return ValueLimitError(f"the value is nested deeper than {max_depth} levels")


def _count(digits: str) -> int:
    if len(digits) > MAX_COUNT_DIGITS:
        raise ValueError("a count of too many digits")
    return int(digits)


def _refuse(text: str) -> NoReturn:
    raise ValueError("a number outside a token")


_DECODER = json.JSONDecoder(parse_int=_count, parse_float=_refuse, parse_constant=_refuse)
