"""Walks a request type of another package down to its last field, and sends odd values in every place.

A place takes values of one typed dictionary. If the smallest value there is refused by name, so is all within it. If it
is accepted, an odd value in each of its fields must be refused, and the places in these fields come next.
"""

from __future__ import annotations

import typing
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin

import httpx
import typing_extensions
from field_checks import ODD

Body = dict[str, Any]
TEXT = "a"
UNHEARD_OF = "unheard_of"
"""A field that no type has."""


@dataclass(frozen=True)
class Place:
    """Where values of a type go: the fields that lead there, and what makes a request of such a value."""

    kind: Any
    fields: tuple[str, ...]
    request: Callable[[Body], Body]


@dataclass
class Found:
    """The types that are accepted somewhere, and fields of theirs, named `Type.field`, that take an odd value."""

    accepted: set[str] = field(default_factory=set)
    take_anything: set[str] = field(default_factory=set)
    unnamed: dict[str, str] = field(default_factory=dict)
    """Refusals that do not name what was refused."""


def walk(
    http: httpx.Client,
    path: str,
    kind: Any,
    body: Body,
    *,
    before: Mapping[str, Sequence[Body]],
    examples: Mapping[str, Body],
) -> Found:
    """Sends requests like `body`, which is of the type `kind` and is accepted. An item of the list in one of its fields
    comes after the items `before`. `examples` have a value of each type whose smallest one says nothing."""
    found = Found()
    waiting = deque(_places(Place(kind, (), lambda value: value), body, before))
    walked = set()
    while waiting:
        place = waiting.popleft()
        name = place.kind.__name__
        value = examples.get(name, smallest(place.kind))
        answer = http.post(path, json=place.request(value))
        if answer.status_code != 200:
            names = {place.fields[-1], *(text for text in value.values() if isinstance(text, str) and text != TEXT)}
            _check(answer, names, f"{'.'.join(place.fields)} as {name}", found)
            continue
        found.accepted.add(name)
        if place.kind in walked:
            continue
        walked.add(place.kind)
        for one in (*_hints(place.kind), UNHEARD_OF):
            answer = http.post(path, json=place.request({**value, one: ODD}))
            if answer.status_code == 200:
                found.take_anything.add(f"{name}.{one}")
            else:
                _check(answer, {one}, f"{name}.{one}", found)
        waiting += _places(place, value, {})
    return found


def smallest(hint: Any) -> Any:
    """A value of a type, without the fields that can be left out."""
    hint = _plain(hint)
    if typing_extensions.is_typeddict(hint):
        return {name: smallest(inner) for name, inner in _hints(hint).items() if name in _required(hint)}
    if get_origin(hint) is Literal:
        return get_args(hint)[0]
    if _is_list(hint):
        return [smallest(get_args(hint)[0])]
    if get_args(hint) and get_origin(hint) is not dict:
        return smallest(get_args(hint)[0])
    return {str: TEXT, bool: True, int: 1, float: 0.5}.get(hint, {})


def _places(outer: Place, value: Body, before: Mapping[str, Sequence[Body]]) -> Iterator[Place]:
    """The places in the fields of one, which has a value that is accepted."""
    for name, hint in _hints(outer.kind).items():
        for kind, in_list in _within(hint):
            items = [*before.get(name, [])] if in_list else None

            def request(inner: Body, name: str = name, items: list[Body] | None = items) -> Body:
                return outer.request({**value, name: inner if items is None else [*items, inner]})

            yield Place(kind, (*outer.fields, name), request)


def _within(hint: Any) -> Iterator[tuple[Any, bool]]:
    """The typed dictionaries that a field takes, and whether it takes them in a list."""
    hint = _plain(hint)
    if typing_extensions.is_typeddict(hint):
        yield hint, False
    elif get_origin(hint) is not dict:
        for inner in get_args(hint):
            for kind, in_list in _within(inner):
                yield kind, in_list or _is_list(hint)


def _hints(kind: Any) -> dict[str, Any]:
    return {name: _plain(hint) for name, hint in typing_extensions.get_type_hints(kind).items()}


def _required(kind: Any) -> set[str]:
    """`__required_keys__` is wrong where annotations are texts, as in a module with `from __future__`."""
    written = typing_extensions.get_type_hints(kind, include_extras=True)
    needed = {name for name, hint in written.items() if get_origin(hint) is typing_extensions.Required}
    return needed or (set(written) if kind.__total__ else set())


def _plain(hint: Any) -> Any:
    """Without `Required` and `Annotated`."""
    while get_origin(hint) in (typing_extensions.Required, typing_extensions.NotRequired, typing.Annotated):
        hint = get_args(hint)[0]
    return hint


def _is_list(hint: Any) -> bool:
    origin = get_origin(hint)
    return isinstance(origin, type) and issubclass(origin, Iterable) and not issubclass(origin, Mapping)


def _check(answer: httpx.Response, names: set[str], where: str, found: Found) -> None:
    """Whether a refusal has one of the names."""
    message = answer.json()["error"]["message"]
    if answer.status_code != 400 or not any(name in message for name in names):
        found.unnamed[where] = f"{answer.status_code}: {message}"
