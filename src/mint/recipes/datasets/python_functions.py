"""One-line Python functions to write, their held-out split, and inputs that tell right from wrong bodies.

The pre-training corpus of the bundled model and the code recipe share this file, so that "held out" means the same
requests to both.
"""

import hashlib
import random
from dataclasses import dataclass
from functools import cache
from typing import Any

HELDOUT_ONE_IN = 8

NUMBERS = "number"
LISTS = "list"
STRINGS = "string"
CASES: dict[str, tuple[Any, ...]] = {
    NUMBERS: (*range(11), 12, 20, -4, 81),
    LISTS: ([3, 1, 2], [5], [4, 4, 9, 0], [7, 2, 8, 2, 6], [-1, 10]),
    STRINGS: ("tea", "Apple", "b", "a b c d e", "Noon", "ok", "planet", "lantern", "notebook"),
}
CONSTANTS = range(2, 10)
ARGUMENT_NAMES = {NUMBERS: ("x", "n", "a", "value"), LISTS: ("items", "xs", "values"), STRINGS: ("s", "text", "word")}


@dataclass(frozen=True)
class FunctionKind:
    """A family of functions. In its texts `{v}` stands for the argument and `{k}` for a constant."""

    argument: str
    names: tuple[str, ...]
    description: str
    body: str
    bug: str
    is_hard: bool


def kind(argument: str, names: str, description: str, body: str, bug: str, *, hard: bool = False) -> FunctionKind:
    """A kind; `names` are separated by spaces."""
    return FunctionKind(argument, tuple(names.split()), description, body, bug, hard)


KINDS = (
    kind(NUMBERS, "add plus increase shift", "{v} plus {k}", "{v} + {k}", "{v} + {k} + 1"),
    kind(NUMBERS, "add_up raise_by grow", "{k} more than {v}", "{k} + {v}", "{k} * {v}", hard=True),
    kind(NUMBERS, "minus reduce lower", "{v} minus {k}", "{v} - {k}", "{v} - {k} - 1"),
    kind(NUMBERS, "less take_off shrink", "{k} less than {v}", "{v} - {k}", "{k} - {v}", hard=True),
    kind(NUMBERS, "times multiply scale", "{v} times {k}", "{v} * {k}", "{v} + {k}"),
    kind(NUMBERS, "rest remainder modulo", "the remainder of {v} by {k}", "{v} % {k}", "{v} // {k}", hard=True),
    kind(NUMBERS, "share divide split", "the whole part of {v} over {k}", "{v} // {k}", "{v} / {k}", hard=True),
    kind(NUMBERS, "above over exceeds", "whether {v} is greater than {k}", "{v} > {k}", "{v} >= {k}"),
    kind(NUMBERS, "at_least reaches", "whether {v} is at least {k}", "{v} >= {k}", "{v} > {k}", hard=True),
    kind(NUMBERS, "fits divisible", "whether {v} is a multiple of {k}", "{v} % {k} == 0", "{v} // {k} == 0"),
    kind(NUMBERS, "cap limit clip", "{v} but at most {k}", "min({v}, {k})", "max({v}, {k})", hard=True),
    kind(NUMBERS, "floor_at lift", "{v} but at least {k}", "max({v}, {k})", "max({v}, {k} + 1)"),
    kind(NUMBERS, "square_plus bump", "the square of {v} plus {k}", "{v} * {v} + {k}", "{v} * 2 + {k}", hard=True),
    kind(LISTS, "top take head", "the first {k} of {v}", "{v}[:{k}]", "{v}[{k}:]"),
    kind(LISTS, "skip drop tail", "{v} without the first {k}", "{v}[{k}:]", "{v}[:{k}]", hard=True),
    kind(LISTS, "total add_all", "the sum of {v} plus {k}", "sum({v}) + {k}", "len({v}) + {k}"),
    kind(LISTS, "size count_all", "the length of {v} plus {k}", "len({v}) + {k}", "len({v}) - {k}", hard=True),
    kind(
        LISTS, "big_ones keep_over", "the {v} above {k}", "[i for i in {v} if i > {k}]", "[i for i in {v} if i < {k}]"
    ),
    kind(
        LISTS, "scaled stretch", "each of {v} times {k}", "[i * {k} for i in {v}]", "[i + {k} for i in {v}]", hard=True
    ),
    kind(LISTS, "has holds contains", "whether {k} is in {v}", "{k} in {v}", "{k} not in {v}"),
    kind(LISTS, "how_many tally", "how often {k} is in {v}", "{v}.count({k})", "{v}.index({k})", hard=True),
    kind(STRINGS, "repeat echo", "{v} repeated {k} times", "{v} * {k}", "{v} + {k}"),
    kind(STRINGS, "start prefix", "the first {k} letters of {v}", "{v}[:{k}]", "{v}[{k}]", hard=True),
    kind(STRINGS, "end suffix", "the last {k} letters of {v}", "{v}[-{k}:]", "{v}[:-{k}]"),
    kind(STRINGS, "long_enough is_long", "whether {v} has {k} letters or more", "len({v}) >= {k}", "len({v}) > {k}"),
    kind(STRINGS, "shout loud", "{v} in capitals {k} times", "{v}.upper() * {k}", "{v}.lower() * {k}", hard=True),
)


