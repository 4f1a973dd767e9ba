"""What pydantic found wrong with a value, as a `MintError` that names field, value and remedy."""

from __future__ import annotations

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from mint.errors import InvalidRequestError

_BRANCHES = frozenset({"float", "int", "str", "list[int]", "list[float]", "list[str]"})
"""The types of a union: pydantic names the one that it tried as a part of the field's path. Tags of unions are such
parts, too; here they stand in parentheses."""

_REMEDIES = {
    "bool_type": "Pass true or false",
    "extra_forbidden": "Remove it or correct its spelling",
    "float_type": "Pass a number",
    "int_type": "Pass a whole number, without a decimal point",
    "missing": "Pass it",
    "string_type": "Pass a text",
}
"""By pydantic's name of what is wrong."""


def invalid_request(error: ValidationError, where: str) -> InvalidRequestError:
    """The first complaint of a pydantic error as a `MintError` that names field, value and remedy."""
    complaints = error.errors()
    no_number = next(filter(_is_null_number, complaints), None)
    first = no_number or complaints[0]
    parts = [part for part in first["loc"] if not _is_branch(part)]
    path = where + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    inner = first.get("ctx", {}).get("error")
    if isinstance(inner, InvalidRequestError):
        if first["loc"] or not inner.field:  # a check of the whole message has named its field already
            inner.field = f"{path}.{_without_class(inner.field)}" if inner.field else path
        return inner
    if no_number is not None:
        message = "is null where a number belongs: JSON has no NaN and no infinity, and clients write null for them"
        return InvalidRequestError(message, field=path, value="null", remedy="Pass a finite number, or leave it out")
    value = "(missing)" if first["type"] == "missing" else first.get("input")
    return InvalidRequestError(first["msg"], field=path, value=value, remedy=_REMEDIES.get(first["type"]))


def _is_branch(part: int | str) -> bool:
    return part in _BRANCHES or (isinstance(part, str) and part.startswith("("))


def _is_null_number(complaint: ErrorDetails) -> bool:
    return complaint["type"] in ("float_type", "int_type") and complaint["input"] is None


def _without_class(field: str) -> str:
    """`betas` of `AdamParams.betas`: the place of the value stands before it instead."""
    return field.partition(".")[2] if field[:1].isupper() and "." in field else field
