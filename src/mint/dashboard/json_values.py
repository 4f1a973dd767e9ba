"""Values as JSON that every browser reads. Knows nothing of what they mean."""

from __future__ import annotations

import json

import pydantic_core


def json_bytes(value: object) -> bytes:
    """A value as JSON in UTF-8. A number that is none (`inf`, `nan`) is null: JSON has no other word for it; half of a
    surrogate pair, which UTF-8 has no word for, is `?`."""
    try:
        return pydantic_core.to_json(value, inf_nan_mode="null")
    except pydantic_core.PydanticSerializationError:
        plain = pydantic_core.to_jsonable_python(value, inf_nan_mode="null")
        return json.dumps(plain, ensure_ascii=False).encode("utf-8", "replace")
