"""The fingerprint of a base model is that of its numbers: the same wherever they lie, another for other numbers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from small_models import write_model

from mint.errors import CheckpointError
from mint.models.fingerprint import fingerprint
from mint.models.registry import BUNDLED


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def test_a_copy_elsewhere_in_shards_or_with_other_documents_has_the_same(tmp_path: Path) -> None:
    write_model(tmp_path / "a", "tied")
    write_model(tmp_path / "in shards", "tied", shards="20KB")
    assert not (tmp_path / "in shards" / "model.safetensors").exists()
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b" / "tokenizer.json").write_text('{"other": 1}')
    change_config(tmp_path / "b", transformers_version="99", max_position_embeddings=64)
    assert fingerprint(tmp_path / "a") == fingerprint(tmp_path / "b") == fingerprint(tmp_path / "in shards")


def test_weights_of_the_same_shapes_and_other_values_have_another(tmp_path: Path) -> None:
    write_model(tmp_path / "a", "tied", seed=0)
    write_model(tmp_path / "b", "tied", seed=1)
    assert fingerprint(tmp_path / "a") != fingerprint(tmp_path / "b")


def test_one_other_norm_has_another(tmp_path: Path) -> None:
    write_model(tmp_path, "tied")
    before = fingerprint(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"][-1] += 1
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert fingerprint(tmp_path) != before


@pytest.mark.parametrize("field", ["rms_norm_eps", "num_attention_heads", "rope_parameters", "quantization_config"])
def test_a_configuration_that_gives_other_numbers_has_another(tmp_path: Path, field: str) -> None:
    write_model(tmp_path, "tied")
    before = fingerprint(tmp_path)
    values = {"rms_norm_eps": 0.5, "num_attention_heads": 2, "quantization_config": {"quant_method": "fp8"}}
    change_config(tmp_path, **{field: values.get(field, {"rope_type": "default", "rope_theta": 5.0})})
    assert fingerprint(tmp_path) != before


@pytest.mark.parametrize(
    "field", ["layer_types", "logit_scale", "rope_interleave", "lm_head_multiplier", "n_head", "use_parallel_residual"]
)
def test_a_setting_of_one_family_counts(tmp_path: Path, field: str) -> None:
    write_model(tmp_path, "tied")
    change_config(tmp_path, **{field: 1})
    before = fingerprint(tmp_path)
    change_config(tmp_path, **{field: 2})
    assert fingerprint(tmp_path) != before


def test_the_settings_of_a_text_model_within_another_count(tmp_path: Path) -> None:
    write_model(tmp_path, "tied")
    change_config(tmp_path, text_config={"sliding_window": 64})
    before = fingerprint(tmp_path)
    change_config(tmp_path, text_config={"sliding_window": 32})
    assert fingerprint(tmp_path) != before


def test_older_names_of_the_settings_of_positions_have_the_same(tmp_path: Path) -> None:
    write_model(tmp_path, "tied")
    change_config(tmp_path, rope_parameters={"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0})
    newer = fingerprint(tmp_path)
    older = {"type": "yarn", "factor": 4.0}
    change_config(tmp_path, rope_parameters=None, rope_scaling=older, rope_theta=500.0)
    assert fingerprint(tmp_path) == newer


def test_that_of_the_bundled_model_stays_because_checkpoints_hold_it() -> None:
    assert fingerprint(BUNDLED["mint/tiny"]) == "1:20decd5f96a3d0019f0900797bd8dbd6"


def test_a_large_tensor_is_not_read_as_a_whole(tmp_path: Path) -> None:
    write_model(tmp_path, "tied")
    size_bytes = 1 << 40  # more than the test could read
    header = json.dumps({"a": {"dtype": "U8", "shape": [size_bytes], "data_offsets": [0, size_bytes]}}).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size_bytes)  # takes no disk: a hole
    assert fingerprint(tmp_path)


def test_a_damaged_file_is_told_with_a_remedy(tmp_path: Path) -> None:
    write_model(tmp_path, "tied")
    for content in (b"", b"{}", b"\x08" + bytes(7) + b"no json!", b"\x02" + bytes(7) + b"[]"):
        (tmp_path / "model.safetensors").write_bytes(content)
        with pytest.raises(CheckpointError) as refusal:
            fingerprint(tmp_path)
        assert refusal.value.remedy
