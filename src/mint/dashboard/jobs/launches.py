"""Commands that the pages start: runs, resumed runs and evaluations, each a `mint` process of its own.

The composition root passes in the callables that make command lines; it decides what a page may run. This module knows
no task and no setting. A process goes on when the dashboard ends; what it printed is forgotten then.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, Protocol

from mint.dashboard.run_readers import RunReaders
from mint.errors import InvalidRequestError, OverloadedError, RequestFailedError
from mint.runs.terminal_text import paragraph

MAX_RUNNING = 4
MAX_KEPT = 32
MAX_OUTPUT_BYTES = 1 << 20
TOLD_CHARACTERS = 1_000
"""The page of a failed process shows at most so many characters: the last ones that the process printed."""

EXIT_S = 10.0
"""How long a resume waits for the exit of the process that a page started for the same run. A run is over before its
process is: Python ends its threads and its model after the run's last write."""

STATES = {0: "done", 130: "stopped"}
"""By exit status; `mint train` ends with 130 when it was asked to stop."""

Kind = Literal["start", "resume", "evaluate"]


class PageCommands(Protocol):
    """Makes the arguments of `mint` commands from what a page asks, and refuses what a page must not run."""

    def start(self, recipe: str, task: str, settings: Mapping[str, Any]) -> tuple[Path, list[str]]:
        """The folder of a new run, and the arguments that start it."""
        ...

    def resume(self, folder: Path) -> list[str]:
        """The arguments that go on with the run in `folder`."""
        ...

    def evaluate(self, folder: Path, checkpoint: str) -> list[str]:
        """The arguments that evaluate a checkpoint on the task of the run in `folder`."""
        ...

    def choices(self) -> dict[str, list[str]]:
        """The `tasks` and `models` that a page may name."""
        ...


@dataclass
class _Launch:
    kind: Kind
    run: str
    checkpoint: str | None
    command: str
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    errors: IO[bytes]


