"""Runs one case: two tenants train, a fault strikes, and the results must be those of a run without faults.

The victim is started again whenever it ends, as a process manager does, and when it says for long that it is not
ready. Nothing else is done to help it.
"""

from __future__ import annotations

import signal
import socket
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path

from mint.chaos.checks import check_folder, check_jobs, read_hits, read_values
from mint.chaos.faults import FROM_OUTSIDE, LOSES_POWER, Case, Fault
from mint.chaos.outcome import TrialOutcome, differences
from mint.chaos.process import FAILED, FINISHED, UP, ProgramLife, ServerLife, run_program, run_server
from mint.chaos.supervised_process import SupervisedProcess
from mint.chaos.workloads import WORKLOADS
from mint.errors import MintError
from mint.server.store.database import Database
from mint.server.store.journal import JOURNAL_FILE
from mint.server.store.keys import ApiKeys

POLL_S = 0.01
STUCK_S = 300.0
"""Nothing new for so long is a violation. On a machine that is overloaded, the start of the programs takes a minute."""

UNREADY_S = 8.0
"""After so long without anything new, the supervisor asks the server whether it is ready; if not, it is restarted."""

MAX_LIVES = 30
START_PAUSE_S = 0.1
SHUTDOWN_S = 20.0
SERVER = "server"


def run_case(
    case: Case, folder: Path, *, clean: TrialOutcome | None = None, shortages: Sequence[TrialOutcome] = ()
) -> TrialOutcome:
    """Runs a case in an empty folder; compares its values and its journal with those of the `clean` outcome.

    `shortages`: see `differences`.
    """
    trial = _Trial(case, folder)
    began = time.monotonic()
    try:
        trial.run()
    finally:
        trial.end()
    outcome = trial.outcome
    outcome.seconds = time.monotonic() - began
    if clean is not None and not outcome.violations:
        outcome.violations += differences(clean, outcome, shortages)
    return outcome


