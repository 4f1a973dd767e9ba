"""The script in docs/operations.md makes a whole copy of a server that trains at the time."""

from __future__ import annotations

import re
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

import mint
from mint.server.store.database import read_only
from mint.server.store.journal import JOURNAL_FILE
from mint.types import AdamParams, Datum, ModelInput
from tests.server.server_harness import running

DOCUMENT = Path(__file__).parents[2] / "docs" / "operations.md"
STEPS_OF_A_COPY = "SELECT digest FROM jobs WHERE kind = 'optim_step' AND status = 'done' ORDER BY seq_id"
RUNNABLE = """
    SELECT count(*) FROM jobs JOIN models USING (model_id) WHERE status = 'pending' AND seq_id = applied_seq + 1
"""
"""Of a step and its pass, which are sent together, a copy may hold the step alone: that waits for its pass."""

SNAPSHOTS = "SELECT file FROM snapshots"
STOPPED = "SELECT count(*) FROM models WHERE diverged IS NOT NULL"


def query(folder: Path, sql: str) -> list[Any]:
    with read_only(folder / JOURNAL_FILE) as queries:
        return queries.values(sql)


def test_a_backup_of_a_server_under_load_is_restored_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_tree = shutil.copytree

    def copy_tree_later(*arguments: Any, **options: Any) -> Path:
        time.sleep(0.2)  # a slow disk: without the lock, steps would remove snapshots meanwhile
        return copy_tree(*arguments, **options)

    monkeypatch.setattr(shutil, "copytree", copy_tree_later)
    script: dict[str, Any] = {"__name__": "backup"}
    exec(re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(), flags=re.DOTALL | re.MULTILINE)[0], script)
    told: list[str | None] = []
    enough = threading.Event()

    def train(url: str) -> None:
        datum = Datum(model_input=ModelInput.from_ints([1, 2, 3]), loss_fn_inputs={"target_tokens": [2, 3, 4]})
        with mint.ServiceClient(base_url=url) as service:
            trainer = service.create_lora_training_client(base_model="mint/tiny", rank=4, seed=1)
            while not enough.is_set():
                trainer.forward_backward([datum], "cross_entropy")
                told.append(trainer.optim_step(AdamParams(learning_rate=1e-3)).result(timeout=60).state_digest)

    with running(tmp_path / "data") as server:
        client = threading.Thread(target=train, args=[server.url])
        client.start()
        backups = [tmp_path / f"backup{number}" for number in range(3)]
        for backup in backups:
            steps = len(told)
            wait_until(lambda steps=steps: len(told) >= steps + 10 or not client.is_alive())
            script["back_up"](tmp_path / "data", backup)
        enough.set()
        client.join()
    for backup in backups:
        known = query(backup, STEPS_OF_A_COPY)
        assert known and known == told[: len(known)]
        assert [file for file in query(backup, SNAPSHOTS) if not (backup / file).is_file()] == []
        with running(backup):
            wait_until(lambda backup=backup: query(backup, STOPPED) != [0] or query(backup, RUNNABLE) == [0])
        assert query(backup, STOPPED) == [0]
        restored = query(backup, STEPS_OF_A_COPY)
        assert len(restored) >= len(known) and restored == told[: len(restored)]
