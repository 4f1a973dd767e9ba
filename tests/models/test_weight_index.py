"""The index of a model in several files is checked where the folder is opened, and never leads out of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mint.errors import CheckpointError, InvalidRequestError
from mint.models.folder import ModelFolder
from mint.models.registry import resolve, shard_names


def _folder(path: Path, index: str) -> Path:
    path.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (path / name).write_text("{}")
    (path / "model.safetensors.index.json").write_text(index)
    return path


def _index(file: object) -> str:
    return json.dumps({"weight_map": {"x": file}})


DAMAGED = [
    "",
    "[1]",
    "null",
    "{}",
    '{"weight_map": {}}',
    '{"weight_map": ["a"]}',
    "[" * 100_000,
    _index(5),
    _index(None),
]
OUTSIDE = [
    _index(name) for name in ("../outside.safetensors", "/etc/passwd", "sub/a.safetensors", "..", ".", "", "a\\b")
]


@pytest.mark.parametrize("index", [*DAMAGED, *OUTSIDE])
def test_an_index_that_is_damaged_or_leads_out_of_the_folder_is_refused(index: str, tmp_path: Path) -> None:
    save_file({"x": torch.ones(2)}, tmp_path / "outside.safetensors")
    folder = _folder(tmp_path / "model", index)
    for open_folder in (lambda: resolve(str(folder), {}), ModelFolder(folder).tensors):
        with pytest.raises(InvalidRequestError, match=r"model\.safetensors\.index\.json.*download the model again"):
            open_folder()


def test_a_file_of_the_folder_may_be_a_link_to_one_elsewhere(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "model", _index("a.safetensors"))
    save_file({"x": torch.ones(2)}, tmp_path / "blob")
    (folder / "a.safetensors").symlink_to(tmp_path / "blob")
    assert shard_names(folder) == ["a.safetensors"] and resolve(str(folder), {}) == folder
    assert ModelFolder(folder).tensors()["x"].shape == (2,)


@pytest.mark.parametrize("content", [b"", b"garbage" * 100, b"\xff" * 8])
def test_a_damaged_weight_file_is_named_with_what_to_do(content: bytes, tmp_path: Path) -> None:
    folder = _folder(tmp_path / "model", _index("a.safetensors"))
    (folder / "a.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"a\.safetensors cannot be read.*download the model again"):
        ModelFolder(folder).tensors()
