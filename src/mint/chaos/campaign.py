"""Runs the cases of a campaign, two or more at once, and reports what held."""

from __future__ import annotations

import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

from mint.chaos import plan
from mint.chaos.checks import last_lines
from mint.chaos.fault_points import FAULT_POINTS
from mint.chaos.faults import SCENARIOS, Case, read_case
from mint.chaos.outcome import Hits, TrialOutcome, differences
from mint.chaos.trial import run_case
from mint.errors import MissingExtraError
from mint.extras import install_command

CLEAN, POINTS, KILLS, SHORTAGES = "undisturbed", "every point", "random kills", "shortages alone"
QUICK_CASES = (
    "http kill:before_exec/optim_step#2 kill:after_commit/optim_step#1 kill:after_accept_before_reply#3",
    "embedded-sft kill:renamed_not_synced/snapshots#2 kill:checkpoint_before_commit#1",
    "http torn:snapshot_before_commit/optim_step#2",
)


@dataclass
class PartReport:
    """The cases of one part of a campaign."""

    name: str
    outcomes: list[TrialOutcome] = field(default_factory=list)

    @property
    def violated(self) -> list[TrialOutcome]:
        return [outcome for outcome in self.outcomes if outcome.violations]

    @property
    def longest_recovery_s(self) -> float | None:
        found = [seconds for outcome in self.outcomes for seconds in outcome.recoveries_s]
        return max(found, default=None)


@dataclass
class CampaignReport:
    """The result of a campaign. `logs` maps the line of each violated case to the last lines of its logs."""

    seed: int
    parts: list[PartReport] = field(default_factory=list)
    points: Counter[str] = field(default_factory=Counter)
    pairs: int = 0
    never_reached: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """Scenarios without a random kill: there were fewer kills than scenarios."""
    logs: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def outcomes(self) -> list[TrialOutcome]:
        return [outcome for part in self.parts for outcome in part.outcomes]

    @property
    def kills(self) -> int:
        """Lives that ended by SIGKILL."""
        return sum(outcome.kills for outcome in self.outcomes)

    @property
    def passed(self) -> bool:
        """Whether nothing was violated, and every point reached."""
        return not self.never_reached and not any(outcome.violations for outcome in self.outcomes)

    def as_json(self) -> dict[str, Any]:
        """For scripts."""
        return {
            "ok": self.passed,
            "seed": self.seed,
            "seconds": round(self.seconds, 1),
            "kills": self.kills,
            "points_reached": len(self.points),
            "pairs_reached": self.pairs,
            "points_never_reached": self.never_reached,
            "scenarios_left_out": self.left_out,
            "parts": [
                {
                    "name": part.name,
                    "cases": len(part.outcomes),
                    "kills": sum(outcome.kills for outcome in part.outcomes),
                    "violated": len(part.violated),
                    "longest_recovery_s": part.longest_recovery_s,
                    "case_seconds": round(sum(outcome.seconds for outcome in part.outcomes), 1),
                }
                for part in self.parts
            ],
            "violations": [
                {"case": str(outcome.case), "violations": outcome.violations, "log": self.logs.get(str(outcome.case))}
                for outcome in self.outcomes
                if outcome.violations
            ],
            "not_reached": [
                {"case": str(outcome.case), "faults": outcome.not_reached}
                for outcome in self.outcomes
                if outcome.not_reached
            ],
        }


