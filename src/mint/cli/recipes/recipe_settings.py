"""The settings of a recipe with type, default and meaning, for `mint train RECIPE --help` and the completion of shells.
It reads the config's class; a meaning is the text below a field in its source."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from mint.recipes.recipe_configs import CONFIGS


@dataclass(frozen=True)
class Setting:
    """One setting: `kind` is its type in words; `choices` are its values if they are few names."""

    name: str
    kind: str
    default: str
    meaning: str
    choices: tuple[str, ...]


def read_settings_of(recipe: str) -> list[Setting]:
    """The settings of a recipe that can be written as `name=value`, in the order of its config."""
    config = CONFIGS[recipe]
    meanings = _meanings(config)
    settings = []
    for name, field in config.model_fields.items():
        if kind := _kind(field.annotation):
            choices = tuple(_choices(field.annotation))
            settings.append(Setting(name, kind, _default(field), meanings.get(name, ""), choices))
    return settings


def _kind(annotation: Any) -> str:
    """A type in words; empty for a function, which has no text."""
    if annotation is NoneType:
        return "none"
    origin = get_origin(annotation)
    if origin is Callable:
        return ""
    if origin is Literal:
        return "|".join(str(value) for value in get_args(annotation))
    if origin in (Union, UnionType):
        return "|".join(kind for kind in map(_kind, get_args(annotation)) if kind not in ("", "none"))
    if origin is not None:
        parts = [_kind(one) for one in get_args(annotation) if one is not Ellipsis]
        return f"{origin.__name__} of {', '.join(parts)}" if all(parts) else ""
    return "text" if annotation is str else getattr(annotation, "__name__", str(annotation)).lower()


def _choices(annotation: Any) -> Iterator[str]:
    if annotation is bool:
        yield from ("true", "false")
    elif get_origin(annotation) is Literal:
        yield from map(str, get_args(annotation))
    elif get_origin(annotation) in (Union, UnionType):
        for one in get_args(annotation):
            yield from _choices(one)


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is None or value in ((), {}):
        return "not set"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _meanings(config: type[BaseModel]) -> dict[str, str]:
    """Field → the string that follows it in the source of the class or of a class below it, on one line."""
    found: dict[str, str] = {}
    for base in reversed(config.__mro__):
        if not issubclass(base, BaseModel) or base is BaseModel:
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for field, text in zip(tree.body, tree.body[1:], strict=False):
            if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                continue
            if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                found[field.target.id] = " ".join(str(text.value.value).split())
    return found
