"""GRPO runs with streams open, in which something is killed or frozen at a random moment: what came of them, and how
long it took until all was there again."""

from __future__ import annotations

import json
import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from open_streams import OpenStreams, Piece
from served_cluster import Server

import mint
from mint.recipes.math import MathAdapter
from mint.rl import RLConfig, run_grpo

STEPS = 10
PATIENCE_S = 240.0
"""How long it may take until all is there again."""

POLL_S = 0.05


@dataclass(frozen=True)
class Seen:
    """All that a run must have in common with the undisturbed one: rollouts, metrics but for times, and the digest."""

    rollouts: list[dict[str, Any]]
    metrics: list[dict[str, float]]
    digest: str | None


@dataclass
class Case:
    """One disturbed run, `at_s` after step `at_step`. It took `recovered_s` until all was there again, and the
    run ended `delay_s` later than an undisturbed one."""

    what: str
    how: str
    number: int
    at_s: float = 0.0
    at_step: int = 0
    recovered_s: float | None = None
    delay_s: float = 0.0
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Disturbance:
    """`strike` does it, once, and says to whom; then `is_whole` tells whether all is there again."""

    what: str
    how: str
    strike: Callable[[], str]
    is_whole: Callable[[], bool]


def grpo(url: str, folder: Path) -> Seen:
    """One run against a server, with the log in a folder."""
    config = RLConfig(
        base_model="mint/tiny",
        rank=8,
        group_size=4,
        batch_size=8,
        steps=STEPS,
        max_tokens=8,
        temperature=1.0,
        learning_rate=1e-3,
        seed=1,
        heldout_size=0,
        run_dir=folder,
        print_progress=False,
    )
    with mint.ServiceClient(base_url=url) as service:
        result = run_grpo(MathAdapter(), config, service_client=service)
    rows = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return Seen(rows, [_without_times(row) for row in metrics], result.state_digest)


def _lines(file: Path) -> int:
    return len(file.read_text().splitlines()) if file.exists() else 0


def _without_times(row: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in row.items() if not name.startswith("time/")}


class Campaign:
    """Runs against one server, each with a disturbance at a random moment, compared with an undisturbed one."""

    def __init__(self, server: Server, folder: Path, expected: Seen, streams: dict[int, list[Piece]]) -> None:
        """`expected` is the undisturbed run, `streams` undisturbed streams by seed; further ones are compared among
        each other."""
        self._server = server
        self._folder = folder
        self._expected = expected
        self._streams = streams
        self._quiet_s: float | None = None
        self.cases: list[Case] = []

    def warm_up(self) -> None:
        """An undisturbed run on this server, which starts what starts with the first requests; and a second one, whose
        time is that of an undisturbed run."""
        for name in ("first", "second"):
            began = time.monotonic()
            streams = OpenStreams(self._server.url, 0)
            assert grpo(self._server.url, self._folder / name) == self._expected
            self._quiet_s = time.monotonic() - began
            streams.finish()
            assert self._wrong_streams(streams) == []

    def run(self, disturbance: Disturbance, number: int, rng: random.Random) -> Case:
        """One disturbed run."""
        assert self._quiet_s is not None, "warm_up comes first"
        case = Case(disturbance.what, disturbance.how, number)
        folder = self._folder / f"{disturbance.what}-{disturbance.how}-{number}"
        moment = rng.randint(1, STEPS - 3), rng.uniform(0.0, 1.0) * self._quiet_s / STEPS
        began, over = time.monotonic(), threading.Event()
        streams = OpenStreams(self._server.url, 0)
        striker = threading.Thread(
            target=self._strike, args=(disturbance, case, moment, folder / "metrics.jsonl", over), daemon=True
        )
        striker.start()
        try:
            seen = grpo(self._server.url, folder)
            case.delay_s = round(time.monotonic() - began - self._quiet_s, 2)
            over.set()
            striker.join(PATIENCE_S + 60)
        finally:
            over.set()
        streams.finish()
        case.wrong += self._wrong_streams(streams) + _differences(seen, self._expected)
        if case.recovered_s is None:
            case.wrong.append("not all is there again")
        self.cases.append(case)
        return case

    def _strike(
        self, disturbance: Disturbance, case: Case, moment: tuple[int, float], log: Path, over: threading.Event
    ) -> None:
        while _lines(log) < moment[0] and not over.wait(POLL_S):
            pass
        if over.wait(moment[1]):
            case.wrong.append("the run had ended before it was disturbed")
            return
        case.at_step, case.at_s = moment[0], round(moment[1], 3)
        began = time.monotonic()
        try:
            disturbance.strike()
            while time.monotonic() - began < PATIENCE_S:
                if disturbance.is_whole():
                    case.recovered_s = round(time.monotonic() - began, 2)
                    return
                time.sleep(POLL_S)
        except Exception as error:  # a thread: the case has it
            case.wrong.append(f"the disturbance failed: {error!r}")

    def _wrong_streams(self, streams: OpenStreams) -> list[str]:
        wrong = list(streams.contradictions)
        for seed, pieces in streams.ended.items():
            if self._streams.setdefault(seed, pieces) != pieces:
                wrong.append(f"stream {seed} has other tokens or logprobs")
        return wrong if streams.ended else [*wrong, "no stream has ended"]


def _differences(seen: Seen, expected: Seen) -> list[str]:
    return [
        f"other {name} than in the undisturbed run"
        for name in ("rollouts", "metrics", "digest")
        if getattr(seen, name) != getattr(expected, name)
    ]


def report(cases: Sequence[Case]) -> str:
    """One line: how many runs were those of the undisturbed one, and the least, middle and longest times."""
    times = [case.recovered_s for case in cases if case.recovered_s is not None]
    same = sum(not case.wrong for case in cases)
    whole, later = _spread(times), _spread([case.delay_s for case in cases])
    which = f"{cases[0].what} {cases[0].how}"
    return f"{which}: {same} of {len(cases)} the same; whole again after {whole} s; later by {later} s"


def _spread(values: Sequence[float]) -> str:
    return f"{min(values):.1f} / {statistics.median(values):.1f} / {max(values):.1f}" if values else "-"


def as_json(case: Case) -> str:
    """A case as one line."""
    return json.dumps(asdict(case))
