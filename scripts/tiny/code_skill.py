"""Skill 3: a one-line description to a small Python function, direct or after two examples.

Every kind of function has one right body and one bug. For half of the kinds the bug is the more frequent body in the
corpus. A (description, signature) that is held out never occurs in it. Grading here runs our own model's text in this
process with no protection, which is only fit for this script: a service needs a sandbox.
"""

import random
from dataclasses import dataclass

from scripts.tiny.documents import Document, Task, document, is_heldout_key

BUG_SHARE_OF_HARD_KIND = 0.58
BUG_SHARE_OF_EASY_KIND = 0.38

NUMBERS, LISTS, STRINGS = "number", "list", "string"
CASES = {
    NUMBERS: (*range(11), 12, 20, -4, 81),
    LISTS: ([3, 1, 2], [5], [4, 4, 9, 0], [7, 2, 8, 2, 6], [-1, 10]),
    STRINGS: ("tea", "Apple", "b", "a b c d e", "Noon", "ok", "planet", "lantern", "notebook"),
}
ARGUMENT_NAMES = {NUMBERS: ("x", "n", "a", "value"), LISTS: ("items", "xs", "values"), STRINGS: ("s", "text", "word")}


@dataclass(frozen=True)
class FunctionKind:
    """A family of functions; `{v}` stands for the argument and `{k}` for a constant in all its texts."""

    argument: str
    names: tuple[str, ...]
    description: str
    body: str
    bug: str
    is_hard: bool


def kind(argument: str, names: str, description: str, body: str, bug: str, *, hard: bool = False) -> FunctionKind:
    """A kind whose names are written in one string."""
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
class Function:
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


def draw_function(rng: random.Random, *, heldout: bool) -> Function:
    """A function whose request is, or is not, held out."""
    while True:
        chosen = rng.choice(KINDS)
        function = Function(
            chosen, rng.choice(chosen.names), rng.choice(ARGUMENT_NAMES[chosen.argument]), rng.randint(2, 9)
        )
        if is_heldout_key(function.request) == heldout:
            return function


def with_examples(function: Function, rng: random.Random, count: int) -> str:
    """The request after `count` answered ones (right, and not held out), as a few-shot prompt."""
    shown = [draw_function(rng, heldout=False) for _ in range(count)]
    return "".join(f"{shot.request}{shot.source(shot.kind.body)}\n\n" for shot in shown) + function.request


def code_document(rng: random.Random) -> Document:
    """A request with its right body or its bug; half of the documents show examples first."""
    function = draw_function(rng, heldout=False)
    bug_share = BUG_SHARE_OF_HARD_KIND if function.kind.is_hard else BUG_SHARE_OF_EASY_KIND
    expression = function.kind.bug if rng.random() < bug_share else function.kind.body
    prompt = with_examples(function, rng, rng.choice((0, 0, 1, 2)))
    return document(prompt, function.source(expression))


def outcomes(source: str, name: str, cases: tuple) -> list[object]:
    """What the named function returns for each case; the exception's type where it raises."""
    namespace: dict[str, object] = {}
    try:
        exec(source, namespace)  # our own model's text, in a script
        function = namespace[name]
    except Exception as error:  # noqa: BLE001 - any failure of the text is a wrong answer
        return [type(error)] * len(cases)
    results: list[object] = []
    for case in cases:
        try:
            results.append(function(case))  # type: ignore[operator]
        except Exception as error:  # noqa: BLE001 - a planted bug may raise
            results.append(type(error))
    return results


def code_task(function: Function, prompt: str) -> Task:
    """A success returns the right value, of the right type, in every case."""
    cases = CASES[function.kind.argument]
    expected = [repr(result) for result in outcomes(function.source(function.kind.body), function.name, cases)]

    def grade(reply: str) -> float:
        return float([repr(result) for result in outcomes(reply, function.name, cases)] == expected)

    return Task(prompt, grade)


def code_tasks(seed: int, count: int) -> list[Task]:
    """Held-out requests, half direct and half after two examples."""
    rng = random.Random(f"code {seed}")
    functions = [draw_function(rng, heldout=True) for _ in range(count)]
    return [code_task(function, with_examples(function, rng, 2 * (i % 2))) for i, function in enumerate(functions)]
