"""The base classes of all values: pydantic models, and plain classes that hold arrays.

A value with numbers is a plain class over numpy arrays (`ArrayValue`): pydantic would check and copy each number again
at every step. Its numbers are lists only in JSON, whose form is a pydantic model.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema, core_schema

from mint.types.arrays import np
from mint.types.first_wrong import FirstWrongElement
from mint.types.validation_errors import invalid_request


class StrictValue(FirstWrongElement):
    """A strict value: no coercion, no unknown field. Infinities and NaN survive JSON."""

    model_config = ConfigDict(strict=True, extra="forbid", ser_json_inf_nan="constants")


class Params(StrictValue):
    """A strict value that users construct by hand: a wrong field raises a `MintError`."""

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise invalid_request(error, type(self).__name__) from error


class Result(FirstWrongElement):
    """A result of the server. Unknown fields are ignored, so that a newer server may send more."""

    model_config = ConfigDict(extra="ignore", ser_json_inf_nan="constants")


class ArrayValue:
    """A value that holds arrays. Users read lists; the arrays themselves are read-only.

    A subclass names its JSON form, a pydantic model, and takes exactly the fields of that form. It reads and writes as
    a pydantic model does, alone or as a field of one. An instance is never checked twice.
    """

    __slots__ = ()
    json_form: ClassVar[type[BaseModel]]

    @classmethod
    def model_validate(cls, value: Any) -> Self:
        """The value in a dictionary of its fields.

        Raises:
            InvalidRequestError: names the first wrong field.
        """
        if isinstance(value, cls):
            return value
        try:
            return cls._from_form(cls.json_form.model_validate(value))
        except ValidationError as error:
            raise invalid_request(error, cls.__name__) from error

    @classmethod
    def model_validate_json(cls, body: str | bytes) -> Self:
        """The value in a JSON object. Raises as `model_validate`."""
        try:
            return cls._from_form(cls.json_form.model_validate_json(body))
        except ValidationError as error:
            raise invalid_request(error, cls.__name__) from error

    def model_dump(self, **options: Any) -> dict[str, Any]:
        """The fields as plain Python values; takes the options of pydantic's method."""
        return self._as_form().model_dump(**options)

    def model_dump_json(self, **options: Any) -> str:
        """The fields as JSON; takes the options of pydantic's method."""
        return self._as_form().model_dump_json(**options)

    def model_copy(self, *, update: dict[str, Any] | None = None) -> Self:
        """The same value with some fields replaced. The replacements are checked."""
        return type(self)(**{**self._fields(), **(update or {})})

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(map(_same, self._content(), other._content()))

    __hash__ = None

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in self._fields().items())
        return f"{type(self).__name__}({fields})"

    def _content(self) -> tuple[Any, ...]:
        """What makes two values equal."""
        raise NotImplementedError

    def _fields(self) -> dict[str, Any]:
        fields = {}
        for name in self.json_form.model_fields:
            fields[name] = getattr(self, name)
        return fields

    def _as_form(self) -> BaseModel:
        return self.json_form.model_construct(**self._fields())  # not checked again

    @classmethod
    def _from_form(cls, form: BaseModel) -> Self:
        return cls(**dict(form))

    @classmethod
    def __get_pydantic_core_schema__(cls, _source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        form = handler(cls.json_form)
        from_form = core_schema.no_info_after_validator_function(cls._from_form, form)
        return core_schema.json_or_python_schema(
            json_schema=from_form,
            python_schema=core_schema.no_info_wrap_validator_function(
                lambda value, parse: value if isinstance(value, cls) else parse(value), from_form
            ),
            serialization=core_schema.plain_serializer_function_ser_schema(cls._as_form, return_schema=form),
        )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    return one == other
