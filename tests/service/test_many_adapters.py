"""2,000 saved LoRAs in one data directory: lists by index, sampling by path, and memory within its setting.

`python -m benchmarks.serving.many_adapters` measures times, with 100,000 of them.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from http_server import http_app

import mint
from benchmarks.serving.many_adapters import make_adapters, path_of
from mint.compose.embedded import open_embedded
from mint.engine.torch_engine import TorchEngine
from mint.server.callers import LOCAL_OWNER
from mint.server.limits import ServerLimits
from mint.server.store.checkpoint_catalog import CheckpointCatalog
from mint.server.store.database import OpenFor
from mint.server.store.journal import JOURNAL_FILE, Journal
from mint.server.store.training_run_catalog import TrainingRunCatalog
from mint.server.worker.samplers import Samplers
from mint.types import ModelInput, SamplingParams
from mint.types.checkpoint_path import CheckpointPath
from mint.types.records import PageQuery

pytestmark = pytest.mark.slow

COUNT = 2000
CACHE_BYTES = 512 << 10
"""Room for about ten of these LoRAs."""


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory with the LoRAs; no service runs on it."""
    folder = tmp_path_factory.mktemp("many")
    make_adapters(folder, COUNT)
    return folder


@pytest.fixture
def client(data_dir: Path) -> Generator[tuple[mint.ServiceClient, Samplers]]:
    """A client of a server on it, and the samplers of its service."""
    limits = ServerLimits(lora_cache_bytes=CACHE_BYTES)
    running = open_embedded(data_dir=data_dir, engine=TorchEngine(threads=1), limits=limits)
    try:
        with http_app(running) as url:
            opened = mint.ServiceClient(base_url=url)
            yield opened, running.service.samplers
            opened.close()
    finally:
        running.release()


def test_every_page_of_the_list_is_there_once_and_in_order(client: tuple[mint.ServiceClient, Samplers]) -> None:
    rest = client[0].create_rest_client()
    listed: list[str] = []
    while len(listed) < COUNT:
        page = rest.list_user_checkpoints(limit=700, offset=len(listed)).result()
        assert page.cursor is not None and page.cursor.total_count == COUNT
        listed += [each.tinker_path for each in page.checkpoints]
    assert [CheckpointPath.parse(path).uri for path in listed] == [path_of(n) for n in reversed(range(COUNT))]


def test_loras_drawn_by_zipfs_law_sample_as_alone_and_stay_within_the_memory_for_them(
    client: tuple[mint.ServiceClient, Samplers],
) -> None:
    service, samplers = client
    rng = np.random.default_rng(0)
    law = 1 / np.arange(1, COUNT + 1)
    seen: dict[int, list[int]] = {}
    repeated = 0
    for number in map(int, rng.choice(COUNT, 150, p=law / law.sum())):
        sampler = service.create_sampling_client(model_path=path_of(number))
        params = SamplingParams(max_tokens=8, temperature=1.0, seed=number)
        answer = sampler.sample(ModelInput.from_ints([5, 6, 7]), num_samples=1, sampling_params=params).result()
        tokens = list(answer.sequences[0].tokens)
        repeated += number in seen
        assert seen.setdefault(number, tokens) == tokens
        assert 0 < samplers.in_engine_bytes <= CACHE_BYTES
    assert repeated > 20 and len(seen) > samplers.in_engine_count > 3
    assert samplers.loaded_count > len(seen)  # some left memory, and were read again


GIVEN = "IN (SELECT value FROM json_each("
"""In a query about the rows of one page, whose ids are given: these few may be sorted."""


@pytest.mark.usefixtures("client")
def test_lists_sums_and_lookups_use_an_index(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    connect = sqlite3.connect

    def traced(*arguments: Any, **options: Any) -> sqlite3.Connection:
        connection = connect(*arguments, **options)
        connection.set_trace_callback(asked.append)
        return connection

    monkeypatch.setattr(sqlite3, "connect", traced)
    with closing(Journal(data_dir / JOURNAL_FILE, OpenFor.READING)) as journal:
        asked.clear()  # those of opening it
        checkpoints = CheckpointCatalog(journal, data_dir)
        page = PageQuery(limit=10, offset=10)
        for owner in (LOCAL_OWNER, None):
            assert len(checkpoints.checkpoints(owner, page).checkpoints) == 10
            checkpoints.used_bytes(owner)
            checkpoints.checkpoint(owner, path_of(1))
            TrainingRunCatalog(journal, data_dir).runs(owner, page)
        assert journal.checkpoint_in("checkpoints/none") is None
    monkeypatch.undo()
    queries = {sql for sql in asked if sql.startswith("SELECT")}
    with closing(sqlite3.connect(data_dir / JOURNAL_FILE)) as connection:
        plans = {sql: [str(row[3]) for row in connection.execute(f"EXPLAIN QUERY PLAN {sql}")] for sql in queries}
    for sql, plan in plans.items():
        if GIVEN in sql:
            assert not any(re.match(r"SCAN (checkpoints|runs|models)", line) for line in plan), (sql, plan)
        else:
            steps = [line for line in plan if not line.startswith("CORRELATED SCALAR SUBQUERY")]  # a heading
            assert all("INDEX" in step and "TEMP B-TREE" not in step for step in steps), (sql, plan)
    assert len(plans) > 10 and sum(GIVEN in sql for sql in plans) > 2
