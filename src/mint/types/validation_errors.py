"""What pydantic found wrong with a value, as a `MintError` that names field, value and remedy."""

from __future__ import annotations

from pydantic import ValidationError

from mint.errors import InvalidRequestError


def invalid_request(error: ValidationError, where: str) -> InvalidRequestError:
    """The first complaint of a pydantic error as a `MintError` that names field, value and remedy."""
    first = error.errors()[0]
    path = where + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
    inner = first.get("ctx", {}).get("error")
    if isinstance(inner, InvalidRequestError):
        if first["loc"] or not inner.field:  # a check of the whole message has named its field already
            inner.field = f"{path}.{_without_class(inner.field)}" if inner.field else path
        return inner
    value = "(missing)" if first["type"] == "missing" else first.get("input")
    remedy = "Remove it or correct its spelling" if first["type"] == "extra_forbidden" else None
    return InvalidRequestError(first["msg"], field=path, value=value, remedy=remedy)


def _without_class(field: str) -> str:
    """`betas` of `AdamParams.betas`: the place of the value stands before it instead."""
    return field.partition(".")[2] if field[:1].isupper() and "." in field else field
