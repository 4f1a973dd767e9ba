"""Lists of models tell the longest sequence of each, also of the text model of one with images."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mint.cli.storage.folder_storage import FolderStorage
from mint.config import Settings
from mint.engine.fake_engine import FakeEngine
from mint.server.worker.base_models import BaseModels

TEXT = {"max_position_embeddings": 512}


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"model_type": "qwen3", **TEXT}, 512),
        ({"model_type": "qwen3_5", "text_config": TEXT}, 512),
        ({"model_type": "qwen3"}, None),
    ],
)
def test_a_server_and_a_folder_tell_the_same_longest_sequence(
    tmp_path: Path, config: dict[str, object], wanted: int | None
) -> None:
    for name in ("tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert BaseModels(FakeEngine(), {"own": str(tmp_path)}).context_length("own") == wanted
    listed = FolderStorage(tmp_path, Settings(models=f"own={tmp_path}")).models()
    assert {model.model_name: model.max_context_length for model in listed}["own"] == wanted
