"""The limit on open files: too low a one is refused at the start, a soft one is raised, and running out is one line."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from waiting import HANG_S, wait_until

from mint.server.ops.open_files import MIN_OPEN_FILES

SERVE = [sys.executable, "-c", "from mint.cli.main import app; app()", "serve", "--port", "0"]
FAKE_SERVE = [sys.executable, str(Path(__file__).with_name("fake_serve.py"))]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}


def with_limits(soft: int, hard: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("more", [[], ["--check"]], ids=["start", "check"])
def test_a_server_that_may_open_too_few_files_says_so_and_does_not_start(tmp_path: Path, more: list[str]) -> None:
    ended = subprocess.run(
        [*SERVE, "--data-dir", str(tmp_path / "data"), *more],
        capture_output=True,
        text=True,
        preexec_fn=with_limits(40, 40),
        env=ENVIRONMENT,
        timeout=HANG_S,
    )
    assert ended.returncode == 1 and "Traceback" not in ended.stderr
    told = " ".join((ended.stdout + ended.stderr).split())
    assert "ulimit -n = 40" in told and str(MIN_OPEN_FILES) in told and "ulimit -Hn" in told
    assert not (tmp_path / "data").exists()


def test_a_soft_limit_is_raised_and_running_out_is_one_line_in_the_log(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w+") as log:
        flags = json.dumps({"port": 0, "data_dir": str(tmp_path / "data"), "log_format": "json"})
        server = subprocess.Popen(
            [*FAKE_SERVE, flags],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            preexec_fn=with_limits(40, MIN_OPEN_FILES),
            env=ENVIRONMENT,
        )
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            address = line.split()[2]
            assert address.startswith("http://"), line
            limits = Path(f"/proc/{server.pid}/limits")
            if limits.exists():
                [found] = [row.split() for row in limits.read_text().splitlines() if row.startswith("Max open files")]
                assert found[3:5] == [str(MIN_OPEN_FILES)] * 2
            host, port = address.removeprefix("http://").split(":")
            with ExitStack() as connections:
                for _ in range(MIN_OPEN_FILES + 20):
                    connections.enter_context(socket.create_connection((host, int(port)), timeout=HANG_S))
                wait_until(lambda: "cannot be accepted" in (tmp_path / "log").read_text())
                time.sleep(2.5)  # asyncio tries again every second
            assert httpx.get(f"{address}/healthz", timeout=HANG_S).status_code == 200
        finally:
            server.terminate()
            server.wait(HANG_S)
        text = (tmp_path / "log").read_text()
    assert "Traceback" not in text and "traceback" not in text.lower()
    [line] = [line for line in text.splitlines() if "cannot be accepted" in line]
    assert "Too many open files" in line and f"{MIN_OPEN_FILES} files" in line