class Campaign:
    """One campaign in a folder of its own."""

    def __init__(
        self, folder: Path, *, seed: int = 0, at_once: int = 1, keep: bool = False, say: Callable[[str], None]
    ) -> None:
        """Keeps the folders of violated cases if `keep`. Calls `say` with a line for every case that ends.

        Raises:
            MissingExtraError: the `local` extra is not installed.
        """
        if find_spec("torch") is None:
            raise MissingExtraError("mint chaos runs a model on this machine", remedy=install_command("local"))
        self.report = CampaignReport(seed)
        self._folder = folder
        self._at_once = at_once
        self._keep = keep
        self._say = say
        self._numbers = count()
        self._clean: dict[str, TrialOutcome] = {}
        self._recovering: dict[str, TrialOutcome] = {}
        self._shortages: dict[Case, TrialOutcome] = {}
        self._began = time.monotonic()

    def run(self, *, kills: int, every_point: bool, faults: Sequence[str]) -> CampaignReport:
        """All parts: undisturbed runs first, whose values all others must have."""
        self._record(SCENARIOS)
        if every_point:
            self._run_every_point()
        if kills:
            self._run_random_kills(kills)
        for name in faults:
            self._run(name, plan.other_cases([name]))
        if every_point:
            self.report.never_reached = [point.name for point in FAULT_POINTS if point.name not in self.report.points]
        return self._ended()

    def run_cases(self, name: str, cases: Sequence[Case]) -> CampaignReport:
        """Some cases alone."""
        self._record(tuple(dict.fromkeys(case.scenario for case in cases)))
        self._run(name, cases)
        return self._ended()

    def _ended(self) -> CampaignReport:
        self.report.seconds = time.monotonic() - self._began
        return self.report

    def _record(self, scenarios: Sequence[str]) -> None:
        part = PartReport(CLEAN)
        self.report.parts.append(part)
        for scenario in scenarios:
            clean = self._case(Case(scenario))
            if self._clean:  # a server and a program with the service in itself must give the same bits
                clean.violations += differences(next(iter(self._clean.values())), clean)
            self._clean[scenario] = clean
            self._note(part, clean)

    def _run_every_point(self) -> None:
        recording = [case for case in plan.recordings() if case.lives]
        for outcome in self._run(POINTS, recording).outcomes:
            self._recovering[outcome.case.scenario] = outcome
        cases = [
            case
            for scenario in SCENARIOS
            for case in plan.enumerated(
                self._clean[scenario].hits[0], _second_life(self._recovering[scenario]), scenario
            )
        ]
        part = self._run(POINTS, cases)
        again = [
            case for outcome in part.outcomes for text in outcome.not_reached for case in plan.alone(outcome.case, text)
        ]
        self._run(POINTS, again)

    def _run_random_kills(self, kills: int) -> None:
        rng = random.Random(self.report.seed)
        places = {scenario: sorted(set(outcome.hits[0])) for scenario, outcome in self._clean.items()}
        part = self._part(KILLS)
        missing = kills
        while missing > 0 and not part.violated:  # a kill at a time after the end of its case was none
            struck = {outcome.case.scenario for outcome in part.outcomes if outcome.kills}
            first = [scenario for scenario in SCENARIOS if scenario not in struck]
            self._run(KILLS, plan.random_cases(rng, places, missing, first=first))
            missing = kills - sum(outcome.kills for outcome in part.outcomes)
        struck = {outcome.case.scenario for outcome in part.outcomes if outcome.kills}
        self.report.left_out = [scenario for scenario in SCENARIOS if scenario not in struck]

    def _part(self, name: str) -> PartReport:
        for part in self.report.parts:
            if part.name == name:
                return part
        self.report.parts.append(PartReport(name))
        return self.report.parts[-1]

    def _run(self, name: str, cases: Sequence[Case]) -> PartReport:
        part = self._part(name)
        with ThreadPoolExecutor(self._at_once) as threads:
            needed = dict.fromkeys(short for case in cases for short in plan.shortages(case))
            for outcome in threads.map(self._case, [short for short in needed if short not in self._shortages]):
                self._note(self._part(SHORTAGES), outcome)
                self._shortages[outcome.case] = outcome
            for outcome in threads.map(self._case, cases):
                self._note(part, outcome)
        return part

    def _case(self, case: Case) -> TrialOutcome:
        folder = self._folder / f"case{next(self._numbers)}"
        needed = plan.shortages(case)
        known = [self._shortages[short] for short in needed if short in self._shortages]
        clean = self._clean.get(case.scenario) if len(known) == len(needed) else None  # not before they have run
        outcome = run_case(case, folder, clean=clean, shortages=known)
        if outcome.violations:
            self.report.logs[str(case)] = last_lines(folder)
        if not (self._keep and outcome.violations):
            shutil.rmtree(folder)
        return outcome

    def _note(self, part: PartReport, outcome: TrialOutcome) -> None:
        part.outcomes.append(outcome)
        found = list(_pairs(outcome))
        self.report.points.update(point for point, _ in found)
        self.report.pairs = len({*found, *(pair for known in self.report.outcomes for pair in _pairs(known))})
        verdict = "VIOLATED" if outcome.violations else "ok"
        self._say(f"{verdict:8} {outcome.seconds:5.1f} s  {outcome.case}")


def quick_cases() -> list[Case]:
    """A minute's worth of cases, for tests."""
    return [read_case(line) for line in QUICK_CASES]


def _second_life(outcome: TrialOutcome) -> Hits:
    return outcome.hits[1] if len(outcome.hits) > 1 else []


def _pairs(outcome: TrialOutcome) -> Iterator[tuple[str, str]]:
    for life in outcome.hits:
        yield from life
