"""What a field of a pydantic model accepts, in words: the remedy of a refusal. Knows no particular model."""

from __future__ import annotations

from collections.abc import Callable
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

_NAMES: dict[Any, str] = {int: "an integer", float: "a number", bool: "True or False", str: "a text"}
_BOUNDS = {"ge": "at least {}", "gt": "above {}", "le": "at most {}", "lt": "below {}"}


def allowed_values(field: FieldInfo) -> str:
    """For example `an integer, at least 1, at most 256`."""
    kinds = _kinds(field.annotation)
    words = [" or ".join(_in_words(kind) for kind in kinds if kind is not NoneType)]
    for constraint in field.metadata:
        words += [
            phrase.format(f"{bound:g}")
            for name, phrase in _BOUNDS.items()
            if (bound := getattr(constraint, name, None)) is not None
        ]
    return ", ".join(words) + (", or None" if NoneType in kinds else "")


def _kinds(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _in_words(kind: Any) -> str:
    container = get_origin(kind)
    if container is Literal:
        return " or ".join(map(_quoted, get_args(kind)))
    if container in (Union, UnionType):
        return " or ".join(_in_words(one) for one in get_args(kind))
    if container is Callable:
        return "a function"
    if container is not None:
        *_, inner = (one for one in get_args(kind) if one is not Ellipsis)
        return f"a {container.__name__} whose values are {_in_words(inner)}"
    return _NAMES.get(kind, f"a {getattr(kind, '__name__', kind)}")


def _quoted(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)
