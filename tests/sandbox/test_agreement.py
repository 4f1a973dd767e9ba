"""Monty and the zygote give the same results for the same code, right or wrong."""

from __future__ import annotations

from typing import Any

import pytest

from mint.recipes.datasets.python_functions import ARGUMENT_NAMES, CASES, KINDS, PythonFunction
from mint.sandbox import Outcome, Sandbox, same_value

SOLUTIONS: dict[str, tuple[str, list[tuple[Any, ...]]]] = {
    "floats": (
        """
def f(a, b):
    return a / b, a ** 0.5, round(a * b, 3), a + 0.1
""",
        [(1, 3), (2.5, 4.0), (10, 7)],
    ),
    "infinities": (
        """
def f(x):
    return [float('inf') * x, float('nan'), -0.0]
""",
        [(1,), (-1,)],
    ),
    "big numbers": (
        """
def f(n):
    r = 1
    for i in range(1, n + 1):
        r *= i
    return r
""",
        [(5,), (60,), (2000,)],
    ),
    "bool is not int": (
        """
def f(x):
    return x > 2
""",
        [(1,), (3,)],
    ),
    "an exception for some": (
        """
def f(x):
    return [1, 2, 3][x]
""",
        [(0,), (7,), (-1,), (-9,)],
    ),
    "raises its own": (
        """
def f(x):
    raise ValueError('no ' + str(x))
""",
        [(1,)],
    ),
    "wrong type of argument": (
        """
def f(x):
    return x + 'a'
""",
        [("b",), (1,)],
    ),
    "wrong number of arguments": (
        """
def f(x, y):
    return x
""",
        [(1,), (1, 2)],
    ),
    "missing name": (
        """
def f(x):
    return undefined + x
""",
        [(1,)],
    ),
    "keeps state between calls": (
        """
seen = []
def f(x):
    seen.append(x)
    return seen
""",
        [(1,), (2,), (3,)],
    ),
    "changes its argument": (
        """
def f(x):
    x.sort()
    return x
""",
        [([3, 1, 2],), ([],)],
    ),
    "text": (
        """
def f(s):
    return s.title(), s[::-1], s.encode(), f'{len(s):03d}|{s!r:>12}'
""",
        [("ab cd",), ("é€",)],
    ),
    "sets and dicts": (
        """
def f(x):
    return {i % 3 for i in x}, {i: [i] for i in x}, frozenset(x)
""",
        [([1, 2, 3, 4],)],
    ),
    "lazy results": (
        """
def f(x):
    return map(str, x)
""",
        [([1, 2],)],
    ),
    "a generator expression": (
        """
def f(x):
    return (i + 1 for i in x)
""",
        [([1, 2],)],
    ),
    "zip made a list": (
        """
def f(x):
    return list(zip(x, reversed(x)))
""",
        [([1, 2],)],
    ),
    "a range": (
        """
def f(x):
    return range(x)
""",
        [(3,)],
    ),
    "a function": (
        """
def f(x):
    return lambda: x
""",
        [(3,)],
    ),
    "a class": (
        """
class A:
    def __init__(self, x):
        self.x = x
def f(x):
    return A(x).x, A(x)
""",
        [(3,)],
    ),
    "inheritance": (
        """
class A(int):
    pass
def f(x):
    return A(x)
""",
        [(3,)],
    ),
    "a generator": (
        """
def g(x):
    yield x
def f(x):
    return list(g(x))
""",
        [(3,)],
    ),
    "a counter": (
        """
from collections import Counter
def f(x):
    return Counter(x)
""",
        [("aab",)],
    ),
    "a counter made a dict": (
        """
from collections import Counter
def f(x):
    return dict(Counter(x))
""",
        [("aab",)],
    ),
    "regular expressions": (
        """
import re
def f(s):
    return re.findall(r'[a-z]+', s), re.sub('a', 'b', s)
""",
        [("ab1cad",)],
    ),
    "a module that one lacks": (
        """
import heapq
def f(x):
    return heapq.nsmallest(2, x)
""",
        [([3, 1, 2],)],
    ),
    "a module that both lack": (
        """
import numpy
def f(x):
    return x
""",
        [(1,)],
    ),
    "random numbers": (
        """
import random
def f(n):
    return [random.randint(0, 9) for _ in range(n)]
""",
        [(8,)],
    ),
    "caching": (
        """
from functools import lru_cache
@lru_cache
def f(n):
    return n if n < 2 else f(n - 1) + f(n - 2)
""",
        [(50,)],
    ),
    "prints": (
        """
def f(x):
    print('debug', x)
    return x
""",
        [(1,)],
    ),
    "nested beyond the limit": (
        """
def f(depth):
    value = 1
    for _ in range(depth):
        value = [value]
    return value
""",
        [(1,), (200,), (201,), (2000,), (3,)],
    ),
    "contains itself": (
        """
def f(x):
    value = [x]
    value.append(value)
    return value
""",
        [(1,)],
    ),
    "more items than the limit": (
        """
def f(count):
    value = []
    for _ in range(count):
        value = [value, value]
    return value
""",
        [(3,), (60,), (3,)],
    ),
    "no function": ("x = 1", [(1,)]),
    "not Python": ("def f(x) return x", [(1,)]),
    "fails while loading": (
        """
1 / 0
def f(x):
    return x
""",
        [(1,)],
    ),
    "empty": ("", [(1,)]),
    "runs its tests when it is the program": (
        """
def f(x):
    return x
if __name__ == '__main__':
    input()
""",
        [(1,)],
    ),
}


def assert_same_answers(one: Outcome, other: Outcome) -> None:
    """The status, the text, and each value in its exact form, or the kind of its exception."""
    assert (one.status, one.stdout) == (other.status, other.stdout)
    assert kinds_of_errors(one) == kinds_of_errors(other)
    values = [[result.value for result in outcome.results] for outcome in (one, other)]
    assert same_value(*values), values


def kinds_of_errors(outcome: Outcome) -> list[str]:
    return [(result.error or "").split(":")[0] for result in outcome.results]


@pytest.mark.parametrize("name", SOLUTIONS)
def test_a_solution_is_answered_alike(both: Sandbox, zygote: Sandbox, name: str) -> None:
    code, inputs = SOLUTIONS[name]
    assert_same_answers(both.run(code, "f", inputs), zygote.run(code, "f", inputs))


@pytest.mark.parametrize("body", ["right", "bug"])
def test_the_functions_of_the_code_task_are_answered_alike(both: Sandbox, zygote: Sandbox, body: str) -> None:
    engines = set()
    for kind in KINDS:
        function = PythonFunction(kind, kind.names[0], ARGUMENT_NAMES[kind.argument][0], 4)
        source = function.source(kind.body if body == "right" else kind.bug)
        inputs = [(case,) for case in CASES[kind.argument]]
        mine, other = both.run(source, function.name, inputs), zygote.run(source, function.name, inputs)
        assert_same_answers(mine, other)
        engines.add(mine.engine)
    assert "monty" in engines


def test_honest_one_liners_are_graded_by_monty(both: Sandbox) -> None:
    assert both.run("def f(x):\n    return [i * 2 for i in x if i > 1]", "f", [([1, 2],)]).engine == "monty"


def test_what_monty_does_not_speak_goes_to_the_zygote(both: Sandbox) -> None:
    outcome = both.run("import heapq\ndef f(x):\n    return heapq.nlargest(1, x)", "f", [([1, 2],)])
    assert (outcome.engine, outcome.results[0].value) == ("zygote", [2])
