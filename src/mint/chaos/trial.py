"""Runs one case: two tenants train, something breaks, is started again, and must end as if nothing had happened.

The victim is started again whenever it ends, as a process manager does, and when it says that it is not ready for long.
Nobody else helps.
"""

from __future__ import annotations

import json
import shutil
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mint.chaos.fault_points import FOLDERS
from mint.chaos.faults import ENDS_THE_PROCESS, FROM_OUTSIDE, Case, Fault
from mint.chaos.process import FAILED, FINISHED, UP, ProgramLife, ServerLife, run_program, run_server
from mint.chaos.supervised_process import SupervisedProcess
from mint.chaos.workloads import WORKLOADS
from mint.errors import MintError
from mint.server.store.database import Database, check_file
from mint.server.store.journal import JOURNAL_FILE, Journal
from mint.server.store.keys import ApiKeys

POLL_S = 0.01
STUCK_S = 60.0
"""Nothing new for so long is a violation."""

UNREADY_S = 8.0
"""After so long without anything new, the victim's supervisor asks whether it is ready, and starts it again if not."""

MAX_RESTARTS = 30
START_PAUSE_S = 0.1
SHUTDOWN_S = 20.0
SERVER = "server"
LOG_LINES = 4

Values = dict[str, dict[str, Any]]
"""Tenant → name of a value → value."""

Hits = list[tuple[str, str]]
"""Fault points with the kind of operation, in the order in which they were reached."""


@dataclass
class TrialOutcome:
    """What became of a case. `recoveries_s`: from each death to the next new result of the victim's clients."""

    case: Case
    values: Values = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    kills: int = 0
    restarts: int = 0
    forced_restarts: int = 0
    not_reached: list[str] = field(default_factory=list)
    recoveries_s: list[float] = field(default_factory=list)
    hits: list[Hits] = field(default_factory=list)  # by life of the victim
    jobs: dict[str, int] = field(default_factory=dict)  # tenant → jobs of its models in the journal
    seconds: float = 0.0


def run_case(case: Case, folder: Path, *, clean: TrialOutcome | None = None) -> TrialOutcome:
    """Runs a case in an empty folder; compares its values and its journal with those of the `clean` outcome."""
    trial = _Trial(case, folder)
    began = time.monotonic()
    try:
        trial.run()
    finally:
        trial.end()
    outcome = trial.outcome
    outcome.seconds = time.monotonic() - began
    if clean is not None and not outcome.violations:
        outcome.violations += differences(clean, outcome)
    return outcome


def differences(clean: TrialOutcome, found: TrialOutcome) -> list[str]:
    """In what two outcomes differ, in words."""
    wrong = []
    for tenant, values in clean.values.items():
        other = found.values.get(tenant, {})
        wrong += [f"{tenant}: {name!r} is missing" for name in values if name not in other]
        wrong += [
            f"{tenant}: {name!r} has other bits" for name in values if name in other and other[name] != values[name]
        ]
    if found.case.scenario == clean.case.scenario == "http":
        wrong += [
            f"{tenant}: {found.jobs.get(tenant)} jobs in the journal instead of {count}"
            for tenant, count in clean.jobs.items()
            if found.jobs.get(tenant) != count
        ]
    return wrong


