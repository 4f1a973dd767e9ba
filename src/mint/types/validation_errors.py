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
    "model_type": "Pass one, or a dictionary of its fields",
    "string_type": "Pass a text",
}
"""By pydantic's name of what is wrong."""

_WORDINGS = {
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "dict_type": "must be an object",
    "enum": "must be {expected}",
    "extra_forbidden": "is not a known field",
    "finite_number": "must be a finite number",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "int_from_float": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_type": "must be a whole number",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "list_type": "must be a list",
    "literal_error": "must be {expected}",
    "missing": "is missing",
    "model_type": "must be an object of the type {class_name}",
    "string_too_long": "must have at most {max_length} characters",
    "string_too_short": "must have at least {min_length} characters",
    "string_type": "must be a text",
    "too_long": "must have at most {max_length} items",
    "too_short": "must have at least {min_length} items",
    "tuple_type": "must be a list",
}
"""The same in mint's words; pydantic's own where none is here."""


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
    return InvalidRequestError(wording(first), field=path, value=value, remedy=_REMEDIES.get(first["type"]))


def wording(complaint: ErrorDetails) -> str:
    """What pydantic complains about as the rest of a sentence about the value: `must be at least 0`."""
    context = complaint.get("ctx", {})
    if complaint["type"] == "value_error" and "error" in context:
        return str(context["error"])
    template = _WORDINGS.get(complaint["type"])
    if template is None:
        return complaint["msg"]
    # The class that pydantic names reads the JSON form of a `ModelInput`.
    return template.format(**context).removesuffix("Json")


def _is_branch(part: int | str) -> bool:
    return part in _BRANCHES or (isinstance(part, str) and part.startswith("("))


def _is_null_number(complaint: ErrorDetails) -> bool:
    return complaint["type"] in ("float_type", "int_type") and complaint["input"] is None


def _without_class(field: str) -> str:
    """`betas` of `AdamParams.betas`: the place of the value stands before it instead."""
    return field.partition(".")[2] if field[:1].isupper() and "." in field else field
