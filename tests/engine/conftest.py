"""Random small models, written once per run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from small_models import write_model
from transformers import PreTrainedModel

from mint.engine.torch_engine import TorchEngine


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def device(request: pytest.FixtureRequest) -> str:
    """Every device of this machine, for promises that hold on all of them."""
    found: str = request.param
    return found


@pytest.fixture(scope="session")
def tied(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """A folder and the model that transformers wrote there."""
    folder = tmp_path_factory.mktemp("tied")
    return folder, write_model(folder, "tied")


@pytest.fixture(scope="session")
def untied(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """As `tied`, with an unembedding of its own."""
    folder = tmp_path_factory.mktemp("untied")
    return folder, write_model(folder, "untied")


@pytest.fixture
def engine(tied: tuple[Path, PreTrainedModel]) -> TorchEngine:
    """An engine with the tied model as base `base`."""
    engine = TorchEngine(dtype="float32", threads=1, device="cpu")
    engine.load_base("base", str(tied[0]))
    return engine


@pytest.fixture(scope="session")
def native_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the kernels in C are compiled: once per run, which workers that run side by side share."""
    own = tmp_path_factory.getbasetemp()
    return (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "native"
