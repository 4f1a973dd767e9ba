"""Prints the fields of all types of the installed `tinker` SDK: JSON, type → field → the types that are named in it.

Runs in an environment of the SDK and imports nothing of mint.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import pkgutil
import sys
import typing
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import pydantic
import tinker.types as package  # ty: ignore[unresolved-import]


def fields(kind: Any, names: dict[str, Any]) -> dict[str, list[str]] | None:
    """A value's fields, each with the types within it; None for what is no value. `names` are those that the SDK's
    modules import for annotations only."""
    if issubclass(kind, pydantic.BaseModel):
        hints = {name: field.annotation for name, field in kind.model_fields.items()}
    elif dataclasses.is_dataclass(kind):
        every = get_type_hints(kind, localns=names)
        hints = {field.name: every[field.name] for field in dataclasses.fields(kind)}
    elif issubclass(kind, dict) and hasattr(kind, "__required_keys__"):
        hints = get_type_hints(kind, localns=names)
    else:
        return None
    return {name: sorted(set(within(hint))) for name, hint in hints.items()}


def within(hint: Any) -> Iterator[str]:
    """The names of the SDK's types in an annotation."""
    if inspect.isclass(hint) and hint.__module__.split(".")[0] == "tinker":
        yield hint.__name__
    for inner in get_args(hint):
        yield from within(inner)


def main() -> None:
    """Reads every module of `tinker.types`."""
    modules = [
        importlib.import_module(module.name) for module in pkgutil.walk_packages(package.__path__, "tinker.types.")
    ]
    names = vars(typing) | {name: kind for module in modules for name, kind in vars(module).items()}
    found: dict[str, dict[str, list[str]]] = {}
    for name, kind in names.items():
        if inspect.isclass(kind) and kind.__module__.split(".")[0] == "tinker" and not name.startswith("_"):
            known = fields(kind, names)
            if known is not None:
                found[name] = known
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
