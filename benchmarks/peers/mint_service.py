"""mint's side of the comparisons: one step of the spec's work for each line on stdin.

Run as `python -m benchmarks.peers.mint_service SPEC.json`. Uses the public SDK only. The service is embedded in this
process or, where the spec says so, a `mint serve` that this process starts. A step is timed from the arrival of its
command on the caller's side, so it includes what the service does: journal, snapshots, hand-over of the weights.
`mint_loops` defines the steps.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.compare.contenders import BENCH_BASE
from benchmarks.peers.answering import Side, answer_turns, open_answers, read_spec
from benchmarks.peers.mint_loops import LOOPS


class OnDevice:
    """A loop in this process, which adds the peak of the GPU's memory at its end."""

    def __init__(self, loop: Side, device: str) -> None:
        """`device`: cpu or cuda."""
        self._loop, self._device = loop, device

    def ready(self) -> dict[str, Any]:
        return self._loop.ready()

    def step(self, index: int) -> dict[str, Any]:
        return self._loop.step(index)

    def finished(self) -> dict[str, Any]:
        """Also `peak_device_bytes` on a GPU."""
        found = self._loop.finished()
        if self._device == "cuda":
            import torch  # deferred: over a socket nothing here needs it

            found["peak_device_bytes"] = torch.cuda.max_memory_allocated()
        return found


class CpuClock:
    """CPU seconds of this process and of the server's."""

    def __init__(self, server_pid: int) -> None:
        self._stat = Path(f"/proc/{server_pid}/stat")

    def seconds(self) -> float:
        """Since the processes began."""
        user, system = self._stat.read_text().rpartition(")")[2].split()[11:13]
        return time.process_time() + (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


@contextmanager
def server(home: Path, base_model: str) -> Generator[tuple[str, int]]:
    """`mint serve` on a free port of this machine, with a data directory below `home`: its address and process id.

    It offers the folder `base_model` as `BENCH_BASE`.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", "from mint.cli.main import app; app()", "serve", "--port", str(port)]
    offer = ["--model", f"{BENCH_BASE}={base_model}", "--data-dir", str(home / "served")]
    process = subprocess.Popen([*command, *offer], stdout=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    """Answers turns until told to finish."""
    answers, spec = open_answers(), read_spec()
    loop = LOOPS[spec["work"]]
    if spec["transport"] == "embedded":
        answer_turns(OnDevice(loop(spec, base_url=None), spec.get("device", "cpu")), answers)
        return
    with server(Path(spec["work_dir"]), spec["base_model"]) as (url, process_id):
        answer_turns(loop(spec, base_url=url), answers, CpuClock(process_id).seconds)


if __name__ == "__main__":
    main()
