"""Tensor files: readable by safetensors, the same bytes each time, damage always named."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch

from mint.errors import CheckpointError
from mint.models.tensor_files import map_tensors, read_tensors, to_bfloat16, write_tensors

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


def test_safetensors_reads_our_files_and_we_read_theirs(tmp_path: Path) -> None:
    write_tensors(tmp_path / "ours.safetensors", ARRAYS, {})
    theirs = safetensors.numpy.load_file(tmp_path / "ours.safetensors")
    assert all(np.array_equal(theirs[name], array) for name, array in ARRAYS.items())
    safetensors.numpy.save_file({k: v.copy() for k, v in ARRAYS.items()}, tmp_path / "theirs.safetensors")
    ours, _ = read_tensors(tmp_path / "theirs.safetensors")
    assert all(np.array_equal(ours[name], array) for name, array in ARRAYS.items())


def test_the_same_tensors_give_the_same_bytes(tmp_path: Path) -> None:
    write_tensors(tmp_path / "one", ARRAYS, {"x": "1", "y": "2"})
    write_tensors(tmp_path / "two", dict(reversed(ARRAYS.items())), {"y": "2", "x": "1"})
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_bfloat16_rounds_as_torch_and_is_read_as_float32(tmp_path: Path) -> None:
    values = np.array([1.0, 1.00390625, 1.01171875, -3.3e38, 1e-40, np.inf, -np.inf, np.nan, 0.1], np.float32)
    write_tensors(tmp_path / "x", {"x": to_bfloat16(values)}, {})
    arrays, _ = read_tensors(tmp_path / "x")
    expected = torch.from_numpy(values).to(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(arrays["x"], expected)


def test_a_failed_write_leaves_the_old_file_and_no_rubbish(tmp_path: Path) -> None:
    write_tensors(tmp_path / "x", {"a": np.ones(2, np.float32)}, {})
    with pytest.raises(CheckpointError, match="complex64"):
        write_tensors(tmp_path / "x", {"a": np.ones(2, np.complex64)}, {})
    assert read_tensors(tmp_path / "x")[0]["a"].tolist() == [1.0, 1.0]
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def _file(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "cannot be read"),
        (b"\x01", "claims"),
        ((1 << 62).to_bytes(8, "little") + b"{}", "claims"),
        (_file(b"{nope"), "not JSON"),
        (_file(b"[" * 100_000), "not JSON"),
        (_file([1]), "not a JSON object"),
        (_file({"__metadata__": {"a": 1}}), "table of strings"),
        (_file({"a": {"dtype": "F32"}}), "no dtype"),
        (_file({"a": {"dtype": "F8_E5M2", "shape": [1], "data_offsets": [0, 1]}}, b"1"), "F8_E5M2"),
        (_file({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, b"1234"), "shape"),
        (_file({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"1234"), "offsets"),
        (_file({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"1234"), "offsets"),
        (_file({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"12345678"), "exactly"),
    ],
)
def test_damage_is_named(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(CheckpointError, match=reason):
        read_tensors(tmp_path / "x")


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    write_tensors(tmp_path / "whole", ARRAYS, {"step": "3"})
    whole = (tmp_path / "whole").read_bytes()
    for length in range(0, len(whole), 7):
        (tmp_path / "part").write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            map_tensors(tmp_path / "part")


def test_a_missing_file_is_a_checkpoint_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_tensors(tmp_path / "nothing")