@dataclass(frozen=True)
class PythonFunction:
    """One function to write: a kind with its name, argument and constant chosen."""

    kind: FunctionKind
    name: str
    argument: str
    constant: int

    @property
    def request(self) -> str:
        """The prompt line that asks for it."""
        return f"# Write {self.name}({self.argument}): return {self.fill(self.kind.description)}.\n"

    def fill(self, template: str) -> str:
        """The template with this function's argument and constant."""
        return template.format(v=self.argument, k=self.constant)

    def source(self, expression: str) -> str:
        """The function with this (unfilled) expression as its body."""
        return f"def {self.name}({self.argument}):\n    return {self.fill(expression)}"


def is_heldout(function: PythonFunction) -> bool:
    """Whether the request is one of the 1 in 8 that the bundled model never saw (a stable hash of its text)."""
    return hashlib.sha256(function.request.encode()).digest()[0] % HELDOUT_ONE_IN == 0


@cache
def all_functions(*, heldout: bool) -> tuple[PythonFunction, ...]:
    """Every function of one side of the split."""
    return tuple(
        function
        for chosen in KINDS
        for name in chosen.names
        for argument in ARGUMENT_NAMES[chosen.argument]
        for constant in CONSTANTS
        if is_heldout(function := PythonFunction(chosen, name, argument, constant)) == heldout
    )


def draw_function(rng: random.Random, *, heldout: bool) -> PythonFunction:
    """A function whose request is, or is not, held out; each kind is equally likely."""
    while True:
        chosen = rng.choice(KINDS)
        function = PythonFunction(
            chosen,
            rng.choice(chosen.names),
            rng.choice(ARGUMENT_NAMES[chosen.argument]),
            rng.randint(CONSTANTS[0], CONSTANTS[-1]),
        )
        if is_heldout(function) == heldout:
            return function


def with_examples(function: PythonFunction, rng: random.Random, count: int) -> str:
    """The request after `count` correctly answered ones that are not held out: a few-shot prompt."""
    shown = [draw_function(rng, heldout=False) for _ in range(count)]
    return "".join(f"{shot.request}{shot.source(shot.kind.body)}\n\n" for shot in shown) + function.request


def edge_inputs(function: PythonFunction) -> list[Any]:
    """Inputs around the function's constant, where a nearly right body gives wrong values."""
    constant = function.constant
    inputs = CASES[function.kind.argument]
    if function.kind.argument == NUMBERS:
        return [constant - 1, constant, constant + 1, 2 * constant, 3 * constant + 1, 0, -4]
    if function.kind.argument == STRINGS:
        return [text for text in inputs if abs(len(text) - constant) <= 1 or text in ("Apple", "notebook")]
    return [*inputs, [constant, constant + 1, constant]]
