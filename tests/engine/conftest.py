"""Random small models, written once per run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import write_model
from transformers import PreTrainedModel

from mint.engine.bases.decoder_base import DecoderBase
from mint.engine.protocol import LoraSpec
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


def limit_sampling(engine: TorchEngine, **limits: int) -> None:
    """Changes fields of the `SamplingLimits` of base `base`."""
    base = engine._bases["base"]
    assert isinstance(base, DecoderBase)
    base.open_sampler()  # makes the memory that all samplers share
    assert base._memory is not None
    base._memory.limits = replace(base._memory.limits, **limits)


Twin = Callable[..., TorchEngine]


@pytest.fixture
def twin(tied: tuple[Path, PreTrainedModel]) -> Twin:
    """Makes an engine with the published weights of another one, by the ids of their models, and an empty cache."""

    def make(engine: TorchEngine, weights: Mapping[str, tuple[str, LoraSpec]], **settings: Any) -> TorchEngine:
        own = TorchEngine(dtype="float32", threads=1, device="cpu", **settings)
        own.load_base("base", str(tied[0]))
        for weights_id, (model_id, lora) in weights.items():
            own.load_weights(weights_id, "base", lora, engine.read_state(model_id).weights)
        return own

    return make
