"""Compares plain values in exact type and value, in linear time, also values that model-written code has returned.

Same parts get the same number, from the leaves up (hash consing), so two values are the same if their numbers are.
No recursion: a deeply nested value needs no stack. A container that occurs several times is numbered once.
"""

from __future__ import annotations

from typing import Any

CONTAINERS = (list, tuple, set, frozenset, dict)


def same_value(got: object, expected: object) -> bool:
    """Whether two plain values have the same type and value, at every depth.

    `True` is not `1`, `1` is not `1.0`, a list is not a tuple. NaN equals NaN and -0.0 equals 0.0; the order of sets
    and dicts does not matter. A value that is not plain, or that contains itself, equals nothing.
    """
    if type(got) is not type(expected):
        return False
    numbering = _Numbering()
    try:
        return numbering.number(got) == numbering.number(expected)
    except TypeError:
        return False


class _Numbering:
    """Gives equal numbers to the same values and different ones to others."""

    def __init__(self) -> None:
        self._by_form: dict[tuple[Any, ...], int] = {}
        self._by_id: dict[int, int] = {}
        """The numbers of containers by `id`, which is safe while the whole value is alive."""

    def number(self, value: Any) -> int:
        """Raises TypeError if the value, or a part of it, is not plain, or if it contains itself."""
        waiting = [(value, False)]
        open_ids: set[int] = set()
        while waiting:
            item, has_parts = waiting.pop()
            if type(item) not in CONTAINERS or id(item) in self._by_id:
                continue
            if has_parts:
                self._by_id[id(item)] = self._of_form(self._container_form(item))
                open_ids.discard(id(item))
                continue
            if id(item) in open_ids:
                raise TypeError("a value that contains itself")
            open_ids.add(id(item))
            waiting.append((item, True))
            waiting += [(part, False) for part in item]
            waiting += [(part, False) for part in item.values()] if type(item) is dict else []
        return self._of_part(value)

    def _of_part(self, part: Any) -> int:
        return self._by_id[id(part)] if type(part) in CONTAINERS else self._of_form(_leaf_form(part))

    def _of_form(self, form: tuple[Any, ...]) -> int:
        return self._by_form.setdefault(form, len(self._by_form))

    def _container_form(self, item: Any) -> tuple[Any, ...]:
        if type(item) is dict:
            return ("dict", *sorted((self._of_part(key), self._of_part(part)) for key, part in item.items()))
        numbers = [self._of_part(part) for part in item]
        return (type(item).__name__, *(sorted(numbers) if type(item) in (set, frozenset) else numbers))


def _leaf_form(value: Any) -> tuple[str, Any]:
    """Only texts and bytes are hashed, with the secret of this process: integers can be chosen to share a hash."""
    kind = type(value)
    if kind in (str, bytes):
        return kind.__name__, value
    if kind is int:
        return "int", hex(value)
    if kind is float:
        return "float", repr(value + 0.0)  # + 0.0 drops the sign of zero
    if value is None or kind is bool:
        return "constant", str(value)
    raise TypeError(f"{kind.__name__} is not a plain value")
