"""What runs in the processes that `mint chaos` starts: a server, or a program with a training loop.

They are forked from a process that has imported everything, so a start takes a tenth of a second instead of seconds.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from mint.chaos.disasters import Disasters
from mint.chaos.faults import LOSES_POWER, Fault
from mint.chaos.injection import Injection
from mint.chaos.workloads import WORKLOADS
from mint.client.service_client import ServiceClient
from mint.compose.embedded import open_embedded, torch_engine
from mint.compose.serving import serve
from mint.config import ServeSettings, Settings, read_settings
from mint.errors import MintError

UP = "up"
FINISHED = "finished"
FAILED = "failed"

UNREADY_EXIT = 3
"""The exit code of a server that could not start."""


@dataclass(frozen=True)
class ServerLife:
    """One life of a server."""

    data_dir: Path
    port: int
    log_file: Path
    hits_file: Path
    faults: tuple[Fault, ...] = ()


@dataclass(frozen=True)
class ProgramLife:
    """One life of a program. With a `base_url` it uses that server, else the service in itself on `data_dir`."""

    workload: str
    folder: Path
    data_dir: Path
    log_file: Path
    hits_file: Path
    base_url: str | None = None
    api_key: str | None = None
    faults: tuple[Fault, ...] = ()

    @property
    def results_file(self) -> Path:
        """One JSON document in each line: the name of a value, and the value."""
        return self.folder / "results.jsonl"


def run_server(life: ServerLife, supervisor: Connection) -> None:
    """Serves until a signal; says `UP` once it answers."""
    _redirect(life.log_file)
    injection = _arm(life.faults, life.data_dir, life.hits_file)

    def announce(_line: str) -> None:
        injection.start_clock()
        supervisor.send((UP, None))

    settings = ServeSettings(port=life.port, data_dir=life.data_dir, api_keys=True, stop_within_s=10.0)
    try:
        serve(settings, announce=announce, engine=torch_engine(_one_thread()))
    except MintError as error:
        logging.getLogger("mint.chaos").error("not started: %s", error)
        sys.exit(UNREADY_EXIT)


def run_program(life: ProgramLife, supervisor: Connection) -> None:
    """Runs a workload to its end; says `FINISHED` with its models, and ends its session when it is told to."""
    _redirect(life.log_file)
    address: dict[str, Any] = {"base_url": life.base_url, "api_key": life.api_key}
    if life.base_url is None:
        injection = _arm(life.faults, life.data_dir, life.hits_file)
        injection.start_clock()
        engine = partial(torch_engine, _one_thread())
        address = {"open_embedded": lambda: open_embedded(data_dir=life.data_dir, engine=engine())}
    supervisor.send((UP, None))
    try:
        with ServiceClient(**address) as client, life.results_file.open("a") as results:

            def record(name: str, value: Any) -> None:
                # a line of its own, also behind one that a kill has cut short
                results.write(f"\n{json.dumps([name, value])}\n")
                results.flush()

            WORKLOADS[life.workload](client, life.folder, record)
            supervisor.send((FINISHED, client.session_id))
            supervisor.recv()
    except Exception as error:  # the boundary: whatever ends the loop is what its user would see
        logging.getLogger("mint.chaos").exception("the program has failed")
        supervisor.send((FAILED, f"{type(error).__name__}: {error}"))


def _arm(faults: Sequence[Fault], data_dir: Path, hits_file: Path) -> Injection:
    watches = any(fault.action in LOSES_POWER for fault in faults)
    injection = Injection(faults, Disasters(data_dir, keeps_unsynced_apart=watches), hits_file)
    injection.install()
    return injection


def _one_thread() -> Settings:
    """One thread, so that several processes do not wait for each other on two cores."""
    return read_settings().model_copy(update={"threads": 1})


def _redirect(log_file: Path) -> None:
    """Everything that is printed goes to a file."""
    handle = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the supervisor's
    logging.basicConfig(level=logging.WARNING)


Target = Callable[[Any, Connection], None]
