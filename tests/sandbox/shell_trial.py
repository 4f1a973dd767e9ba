"""Runs hostile commands in a shell and looks whether the host is unharmed. A program of its own, so that another user
can run it: prints one JSON object, command → what happened.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from mint.sandbox import Shell, ShellLimits

SECRET = "s3cret-of-the-host"
SLEEP = f"31415.{os.getpid()}"
"""Seconds that nobody else sleeps: it finds our processes on the host."""

ABSTRACT = f"\0mint-shell-{os.getpid()}"
LIMITS = ShellLimits(wall_s=20, memory_bytes=192 << 20, processes=32, folder_bytes=8 << 20, output_bytes=4096)
HASTY = ShellLimits(wall_s=1.5, memory_bytes=192 << 20, processes=32, folder_bytes=8 << 20, output_bytes=4096)

HARMFUL = {
    "reads a file": "cat {canary} /etc/shadow /root/* /home/*; ls -R /root /home {folder}",
    "reads the environment": "env; cat /proc/*/environ",
    "reads through a link": "ln -s {canary} link; cat link; ln {canary} hard; cat hard",
    "reads through its parent": "cd ..; ls; cat ../{canary} ../../..{canary} /proc/1/root{canary} /proc/1/cwd/{canary}",
    "writes a file": "echo harm > {canary}; echo harm > {folder}/more; mkdir -p {folder}/folder; touch {folder}",
    "writes through a link": "ln -s {folder} out; echo harm > out/more; ln -s {canary} file; echo harm > file",
    "writes the system": "touch /x /usr/x /usr/bin/x /etc/x /dev/x /proc/x; rm -rf /usr/bin; echo x > /etc/passwd",
    "writes the kernel": "echo x > /proc/sys/kernel/core_pattern; echo b > /proc/sysrq-trigger; echo x > /sys/x",
    "mounts": "mount -o remount,rw /usr; mount -t tmpfs x /usr; umount -l /usr; umount /; unshare -Urm bash -c id",
    "connects": "exec 3<>/dev/tcp/127.0.0.1/{port}; exec 3<>/dev/udp/127.0.0.1/{port}; exec 3<>/dev/tcp/1.1.1.1/53",
    "connects to a socket without a file": """perl -e 'use Socket; socket(my $s, AF_UNIX, SOCK_STREAM, 0);
        connect($s, pack("S a*", AF_UNIX, "\\0{abstract}")) and print "connected"'""",
    "kills others": "kill -9 {pid}; kill -9 -1; kill -9 -{pid}; kill -9 1; echo",
    "leaves processes": "sleep {sleep} & setsid sleep {sleep} & nohup sleep {sleep} > /dev/null & (sleep {sleep} &)",
    "closes its output and goes on": "exec > /dev/null 2>&1 < /dev/null; (setsid sleep {sleep} &) ; true",
    "a device": "mknod disk b 254 0; mknod disk b 8 0; cat disk; mknod mem c 1 1; head -c 9 mem",
    "a program with rights": "cp /usr/bin/id id; chmod u+s id; ./id; su -c id; /usr/bin/passwd -S root",
}
ALLOCATE = "perl -e 'my $x = \"x\" x 60000000; sleep 60'"
BOUNDED = {
    "waits": ("sleep {sleep}", {"timeout"}),
    "loops": ("while true; do :; done", {"timeout"}),
    "ignores signals": ("trap '' TERM INT HUP; while true; do sleep 1; done", {"timeout"}),
    "a fork bomb": ("bomb() {{ bomb | bomb & }}; bomb; sleep {sleep}", {"timeout", "output"}),
    "many processes": ("for i in $(seq 500); do sleep {sleep} & done; wait", {"timeout", "exit"}),
    "endless output": ("yes", {"output", "timeout"}),
    "endless lines of errors": ("while true; do echo x >&2; done", {"output", "timeout"}),
    "memory of one process": ("perl -e 'my $x = \"x\" x (1 << 32)'", {"exit", "memory"}),
    "memory of many": (f"for i in $(seq 20); do {ALLOCATE} & done; wait", {"memory", "exit", "timeout"}),
    "a large file": ("head -c 1G /dev/zero > large", {"exit", "files"}),
    "many files": ("for i in $(seq 100); do head -c 1M /dev/zero > f$i; done; sleep 99", {"files"}),
    "many files in /tmp": ("cd /tmp; for i in $(seq 100); do head -c 1M /dev/zero > f$i; done; sleep 99", {"files"}),
    "shared memory": ("for i in $(seq 40); do head -c 1M /dev/zero > /dev/shm/f$i; done; sleep 99", {"timeout"}),
    "deep folders": ("for i in $(seq 3000); do mkdir d && cd -P d || break; done; sleep 99", {"timeout", "files"}),
    "folders that forbid their owner": ("mkdir a a/b; touch a/b/c; chmod 000 a/b a; sleep 99", {"timeout"}),
    "not text": ("head -c 3000 /dev/urandom; sleep 99", {"timeout"}),
}


