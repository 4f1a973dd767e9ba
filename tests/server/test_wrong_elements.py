"""A list or mapping with many wrong elements is refused at the first one, on every route.

Generated from the table of routes: a route that is added is tried here.
"""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from pydantic import BaseModel, ValidationError

from mint.server.all_routes import ROUTES
from mint.types.value_classes import ArrayValue

ELEMENTS = 3_000
MAX_ERRORS = 40
"""A message with several wrong fields has several errors, and so has a union; one for each element would be more."""

MAX_DEPTH = 8
WRONG: tuple[Any, ...] = ({}, [], [[None]], None)
"""No list or mapping with types takes all of these."""

REQUESTS = {row.request for row in ROUTES if row.method != "GET" and row.request is not None}


def members(annotation: Any) -> Iterator[Any]:
    """The types that a field may have, without `Annotated` and unions around them."""
    if get_origin(annotation) in (Union, types.UnionType):
        for part in get_args(annotation):
            yield from members(part)
    elif get_origin(annotation) is Annotated:
        yield from members(get_args(annotation)[0])
    elif isinstance(annotation, type) and issubclass(annotation, ArrayValue):
        yield annotation.json_form
    else:
        yield annotation


def example(annotation: Any) -> Any:
    """A value of this type, so that the elements beside a wrong one are right."""
    kind = next(members(annotation))
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return complete(kind)
    if get_origin(kind) is Literal:
        return get_args(kind)[0]
    if get_origin(kind) is list:
        return [example(get_args(kind)[0])]
    if get_origin(kind) is dict:
        return {}
    return {str: "a", int: 1, float: 1.0, bool: False}.get(kind, "a")


def complete(kind: type[BaseModel]) -> dict[str, Any]:
    """A message with its required fields and its type."""
    fields = kind.model_fields.items()
    return {
        field.alias or name: example(field.annotation)
        for name, field in fields
        if field.is_required() or (name == "type" and get_origin(field.annotation) is Literal)
    }


def bodies(annotation: Any, wrong: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Each place in this type that takes a collection, and a value that has one of wrong elements there."""
    for kind in members(annotation):
        if depth > MAX_DEPTH:
            return
        if get_origin(kind) is list:
            yield "[]", [wrong] * ELEMENTS
            for place, value in bodies(get_args(kind)[0], wrong, depth + 1):
                yield f"[]{place}", [value]
        elif get_origin(kind) is dict and get_args(kind)[1] is not Any:
            yield "{}", {f"{number}": wrong for number in range(ELEMENTS)}
            for place, value in bodies(get_args(kind)[1], wrong, depth + 1):
                yield f"{{}}{place}", {"1": value}
        elif isinstance(kind, type) and issubclass(kind, BaseModel):
            for name, field in kind.model_fields.items():
                for place, value in bodies(field.annotation, wrong, depth + 1):
                    yield f".{name}{place}", {**complete(kind), field.alias or name: value}


def errors_of(kind: type[BaseModel], body: bytes) -> int:
    try:
        kind.model_validate_json(body)
    except ValidationError as error:
        return error.error_count()
    return 0


@pytest.mark.parametrize("kind", sorted(REQUESTS, key=lambda kind: kind.__name__), ids=lambda kind: kind.__name__)
def test_a_collection_of_wrong_elements_is_one_error(kind: type[BaseModel]) -> None:
    most: dict[str, int] = {}
    for wrong in WRONG:
        for place, value in bodies(kind, wrong):
            count = errors_of(kind, json.dumps(value).encode())
            assert count <= MAX_ERRORS, (place, wrong, count)
            most[place] = max(most.get(place, 0), count)
    assert all(most.values()), f"no wrong element was found in {[place for place in most if not most[place]]}"


def test_the_collections_of_the_larger_protocols_are_tried() -> None:
    """The generator does not lose a part of a message."""
    tried = {f"{kind.__name__}{place}" for kind in REQUESTS for place, _ in bodies(kind, 0)}
    assert tried >= {
        "ChatRequest.messages[].content[]",
        "ChatRequest.tools[]",
        "CompletionRequest.logit_bias{}",
        "CompletionRequest.prompt[][]",
        "ForwardBackwardRequest.forward_backward_input.data[].model_input.chunks[].tokens[]",
        "MessagesRequest.messages[].content[]",
        "ResponsesRequest.input[].content[]",
        "RetrieveFuturesRequest.retrieved_request_ids[]",
        "SampleRequest.prompt.chunks[]",
    }
