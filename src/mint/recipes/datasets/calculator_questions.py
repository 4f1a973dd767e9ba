"""Questions for a calculator: expressions and one-sentence word problems, and their held-out split.

The pre-training corpus of the bundled model and the tools recipe share this file, so that both hold out the same
operands.
"""

from __future__ import annotations

import json
import random

from mint.recipes.datasets.arithmetic import Problem
from mint.rl.tasks.calculator import calculator
from mint.types.tool_call_formats import CALL_CLOSE, CALL_OPEN

SHORT_SYSTEM = "You have a calculator."
TOOLS_INTRO = "# Tools\n\nYou may call one of these functions:\n<tools>\n"
TOOLS_OUTRO = (
    "\n</tools>\n\nTo call one, reply with\n"
    f'{CALL_OPEN}{{"name": <function-name>, "arguments": <args-json-object>}}{CALL_CLOSE}'
)
TOOLS_SYSTEM = TOOLS_INTRO + json.dumps(calculator.schema) + TOOLS_OUTRO
"""The system message that the bundled model's chat template makes of the calculator."""

EXPRESSION_MESSAGES = ("What is {expression}?", "Calculate {expression}.", "How much is {expression}?")
WORD_PROBLEMS = {
    "+": (
        "I have {a} {items} and get {b} more. How many {items} do I have?",
        "There are {a} {items} here and {b} {items} there. How many {items} are there?",
    ),
    "-": (
        "I had {a} {items} and gave away {b}. How many {items} are left?",
        "There were {a} {items} and {b} were sold. How many {items} are left?",
    ),
    "*": (
        "There are {a} boxes with {b} {items} each. How many {items} are there?",
        "I buy {b} {items} on each of {a} days. How many {items} do I have?",
    ),
}
ITEMS = ("apples", "books", "stones", "coins", "cards", "eggs", "pens", "stamps")


def draw_tool_problem(rng: random.Random) -> Problem:
    """Two- and three-digit operands; a >= b for subtraction."""
    op = rng.choice("+-*")
    a = rng.randint(2, 99) if rng.random() < 0.5 else rng.randint(100, 999)
    b = rng.randint(2, 99) if op == "*" or rng.random() < 0.5 else rng.randint(100, 999)
    return Problem(max(a, b), op, min(a, b)) if op == "-" else Problem(a, op, b)


def draw_message(problem: Problem, rng: random.Random) -> tuple[str, bool]:
    """A user's message that asks for the problem, and whether it is a word problem."""
    if rng.random() < 0.5:
        return rng.choice(EXPRESSION_MESSAGES).format(expression=problem.expression), False
    template = rng.choice(WORD_PROBLEMS[problem.op])
    return template.format(a=problem.a, b=problem.b, items=rng.choice(ITEMS)), True
