"""Runs every hostile program and every hack, and looks whether the host is unharmed. A program of its own, so that it
can be run by another user: prints one JSON object, program → what happened.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hostile import ANSWER, HACKS, HOSTILE

from mint.sandbox import Limits, Sandbox, same_value

SECRET = "s3cret-of-the-host"
PATIENT = Limits(cpu_s=1, wall_s=60.0, memory_bytes=32 << 20)
HASTY = Limits(cpu_s=1, wall_s=0.7, memory_bytes=32 << 20)
ENDLESS = {
    "big power",
    "busy loop",
    "busy loop in CPython",
    "ignores signals",
    "loop in C",
    "regex bomb",
    "waits for ever",
}
"""Programs that a limit of time ends; the others may take theirs, on a busy machine too."""


def main(engines: list[str]) -> dict[str, Any]:
    os.environ["MINT_SECRET"] = SECRET
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        canary = Path(folder) / "canary"
        canary.write_text(SECRET)
        bystander = subprocess.Popen(["/bin/sleep", "600"])
        mine = set(Path(folder).iterdir())
        report: dict[str, Any] = {}
        try:
            with Sandbox(PATIENT, engines=engines) as patient, Sandbox(HASTY, engines=engines) as hasty:
                before = processes()
                for name, program in (HOSTILE | HACKS).items():
                    code = fill(program, canary=canary, pid=bystander.pid, port=server.getsockname()[1])
                    outcome = (hasty if name in ENDLESS else patient).run(code, "f", [(3,)])
                    result = outcome.results[0]
                    report[name] = {
                        "status": outcome.status,
                        "engine": outcome.engine,
                        "value": repr(result.value)[:80],
                        "error": (result.error or "")[:80],
                        "stdout_bytes": len(outcome.stdout),
                        "won": name in HACKS and result.returned and same_value(result.value, ANSWER),
                        "harm": harm(outcome, canary, bystander, server, set(Path(folder).iterdir()) - mine),
                    }
                report["after_programs"] = {
                    "strays": sorted(processes() - before),
                    "honest": patient.run("import heapq\ndef f(x): return x + 1", "f", [(3,)]).results[0].value,
                    "level": list(patient.level.engines),
                    "user": os.geteuid(),
                }
        finally:
            bystander.kill()
            bystander.wait()
    return report


def fill(program: str, **values: object) -> str:
    for name, value in values.items():
        program = program.replace(f"{{{name}}}", str(value))
    return program.replace("{secret}", SECRET)


def harm(outcome: Any, canary: Path, bystander: Any, server: socket.socket, new_files: set[Path]) -> list[str]:
    """Everything that a program did to the host, in words."""
    found = []
    said = f"{[(result.value, result.error) for result in outcome.results]} {outcome}"
    if "HARM" in said or SECRET in said:
        found.append("it says that it got through")
    if not canary.exists() or canary.read_text() != SECRET or canary.stat().st_mode & 0o777 == 0o777 or new_files:
        found.append("files were touched")
    if Path("/tmp/mint-hostile").exists():
        found.append("a file was written")
    if bystander.poll() is not None:
        found.append("another process was ended")
    try:
        server.accept()[0].close()
        found.append("a connection was made")
    except BlockingIOError:
        pass
    return found


def processes() -> set[int]:
    """The live processes of this one and all below it, but those of Monty, whose pool replaces its own workers."""
    parents = {}
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rpartition(")")
            parents[int(entry.name)] = (int(fields[2].split()[1]), fields[0].partition("(")[2], fields[2].split()[0])
        except (ValueError, OSError):
            continue
    family = {os.getpid()}
    for _ in range(5):
        family |= {pid for pid, (parent, _, _) in parents.items() if parent in family}
    return {pid for pid in family if pid in parents and parents[pid][1] != "monty" and parents[pid][2] != "Z"}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
