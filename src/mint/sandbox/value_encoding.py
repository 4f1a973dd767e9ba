"""The values that cross the border of a sandbox, encoded as text: a closed set of plain types.

`encode` runs on both sides: here, in the zygote's child, and, from its source text, inside Monty. It therefore uses
only Python that Monty supports, and needs nothing from outside its own body. Knows no expected answer; the code under
test never sees one.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Any

SEQUENCES: dict[str, Callable[..., Any]] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def encode(value: object) -> str:
    """The value as JSON text with its exact type; TypeError if it, or a part of it, is not plain."""
    import json  # deferred: the sandbox runs this source without the module around it

    def form(value):
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            return ["int", hex(value)]  # decimal text is limited to 4,300 digits
        if kind is float:
            return ["float", repr(value)]
        if kind is bytes:
            return ["bytes", value.hex()]
        if kind is dict:
            return ["dict", [[form(key), form(item)] for key, item in value.items()]]
        for name, sequence in (("list", list), ("tuple", tuple), ("set", set), ("frozenset", frozenset)):
            if kind is sequence:
                return [name, [form(item) for item in value]]
        raise TypeError(f"{kind.__name__} is not a plain value")

    return json.dumps(form(value))


ENCODE_SOURCE = inspect.getsource(encode)


def decode(text: str) -> Any:
    """The value that `encode` wrote; ValueError for any other text, however nested or long."""
    try:
        return _value(json.loads(text))
    except (ValueError, TypeError, RecursionError, AttributeError) as error:
        raise ValueError(f"not an encoded value: {type(error).__name__}") from error


def same_value(got: object, expected: object) -> bool:
    """Whether two plain values have the same type and value, at every depth.

    `True` is not `1`, `1` is not `1.0`, a list is not a tuple. NaN equals NaN and -0.0 equals 0.0; the order of sets
    and dicts does not matter. A value that is not plain equals nothing.
    """
    try:
        return _canonical(got) == _canonical(expected)
    except (TypeError, RecursionError):
        return False


def _value(form: Any) -> Any:
    if form is None or type(form) in (bool, str):
        return form
    name, body = form
    if name == "int":
        return int(body, 16)
    if name == "float":
        return float(body)
    if name == "bytes":
        return bytes.fromhex(body)
    if name == "dict":
        return {_value(key): _value(item) for key, item in body}
    if name in SEQUENCES and type(body) is list:
        return SEQUENCES[name](_value(item) for item in body)
    raise ValueError(f"unknown kind {name!r}")


def _canonical(value: Any) -> str:
    """A text that is equal for two values exactly if they are the same."""
    kind = type(value)
    if kind is float:
        return f"float {value + 0.0!r}"  # + 0.0 drops the sign of zero
    if kind is dict:
        return f"dict {sorted((_canonical(key), _canonical(item)) for key, item in value.items())}"
    if kind in (set, frozenset):
        return f"{kind.__name__} {sorted(_canonical(item) for item in value)}"
    if kind in (list, tuple):
        return f"{kind.__name__} {[_canonical(item) for item in value]}"
    return encode(value)
