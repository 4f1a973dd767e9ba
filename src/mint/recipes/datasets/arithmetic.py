"""Arithmetic problems, their held-out split, and how to draw a representative set.

The pre-training corpus of the bundled model and the RL recipe share this file, so that both hold out the same problems.
"""

import hashlib
import random
from dataclasses import dataclass
from functools import cache

from mint.errors import InvalidRequestError

KIND_SHARES = {
    "one-digit +": 0.06,
    "two-digit +": 0.38,
    "one-digit -": 0.05,
    "two-digit -": 0.31,
    "times table": 0.08,
    "two-digit * one-digit": 0.12,
}
"""Share of each kind in a drawn set, if the kind has enough problems."""

HELDOUT_ONE_IN = 8


@dataclass(frozen=True)
class Problem:
    """One question with one right answer: `a op b`, op one of + - *, and a >= b for -."""

    a: int
    op: str
    b: int

    @property
    def expression(self) -> str:
        """`34 + 58`."""
        return f"{self.a} {self.op} {self.b}"

    @property
    def question(self) -> str:
        """The prompt; the completion is a space, the answer, and the end-of-turn token."""
        return f"Q: What is {self.expression}?\nA:"

    @property
    def value(self) -> int:
        """The right answer as a number."""
        results = {"+": self.a + self.b, "-": self.a - self.b, "*": self.a * self.b}
        return results[self.op]

    @property
    def answer(self) -> str:
        """The right answer as text."""
        return str(self.value)

    @property
    def kind(self) -> str:
        """A key of `KIND_SHARES`."""
        if self.op == "*":
            return "times table" if max(self.a, self.b) < 10 else "two-digit * one-digit"
        return f"{'one' if max(self.a, self.b) < 10 else 'two'}-digit {self.op}"


def is_heldout(problem: Problem) -> bool:
    """Whether the problem is one of the 1 in 8 that are never trained on in the question format.

    A stable hash decides; 3 + 5 and 5 + 3 are on the same side.
    """
    low, high = sorted((problem.a, problem.b))
    first, second = (problem.a, problem.b) if problem.op == "-" else (low, high)
    digest = hashlib.sha256(f"{first} {problem.op} {second}".encode()).digest()
    return digest[0] % HELDOUT_ONE_IN == 0


@cache
def all_problems() -> tuple[Problem, ...]:
    """Every problem in range: sums and differences below 100 each side, times tables, and 11..60 times 2..6."""
    sums = [Problem(a, "+", b) for a in range(100) for b in range(100)]
    differences = [Problem(a, "-", b) for a in range(100) for b in range(a + 1)]
    table = [Problem(a, "*", b) for a in range(2, 10) for b in range(2, 10)]
    longer = [Problem(a, "*", b) for a in range(11, 61) for b in range(2, 7)]
    return tuple(sums + differences + table + longer)


@cache
def problems_by_kind(*, heldout: bool) -> dict[str, tuple[Problem, ...]]:
    """The problems of one side of the split, grouped by kind."""
    side = [problem for problem in all_problems() if is_heldout(problem) == heldout]
    return {kind: tuple(problem for problem in side if problem.kind == kind) for kind in KIND_SHARES}


def draw_problems(seed: int, count: int, *, heldout: bool) -> list[Problem]:
    """`count` distinct problems from one side of the split, mixed as `KIND_SHARES` says, in random order.

    If a kind has too few problems, others of the side fill up the set.

    Raises:
        InvalidRequestError: that side has fewer than `count` problems, or `count` is negative.
    """
    pools = problems_by_kind(heldout=heldout)
    available = sum(len(pool) for pool in pools.values())
    if not 0 <= count <= available:
        raise InvalidRequestError(
            "is not a number of problems of this side of the split",
            field="heldout_size" if heldout else "train_size",
            value=count,
            remedy=f"Give 0 to {available}",
        )
    rng = random.Random(f"arithmetic {seed} {heldout}")
    drawn: list[Problem] = []
    spare: list[Problem] = []
    for kind, share in KIND_SHARES.items():
        shuffled = rng.sample(pools[kind], len(pools[kind]))
        quota = min(int(share * count), len(shuffled))
        drawn += shuffled[:quota]
        spare += shuffled[quota:]
    drawn += rng.sample(spare, count - len(drawn))
    rng.shuffle(drawn)
    return drawn
