"""Messages that are refused at the first wrong element of a list or mapping.

By itself pydantic describes every wrong element: about 1.5 KB and 10 µs each, in one call that holds the interpreter's
lock. A body of 1 MiB can have 500,000 of them.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, GetCoreSchemaHandler
from pydantic_core import CoreSchema

_COLLECTIONS = frozenset({"dict", "frozenset", "list", "set", "tuple"})
"""The types of pydantic's schemas that have the setting `fail_fast`."""

_NO_SCHEMAS = frozenset({"default", "metadata", "serialization"})
"""The settings of a schema that hold no schema of what is read."""


def _stop_at_first(part: Any) -> None:
    """Sets `fail_fast` in each collection of a schema, or of a part of one."""
    if isinstance(part, list | tuple):
        for inner in part:
            _stop_at_first(inner)
    elif isinstance(part, dict):
        kind = part.get("type")  # a text in a schema; in a mapping of fields there may be a field of this name
        is_schema = isinstance(kind, str)
        if is_schema and kind in _COLLECTIONS:
            part["fail_fast"] = True
        for name, inner in part.items():
            if not (is_schema and name in _NO_SCHEMAS):
                _stop_at_first(inner)


class FirstWrongElement(BaseModel):
    """A message in which each list or mapping, at any depth, has at most one wrong element in pydantic's errors."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Pydantic's own schema, in which every collection stops at its first wrong element."""
        schema = handler(source)
        _stop_at_first(schema)
        return schema