class _Trial:
    """One case under way."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.outcome = TrialOutcome(case)
        self._folder = folder
        self._data_dir = folder / "data"
        self._is_http = case.scenario == "http"
        self._victim = SERVER if self._is_http else case.scenario.removeprefix("embedded-")
        self._processes: dict[str, SupervisedProcess] = {}
        self._lives: Counter[str] = Counter()
        self._sessions: dict[str, str] = {}  # of programs that have finished
        self._failed = False
        self._died_at: float | None = None
        self._size = 0
        self._changed_at = time.monotonic()
        self._start_at: dict[str, float] = {}
        self._port = _free_port() if self._is_http else 0
        self._keys: dict[str, str] = {}
        self._threads: list[threading.Thread] = []

    def run(self) -> None:
        self._data_dir.mkdir(parents=True, mode=0o700)
        for tenant in WORKLOADS:
            (self._folder / tenant).mkdir()
        if self._is_http:
            with closing(Database(self._data_dir / JOURNAL_FILE)) as database:
                self._keys = {tenant: ApiKeys(database).create(tenant)[0] for tenant in WORKLOADS}
            self._start(SERVER)
        for tenant in WORKLOADS:
            self._start(tenant)
        while len(self._sessions) < len(WORKLOADS) and not self._failed:
            self._listen()
            self._restart_the_dead()
            self._watch_progress()
            time.sleep(POLL_S)
        if not self._failed:
            self._read_values()
            self._check_journal()

    def end(self) -> None:
        """Ends all processes; the programs first, so that their sessions end."""
        for name, process in sorted(self._processes.items(), key=lambda item: item[0] == SERVER):
            if self._failed:
                process.signal(signal.SIGKILL)
            elif name == SERVER:
                process.signal(signal.SIGTERM)
            else:
                process.tell("close")
            if not process.end(SHUTDOWN_S):
                self._violate(f"{name} does not end within {SHUTDOWN_S:g} s")
        self.outcome.hits = [
            _read_hits(self._folder / f"hits-{self._victim}-{life}") for life in range(self._lives[self._victim])
        ]
        self._note_faults_not_reached()
        if not self._failed:
            self._check_folder()

    # --- lives ---------------------------------------------------------------------------------------------------

    def _start(self, name: str) -> None:
        number = self._lives[name]
        self._lives[name] += 1
        faults = self._faults(number) if name == self._victim else ()
        inside = tuple(fault for fault in faults if fault.action not in FROM_OUTSIDE)
        log_file, hits_file = self._folder / f"{name}.log", self._folder / f"hits-{name}-{number}"
        if name == SERVER:
            life = ServerLife(self._data_dir, self._port, log_file, hits_file, inside)
            self._processes[name] = SupervisedProcess(run_server, life)
            return
        url = f"http://127.0.0.1:{self._port}" if self._is_http else None
        program = ProgramLife(
            name, self._folder / name, self._data_dir, log_file, hits_file, url, self._keys.get(name), inside
        )
        self._processes[name] = SupervisedProcess(run_program, program)

    def _faults(self, life: int) -> tuple[Fault, ...]:
        lives = self.outcome.case.lives
        return lives[life] if life < len(lives) else ()

    def _listen(self) -> None:
        for name, process in self._processes.items():
            while (message := process.message()) is not None:
                match message:
                    case (kind, _) if kind == UP:
                        if name == self._victim:
                            self._strike_from_outside(process)
                    case (kind, session) if kind == FINISHED:
                        self._sessions[name] = session
                    case (kind, error) if kind == FAILED:
                        self._violate(f"{name} has failed: {error}")

    def _restart_the_dead(self) -> None:
        now = time.monotonic()
        for name, process in list(self._processes.items()):
            code = process.exit_code
            if code is None or name in self._sessions or self._failed:
                continue
            if name not in self._start_at:
                process.end(0)
                self._start_at[name] = now + START_PAUSE_S
                self._note_death(name, code)
            elif now >= self._start_at[name]:
                del self._start_at[name]
                self._start(name)

    def _note_death(self, name: str, code: int) -> None:
        self.outcome.kills += code == -signal.SIGKILL
        self.outcome.restarts += 1
        if name != self._victim:
            self._violate(f"{name} has died ({code}), and was not struck")
        if self._lives[name] > MAX_RESTARTS:
            self._violate(f"{name} was started {MAX_RESTARTS} times")
        self._died_at = time.monotonic()
        self._size = self._results_size()
        found = self._folder / "found"
        if found.exists():  # what a loss of power has left
            self._data_dir.rename(self._folder / f"lost-{self._lives[name]}")
            found.rename(self._data_dir)

    def _watch_progress(self) -> None:
        now, size = time.monotonic(), self._results_size()
        if size != self._size or self._start_at:
            if size > self._size and self._died_at is not None:
                self.outcome.recoveries_s.append(now - self._died_at)
                self._died_at = None
            self._size, self._changed_at = size, now
        elif now - self._changed_at > STUCK_S:
            self._violate(f"nothing new for {STUCK_S:g} s")
        elif self._is_http and now - self._changed_at > UNREADY_S and self._processes[SERVER].up_at is not None:
            self._restart_if_not_ready()

    def _restart_if_not_ready(self) -> None:
        server = self._processes[SERVER]
        asked_at = server.up_at or 0.0
        if time.monotonic() - asked_at < UNREADY_S or _is_ready(self._port):
            return
        server.up_at = time.monotonic()
        self.outcome.forced_restarts += 1
        server.signal(signal.SIGTERM)

    def _results_size(self) -> int:
        total = 0
        for tenant in WORKLOADS if self._is_http else (self._victim,):
            with suppress(FileNotFoundError):
                total += (self._folder / tenant / "results.jsonl").stat().st_size
            with suppress(FileNotFoundError):
                total += (self._folder / tenant / "run" / "metrics.jsonl").stat().st_size
        return total

    # --- faults from outside -------------------------------------------------------------------------------------

    def _strike_from_outside(self, process: SupervisedProcess) -> None:
        process.up_at = time.monotonic()
        for fault in self._faults(self._lives[self._victim] - 1):
            if fault.action in FROM_OUTSIDE:
                thread = threading.Thread(target=self._strike, args=(fault, process), daemon=True)
                thread.start()
                self._threads.append(thread)

    def _strike(self, fault: Fault, process: SupervisedProcess) -> None:
        time.sleep(fault.at_s or 0.0)
        match fault.action:
            case "terminate":
                process.signal(signal.SIGTERM)
            case "stop":
                process.signal(signal.SIGSTOP)
                time.sleep(fault.value)
                process.signal(signal.SIGCONT)
            case "locked-database":
                with (
                    suppress(MintError),
                    closing(Database(self._data_dir / JOURNAL_FILE)) as database,
                    database.transaction(durable=False),
                ):
                    time.sleep(fault.value)

    # --- what must hold ------------------------------------------------------------------------------------------

    def _violate(self, text: str) -> None:
        self._failed = True
        self.outcome.violations.append(text)

    def _read_values(self) -> None:
        for tenant in WORKLOADS:
            values: dict[str, Any] = {}
            for line in (self._folder / tenant / "results.jsonl").read_text().splitlines():
                with suppress(ValueError):  # a kill has cut it short
                    name, value = json.loads(line)
                    if values.setdefault(name, value) != value:
                        self.outcome.violations.append(f"{tenant}: {name!r} came twice, with different bits")
            self.outcome.values[tenant] = values

    def _check_journal(self) -> None:
        """Every accepted request of the sessions that finished was done, once, in order."""
        with closing(Journal(self._data_dir / JOURNAL_FILE)) as journal:
            for tenant, session_id in self._sessions.items():
                count = 0
                for model in journal.models_of(session_id):
                    jobs = journal.jobs(model.model_id, after=-1)
                    numbers = [job.seq_id for job in jobs]
                    count += len(jobs)
                    if numbers != list(range(len(jobs))):
                        self.outcome.violations.append(f"{tenant}: the journal of {model.model_id} has gaps: {numbers}")
                    if model.applied_seq != len(jobs) - 1:
                        self.outcome.violations.append(f"{tenant}: {model.applied_seq + 1} of {len(jobs)} jobs applied")
                    undone = [f"{job.seq_id} {job.kind} {job.status}" for job in jobs if job.status != "done"]
                    if undone:
                        self.outcome.violations.append(f"{tenant}: not done: {', '.join(undone)}")
                self.outcome.jobs[tenant] = count

    def _check_folder(self) -> None:
        _, verdict = check_file(self._data_dir / JOURNAL_FILE)
        if verdict != "ok":
            self.outcome.violations.append(f"the journal is damaged: {verdict}")
        with closing(Journal(self._data_dir / JOURNAL_FILE)) as journal:
            named = [
                name for name in journal.named_files() if name.startswith(tuple(f"{folder}/" for folder in FOLDERS))
            ]
            missing = [name for name in named if not (self._data_dir / name).exists()]
            if missing:
                self.outcome.violations.append(f"rows name files that are gone: {missing}")

    def _note_faults_not_reached(self) -> None:
        for life, faults in enumerate(self.outcome.case.lives):
            hits = self.outcome.hits[life] if life < len(self.outcome.hits) else []
            for fault in faults:
                reached = Counter(point for point, kind in hits if fault.kind in (kind, None))
                if fault.point is not None and reached[fault.point] < fault.hit:
                    self.outcome.not_reached.append(str(fault))
        ending = sum(any(fault.action in ENDS_THE_PROCESS for fault in life) for life in self.outcome.case.lives)
        timed = [fault for life in self.outcome.case.lives for fault in life if fault.at_s is not None]
        if timed and self.outcome.restarts < ending and not self.outcome.not_reached:
            self.outcome.not_reached.append("a fault at a time after the end of the case")


def discard(folder: Path) -> None:
    """Removes the folder of a case."""
    shutil.rmtree(folder, ignore_errors=True)


def last_lines(folder: Path) -> str:
    """The ends of the logs of a case, for a report."""
    found = []
    for log in sorted(folder.glob("*.log")):
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        found += [f"{log.name}: {line}" for line in lines[-LOG_LINES:]]
    return "\n".join(found)


def _read_hits(file: Path) -> Hits:
    if not file.exists():
        return []
    lines = [line.split(" ") for line in file.read_text().splitlines()]
    return [(line[0], line[1]) for line in lines if len(line) == 2]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=6) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False
