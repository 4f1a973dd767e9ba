"""A server that is sampled for, and workers that join it: each a process of its own, with no folder in common."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ports import free_port
from waiting import wait_until

MODEL = "mint/tiny"


class Process:
    """One process of mint."""

    def __init__(self, folder: Path, *words: str, key: str | None = None, inside: Sequence[str] = ()) -> None:
        """`inside` are the words before the command: those of a network namespace."""
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder / "log"
        given = {name: value for name, value in os.environ.items() if not name.startswith(("MINT_", "TINKER_"))}
        given |= {"MINT_HOME": str(folder / "home"), "MINT_THREADS": "1", "TMPDIR": str(folder)}
        command = [*inside, sys.executable, "-m", "mint.cli.main", *words]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command, env=given | ({} if key is None else {"MINT_API_KEY": key}), stdout=log, stderr=log
            )

    @property
    def log(self) -> str:
        """What it has written."""
        return self._log.read_text()

    def wait_for(self, text: str) -> None:
        """Returns once it has written a text."""

        def has_written() -> bool:
            assert self.process.poll() is None or text in self.log, self.log[-3000:]
            return text in self.log

        wait_until(has_written)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Ends it, and returns its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(60)


class Server(Process):
    """`mint serve --sampler workers`, with a key."""

    def __init__(self, folder: Path, host: str = "127.0.0.1") -> None:
        home = folder / "data"
        self.key = made_key(home)
        port = free_port()
        super().__init__(
            folder,
            *("serve", "--model", MODEL, "--host", host, "--port", str(port), "--data-dir", str(home)),
            *("--sampler", "workers"),
        )
        self.url = f"http://{host}:{port}"
        self.wait_for("mint serves")

    def samplers(self) -> list[dict[str, Any]]:
        """What the server says of its samplers."""
        with urllib.request.urlopen(f"{self.url}/readyz", timeout=30) as answer:
            hosts: list[dict[str, Any]] = json.load(answer)["cluster"]["external"]["hosts"]
        return hosts


def made_key(home: Path) -> str:
    """A key of the only owner of a data directory."""
    words = [sys.executable, "-m", "mint.cli.main", "keys", "create", "--owner", "ann", "--json"]
    made = subprocess.run([*words, "--data-dir", str(home)], capture_output=True, text=True, check=True)
    key: str = json.loads(made.stdout)["key"]
    return key
