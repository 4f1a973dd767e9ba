"""Fake contenders for the tests of the benchmark."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks.compare.grpo import make_spec
from benchmarks.compare.shapes import GrpoShape
from benchmarks.compare.turns import Worker

SHAPE = GrpoShape()
MACHINE = {"cpu": "a processor", "cores": 2, "python": "3", "load_before": 0.0, "load_after": 0.0}


def fake(name: str, folder: Path, fault: str = "", *, may_fail: bool = False) -> Worker:
    """A worker that answers at once, or misbehaves as `fake_peer.py` knows how to."""
    path = folder / f"{name}.json"
    path.write_text(json.dumps(make_spec(SHAPE, base_model=folder, steps=5, threads=1)))
    script = Path(__file__).parent / "fake_peer.py"
    command = [sys.executable, str(script), str(path), fault]
    return Worker(name, command, log_path=folder / f"{name}.log", environment={}, may_fail=may_fail)


def silent(text: str) -> None:
    """Progress that nobody reads."""