class Launches:
    """The processes that the pages of this dashboard have started. Thread-safe."""

    def __init__(
        self,
        readers: RunReaders,
        commands: PageCommands | None,
        *,
        environment: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        """`commands` is None if pages may start nothing. `environment` returns that of the processes."""
        self._readers = readers
        self._commands = commands
        self._environment = environment
        self._lock = threading.Lock()
        self._launches: OrderedDict[str, _Launch] = OrderedDict()

    @property
    def can_start(self) -> bool:
        """Whether pages may start something."""
        return self._commands is not None

    def choices(self) -> dict[str, list[str]]:
        """The `tasks` and `models` that a page may name; empty if it may start nothing."""
        return {} if self._commands is None else self._commands.choices()

    def start(self, given: object) -> dict[str, Any]:
        """Starts a run: `given` is an object with `recipe`, `task` and `settings`.

        Raises:
            InvalidRequestError: it is not, or a value cannot be used.
            OverloadedError: `MAX_RUNNING` processes are running.
            RequestFailedError: pages may start nothing here.
        """
        commands = self._allowed("mint train")
        asked = given if isinstance(given, dict) else {}
        settings = asked.get("settings", {})
        if not isinstance(settings, dict):
            raise InvalidRequestError("is not an object", field="settings", value=settings, remedy='Send {"steps": 20}')
        folder, arguments = commands.start(str(asked.get("recipe", "rl")), str(asked.get("task", "")), settings)
        return self._begin("start", folder.name, None, arguments)

    def resume(self, run: str) -> dict[str, Any]:
        """Goes on with a run that has ended.

        Raises:
            NotFoundError: there is no such run.
            InvalidRequestError: it is running, or a page must not run what it needs.
            OverloadedError, RequestFailedError: as `start`.
        """
        folder = self._readers.folders.folder(run)
        commands = self._allowed("mint train … --resume")
        state = self._readers.summary(run).state
        if state in ("running", "finished"):
            remedy = "Stop it first" if state == "running" else "Start a new run from its last checkpoint: init_from"
            raise InvalidRequestError(f"is {state}", field="run", value=run, remedy=remedy)
        arguments = commands.resume(folder)
        self._wait_for_exit(run)
        return self._begin("resume", run, None, arguments)

    def evaluate(self, run: str, given: object) -> dict[str, Any]:
        """Evaluates a checkpoint of a run on its task: `given` is an object with `checkpoint`.

        Raises:
            As `resume`, but for running and finished runs, too.
        """
        folder = self._readers.folders.folder(run)
        commands = self._allowed("mint eval")
        checkpoint = str(given.get("checkpoint", "")) if isinstance(given, dict) else ""
        return self._begin("evaluate", run, checkpoint, commands.evaluate(folder, checkpoint))

    def entries(self) -> list[dict[str, Any]]:
        """The launches, newest first."""
        with self._lock:
            found = list(self._launches.items())
        return [_entry(name, launch) for name, launch in reversed(found)]

    def _wait_for_exit(self, run: str) -> None:
        with self._lock:
            living = [one for one in self._launches.values() if one.run == run and one.kind != "evaluate"]
        for launch in living:
            with suppress(subprocess.TimeoutExpired):
                launch.process.wait(EXIT_S)

    def _allowed(self, command: str) -> PageCommands:
        if self._commands is None:
            raise RequestFailedError(
                "these pages start nothing", remedy=f"Start `mint dashboard --start-runs`, or run {command} yourself"
            )
        return self._commands

    def _begin(self, kind: Kind, run: str, checkpoint: str | None, arguments: Sequence[str]) -> dict[str, Any]:
        with self._lock:
            living = [one for one in self._launches.values() if one.process.poll() is None]
            if len(living) >= MAX_RUNNING:
                raise OverloadedError(
                    f"{len(living)} commands that pages started are running", remedy="Wait until one ends, or stop it"
                )
            if any((one.run, one.checkpoint) == (run, checkpoint) for one in living):
                raise OverloadedError("this was started already", remedy="Wait until it ends")
            output, errors = (tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115 as long as the launch is kept
            # -P: no module is imported from the folder that the dashboard was started in. No shell reads the words.
            try:
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "mint.cli.main", *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=errors,
                    env=dict(self._environment()),
                    start_new_session=True,
                )
            except OSError as error:  # more arguments than the system takes, or no memory
                raise RequestFailedError(f"the process cannot be started: {error}") from error
            command = shlex.join(["mint", *arguments])
            launch = _Launch(kind, run, checkpoint, command, process, output, errors)
            name = uuid.uuid4().hex[:12]
            self._launches[name] = launch
            self._forget_oldest()
        return _entry(name, launch)

    def _forget_oldest(self) -> None:
        ended = [name for name, one in self._launches.items() if one.process.poll() is not None]
        for name in ended[: max(0, len(self._launches) - MAX_KEPT)]:
            del self._launches[name]


def _entry(name: str, launch: _Launch) -> dict[str, Any]:
    status = launch.process.poll()
    about = {"launch": name, "kind": launch.kind, "run": launch.run, "checkpoint": launch.checkpoint}
    state = "running" if status is None else STATES.get(status, "failed")
    told = _tail(launch.errors)[-TOLD_CHARACTERS:] if state == "failed" else ""
    result = _last_json(launch.output) if state == "done" and launch.kind == "evaluate" else None
    return {**about, "command": launch.command, "state": state, "told": paragraph(told), "result": result}


def _tail(file: IO[bytes]) -> str:
    """The end of a file that another process writes, read without moving the place that both share."""
    begin = max(0, os.fstat(file.fileno()).st_size - MAX_OUTPUT_BYTES)
    return os.pread(file.fileno(), MAX_OUTPUT_BYTES, begin).decode("utf-8", "replace").strip()


def _last_json(file: IO[bytes]) -> Any:
    lines = _tail(file).splitlines()
    try:
        return json.loads(lines[-1]) if lines else None
    except ValueError:
        return None
