"""The limit on open files: too low a one is refused at the start, a soft one is raised, and running out is one line."""

from __future__ import annotations

import json
import os
import resource
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TextIO

import httpx
import pytest
from waiting import HANG_S

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


BUSY = b"POST /api/v1/create_session HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\nExpect: 100-continue\r\n\r\n"


@contextmanager
def small_server(folder: Path, log: TextIO) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server that may open `MIN_OPEN_FILES` files, and its address."""
    flags = {"port": 0, "data_dir": str(folder / "data"), "log_format": "json", "body_timeout_s": 3600}
    server = subprocess.Popen(
        [*FAKE_SERVE, json.dumps(flags)],
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        preexec_fn=with_limits(40, MIN_OPEN_FILES),
        env=ENVIRONMENT,
    )
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        assert line.split()[2].startswith("http://"), line
        yield server, line.split()[2]
    finally:
        server.terminate()
        server.wait(HANG_S)


def connect(address: str) -> socket.socket:
    host, port = address.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=HANG_S)


def test_idle_connections_make_room_for_new_ones(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w+") as log, small_server(tmp_path, log) as (_, address), ExitStack() as connections:
        busy = connections.enter_context(connect(address))
        busy.sendall(BUSY)
        assert busy.recv(100).startswith(b"HTTP/1.1 100 ")
        idle = [connections.enter_context(connect(address)) for _ in range(2 * MIN_OPEN_FILES)]
        assert httpx.get(f"{address}/healthz", timeout=HANG_S).status_code == 200
        assert idle[0].recv(1) == b"", "the oldest idle connection was closed"
        busy.sendall(b'{"tags":[]')  # one byte is missing in this JSON
        assert busy.recv(100).startswith(b"HTTP/1.1 400 "), "a connection with a request was not"
        idle[-1].sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert idle[-1].recv(100).startswith(b"HTTP/1.1 200 "), "a young one was not"
    assert "cannot be accepted" not in (tmp_path / "log").read_text()


def test_a_soft_limit_is_raised_and_running_out_is_one_line_in_the_log(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w+") as log, small_server(tmp_path, log) as (server, address):
        limits = Path(f"/proc/{server.pid}/limits")
        if limits.exists():
            [found] = [row.split() for row in limits.read_text().splitlines() if row.startswith("Max open files")]
            assert found[3:5] == [str(MIN_OPEN_FILES)] * 2
        with ExitStack() as connections:
            for _ in range(2 * MIN_OPEN_FILES):
                busy = connections.enter_context(connect(address))
                busy.sendall(BUSY)
                select.select([busy], [], [], 1.0)  # until it is "100 Continue", the connection counts as idle
                if "cannot be accepted" in (tmp_path / "log").read_text():
                    break
            time.sleep(2.5)  # asyncio tries again every second
        assert httpx.get(f"{address}/healthz", timeout=HANG_S).status_code == 200
    text = (tmp_path / "log").read_text()
    assert "Traceback" not in text and "traceback" not in text.lower()
    [line] = [line for line in text.splitlines() if "cannot be accepted" in line]
    assert "Too many open files" in line and f"{MIN_OPEN_FILES} files" in line
