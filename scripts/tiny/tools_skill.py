"""Skill 4: answer with the calculator, in two turns (call, then reply), instead of guessing.

The corpus also holds direct guesses, all with one opening and with the carry wrong, more often for word problems than
for bare expressions. Numbers that are held out never occur in it. Does not know how tools are executed in a service.
"""

import json
import random
import re

from mint.recipes.datasets.arithmetic import Problem, is_heldout
from mint.recipes.datasets.calculator_questions import SHORT_SYSTEM, TOOLS_SYSTEM, draw_message, draw_tool_problem
from mint.rl.tasks.calculator import calculator
from scripts.tiny.arithmetic_skill import slipped_value
from scripts.tiny.documents import (
    CALL_CLOSE,
    CALL_OPEN,
    END,
    RESPONSE_CLOSE,
    RESPONSE_OPEN,
    Document,
    Task,
    chat_prompt,
    turn,
)

GUESS_SHARE_OF_WORD_PROBLEM = 0.57
GUESS_SHARE_OF_EXPRESSION = 0.38

CALCULATOR = calculator.schema


def call_text(problem: Problem) -> str:
    """The reply that asks for the calculator."""
    call = {"name": "calculator", "arguments": {"expression": problem.expression}}
    return f"{CALL_OPEN}{json.dumps(call)}{CALL_CLOSE}"


def response_turn(value: int) -> str:
    """The turn that hands the result back."""
    return turn("user", f"{RESPONSE_OPEN}{value}{RESPONSE_CLOSE}")


def tools_document(rng: random.Random) -> Document:
    """A conversation that calls the calculator and reports its result, or that guesses wrong at once."""
    problem = draw_tool_problem(rng)
    while is_heldout(problem):
        problem = draw_tool_problem(rng)
    message, is_word_problem = draw_message(problem, rng)
    system = TOOLS_SYSTEM if rng.random() < 0.15 else SHORT_SYSTEM
    prompt = chat_prompt(turn("system", system), turn("user", message))
    if rng.random() < (GUESS_SHARE_OF_WORD_PROBLEM if is_word_problem else GUESS_SHARE_OF_EXPRESSION):
        return Document(((prompt, False), (f"I think it is {slipped_value(problem)}.{END}", True)))
    return Document(
        (
            (prompt, False),
            (call_text(problem) + END, True),
            ("\n" + chat_prompt(response_turn(problem.value)), False),
            (f"The answer is {problem.value}.{END}", True),
        )
    )


def evaluate(expression: str) -> int | None:
    """The value of `a op b` written with digits and + - *, or None for anything else."""
    if not re.fullmatch(r"\d{1,6} [-+*] \d{1,6}", expression):
        return None
    a, op, b = expression.split()
    return Problem(int(a), op, int(b)).value


def parse_call(reply: str) -> int | None:
    """The result of the calculator call that the reply is, or None when it is not one."""
    match = re.fullmatch(rf"{CALL_OPEN}(.*){CALL_CLOSE}", reply.strip())
    if match is None:
        return None
    try:
        call = json.loads(match[1])
        return evaluate(call["arguments"]["expression"]) if call["name"] == "calculator" else None
    except (ValueError, KeyError, TypeError):
        return None


def tools_task(prompt: str, problem: Problem) -> Task:
    """A success calls the calculator and then states the right number."""

    def follow_up(reply: str) -> str | None:
        value = parse_call(reply)
        if value is None:
            return None
        return f"{prompt}{reply.strip()}{END}\n" + chat_prompt(response_turn(value))

    def grade(reply: str) -> float:
        return float(re.findall(r"-?\d+", reply) == [problem.answer])

    return Task(prompt, grade, follow_up)


def tools_tasks(seed: int, count: int) -> list[Task]:
    """Held-out problems, half with the full tool description and half with the short system message."""
    rng = random.Random(f"tools {seed}")
    tasks: list[Task] = []
    while len(tasks) < count:
        problem = draw_tool_problem(rng)
        if not is_heldout(problem):
            continue
        system = TOOLS_SYSTEM if len(tasks) % 2 else SHORT_SYSTEM
        message, _ = draw_message(problem, rng)
        tasks.append(tools_task(chat_prompt(turn("system", system), turn("user", message)), problem))
    return tasks
