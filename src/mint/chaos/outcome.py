"""The outcome of a case, and the comparison of two outcomes. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mint.chaos.faults import ENDS_THE_PROCESS, Case

Values = dict[str, dict[str, Any]]
"""Tenant → name of a value → value."""

Hits = Sequence[tuple[str, str]]
"""Fault points with the kind of work, in the order in which they were reached."""


@dataclass
class TrialOutcome:
    """The values and violations of one case."""

    case: Case
    values: Values = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    kills: int = 0
    """Lives that ended by SIGKILL."""
    restarts: int = 0
    forced_restarts: int = 0
    """Restarts because the server said for long that it is not ready."""
    recoveries_s: list[float] = field(default_factory=list)
    """From each death to the next new result of the victim's clients."""
    hits: list[Hits] = field(default_factory=list)
    """By life of the victim."""
    jobs: dict[str, int] = field(default_factory=dict)
    """Tenant → jobs of its models in the journal."""
    seconds: float = 0.0

    @property
    def not_reached(self) -> list[str]:
        """The faults that never struck, because the case came to its end without coming to their place."""
        missed = []
        for life, faults in enumerate(self.case.lives):
            hits = self.hits[life] if life < len(self.hits) else ()
            for fault in faults:
                reached = Counter(point for point, kind in hits if fault.kind in (kind, None))
                if fault.point is not None and reached[fault.point] < fault.hit:
                    missed.append(str(fault))
        ending = sum(any(fault.action in ENDS_THE_PROCESS for fault in life) for life in self.case.lives)
        if self.restarts < ending and not missed:
            missed.append("a fault at a time after the end of the case")
        return missed


def differences(clean: TrialOutcome, found: TrialOutcome, shortages: Sequence[TrialOutcome] = ()) -> list[str]:
    """In what an outcome differs from that of an undisturbed run, in words.

    A tenant may also have the values of one of the `shortages`: runs in which the same shortage struck alone, at one of
    the places where it may have come.
    """
    wrong = []
    for tenant, values in clean.values.items():
        other = found.values.get(tenant, {})
        wrong += [f"{tenant}: {name!r} is missing" for name in values if name not in other]
        allowed = [values, *(outcome.values[tenant] for outcome in shortages if tenant in outcome.values)]
        changed = [[name for name in values if name in other and other[name] != known[name]] for known in allowed]
        wrong += [f"{tenant}: {name!r} has other bits" for name in min(changed, key=len)]
    # a program that was started again has a new session, with fewer jobs
    if found.case.scenario == clean.case.scenario == "http":
        wrong += [
            f"{tenant}: {found.jobs.get(tenant)} jobs in the journal instead of {count}"
            for tenant, count in clean.jobs.items()
            if found.jobs.get(tenant) != count
        ]
    return wrong
