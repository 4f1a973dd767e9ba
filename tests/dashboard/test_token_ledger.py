"""The sums of tokens are those of all steps of the log, also after it has grown or was cut back by a resume."""

from __future__ import annotations

from pathlib import Path

import pytest

from mint.dashboard.run_folders import RunFolders
from mint.dashboard.run_readers import RunReaders
from mint.dashboard.token_ledger import TokenLedger
from mint.errors import NotFoundError
from tests.dashboard.dashboard_harness import append, metrics, write_run


def test_the_sums_follow_the_log(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "runs" / "a", 0)
    ledger = TokenLedger(RunReaders(RunFolders([tmp_path])))
    assert ledger.of("a") == ({}, 0)
    for step, (sums, last) in enumerate([({"generated": 10.0}, 1), ({"generated": 20.0}, 2)], start=1):
        append(folder, "metrics.jsonl", metrics(step) | {"ledger/generated": 10.0})
        assert ledger.of("a") == ledger.of("a") == (sums, last)
    log = folder / "metrics.jsonl"
    log.write_bytes(log.read_bytes().splitlines(keepends=True)[0])
    assert ledger.of("a") == ({"generated": 10.0}, 1)
    with pytest.raises(NotFoundError):
        ledger.of("b")
