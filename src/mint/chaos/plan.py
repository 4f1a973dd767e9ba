"""Which cases a campaign runs: every fault point with every kind of work, random kills, and the other faults. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from mint.chaos.fault_points import FAULT_POINTS
from mint.chaos.faults import SCENARIOS, Case, Fault, read_case
from mint.chaos.outcome import Hits

LIVES = 4
"""How many lives of a victim end in one case: starting a run costs more than starting it again."""

REPLAYED = "kill:after_commit/forward_backward#2"
"""After this kill there is something to replay: a pass behind the newest snapshot."""

KILL_TIMES_S = (0.02, 2.0)
"""When a random kill comes, after the start of its victim."""

MAX_HIT = 3
"""The last time that a victim comes to a point at which a random kill strikes it."""

RECOVERY_POINTS = frozenset(point.name for point in FAULT_POINTS if point.happens_in_recovery)

OTHER_FAULTS: dict[str, tuple[str, ...]] = {
    "disk-full": (
        "http disk-full=3:before_accept/forward_backward#3",
        "http disk-full=3:snapshot_open/optim_step#2",
        "http disk-full=3:checkpoint_before_manifest/save_weights#2",
        "http disk-full=3:before_publication#2",
        "embedded-sft disk-full=3:snapshot_open/optim_step#2",
    ),
    "read-only": (
        "http read-only=3:before_accept/optim_step#2",
        "embedded-grpo read-only=3:before_accept/optim_step#2",
    ),
    "eio": (
        "http eio=3:snapshot_open/optim_step#2",
        "http eio=3:checkpoint_before_manifest/save_weights#2",
        "http eio=3:before_publication#2",
        "http eio-journal=1:accepted_not_synced/forward_backward#3",
        "http eio-journal=1:after_commit/optim_step#2",
    ),
    "slow-disk": ("http slow-disk=50:before_accept#1", "http slow-disk=200:before_accept#1"),
    "locked-database": ("http locked-database=2:@0.4", "http locked-database=12:@0.4"),
    "clock": (
        "http clock=90000:before_exec/optim_step#2",
        "http clock=-90000:before_exec/optim_step#2",
        "http kill:before_exec/optim_step#3 clock=90000:before_migration#1",
        "http kill:before_exec/optim_step#3 clock=-90000:before_migration#1",
        "embedded-sft kill:before_exec/optim_step#3 clock=90000:before_migration#1",
    ),
    "stop": ("http stop=3:@0.4", "http stop=15:@0.8", "embedded-grpo stop=3:@0.8"),
    "memory": (
        "http memory=1:before_exec/forward_backward#2",
        "http memory=1:before_exec/forward_backward#4+kill:after_commit/forward_backward#4",
        "http memory=2:before_exec/forward_backward#3",
        "http memory=2:before_exec/forward_backward#4+kill:after_commit/forward_backward#4",
        "http memory=1:before_exec/optim_step#2",
        "http memory=1:snapshot_open/optim_step#2",
        "http memory=1:before_publication#2",
        "http memory=1:checkpoint_before_manifest/save_weights#2",
        "http memory=1:before_sampling/sample#1",
        "embedded-grpo memory=1:mid_sampling/sample#2",
        "embedded-sft memory=1:before_exec/optim_step#2+kill:after_commit/optim_step#2",
        "http address-space=3:before_exec/forward_backward#2",
        "http address-space=3:before_exec/optim_step#2",
        "http address-space=3:before_accept/forward_backward#2",
        "http address-space=3:snapshot_open/optim_step#2",
        "http address-space=3:before_sampling/sample#1",
        "embedded-grpo address-space=3:before_sampling/sample#1",
    ),
    "descriptors": (
        "http descriptors=3:before_accept/forward_backward#2",
        "http descriptors=3:snapshot_open/optim_step#2",
        "http descriptors=3:before_sampling/sample#1",
        "embedded-sft descriptors=3:snapshot_open/optim_step#2",
    ),
    "terminate": ("http terminate:@0.3 terminate:@0.3 terminate:@0.5", "http terminate:@0.8 terminate:@1"),
    "power-loss": (
        "http power-loss:accepted_not_synced/optim_step#2 torn:after_accept_before_reply/forward_backward#1",
        "http power-loss:after_commit/optim_step#2 torn:renamed_not_synced/snapshots#1",
        "http torn:snapshot_before_commit/optim_step#2 power-loss:after_snapshot#1",
        "http torn:renamed_not_synced/checkpoints#2 power-loss:checkpoint_before_manifest/save_weights#1",
        "http power-loss:checkpoint_before_commit/save_weights#2 torn:gc_between_row_and_unlink#1",
        "http torn:published_before_commit#1 power-loss:before_result_reply/training#2",
        "http kill:after_commit/optim_step#2 power-loss:after_adoption#1 torn:after_unlink#1",
        "http kill:after_commit/forward_backward#2 torn:during_replay#1 power-loss:after_restore#1",
        "http torn:upload_before_reply#1",
        "embedded-sft power-loss:accepted_not_synced/optim_step#2 torn:snapshot_before_commit/optim_step#2",
        "embedded-sft torn:renamed_not_synced/checkpoints#1 power-loss:checkpoint_before_commit/save_weights#1",
        "embedded-sft kill:after_commit/forward_backward#2 power-loss:during_replay#1",
        "embedded-grpo power-loss:after_commit/optim_step#1 torn:published_before_commit#2",
        "embedded-grpo torn:accepted_not_synced/forward_backward#2 power-loss:after_snapshot#1",
    ),
}
"""The cases of the other faults, by the names of `--faults`."""


def other_cases(names: Sequence[str]) -> list[Case]:
    """The cases of some kinds of fault."""
    return [read_case(line) for name in names for line in OTHER_FAULTS[name]]


def recordings() -> list[Case]:
    """The cases that show which points a scenario reaches: undisturbed, and while it recovers."""
    return [case for scenario in SCENARIOS for case in (Case(scenario), read_case(f"{scenario} {REPLAYED}"))]


def enumerated(hits: Hits, recovery_hits: Hits, scenario: str) -> list[Case]:
    """A kill at every point with every kind of work that a scenario reaches.

    A case ends several lives, each at one pair of point and kind. The pairs are in the order in which a run reaches
    them for the last time. So after a kill at one pair, the rest of the run still reaches the next one.
    """
    last = {pair: position for position, pair in enumerate(hits)}
    ordered = [Fault("kill", point=point, kind=kind) for point, kind in sorted(last, key=lambda pair: last[pair])]
    chains = -(-len(ordered) // LIVES)
    cases = [Case(scenario, tuple((fault,) for fault in ordered[first::chains])) for first in range(chains)]
    recovering = sorted({pair for pair in recovery_hits if pair[0] in RECOVERY_POINTS})
    first_kill = read_case(f"{scenario} {REPLAYED}").lives
    cases += [Case(scenario, (*first_kill, (Fault("kill", point=point, kind=kind),))) for point, kind in recovering]
    return cases


def random_cases(
    rng: random.Random, places: Mapping[str, Sequence[tuple[str, str]]], kills: int, *, first: Sequence[str] = ()
) -> list[Case]:
    """Cases with so many random kills in all, half of them at a time, half at a point.

    `places` are the points with their kinds of work that each scenario reaches, in a fixed order. The scenarios in
    `first` get a case each, as far as the kills go round; those of the other cases are drawn.
    """
    number = min(kills, max(-(-kills // LIVES), len(first)))
    drawn = [rng.choice((SCENARIOS[0], *SCENARIOS)) for _ in range(number - len(first))]  # the server half of the time
    cases = []
    for place, scenario in enumerate([*first, *drawn][:number]):
        lives = kills // number + (place < kills % number)
        cases.append(Case(scenario, tuple((_random_kill(rng, places[scenario]),) for _ in range(lives))))
    return cases


def _random_kill(rng: random.Random, places: Sequence[tuple[str, str]]) -> Fault:
    if rng.random() < 0.5:
        return Fault("kill", at_s=round(rng.uniform(*KILL_TIMES_S), 2))
    point, kind = rng.choice(places)
    return Fault("kill", point=point, kind=kind, hit=rng.randint(1, MAX_HIT))


def alone(case: Case, fault_text: str) -> Iterator[Case]:
    """The cases in which one fault of a longer case strikes alone; one of a recovery, in the first recovery."""
    for life in case.lives:
        for fault in life:
            before = read_case(f"{case.scenario} {REPLAYED}").lives if fault.point in RECOVERY_POINTS else ()
            if str(fault) == fault_text and case.lives != (*before, (fault,)):
                yield Case(case.scenario, (*before, (fault,)))


def shortages(case: Case) -> list[Case]:
    """The shortages of memory of a case that change bits, each alone, at each place where it may strike.

    A server counts the passes of both tenants together; which tenant's pass is struck is up to the machine. A program
    with the service in itself counts its own.
    """
    return [
        Case(scenario, ((replace(fault, hit=hit),),))
        for life in case.lives
        for fault in life
        if fault.action == "memory" and fault.value > 1
        for scenario in SCENARIOS[1:]
        for hit in range(1, fault.hit + 1)
    ]
