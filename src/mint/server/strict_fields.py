"""Messages of other people's protocols in which no field is ignored in silence.

Each field is honoured, or is a label or hint that asks for nothing, or is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator

from mint.errors import InvalidRequestError

Refusals = Mapping[str, tuple[tuple[Any, ...], str]]
"""Fields that cannot be honoured: the values (besides null) that ask for nothing, and what to do instead."""


class StrictFields(BaseModel):
    """Treats null as left out, converts no types (`"1"` is no number), and refuses what it does not know by name.

    `refused` are the known fields that cannot be honoured. `labels` change no reply, and take any value.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    refused: ClassVar[Refusals] = {}
    labels: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        own = {field.alias or name for name, field in cls.model_fields.items()}
        honoured: dict[str, Any] = {}
        for name, value in fields.items():
            if value is None or (name in cls.labels and name not in own):
                continue
            if name in own:
                honoured[name] = value
                continue
            known = cls.refused.get(name)
            if known is None:
                remedy = "Remove it or correct its spelling"
                raise InvalidRequestError("is not known here", field=name, value=value, remedy=remedy)
            harmless, remedy = known
            if not any(value == nothing for nothing in harmless):
                raise InvalidRequestError("is not supported", field=name, value=value, remedy=remedy)
        return honoured
