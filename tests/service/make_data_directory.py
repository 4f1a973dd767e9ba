"""Makes a data directory of the mint that this checkout is, as a kill in the middle of training leaves it.

`python make_data_directory.py FOLDER` writes `FOLDER/schemaN.tar.gz`, with N the schema of the checkout. The last
version of each schema made its archive in `data_directories` so: with this file in its `tests/service`, and its `src`
and `tests` as `PYTHONPATH`. `expected.json` in the archive is what the same version computes if it goes on.

The engine is the fake one, whose state is a chain of hashes: the same bits on every machine.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tarfile
import tempfile
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

from service_harness import Harness, datum, open_service, pass_body

from mint.engine.fake_engine import FakeEngine

KILLING_RATE = 0.5
STEPS = 4
ADAM = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-9, "weight_decay": 0.01, "grad_clip_norm": 1.0}
"""All settings, as clients send them: schema 1 had other values for those that a request leaves out."""

STEP = {"adam_params": {"learning_rate": 0.001, **ADAM}}


class Deadly(FakeEngine):
    """Its process ends in the step with this learning rate."""

    def optim_step(self, model_id: str, adam: Any) -> Any:
        if adam.learning_rate == KILLING_RATE:
            os._exit(9)
        return super().optim_step(model_id, adam)


def train(folder: Path, notes: Path) -> None:
    """Four steps, a checkpoint, a sampler, a pass; then a step and a pass that are accepted and never done."""
    harness = Harness(open_service(folder, engine=Deadly()))
    model_id = harness.create_model()
    digests = {}
    for step in range(STEPS):
        harness.run("forward_backward", model_id, 2 * step + 1, pass_body(datum(1, 2, 3 + step)))
        digests[2 * step + 2] = harness.run("optim_step", model_id, 2 * step + 2, STEP)["state_digest"]
    path = harness.run("save_weights", model_id, 9, {"path": "kept"})["path"]
    published = harness.run("save_weights_for_sampler", model_id, 10, {"sampling_session_seq_id": 0})
    passed = harness.run("forward_backward", model_id, 11, pass_body(datum(4, 5, 6)))
    sampler = published["sampling_session_id"]
    known = {"session_id": harness.session_id, "model_id": model_id, "path": path, "sampler": sampler}
    known["digests"], known["outputs"] = digests, {11: passed["loss_fn_outputs"]}
    notes.write_text(json.dumps(known))
    harness.send("forward_backward", model_id, 13, pass_body(datum(7, 8, 9)))
    harness.send("optim_step", model_id, 12, {"adam_params": {"learning_rate": KILLING_RATE, **ADAM}})
    threading.Event().wait()  # until the engine's thread has run it


def go_on(folder: Path, known: dict[str, Any]) -> dict[str, Any]:
    """What this version of mint computes from here on."""
    service = open_service(folder)
    harness = Harness(service, known["session_id"])
    model_id = known["model_id"]
    known["digests"]["12"] = harness.wait(f"{model_id}:12")["state_digest"]
    known["outputs"]["13"] = harness.wait(f"{model_id}:13")["loss_fn_outputs"]
    known["digests"]["14"] = harness.run("optim_step", model_id, 14, STEP)["state_digest"]
    known["sampled"] = harness.sample(known["sampler"], 0, params={"seed": 3, "max_tokens": 5})["sequences"]
    service.stop()
    return known


def make(target: Path) -> Path:
    """Writes the archive; returns its path."""
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        data, notes = work / "data", work / "known.json"
        subprocess.run([sys.executable, __file__, str(data), str(notes)], check=False)
        with closing(sqlite3.connect(f"file:{data / 'journal.sqlite3'}?mode=ro", uri=True)) as database:
            (schema,) = database.execute("PRAGMA user_version").fetchone()
        shutil.copytree(data, work / "copy")
        expected = go_on(work / "copy", json.loads(notes.read_text()))
        (data / "expected.json").write_text(json.dumps(expected))
        archive = target / f"schema{schema}.tar.gz"
        with tarfile.open(archive, "w:gz") as written:
            for path in sorted(data.rglob("*")):
                if path.is_file() and path.suffix != ".lock" and not path.name.endswith("-shm"):
                    written.add(path, path.relative_to(data), recursive=False)
        return archive


if __name__ == "__main__":
    if len(sys.argv) == 3:
        train(Path(sys.argv[1]), Path(sys.argv[2]))
    else:
        print(make(Path(sys.argv[1])))
