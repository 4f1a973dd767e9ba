"""Base models and adapters are written once, whole or not at all, and are what transformers and PEFT load."""

from __future__ import annotations

import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_sides import silent

from benchmarks.compare import base_models
from benchmarks.compare.base_models import adapter_files, base_model_folder
from benchmarks.compare.shapes import GrpoShape
from mint.models.random_base import ModelShape
from mint.models.tensor_files import open_tensors, read_tensors

SMALL = ModelShape(hidden=32, layers=2, heads=2, kv_heads=1, head_size=16, mlp=64, vocabulary=256)


def test_a_base_is_written_once_for_each_shape_and_seed(tmp_path: Path) -> None:
    said: list[str] = []
    first = base_model_folder(tmp_path, SMALL, seed=0, say=said.append)
    assert base_model_folder(tmp_path, SMALL, seed=0, say=said.append) == first
    assert len(said) == 1
    assert base_model_folder(tmp_path, SMALL, seed=1, say=silent) != first
    assert base_model_folder(tmp_path, replace(SMALL, layers=1), seed=0, say=silent) != first


def test_what_could_not_be_finished_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: object, **_settings: object) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as broken:
        broken.setattr(base_models, "write_random_base", fail)
        with pytest.raises(OSError, match="no space left"):
            base_model_folder(tmp_path, SMALL, seed=0, say=silent)
    assert list((tmp_path / "bench" / "bases").iterdir()) == []
    assert (base_model_folder(tmp_path, SMALL, seed=0, say=silent) / "model.safetensors").is_file()


def test_a_base_in_bfloat16_is_the_rounded_one_in_float32(tmp_path: Path) -> None:
    wide = base_model_folder(tmp_path, SMALL, seed=0, say=silent)
    narrow = base_model_folder(tmp_path, replace(SMALL, stored="bfloat16"), seed=0, say=silent)
    rounded = open_tensors(narrow / "model.safetensors")
    arrays, _ = read_tensors(wide / "model.safetensors")
    for name, array in arrays.items():
        assert torch.equal(rounded[name].read(), torch.from_numpy(array).to(torch.bfloat16)), name


def test_a_matrix_that_is_drawn_in_parts_has_the_stated_deviation(tmp_path: Path) -> None:
    folder = base_model_folder(tmp_path, replace(SMALL, vocabulary=20_000), seed=0, say=silent)
    arrays, _ = read_tensors(folder / "model.safetensors")
    embedding = arrays["model.embed_tokens.weight"]
    assert embedding.shape == (20_000, 32)
    assert embedding.std() == pytest.approx(0.02, rel=0.02)
    assert np.unique(embedding[:, 0]).size > 19_000


@pytest.mark.slow
def test_peft_loads_the_adapter_and_it_changes_what_is_computed(tmp_path: Path) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    shape = GrpoShape(model=SMALL)
    base = base_model_folder(tmp_path, SMALL, seed=0, say=silent)
    adapter = adapter_files(tmp_path, shape, seed=0, base_name="bench/base")
    with tarfile.open(adapter.archive) as archive:
        assert set(archive.getnames()) == {path.name for path in adapter.folder.iterdir()}
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    ids = torch.arange(1, 20)[None]
    plain = model(ids).logits
    adapted = peft.PeftModel.from_pretrained(model, adapter.folder)
    lora = sum(parameter.numel() for name, parameter in adapted.named_parameters() if "lora_" in name)
    assert lora == shape.rank * SMALL.lora_parameters_per_rank
    assert (adapted(ids).logits - plain).abs().max() > 1e-3
