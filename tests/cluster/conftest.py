"""A small model, and processes that join gloo groups of any size, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from rank_work import run_rank
from small_models import write_model

from mint.config import prepare_ray

prepare_ray()  # before a test module imports ray

PROCESSES = 4

OnRanks = Callable[..., list[Any]]


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small random model."""
    path = tmp_path_factory.mktemp("model")
    write_model(path, "tied")
    return path


@pytest.fixture(scope="module")  # so that each file's processes end with it: they take half a gigabyte each
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnRanks]:
    """`on_ranks(world, function, *arguments)` calls a function of a module on each rank of a new group; returns what
    the ranks return, in order."""
    folder = tmp_path_factory.mktemp("groups")
    number = 0
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:

        def run(world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
            nonlocal number
            number += 1
            file: Path = folder / str(number)
            ranks = [pool.submit(run_rank, rank, world, file, function, arguments) for rank in range(world)]
            return [rank.result(timeout=300) for rank in ranks]

        yield run
