"""Skill 3: a one-line description to a small Python function, direct or after two examples.

Every kind of function has one right body and one bug. For half of the kinds the bug is the more frequent body in the
corpus. A (description, signature) that is held out never occurs in it (`mint.recipes.datasets.python_functions`).
Grading here runs our own model's text in this process with no protection, which is only fit for this script:
`mint.sandbox` is the real one.
"""

import random

from mint.recipes.datasets.python_functions import CASES, PythonFunction, draw_function, with_examples
from scripts.tiny.documents import Document, Task, document

BUG_SHARE_OF_HARD_KIND = 0.58
BUG_SHARE_OF_EASY_KIND = 0.38


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


def code_task(function: PythonFunction, prompt: str) -> Task:
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
