"""Messages of other people's protocols in which no field is ignored in silence.

Each field is honoured, or is a label or hint that asks for nothing, or is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from mint.errors import InvalidRequestError
from mint.types import invalid_request
from mint.types.first_wrong import FirstWrongElement

Refusals = Mapping[str, tuple[tuple[Any, ...], str]]
"""Fields that cannot be honoured: the values (besides null) that ask for nothing, and what to do instead."""


class StrictFields(FirstWrongElement):
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


M = TypeVar("M", bound=BaseModel)


def read_json(kind: type[M], body: bytes) -> M:
    """A request. Not by `wire.decode`, which logs unknown fields: clients of these protocols send many.

    Raises:
        InvalidRequestError: it is no such request.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise invalid_request(error, kind.__name__) from error


def read_fields(kind: type[M], fields: Mapping[str, Any]) -> M:
    """The same from fields that are messages already.

    Raises:
        InvalidRequestError: as `read_json`.
    """
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise invalid_request(error, kind.__name__) from error
