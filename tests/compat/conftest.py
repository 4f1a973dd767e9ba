"""A server for programs of tinker-cookbook, with stand-ins for the models that they name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compat.cookbook_models import make_models, served_models
from tests.compat.served import Served, mint_serve


@pytest.fixture(scope="module")
def cookbook_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the programs run: it has the stand-in models."""
    work = tmp_path_factory.mktemp("work")
    make_models(work)
    return work


@pytest.fixture(scope="module")
def cookbook_served(cookbook_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`mint serve` with the stand-in models."""
    with mint_serve(tmp_path_factory.mktemp("served"), *served_models(cookbook_folder)) as running:
        yield running
