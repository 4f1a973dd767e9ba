"""Admission: which waiting job of a sampler gets rows next, and which prompt is computed next.

Each job belongs to a scope. Scopes get equal shares as far as they want them (max-min fairness): the scope with the
fewest rows goes first, and the jobs of one scope in the order of their arrival. A scope with less than its share finds
spare rows in a full batch, so that nobody waits until the jobs of another end. Knows numbers of rows and tokens, not
what a job computes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Mapping
from operator import attrgetter
from typing import Generic, Protocol, TypeVar


class WaitingJob(Protocol):
    """The fields of a job, or of one of its sequences, that decide when it is admitted. `turn` is the arrival of the
    job, which counts upwards, and the number of the sequence: no two that wait have the same."""

    turn: tuple[int, int]
    scope: str


J = TypeVar("J", bound=WaitingJob)

_turn = attrgetter("turn")


class WaitingJobs(Generic[J]):
    """Jobs, or sequences of them, that have no rows yet, or no more."""

    def __init__(self) -> None:
        self._of: dict[str, deque[J]] = {}  # by scope, each in the order of turns

    def __bool__(self) -> bool:
        return bool(self._of)

    @property
    def scopes(self) -> set[str]:
        """The scopes of the jobs."""
        return set(self._of)

    def add(self, job: J) -> None:
        """Adds a job at its place: one that was admitted before and comes back keeps its turn."""
        insort(self._of.setdefault(job.scope, deque()), job, key=_turn)

    def remove(self, job: J) -> None:
        """Removes a job; does nothing if it does not wait."""
        own = self._of.get(job.scope, deque())
        place = bisect_left(own, job.turn, key=_turn)
        if place < len(own) and own[place] is job:
            del own[place]
            if not own:
                del self._of[job.scope]

    def first(self, rows: Mapping[str, int]) -> J:
        """The job whose turn it is, where scopes have so many `rows`. There must be one."""
        return min((own[0] for own in self._of.values()), key=lambda job: (rows.get(job.scope, 0), job.turn))


def may_begin(scope: str, count: int, rows: Counter[str], *, scopes: int, limit: int, spare: int) -> bool:
    """Whether a job gets `count` rows beside the `rows` that scopes have; `scopes` is how many have or want any.

    An empty batch takes any job. Otherwise there are `limit` rows, and `spare` more for a scope that has at most its
    share with this job. Where one job has more rows than the limit, the spare ones come on top of it.
    """
    used = rows.total()
    if not used or used + count <= limit:
        return True
    is_small = rows[scope] + count <= max(1, limit // scopes)
    return is_small and used + count <= max(limit, *rows.values()) + spare


def fair_shares(wanted: Mapping[str, int], budget: int) -> dict[str, int]:
    """How much of `budget` each scope gets: equal shares. What a scope does not want is divided among the others."""
    shares: dict[str, int] = {}
    for place, scope in enumerate(sorted(wanted, key=lambda scope: wanted[scope])):
        shares[scope] = min(wanted[scope], budget // (len(wanted) - place))
        budget -= shares[scope]
    return shares
