"""The worker's side of the turns: only the step is timed, stdout is for answers, and a memory limit holds."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.compare.turns import Worker
from mint.errors import RequestFailedError

SIDE = """
import sys, time
from benchmarks.peers.answering import answer_turns, open_answers, read_spec

class Side:
    def ready(self):
        return {"dtype": "float32", "threads": 1}
    def step(self, index):
        print("a library talks")
        memory = bytearray(spec["bytes"])
        until = time.process_time() + spec["cpu_s"]
        while time.process_time() < until:
            pass
        return {"tokens": len(memory), "index": index}
    def finished(self):
        return {"versions": {}}

answers, spec = open_answers(), read_spec()
answer_turns(Side(), answers)
"""


def worker(folder: Path, **spec: float) -> Worker:
    (folder / "spec.json").write_text(json.dumps({"bytes": 1, "cpu_s": 0.0, **spec}))
    command = [sys.executable, "-c", SIDE, str(folder / "spec.json")]
    return Worker("side", command, log_path=folder / "log", environment={})


def test_a_step_is_timed_and_numbered_and_idling_is_not_computing(tmp_path: Path) -> None:
    with worker(tmp_path, cpu_s=0.05) as side:
        assert side.hear("ready", timeout_s=30)["dtype"] == "float32"
        first = side.ask("step", answer="step", timeout_s=30)
        second = side.ask("step", answer="step", timeout_s=30)
        assert side.ask("finish", answer="finished", timeout_s=30)["versions"] == {}
    assert (first["index"], second["index"]) == (0, 1)
    for step in (first, second):
        assert step["wall_s"] >= step["cpu_s"] * 0.99
        assert step["cpu_s"] >= 0.05
        assert step["idle_cpu_s"] < 0.05
    assert (tmp_path / "log").read_text().count("a library talks") == 2


def test_a_memory_limit_ends_the_worker_and_not_the_machine(tmp_path: Path) -> None:
    with worker(tmp_path, memory_limit_bytes=2**31, bytes=2**32) as side:
        side.hear("ready", timeout_s=30)
        with pytest.raises(RequestFailedError, match="MemoryError"):
            side.ask("step", answer="step", timeout_s=30)
