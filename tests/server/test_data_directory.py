"""Who may use a data directory at the same time: one server, and any number of embedded processes."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from default_engine import fake_engine
from typer.testing import CliRunner
from waiting import HANG_S, wait_until

from mint.cli.main import app
from mint.compose.embedded import open_embedded
from mint.compose.serving import Server, check
from mint.config import read_serve_settings
from mint.errors import InvalidRequestError, MintError, NotFoundError
from mint.server.callers import LOCAL
from mint.server.store.instances import ServerLock
from tests.server.server_harness import BASE, Person, make_key, pass_input, running

SERVE = """
import sys
from pathlib import Path
from mint.compose.serving import serve
from mint.config import ServeSettings
from mint.engine.fake_engine import FakeEngine
serve(ServeSettings(port=0, data_dir=Path(sys.argv[1])), announce=lambda line: print(line, flush=True),
      engine=FakeEngine())
"""


@contextmanager
def served(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A server in a process of its own."""
    child = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(folder)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert child.stdout is not None and child.stdout.readline().startswith("mint serves ")
        yield child
    finally:
        child.kill()
        child.communicate()


def refusal(folder: Path) -> str:
    """Why no server can start on this folder now."""
    with pytest.raises(InvalidRequestError) as caught:
        Server(read_serve_settings({"port": 0, "data_dir": folder}), engine=fake_engine())
    return str(caught.value)


def test_a_second_server_on_a_folder_is_refused_with_one_line_that_names_the_first(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-c",
        "from mint.cli.main import app; app()",
        "serve",
        "--port",
        "0",
        "--data-dir",
        str(tmp_path),
    ]
    with served(tmp_path) as first:
        second = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
        assert second.returncode == 1 and second.stdout == ""
        (line,) = second.stderr.splitlines()
        for part in (
            str(tmp_path),
            f"process {first.pid} on host {socket.gethostname()}, since 20",
            "Stop that server",
        ):
            assert part in line
        checked = CliRunner().invoke(app, ["serve", "--check", "--port", "0", "--data-dir", str(tmp_path)])
        assert checked.exit_code == 1 and "is served already" in " ".join(checked.stdout.split())
        assert first.poll() is None


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_folder_is_free_again_however_its_server_ended(tmp_path: Path, number: int) -> None:
    with served(tmp_path) as first:
        refusal(tmp_path)
        first.send_signal(number)
        first.wait(HANG_S)
        with running(tmp_path) as second:
            assert Person(second).send("GET", "/healthz").status_code == 200


def test_a_server_that_cannot_start_leaves_the_folder_free(tmp_path: Path) -> None:
    settings = read_serve_settings({"port": 0, "data_dir": tmp_path, "models": ("no/such-model",)})
    with pytest.raises(MintError):
        Server(settings, engine=fake_engine())
    with running(tmp_path):
        pass


def test_a_forked_child_does_not_keep_the_lock_of_its_dead_parent(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    done = fork.Event()
    with closing(ServerLock(tmp_path)):
        child = fork.Process(target=done.wait)
        child.start()
    with closing(ServerLock(tmp_path)):
        assert child.is_alive()
    done.set()
    child.join()


def test_the_check_leaves_the_lock_to_a_server_that_starts_meanwhile(tmp_path: Path) -> None:
    with closing(ServerLock(tmp_path)):
        pass
    settings = read_serve_settings({"port": 0, "data_dir": tmp_path})
    stopped = threading.Event()

    def look() -> None:
        while not stopped.is_set():
            check(settings)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        for _ in range(20):
            with closing(ServerLock(tmp_path)):
                pass
    finally:
        stopped.set()
        looking.join()


def no_locks(_file: int, _operation: int) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


@pytest.mark.parametrize(
    ("flock", "reason"),
    [(no_locks, "No locks available"), (lambda _file, _operation: None, "it grants one lock twice")],
)
def test_a_file_system_without_working_locks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flock: Callable[[int, int], None], reason: str
) -> None:
    monkeypatch.setattr(fcntl, "flock", flock)
    assert f"without working file locks: {reason}" in refusal(tmp_path)


def test_a_key_is_made_while_the_server_runs(tmp_path: Path) -> None:
    make_key(tmp_path, "ann")
    with running(tmp_path) as server:
        command = ["keys", "create", "--owner", "bob", "--data-dir", str(tmp_path)]
        made = CliRunner().invoke(app, command)
        assert made.exit_code == 0
        bob = Person(server, made.stdout.splitlines()[0])
        wait_until(lambda: bob.send("POST", "/api/v1/create_session", {}).status_code == 200)


def test_a_server_and_two_embedded_processes_share_checkpoints_and_no_session(tmp_path: Path) -> None:
    """Each is an instance of its own, as in a process of its own: what they share goes through the folder."""
    notebooks = [open_embedded(data_dir=tmp_path, engine=fake_engine()) for _ in range(2)]
    with running(tmp_path) as server:
        person = Person(server)
        services = [server.service, *(notebook.service for notebook in notebooks)]
        session_id = person.session()
        model_id = person.model(session_id)
        person.done("forward_backward", {"model_id": model_id, "seq_id": 1, "forward_backward_input": pass_input()})
        path = person.done("save_weights", {"model_id": model_id, "seq_id": 2, "path": "shared"})["path"]
        for service in services:
            body = b'{"tinker_path": "%s"}' % path.encode()
            assert service.weights_info(LOCAL, body).base_model == BASE
            (listed,) = service.checkpoints.checkpoints("local").checkpoints
            assert listed.tinker_path.partition("://")[2] == path.partition("://")[2]
        for notebook in notebooks:
            with pytest.raises(NotFoundError, match="another process"):
                notebook.service.sessions.heartbeat(LOCAL, b'{"session_id": "%s"}' % session_id.encode())
            assert notebook.service.session_owners == {}
    for notebook in notebooks:
        assert notebook.service.is_working
        assert notebook.service.sessions.create(LOCAL, b"{}").session_id
        notebook.release()
    assert [file.name for file in (tmp_path / "instances").iterdir()] == ["adopt.lock"]
