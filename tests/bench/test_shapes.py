"""The benchmark's base model is what it says: the stated shape, loadable, and one token for each word of a prompt."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.compare.shapes import GrpoShape, make_prompts
from mint.models import random_base
from mint.models.random_base import ModelShape, write_random_base
from mint.models.tensor_files import open_tensors


def test_the_step_has_the_stated_size() -> None:
    shape = GrpoShape()
    assert (shape.sequences, shape.sampled_tokens) == (64, 2048)
    assert shape.rank * shape.model.lora_parameters_per_rank == 155_648


def test_the_base_model_is_the_same_for_the_same_seed(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_random_base(tmp_path / name, ModelShape(), seed=seed)
    first, again, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert first == again
    assert first != other


def test_a_large_base_is_written_of_random_bits_that_are_numbers_of_the_usual_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random_base, "MANY_PARAMETERS", 1000)
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_random_base(tmp_path / name, replace(ModelShape(), stored="bfloat16"), seed=seed)
    first, again, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert first == again != other
    for name, stored in open_tensors(tmp_path / "a" / "model.safetensors").items():
        values = stored.read().double()
        if values.dim() == 1:
            assert (values == 1).all(), name
        else:
            assert 0.018 < values.std() < 0.02 and abs(values.mean()) < 0.001, name
            assert values.abs().min() >= 2**-7 and values.abs().max() < 2**-5, name


def test_prompts_are_different_and_reproducible() -> None:
    shape = GrpoShape()
    prompts = make_prompts(shape, steps=3, seed=1)
    assert len(set(prompts)) == 24
    assert prompts == make_prompts(shape, steps=3, seed=1)


def test_transformers_loads_the_folder_with_the_stated_parameters(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    shape = GrpoShape()
    write_random_base(tmp_path, shape.model, seed=0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert sum(parameter.numel() for parameter in model.parameters()) == 853_376
    prompt = make_prompts(shape, steps=1, seed=1)[0]
    ids = tokenizer(prompt)["input_ids"]
    assert [f"w{token}" for token in ids] == prompt.split()
    assert tokenizer.decode(ids) == prompt
    assert tokenizer.eos_token_id == shape.model.vocabulary  # nothing can sample it
    assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] is None