def harmless(folder: Path, canary: Path, bystander: subprocess.Popen[bytes], *servers: socket.socket) -> list[str]:
    """What a command has done to the host; empty is good."""
    harm = []
    if canary.read_text() != SECRET or [one.name for one in folder.iterdir()] != [canary.name]:
        harm.append("a file is changed")
    if bystander.poll() is not None:
        harm.append("a process of the host has ended")
    for server in servers:
        try:
            server.accept()
            harm.append("a connection")
        except BlockingIOError:
            pass
    if sleepers():
        harm.append("processes are left")
    return harm


def sleepers() -> list[int]:
    """Our processes on the host that still sleep."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and SLEEP in (process / "cmdline").read_text(errors="replace"):
                found.append(int(process.name))
        except OSError:
            continue
    return found


async def trial(sandbox: Any, image: str) -> dict[str, Any]:
    os.environ["MINT_SECRET"] = SECRET
    report: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory() as name,
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        folder, canary = Path(name), Path(name) / "canary"
        folder.chmod(0o777)
        canary.write_text(SECRET)
        canary.chmod(0o666)
        abstract.bind(ABSTRACT)
        abstract.listen()
        tcp.setblocking(False)
        abstract.setblocking(False)
        bystander = subprocess.Popen(["/bin/sleep", "600"])
        words = {
            "canary": canary,
            "folder": folder,
            "port": tcp.getsockname()[1],
            "pid": bystander.pid,
            "sleep": SLEEP,
            "abstract": ABSTRACT[1:],
        }
        shells = folder.with_name(f"{folder.name}-shells")
        shells.mkdir(mode=0o755)
        tempfile.tempdir = str(shells)

        async def attempt(command: str, limits: ShellLimits) -> dict[str, Any]:
            with Shell({"mine.txt": "mine"}, sandbox=sandbox, image=image, limits=limits) as shell:
                result = await shell.run(command.format(**words))
                again = await shell.run("cat mine.txt")
            return {
                "ended": result.ended,
                "exit_code": result.exit_code,
                "secret": SECRET in result.output,
                "connected": "connected" in result.output,
                "characters": len(result.output),
                "output": result.output[-300:],
                "seconds": result.seconds,
                "after": again.output,
                "harm": harmless(folder, canary, bystander, tcp, abstract),
            }

        try:
            for title, command in HARMFUL.items():
                report[title] = await attempt(command, LIMITS)
            for title, (command, _) in BOUNDED.items():
                report[title] = await attempt(command, HASTY)
        finally:
            bystander.kill()
            bystander.wait()
        report["folders left"] = [one.name for one in shells.iterdir()]
        shells.rmdir()
        report["user"] = os.geteuid()
    return report


if __name__ == "__main__":
    print(json.dumps(asyncio.run(trial(sys.argv[1], sys.argv[2]))))
