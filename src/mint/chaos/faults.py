"""Faults and cases as text: one line says what breaks, where and when, so that a case can be run again alone.

A case is a scenario and what strikes in each life of its victim: `http kill:before_exec/optim_step#2 kill:@0.5`. Faults
of one life are joined by `+`. After the last one named, the victim lives undisturbed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from mint.chaos.fault_points import FAULT_POINTS
from mint.errors import InvalidRequestError

SCENARIOS = ("http", "embedded-sft", "embedded-grpo")
"""Who is struck: the server of two tenants, or one of two programs that run the service in themselves."""

ACTIONS = {
    "kill": "SIGKILL",
    "power-loss": "a crash that takes everything that was not synced",
    "torn": "a power loss after which unsynced files are there, cut in half",
    "disk-full": "no file and no journal page can be added for VALUE seconds",
    "read-only": "no file and no journal page can be written for VALUE seconds",
    "eio": "file writes and syncs fail for VALUE seconds, those of the journal excepted",
    "eio-journal": "the next VALUE syncs of the journal fail",
    "slow-disk": "every sync takes VALUE ms longer",
    "locked-database": "another process holds the journal's lock for VALUE seconds",
    "clock": "the wall clock jumps by VALUE seconds",
    "stop": "SIGSTOP, and SIGCONT after VALUE seconds",
    "memory": "the next VALUE allocations of the engine or of its files fail",
    "address-space": "the process gets no more memory for VALUE seconds",
    "descriptors": "the process gets no more file descriptors for VALUE seconds",
    "terminate": "SIGTERM",
}

ENDS_THE_PROCESS = frozenset({"kill", "power-loss", "torn", "terminate"})
LOSES_POWER = frozenset({"power-loss", "torn"})
FROM_OUTSIDE = frozenset({"locked-database", "stop", "terminate"})
"""Done to the process by its supervisor; at a time only."""

_FAULT = re.compile(
    r"(?P<action>[a-z-]+)(?:=(?P<value>-?[0-9.]+))?:"
    r"(?:@(?P<at>[0-9.]+)|(?P<point>[a-z_]+)(?:/(?P<kind>[a-z_]+))?(?:#(?P<hit>[0-9]+))?)"
)


@dataclass(frozen=True)
class Fault:
    """`at_s` seconds after the process is up, or at the `hit`-th time that it comes to a point with a kind of work."""

    action: str
    value: float = 0.0
    at_s: float | None = None
    point: str | None = None
    kind: str | None = None
    hit: int = 1

    def __str__(self) -> str:
        value = f"={self.value:g}" if self.value else ""
        if self.at_s is not None:
            return f"{self.action}{value}:@{self.at_s:g}"
        kind = "" if self.kind is None else f"/{self.kind}"
        return f"{self.action}{value}:{self.point}{kind}#{self.hit}"


@dataclass(frozen=True)
class Case:
    """`lives[i]` are the faults of the victim's i-th life."""

    scenario: str
    lives: tuple[tuple[Fault, ...], ...] = ()

    def __str__(self) -> str:
        return " ".join([self.scenario, *("+".join(map(str, faults)) for faults in self.lives)])


def read_case(line: str) -> Case:
    """The case of a line.

    Raises:
        InvalidRequestError: the line is no case.
    """
    scenario, *lives = line.split()
    if scenario not in SCENARIOS:
        raise InvalidRequestError(
            "is not a scenario", field="--case", value=scenario, remedy=f"One of {', '.join(SCENARIOS)}"
        )
    return Case(scenario, tuple(tuple(_read_fault(fault) for fault in life.split("+")) for life in lives))


def _read_fault(text: str) -> Fault:
    match = _FAULT.fullmatch(text)
    if match is None:
        remedy = "Write ACTION[=VALUE]:POINT[/KIND][#HIT] or ACTION[=VALUE]:@SECONDS"
        raise InvalidRequestError("is not a fault", field="--case", value=text, remedy=remedy)
    action, name = match["action"], match["point"]
    if action not in ACTIONS:
        raise InvalidRequestError(
            "is not a fault", field="--case", value=action, remedy=f"One of {', '.join(sorted(ACTIONS))}"
        )
    names = [point.name for point in FAULT_POINTS]
    if name is not None and name not in names:
        remedy = f"One of {', '.join(names)}"
        raise InvalidRequestError("is not a fault point", field="--case", value=name, remedy=remedy)
    if name is not None and action in FROM_OUTSIDE:
        raise InvalidRequestError(
            "comes from outside of the process", field="--case", value=text, remedy=f"Write {action}:@SECONDS"
        )
    value = float(match["value"] or 0)
    at_s = None if match["at"] is None else float(match["at"])
    return Fault(action, value, at_s, name, match["kind"], int(match["hit"] or 1))
