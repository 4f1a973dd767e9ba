"""Tensor files: what is written is read back, whole or not at all, and damage is always named."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from mint.errors import CheckpointError, JournalError
from mint.models.tensor_files import (
    LaterArray,
    open_tensors,
    read_header,
    read_tensors,
    write_later_tensors,
    write_tensors,
)

ARRAYS = {
    "b": np.arange(6, dtype=np.float32).reshape(2, 3),
    "a": np.array([1, -2], dtype=np.int64),
    "empty": np.zeros((0, 4), np.float32),
    "scalar": np.array(3.5, np.float32),
    "strided": np.arange(8, dtype=np.float32)[::2],
}


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    write_tensors(tmp_path / "x.safetensors", ARRAYS, {"step": "3"})
    arrays, metadata = read_tensors(tmp_path / "x.safetensors")
    assert metadata == {"step": "3"}
    assert arrays.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert arrays[name].dtype == array.dtype and arrays[name].shape == array.shape
        np.testing.assert_array_equal(arrays[name], array)
    arrays["b"][0, 0] = 9.0  # copies are writable


def test_the_same_tensors_give_the_same_bytes(tmp_path: Path) -> None:
    write_tensors(tmp_path / "one", ARRAYS, {"x": "1"})
    write_tensors(tmp_path / "two", dict(reversed(ARRAYS.items())), {"x": "1"})
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_arrays_that_are_made_while_they_are_written_give_the_same_bytes(tmp_path: Path) -> None:
    in_memory = 0

    def make(array: np.ndarray) -> LaterArray:
        def computed() -> np.ndarray:
            nonlocal in_memory
            in_memory += 1
            return array

        return LaterArray(array.dtype, array.shape, computed)

    write_tensors(tmp_path / "one", ARRAYS, {"x": "1"})
    later = {name: make(array) for name, array in ARRAYS.items()}
    assert in_memory == 0
    write_later_tensors(tmp_path / "two", later, {"x": "1"})
    assert in_memory == len(ARRAYS)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


@pytest.mark.parametrize("made", [np.zeros(3, np.float64), np.zeros((3, 1), np.float32), None])
def test_a_file_whose_arrays_cannot_be_made_is_not_there(tmp_path: Path, made: np.ndarray | None) -> None:
    def make() -> np.ndarray:
        if made is None:
            raise CheckpointError("no array")
        return made

    with pytest.raises(CheckpointError, match="no array" if made is None else r"tensor x is .*, not float32 \(3,\)"):
        write_later_tensors(tmp_path / "y", {"x": LaterArray(np.dtype("float32"), (3,), make)}, {})
    assert not list(tmp_path.iterdir())


def test_bfloat16_weights_are_opened_as_they_are(tmp_path: Path) -> None:
    values = torch.tensor([[1.0, -3.3e38], [0.1, float("inf")]]).to(torch.bfloat16)
    save_file({"x": values}, tmp_path / "x")
    stored = open_tensors(tmp_path / "x")["x"]
    assert (stored.dtype, stored.shape) == ("BF16", (2, 2))
    assert torch.equal(stored.read(), values)


def test_a_failed_write_leaves_the_old_file_and_no_rubbish(tmp_path: Path) -> None:
    write_tensors(tmp_path / "x", {"a": np.ones(2, np.float32)}, {})
    with pytest.raises(CheckpointError, match="complex64"):
        write_tensors(tmp_path / "x", {"a": np.ones(2, np.complex64)}, {})
    assert read_tensors(tmp_path / "x")[0]["a"].tolist() == [1.0, 1.0]
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def _file(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def test_a_pointer_of_git_lfs_is_told_by_name(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 1503300328\n")
    for read in (open_tensors, read_tensors):
        with pytest.raises(CheckpointError, match="is a pointer of Git LFS and has no weights; run `git lfs pull`"):
            read(path)
    with path.open("rb") as file, pytest.raises(ValueError, match="is a pointer of Git LFS"):
        read_header(file)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01",
        (1 << 62).to_bytes(8, "little") + b"{}",
        _file(b"{nope"),
        _file(b"[" * 100_000),
        _file([1]),
        _file({"__metadata__": {"a": 1}}),
        _file({"a": {"dtype": "F32"}}),
        _file({"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 1]}}, b"1"),
        _file({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, b"1234"),
        _file({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"1234"),
        _file({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"1234"),
        _file({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"12345678"),
    ],
)
def test_a_damaged_file_raises_an_error_that_says_it_cannot_be_read(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    for read in (read_tensors, open_tensors):
        with pytest.raises(CheckpointError, match="cannot be read"):
            read(tmp_path / "x")


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    write_tensors(tmp_path / "whole", ARRAYS, {"step": "3"})
    whole = (tmp_path / "whole").read_bytes()
    for length in range(0, len(whole), 7):
        (tmp_path / "part").write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            open_tensors(tmp_path / "part")


def test_a_missing_file_is_a_checkpoint_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_tensors(tmp_path / "nothing")


def test_a_file_that_cannot_be_opened_for_want_of_descriptors_is_not_called_damaged(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    write_tensors(file, ARRAYS, {})
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(JournalError, match="ulimit"):
            read_tensors(file)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with pytest.raises(CheckpointError):
        read_tensors(tmp_path / "missing")
