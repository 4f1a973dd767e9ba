"""What durability costs: training steps on a service with its journal, digests and snapshots, and on one without.

    python -m benchmarks.serving.durability [--datums 64] [--tokens 80] [--rank 16] [--steps 20] [--json]
    python -m benchmarks.serving.durability --hidden 512 --layers 4 --rank 256 --datums 64 --steps 60   150 MB of state

Both services are in this process and take turns, step by step; they have the same engine, base and requests (a pass
and a step, sent together). The second one has no journal of requests, no fsync, no digest and no snapshot. CPU time is
that of the whole process, the disk's thread included. `snapshot_share` is the part of all time that snapshots took: on
the worker's thread, and on the disk's thread, which works beside it. `journal_bytes` are those of the request and of
the two results.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mint import wire
from mint.engine.torch_engine import TorchEngine
from mint.errors import from_wire
from mint.models.random_base import ModelShape, write_random_base
from mint.server.callers import LOCAL
from mint.server.service.service import Service

WARM_UP = 3


class Side:
    """A service with one model, and what its steps took."""

    def __init__(self, folder: Path, base: Path, *, rank: int, threads: int) -> None:
        self.engine = TorchEngine(dtype="float32", threads=threads, device="cpu")
        self.service = Service(self.engine, folder, aliases={})
        self.service.start()
        self.wall_s: list[float] = []
        self.cpu_s: list[float] = []
        session = self.service.sessions.create(LOCAL, b"{}").session_id
        config = {"rank": rank, "seed": 7}
        body = {"session_id": session, "model_seq_id": 0, "base_model": str(base), "lora_config": config}
        created = self._submit("create_model", body)
        self._wait(created)
        self.model_id = created.removesuffix(":0")
        self.next_seq = 1

    def step(self, data: list[dict[str, Any]]) -> None:
        """One pass and one step, sent together."""
        began, cpu = time.perf_counter(), time.process_time()
        content = {"data": data, "loss_fn": "cross_entropy"}
        place = {"model_id": self.model_id, "seq_id": self.next_seq}
        passed = self._submit("forward_backward", {**place, "forward_backward_input": content})
        stepped = self._submit(
            "optim_step", {**place, "seq_id": self.next_seq + 1, "adam_params": {"learning_rate": 1e-4}}
        )
        self._wait(passed)
        self._wait(stepped)
        self.next_seq += 2
        self.wall_s.append(time.perf_counter() - began)
        self.cpu_s.append(time.process_time() - cpu)

    def _submit(self, kind: str, body: dict[str, Any]) -> str:
        return self.service.training.submit(LOCAL, kind, json.dumps(body).encode()).request_id

    def _wait(self, request_id: str) -> None:
        while (answer := asyncio.run(self.service.results.retrieve(LOCAL, request_id))) is None:
            pass
        if (error := wire.decode_error(answer.body)) is not None:
            raise from_wire(error)


def without_durability(side: Side) -> None:
    """Takes journal, fsyncs, digests and snapshots away."""
    journal = side.service._journal
    replaced: list[tuple[Any, str, Callable[..., Any]]] = [
        (journal, "add_job", lambda *_, **__: None),
        (journal, "finish_job", lambda *_, **__: True),
        (journal.durability, "wait_durable", lambda *_: None),
        (journal.durability, "call_when_durable", lambda _commit, callback: callback()),
        (side.service._worker._trainer._snapshots, "save", lambda *_, **__: ({}, ())),
        (side.engine, "state_digest", lambda *_, **__: "none"),
    ]
    for owner, name, replacement in replaced:
        setattr(owner, name, replacement)


class SnapshotTimes:
    """Seconds that snapshots take, on the worker's thread and on the disk's, and how many there were."""

    def __init__(self, side: Side) -> None:
        self.worker_s = self.disk_s = 0.0
        self.count = 0
        self._save = side.service._worker._trainer._snapshots.save
        self._submit = side.service._journal.durability.submit
        side.service._worker._trainer._snapshots.save = self.save
        side.service._journal.durability.submit = self.submit

    def save(self, *arguments: Any, **named: Any) -> Any:
        began = time.perf_counter()
        saved = self._save(*arguments, **named)
        self.worker_s += time.perf_counter() - began
        self.count += "snapshot" in saved[0]
        return saved

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Any:
        if getattr(work, "__name__", "") == "_wait_and_call":  # a result that waits for its commit
            return self._submit(work, *arguments)

        def timed(*passed: Any) -> Any:
            began = time.perf_counter()
            result = work(*passed)
            self.disk_s += time.perf_counter() - began
            return result

        return self._submit(timed, *arguments)


def some_data(datums: int, tokens: int, vocabulary: int) -> list[dict[str, Any]]:
    """Random sequences as JSON."""
    random = np.random.default_rng(0)
    rows = []
    for _ in range(datums):
        whole = random.integers(20, vocabulary, tokens + 1).tolist()
        targets = {"target_tokens": {"data": whole[1:], "dtype": "int64"}}
        rows.append({"model_input": {"chunks": [{"tokens": whole[:-1]}]}, "loss_fn_inputs": targets})
    return rows


def measure(options: argparse.Namespace) -> dict[str, float]:
    """All figures of one run."""
    heads = options.hidden // 32
    shape = ModelShape(
        hidden=options.hidden, layers=options.layers, heads=heads, kv_heads=heads // 2, mlp=3 * options.hidden
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_random_base(folder / "base", shape, seed=0)
        durable, bare = (
            Side(folder / kind, folder / "base", rank=options.rank, threads=options.threads)
            for kind in ("durable", "bare")
        )
        without_durability(bare)
        data = some_data(options.datums, options.tokens, shape.vocabulary)
        for _ in range(WARM_UP):
            for side in (durable, bare):
                side.step(data)
        times = SnapshotTimes(durable)
        for side in (durable, bare):
            side.wall_s.clear()
            side.cpu_s.clear()
        for turn in range(options.steps):
            for side in (durable, bare) if turn % 2 else (bare, durable):
                side.step(data)
        state = durable.engine.read_state(durable.model_id)
        sides = {
            f"{kind}_{clock}_ms": 1e3 * statistics.median(values)
            for kind, side in (("durable", durable), ("bare", bare))
            for clock, values in (("wall", side.wall_s), ("cpu", side.cpu_s))
        }
        journal = durable.service._journal.database
        job_bytes = journal.value("SELECT avg(length(result)) FROM jobs WHERE kind = 'forward_backward'")
        step_bytes = journal.value("SELECT avg(length(result)) FROM jobs WHERE kind = 'optim_step'")
        payload = journal.value("SELECT max(length(payload)) FROM jobs")
        total_s = sum(durable.wall_s)
        for side in (durable, bare):
            side.service.stop()
        return {
            "state_mb": 3 * sum(array.nbytes for array in state.weights.values()) / 1e6,
            **sides,
            "wall_ratio": statistics.median(
                ours / theirs for ours, theirs in zip(durable.wall_s, bare.wall_s, strict=True)
            ),
            "cpu_ratio": statistics.median(
                ours / theirs for ours, theirs in zip(durable.cpu_s, bare.cpu_s, strict=True)
            ),
            "steps": float(options.steps),
            "snapshots": float(times.count),
            "snapshot_share_worker": times.worker_s / total_s,
            "snapshot_share_disk": times.disk_s / total_s,
            "request_bytes": float(payload),
            "result_bytes": job_bytes + step_bytes,
            "journal_bytes": float(payload) + job_bytes + step_bytes,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("hidden", 128), ("layers", 4), ("rank", 16), ("datums", 64), ("tokens", 80), ("steps", 20), ("threads", 1),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = measure(options)
    if options.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name:24} {value:12.3f}")


if __name__ == "__main__":
    main()
