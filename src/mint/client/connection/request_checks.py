"""Checks requests before they are sent. Its errors are `MintError`s that name field, value and remedy.

Knows no route and no meaning of a request.
"""

from __future__ import annotations

from typing import Any, TypeVar

import pydantic_core
from pydantic import BaseModel, ValidationError

from mint.errors import InvalidRequestError
from mint.types import invalid_request

Q = TypeVar("Q", bound=BaseModel)


def checked(message: type[Q], /, **fields: Any) -> Q:
    """The request with these fields.

    Raises:
        InvalidRequestError: names the first wrong field.
    """
    try:
        return message(**fields)
    except ValidationError as error:
        raise invalid_request(error, message.__name__) from error


def unwritable(message: BaseModel, error: ValueError) -> InvalidRequestError:
    """The refusal of a request that cannot be sent; `error` is what stopped it from being written."""
    name = type(message).__name__
    field, value = _first_unwritable(message.model_dump(), name) or (name, error)
    return InvalidRequestError(
        "cannot be written as JSON",
        field=_printable(field),
        value=_printable(value),
        remedy="Pass text that is valid Unicode, and only numbers, texts, lists and dictionaries",
    )


def _first_unwritable(part: Any, path: str) -> tuple[str, Any] | None:
    """The path and the value of the first text or object inside `part` that JSON cannot carry."""
    if isinstance(part, dict):
        inner = [*((path, name) for name in part), *((f"{path}.{name}", own) for name, own in part.items())]
    elif isinstance(part, list | tuple):
        inner = [(f"{path}[{index}]", own) for index, own in enumerate(part)]
    else:
        try:
            pydantic_core.to_json(part)
        except ValueError:
            return path, part
        return None
    return next(filter(None, (_first_unwritable(own, where) for where, own in inner)), None)


def _printable(value: object) -> str:
    """Its text, with half of a surrogate pair escaped: to print that would be the next error."""
    return str(value).encode(errors="backslashreplace").decode()
