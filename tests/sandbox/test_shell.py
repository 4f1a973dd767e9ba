"""Shells for agents: no command harms the host or outlives its limits, in any sandbox, whoever runs it."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from shell_trial import BOUNDED, HARMFUL, SLEEP, sleepers  # ty: ignore[unresolved-import]
from waiting import wait_until

from mint.errors import InvalidRequestError, MissingExtraError
from mint.sandbox import Shell, ShellLimits
from mint.sandbox.shell_process import CommandLine, ShellResult, run_command
from mint.sandbox.shell_sandboxes import Docker, find_sandbox

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
NOBODY = 65534
SYSTEM_PYTHON = "/usr/bin/python3"
"""What another user may run: the interpreter of the tests can live in a closed home."""

IMAGE = "mint-test-shell"
PROGRAMS = (
    "bash", "cat", "chmod", "cp", "find", "head", "id", "kill", "ln", "ls", "mkdir", "mknod", "nohup", "perl", "rm",
    "seq", "setsid", "sleep", "sort", "timeout", "touch", "tr", "wc", "yes",
)  # fmt: skip
"""Programs of this machine that the image of the tests has."""


@pytest.fixture(scope="session")
def docker_image(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An image of this machine's own programs, so that none is downloaded; skips without a daemon of Docker."""
    if shutil.which("docker") is None or subprocess.run(["docker", "info"], capture_output=True).returncode:
        pytest.skip("no daemon of Docker answers")
    root = tmp_path_factory.mktemp("image")
    for name in PROGRAMS:
        program = Path(str(shutil.which(name)))
        needed = subprocess.run(["ldd", program], capture_output=True, text=True).stdout
        for path in (str(program), *re.findall(r"/\S+", needed)):
            place = root / Path(path).relative_to("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, place)
    root.chmod(0o755)
    packed = shutil.make_archive(str(root), "tar", root)
    subprocess.run(["docker", "import", packed, IMAGE], check=True, capture_output=True)
    return IMAGE


def arguments(kind: str, request: pytest.FixtureRequest) -> dict[str, Any]:
    """The arguments of a shell in this sandbox; skips where it does not run."""
    if kind == "docker":
        return {"sandbox": "docker", "image": request.getfixturevalue("docker_image")}
    try:
        find_sandbox("bubblewrap")
    except MissingExtraError as error:
        pytest.skip(str(error))
    return {"sandbox": "bubblewrap"}


@pytest.fixture(scope="session", params=["bubblewrap", "docker"])
def sandbox(request: pytest.FixtureRequest) -> dict[str, Any]:
    return arguments(request.param, request)


@pytest.fixture
def shell(sandbox: dict[str, Any]) -> Iterator[Shell]:
    with Shell({"notes/a.txt": "one\n"}, limits=ShellLimits(wall_s=30, output_bytes=2000), **sandbox) as opened:
        yield opened


def ask(shell: Shell, command: str, stdin: bytes = b"") -> ShellResult:
    return asyncio.run(shell.run(command, stdin=stdin))


@pytest.fixture(
    scope="module", params=["bubblewrap", pytest.param("bubblewrap as nobody", marks=pytest.mark.slow), "docker"]
)
def report(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What `shell_trial.py` has seen."""
    kind, _, who = request.param.partition(" as ")
    given = arguments(kind, request)
    python, options = sys.executable, dict[str, Any]()
    if who == "nobody":
        if os.geteuid() != 0 or not all(folder.stat().st_mode & 0o005 == 0o005 for folder in (HERE, *HERE.parents)):
            pytest.skip("only root can become another user, in a checkout that it can read")
        python, options = SYSTEM_PYTHON, {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    words = [python, str(HERE / "shell_trial.py"), kind, given.get("image", "")]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["user"] == (NOBODY if who == "nobody" else os.geteuid())
    return seen


@pytest.mark.restarts
@pytest.mark.parametrize("title", [*HARMFUL, *BOUNDED])
def test_no_command_harms_the_host_or_is_left_behind(title: str, report: dict[str, Any]) -> None:
    seen = report[title]
    assert seen["harm"] == []
    assert not seen["secret"]
    assert not seen["connected"]
    assert seen["after"] == "mine", "the next command of the same shell works"
    assert report["folders left"] == []


@pytest.mark.restarts
@pytest.mark.parametrize("title", BOUNDED)
def test_every_command_ends_by_a_limit_with_a_bounded_output(title: str, report: dict[str, Any]) -> None:
    seen = report[title]
    assert seen["ended"] in BOUNDED[title][1], seen["output"]
    assert seen["characters"] < 4096 + 100


def test_files_stay_from_command_to_command_and_variables_do_not(shell: Shell) -> None:
    assert ask(shell, "cat notes/a.txt; pwd; x=1; echo two > notes/b.txt; echo three > /tmp/c").output == "one\n/work\n"
    assert ask(shell, "cat notes/*.txt /tmp/c; echo $x").output == "one\ntwo\nthree\n\n"
    assert asyncio.run(shell.read_text("notes/b.txt")) == "two\n"
    assert asyncio.run(shell.read_text("notes/none.txt")) is None


def test_a_result_has_output_errors_and_exit_code(shell: Shell) -> None:
    result = ask(shell, "echo out; echo err >&2; exit 3")
    assert (result.output, result.exit_code, result.ended) == ("out\nerr\n", 3, "exit")
    assert asyncio.run(shell.bash("echo out; exit 3")) == "out\n[exit code 3]"
    assert asyncio.run(shell.bash("echo out")) == "out\n"
    assert "a file became larger than a file may be]" in asyncio.run(
        shell.bash("ulimit -f 1; yes | head -c 99999 > big")
    )
    assert ask(shell, "cat", stdin="привет".encode()).output == "привет"
    assert ask(shell, "true\0false").exit_code == 126


def test_a_long_output_keeps_its_beginning_and_its_end(shell: Shell) -> None:
    output = ask(shell, "seq 1 5000").output
    whole = "".join(f"{number}\n" for number in range(1, 5001))
    assert output == f"{whole[:1000]}\n[... {len(whole) - 2000} bytes are left out ...]\n{whole[-1000:]}"


def test_a_link_out_of_the_folder_reads_nothing(shell: Shell, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    ask(shell, f"ln -s {secret} link; ln -s /etc/passwd passwd; ln -s notes/a.txt inside")
    assert asyncio.run(shell.read_text("link")) is None
    assert "root:" not in (asyncio.run(shell.read_text("passwd")) or "")
    assert asyncio.run(shell.read_text("inside")) == "one\n"


@pytest.mark.parametrize("path", ["../a", "/etc/passwd", "a/../../b", "", "."])
def test_a_path_that_leads_out_is_refused(path: str, sandbox: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="below the working folder"):
        Shell({path: "x"}, **sandbox)


def test_many_small_files_count_against_the_limit_of_the_folder(sandbox: dict[str, Any]) -> None:
    limits = ShellLimits(wall_s=60, folder_bytes=100 << 10)
    with Shell(limits=limits, **sandbox) as shell:
        assert ask(shell, "touch $(seq 1 2000); sleep 60").ended == "files"
        assert ask(shell, "rm -f ?? ??? ????; echo removed").output == "removed\n"


def test_the_memory_of_all_processes_together_is_limited(sandbox: dict[str, Any]) -> None:
    limits = ShellLimits(wall_s=120, memory_bytes=128 << 20)
    with Shell(limits=limits, **sandbox) as shell:
        allocate = "perl -e 'my $x = \"x\" x 60000000; sleep 200'"
        result = ask(shell, f"{allocate} & {allocate} & {allocate} & wait -n; echo one was killed; sleep 200")
    # Docker's daemon kills one process of the container, we end the command.
    assert result.ended == "memory" if sandbox["sandbox"] == "bubblewrap" else "one was killed" in result.output


def test_a_cancelled_command_ends_with_its_processes(shell: Shell) -> None:
    async def cancel() -> None:
        running = asyncio.create_task(shell.run(f"sleep {SLEEP} & sleep {SLEEP}"))
        while not sleepers():
            await asyncio.sleep(0.05)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(cancel())
    assert sleepers() == []


def test_a_command_that_is_cancelled_as_it_starts_ends_with_its_processes() -> None:
    """asyncio has started the process, and has not yet returned it."""
    command = CommandLine(["bash", "-c", f"sleep {SLEEP} & sleep {SLEEP}"])

    async def cancel() -> None:
        running = asyncio.create_task(run_command(command, ShellLimits(), []))
        while not sleepers():
            await asyncio.sleep(0)
        wait_until(lambda: len(sleepers()) == 3)  # bash and its two; this holds the event loop
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(cancel())
    assert sleepers() == []


def test_commands_of_many_shells_run_at_once(sandbox: dict[str, Any]) -> None:
    async def meet() -> list[ShellResult]:
        return await asyncio.gather(*(one.run("echo ready; cat", stdin=b"x") for one in shells))

    shells = [Shell(**sandbox) for _ in range(6)]
    try:
        assert {result.output for result in asyncio.run(meet())} == {"ready\nx"}
    finally:
        for each in shells:
            each.close()


def start_sleeping_shell(folder: str) -> subprocess.Popen[bytes]:
    """A process whose shell sleeps, with a limit on its time that no test waits for."""
    code = (
        "import asyncio; from mint.sandbox import Shell, ShellLimits;"
        f"asyncio.run(Shell(sandbox='bubblewrap', limits=ShellLimits(wall_s=9999)).run('sleep {SLEEP}'))"
    )
    Path(folder).chmod(0o755)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TMPDIR": folder}
    return subprocess.Popen([sys.executable, "-c", code], env=environment)


def test_nothing_runs_on_after_the_process_that_has_the_shell_was_killed(request: pytest.FixtureRequest) -> None:
    arguments("bubblewrap", request)
    with tempfile.TemporaryDirectory() as folder:
        process = start_sleeping_shell(folder)
        try:
            wait_until(lambda: any(has_words(pid, "sleep", SLEEP) for pid in sleepers()))
        finally:
            process.kill()
            process.wait()
        wait_until(lambda: sleepers() == [])


def test_no_command_begins_after_the_process_that_has_the_shell_was_killed(request: pytest.FixtureRequest) -> None:
    """The first process of the sandbox stands still before it has asked to die with its parent; then that is gone."""
    arguments("bubblewrap", request)
    stopped = None
    while stopped is None:  # the moment is short
        with tempfile.TemporaryDirectory() as folder:
            process = start_sleeping_shell(folder)
            try:
                stopped = stopped_early(process)
            finally:
                process.kill()
                process.wait()
        if stopped is None:
            wait_until(lambda: sleepers() == [])
    monitor, first = stopped
    wait_until(lambda: not is_running(monitor))
    os.kill(first, signal.SIGCONT)
    wait_until(lambda: not is_running(first))
    assert sleepers() == []


def stopped_early(process: subprocess.Popen[bytes]) -> tuple[int, int] | None:
    """Waits for the sandbox of the sleeper (the one before it proves that the sandbox works). Returns bubblewrap's
    process on the host and the first of the sandbox, stopped while it has no filter of system calls: it asks to die
    with its parent just before it gets that. None if it had one already, and goes on."""
    seen: list[int] = []
    while True:
        assert process.poll() is None
        for monitor in children(process.pid):
            for first in children(monitor):
                if first in seen:
                    continue
                seen.append(first)
                if len(seen) == 2:
                    os.kill(first, signal.SIGSTOP)
                    if "Seccomp:\t0" in Path(f"/proc/{first}/status").read_text():
                        # Once bubblewrap has told the first process to go on, it waits for it.
                        wait_until(lambda monitor=monitor: "State:\tS" in Path(f"/proc/{monitor}/status").read_text())
                        return monitor, first
                    os.kill(first, signal.SIGCONT)
                    return None


def children(pid: int) -> list[int]:
    with suppress(OSError):
        threads = Path(f"/proc/{pid}/task").iterdir()
        return [int(child) for thread in threads for child in (thread / "children").read_text().split()]
    return []


def is_running(pid: int) -> bool:
    with suppress(OSError):
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    return False


def has_words(pid: int, *words: str) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text() == "".join(f"{word}\0" for word in words)
    except OSError:
        return False


def test_a_missing_sandbox_is_an_error_that_names_what_to_install(tmp_path: Path) -> None:
    code = "from mint.sandbox import Shell\nShell()"
    for program in ("chmod", "rm"):
        (tmp_path / program).symlink_to(str(shutil.which(program)))
    environment = {"PYTHONPATH": str(ROOT / "src"), "PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert "MissingExtraError: no sandbox for shells runs here" in done.stderr
    assert "bwrap is not installed; docker: docker is not installed" in done.stderr
    assert "apt-get install bubblewrap (or start Docker, and run: docker pull python:3.12-slim)" in done.stderr


def test_a_bubblewrap_that_the_system_forbids_is_named_with_its_reason() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        program = Path(folder) / "bwrap"
        program.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2; exit 1\n")
        program.chmod(0o755)
        code = "from mint.sandbox import Shell\nShell(sandbox='bubblewrap')"
        environment = {"PYTHONPATH": str(ROOT / "src"), "PATH": f"{folder}:{os.environ['PATH']}"}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert "no sandbox for shells runs here (bubblewrap: bwrap: No permissions to create new namespace)" in done.stderr
    assert "let this user make user namespaces" in done.stderr


def test_an_unknown_sandbox_is_refused_with_the_choices() -> None:
    with pytest.raises(InvalidRequestError, match="Choose auto, bubblewrap, docker"):
        Shell(sandbox="podman")  # ty: ignore[invalid-argument-type]


def test_an_image_that_is_not_here_is_named_and_not_downloaded(docker_image: str) -> None:
    with pytest.raises(MissingExtraError, match="docker pull mint/none-such"):
        Shell(sandbox="docker", image="mint/none-such")


def test_docker_gets_every_limit(tmp_path: Path) -> None:
    if shutil.which("docker") is None:
        pytest.skip("docker is not installed")
    limits = ShellLimits(wall_s=7, memory_bytes=64 << 20, processes=9)
    words = list(Docker("some-image").start("echo a  b", tmp_path, 1234, limits, "a-name").words)
    options = dict(itertools.pairwise(words))
    expected = {
        "--network": "none", "--user": "1234:1234", "--cap-drop": "ALL", "--security-opt": "no-new-privileges",
        "--pids-limit": "9", "--memory": str(64 << 20), "--memory-swap": str(64 << 20), "--pull": "never",
        "--name": "a-name", "--workdir": "/work",
    }  # fmt: skip
    assert expected.items() <= options.items()
    assert "--read-only" in words
    assert words[-1] == "echo a  b"
    assert words.index("some-image") < words.index("timeout")