class _Trial:
    """One case under way."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.outcome = TrialOutcome(case)
        self._folder = folder
        self._data_dir = folder / "data"
        self._is_http = case.scenario == "http"
        self._victim = SERVER if self._is_http else case.scenario.removeprefix("embedded-")
        self._port = _free_port() if self._is_http else 0
        self._keys: dict[str, str] = {}
        self._processes: dict[str, SupervisedProcess] = {}
        self._lives: Counter[str] = Counter()
        self._start_at: dict[str, float] = {}  # of those that have died
        self._sessions: dict[str, str] = {}  # of programs that have finished
        self._failed = False
        self._died_at: float | None = None
        self._size = 0
        self._changed_at = time.monotonic()

    def run(self) -> None:
        """Until both programs have finished, or something is wrong."""
        self._data_dir.mkdir(parents=True, mode=0o700)
        for tenant in WORKLOADS:
            (self._folder / tenant).mkdir()
        if self._is_http:
            with closing(Database(self._data_dir / JOURNAL_FILE)) as database:
                self._keys = {tenant: ApiKeys(database).create(tenant)[0] for tenant in WORKLOADS}
            self._start(SERVER)
        for tenant in WORKLOADS:
            if self._is_http or tenant == self._victim:
                self._start(tenant)
        while len(self._sessions) < len(WORKLOADS) and not self._failed:
            self._listen()
            self._restart_the_dead()
            self._start_those_beside()
            self._watch_progress()
            time.sleep(POLL_S)
        if not self._failed:
            self._compare_with_the_journal()

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
        lives = range(self._lives[self._victim])
        self.outcome.hits = [read_hits(self._hits_file(self._victim, life)) for life in lives]
        if not self._failed:
            self.outcome.violations += check_folder(self._data_dir)

    # --- lives ---------------------------------------------------------------------------------------------------

    def _start(self, name: str) -> None:
        number = self._lives[name]
        self._lives[name] += 1
        faults = self._faults(number) if name == self._victim else ()
        inside = tuple(fault for fault in faults if fault.action not in FROM_OUTSIDE)
        log_file, hits_file = self._folder / f"{name}.log", self._hits_file(name, number)
        if name == SERVER:
            life = ServerLife(self._data_dir, self._port, log_file, hits_file, inside)
            self._processes[name] = SupervisedProcess(run_server, life)
            return
        url = f"http://127.0.0.1:{self._port}" if self._is_http else None
        program = ProgramLife(
            name, self._folder / name, self._data_dir, log_file, hits_file, url, self._keys.get(name), inside
        )
        self._processes[name] = SupervisedProcess(run_program, program)

    def _start_those_beside(self) -> None:
        """Starts the other program with a service in itself, which shares the victim's data folder.

        A loss of power strikes all who use the folder, and the victim's watch sees the victim's syncs alone. So the
        other one starts when the last loss is over.
        """
        lives = self.outcome.case.lives
        losses = [life for life, faults in enumerate(lives) if any(fault.action in LOSES_POWER for fault in faults)]
        is_over = self._victim in self._sessions or self._lives[self._victim] > max(losses, default=-1) + 1
        for tenant in WORKLOADS:
            if is_over and not self._failed and self._lives[tenant] == 0:
                self._start(tenant)

    def _faults(self, life: int) -> tuple[Fault, ...]:
        lives = self.outcome.case.lives
        return lives[life] if life < len(lives) else ()

    def _hits_file(self, name: str, life: int) -> Path:
        return self._folder / f"hits-{name}-{life}"

    def _listen(self) -> None:
        for name, process in self._processes.items():
            while (message := process.message()) is not None:
                event, detail = message
                if event == UP and name == self._victim:
                    self._strike_from_outside(process)
                elif event == FINISHED:
                    self._sessions[name] = detail
                elif event == FAILED:
                    self._violate(f"{name} has failed: {detail}")

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
        if self._lives[name] >= MAX_LIVES:
            self._violate(f"{name} has died {MAX_LIVES} times, the last time with {code}")
        self._died_at = time.monotonic()
        self._size = self._results_size()
        found = self._folder / "found"
        if found.exists():  # what a loss of power has left
            self._data_dir.rename(self._folder / f"lost-{self._lives[name]}")
            found.rename(self._data_dir)

    # --- progress ------------------------------------------------------------------------------------------------

    def _watch_progress(self) -> None:
        now, size = time.monotonic(), self._results_size()
        if size != self._size or self._start_at:
            if size > self._size and self._died_at is not None:
                self.outcome.recoveries_s.append(now - self._died_at)
                self._died_at = None
            self._size, self._changed_at = size, now
        elif now - self._changed_at > STUCK_S:
            self._violate(f"nothing new for {STUCK_S:g} s")
        elif self._is_http and now - self._changed_at > UNREADY_S:
            self._restart_if_not_ready(now)

    def _restart_if_not_ready(self, now: float) -> None:
        server = self._processes[SERVER]
        if server.up_at is None or now - server.up_at < UNREADY_S or _is_ready(self._port):
            return
        server.up_at = now  # it gets as long again to end
        self.outcome.forced_restarts += 1
        server.signal(signal.SIGTERM)

    def _results_size(self) -> int:
        """Grows with every result that the victim's clients get."""
        total = 0
        for tenant in WORKLOADS if self._is_http else (self._victim,):
            for file in ("results.jsonl", "run/metrics.jsonl"):
                with suppress(FileNotFoundError):
                    total += (self._folder / tenant / file).stat().st_size
        return total

    # --- faults from outside -------------------------------------------------------------------------------------

    def _strike_from_outside(self, process: SupervisedProcess) -> None:
        process.up_at = time.monotonic()
        for fault in self._faults(self._lives[self._victim] - 1):
            if fault.action in FROM_OUTSIDE:
                threading.Thread(target=self._strike, args=(fault, process), daemon=True).start()

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

    def _compare_with_the_journal(self) -> None:
        """While the sessions are open: their jobs go with them."""
        for tenant in WORKLOADS:
            self.outcome.values[tenant], changed = read_values(self._folder / tenant / "results.jsonl")
            self.outcome.violations += [f"{tenant}: {name!r} came again, with other bits" for name in changed]
        self.outcome.jobs, wrong = check_jobs(self._data_dir, self._sessions)
        self.outcome.violations += wrong


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=6) as answer:
            return answer.status == 200
    except OSError:  # also the answer of a server that is not ready
        return False
