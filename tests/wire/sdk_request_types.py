"""Prints the fields of all request types of the installed `tinker` SDK: JSON, type → names.

Runs in an environment of the SDK and imports nothing of mint.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import pkgutil
from typing import Any

import pydantic
import tinker.types  # ty: ignore[unresolved-import]


def fields(kind: Any) -> list[str] | None:
    """The names of a value's fields; None for what is no value."""
    if issubclass(kind, pydantic.BaseModel):
        return sorted(kind.model_fields)
    if dataclasses.is_dataclass(kind):
        return sorted(field.name for field in dataclasses.fields(kind))
    if issubclass(kind, dict) and hasattr(kind, "__required_keys__"):
        return sorted(kind.__annotations__)
    return None


def main() -> None:
    """Reads every module of `tinker.types`."""
    found: dict[str, list[str]] = {}
    for module in pkgutil.walk_packages(tinker.types.__path__, "tinker.types."):
        for name, kind in vars(importlib.import_module(module.name)).items():
            if inspect.isclass(kind) and kind.__module__.split(".")[0] == "tinker" and not name.startswith("_"):
                names = fields(kind)
                if names is not None:
                    found[name] = names
    print(json.dumps(found))


if __name__ == "__main__":
    main()
