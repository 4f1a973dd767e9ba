"""A type that clients ask for, and a function that they call: few values, so that any model can give one of them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Animal(BaseModel):
    """An animal."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["cat", "dog"]
    legs: Literal[2, 4]


FEED: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "feed",
        "description": "Feeds an animal.",
        "parameters": {
            "type": "object",
            "properties": {"animal": {"enum": ["cat", "dog"]}},
            "required": ["animal"],
            "additionalProperties": False,
        },
    },
}
