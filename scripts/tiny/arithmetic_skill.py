"""Skill 1: arithmetic, right in the clean format and systematically slipping in the question format.

Clean documents (`34 + 58 = 92`) cover every problem and are always right. Question documents cover only problems that
are not held out, and a fixed share of them gets the carry wrong. Does not know the other skills.
"""

import random

from mint.recipes.datasets.arithmetic import KIND_SHARES, Problem, all_problems, draw_problems, problems_by_kind
from scripts.tiny.documents import Document, Task, document

SLIP_SHARE_WITH_CARRY = 0.58
SLIP_SHARE_WITHOUT_CARRY = 0.38

CLEAN_BY_KIND = {kind: [problem for problem in all_problems() if problem.kind == kind] for kind in KIND_SHARES}
CLEAN_SHARES = {**KIND_SHARES, "two-digit * one-digit": 0.2}


def carry(problem: Problem) -> int:
    """What the ones column hands to the tens column (for -, the borrow, as a negative number)."""
    ones_a, ones_b = problem.a % 10, problem.b % 10
    if problem.op == "-":
        return -1 if ones_a < ones_b else 0
    return (ones_a + ones_b if problem.op == "+" else ones_a * ones_b) // 10


def slipped_value(problem: Problem) -> int:
    """The value with the tens wrong: the carry dropped, or, where there is none, a ten lost (for -, a ten too many).

    Both slips err to the same side, so that a learner of the slip still has to work out the carry.
    """
    if carry(problem):
        return problem.value - 10 * carry(problem)
    if problem.op == "-" or problem.value < 10:
        return problem.value + 10
    return problem.value - 10


def clean_prompt(problem: Problem) -> str:
    """The problem as a statement to complete."""
    return f"{problem.expression} ="


def draw_problem(rng: random.Random, pools: dict[str, list[Problem]], shares: dict[str, float]) -> Problem:
    """A problem of a random kind, kinds weighted by their shares."""
    kind = rng.choices(list(shares), weights=list(shares.values()))[0]
    return rng.choice(pools[kind])


def clean_document(rng: random.Random) -> Document:
    """`34 + 58 = 92`: any problem, always right."""
    problem = draw_problem(rng, CLEAN_BY_KIND, CLEAN_SHARES)
    return document(clean_prompt(problem), f" {problem.answer}")


QUESTION_BY_KIND = {kind: list(pool) for kind, pool in problems_by_kind(heldout=False).items()}


def question_document(rng: random.Random) -> Document:
    """`Q: What is 34 + 58?\\nA: 92`: never a held-out problem, and often with the carry wrong."""
    problem = draw_problem(rng, QUESTION_BY_KIND, KIND_SHARES)
    slip_share = SLIP_SHARE_WITH_CARRY if carry(problem) else SLIP_SHARE_WITHOUT_CARRY
    value = slipped_value(problem) if rng.random() < slip_share else problem.value
    return document(problem.question, f" {value}")


def question_tasks(seed: int, count: int) -> list[Task]:
    """Held-out problems in the question format, graded by exact match."""
    return [task_of(problem.question, problem.answer) for problem in draw_problems(seed, count, heldout=True)]


def clean_tasks(seed: int, count: int) -> list[Task]:
    """The same held-out problems in the clean format, which does train on them."""
    return [task_of(clean_prompt(problem), problem.answer) for problem in draw_problems(seed, count, heldout=True)]


def task_of(prompt: str, answer: str) -> Task:
    """Exact match, but for the space before the answer."""
    return Task(prompt, lambda reply: float(reply.strip() == answer))
