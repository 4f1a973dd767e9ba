"""The rewards of `against_trl`'s tasks, for the side that has no mint. Imports the standard library only."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal, InvalidOperation


def exact(text: str, solution: str) -> float:
    """1 for the right answer and nothing else, white space at the ends aside."""
    return float(text.strip() == solution)


def number(text: str, solution: str) -> float:
    """As reasoning-gym scores chain_sum: 1 for the right number, written in any way. Where more stands beside the
    solution, the share of the characters that are the solution, and nothing up to 0.05."""
    answer = text.strip().replace(",", "")
    try:
        if Decimal(answer) == Decimal(solution):
            return 1.0
    except InvalidOperation:  # not a number
        pass
    share = len(solution) / len(answer) if solution in answer else 0.0
    return share if share > 0.05 else 0.0


REWARDS: dict[str, Callable[[str, str], float]] = {"exact": exact, "number": number}
"""By the name that the spec gives."""
