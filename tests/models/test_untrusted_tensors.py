"""How much a stranger's header may hold: a little, or as much as a lora of the model at hand needs."""

from __future__ import annotations

import io
import json

import pytest

from mint.errors import InvalidRequestError
from mint.models.untrusted_tensors import BYTES_PER_TENSOR, MAX_HEADER_BYTES, MAX_TENSORS, UntrustedTensors


def _file(count: int, padding: int = 0) -> io.BytesIO:
    """`count` empty matrices with the names that the experts of a large model have."""
    name = "base_model.model.model.layers.{}.mlp.experts.{}.gate_proj.lora_A.weight"
    entry = {"dtype": "BF16", "shape": [0, 4096], "data_offsets": [0, 0]}
    header = {name.format(index // 128, index % 128): entry for index in range(count)}
    text = json.dumps(header, separators=(",", ":")).encode() + b" " * padding
    return io.BytesIO(len(text).to_bytes(8, "little") + text)


def test_a_lora_of_many_experts_is_read_where_the_base_model_has_them() -> None:
    count = MAX_TENSORS + 10_000
    assert len(UntrustedTensors(_file(count), "file", expected=count).entries) == count


def test_a_header_beyond_what_the_base_model_needs_is_refused() -> None:
    assert len(UntrustedTensors(_file(5), "file").entries) == 5
    with pytest.raises(InvalidRequestError, match="header"):
        UntrustedTensors(_file(MAX_TENSORS + 10_000), "file")
    with pytest.raises(InvalidRequestError, match="header"):
        UntrustedTensors(_file(5, padding=MAX_HEADER_BYTES), "file")
    expected = 2 * MAX_TENSORS
    assert len(UntrustedTensors(_file(5, padding=4 * MAX_HEADER_BYTES), "file", expected=expected).entries) == 5
    with pytest.raises(InvalidRequestError, match="header"):
        UntrustedTensors(_file(5, padding=BYTES_PER_TENSOR * expected), "file", expected=expected)
    with pytest.raises(InvalidRequestError, match="tensors, more than"):
        UntrustedTensors(_file(expected + 1), "file", expected=expected)
