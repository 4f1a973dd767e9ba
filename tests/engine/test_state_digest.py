"""The digest of a state is a function of names, shapes, values and step count; nothing else enters it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from decoders import new_lora, open_decoder
from engine_data import LORA, train
from transformers import Qwen3ForCausalLM

from mint.engine.protocol import ModelState
from mint.engine.state_digest import BLOCK, digest_of, is_old
from mint.engine.torch_engine import TorchEngine

PLACES = {
    "b": (slice(0, 3 * BLOCK + 10), (1, 3 * BLOCK + 10)),
    "a": (slice(3 * BLOCK + 10, 5 * BLOCK + 10), (BLOCK, 2)),
    "c": (slice(5 * BLOCK + 10, 16 * BLOCK), (2, (11 * BLOCK - 10) // 2)),
}
"""12 MB in three vectors: enough for several threads."""


def vectors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(16 * BLOCK, generator=generator) for _ in range(3)]


def as_documented(state: ModelState) -> str:
    """Written from the module's docstring alone."""
    names = sorted(state.weights)
    header = json.dumps({"arrays": [[name, list(state.weights[name].shape)] for name in names], "step": state.step})
    blocks = b""
    for part in (state.weights, state.exp_avg or {}, state.exp_avg_sq or {}):
        for name in names:
            raw = part[name].astype("<f4").tobytes()
            for start in range(0, len(raw), 4 * 65_536):
                blocks += hashlib.sha256(raw[start : start + 4 * 65_536]).digest()
    return "b1:" + hashlib.sha256(header.encode() + b"\n" + blocks).hexdigest()[:32]


def cut(vector: torch.Tensor) -> Mapping[str, np.ndarray]:
    return {name: vector[place].numpy().reshape(shape) for name, (place, shape) in PLACES.items()}


def test_the_digest_of_a_model_is_as_documented(tied: tuple[Path, Qwen3ForCausalLM]) -> None:
    engine = TorchEngine(dtype="float32", threads=1, device="cpu")
    engine.load_base("base", str(tied[0]))
    engine.create_model("m", "base", LORA)
    train(engine, "m")
    assert engine.state_digest("m") == as_documented(engine.read_state("m"))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_any_number_of_threads_gives_the_digest_of_the_blocks(threads: int) -> None:
    parts = vectors()
    expected = as_documented(ModelState(cut(parts[0]), 3, cut(parts[1]), cut(parts[2])))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert digest_of(3, PLACES, parts) == expected
    finally:
        torch.set_num_threads(before)


def test_every_bit_name_shape_and_the_step_enter_the_digest() -> None:
    parts = vectors()
    found = {
        digest_of(3, PLACES, parts),
        digest_of(4, PLACES, parts),
        digest_of(3, PLACES, [parts[0], parts[2], parts[1]]),
    }
    found.add(digest_of(3, {**PLACES, "b": (PLACES["b"][0], (3 * BLOCK + 10, 1))}, parts))
    found.add(digest_of(3, {"d" if name == "c" else name: place for name, place in PLACES.items()}, parts))
    for vector in range(3):
        for value in (0, BLOCK - 1, 5 * BLOCK + 9, 16 * BLOCK - 1):
            changed = [part.clone() for part in parts]
            changed[vector].view(torch.int32)[value] ^= 1
            found.add(digest_of(3, PLACES, changed))
    assert len(found) == 5 + 3 * 4


def test_the_digest_of_an_older_version_can_still_be_computed(tied: tuple[Path, Qwen3ForCausalLM]) -> None:
    engine = TorchEngine(dtype="float32", threads=1, device="cpu")
    engine.load_base("base", str(tied[0]))
    engine.create_model("m", "base", LORA)
    train(engine, "m")
    state = engine.read_state("m")
    layout = new_lora(open_decoder(tied[0]), LORA).layout
    old = hashlib.blake2b((2).to_bytes(8, "little"), digest_size=16)
    for arrays in (state.weights, state.exp_avg or {}, state.exp_avg_sq or {}):
        old.update(layout.assemble(arrays, "the arrays").numpy().tobytes())
    assert is_old(old.hexdigest()) and not is_old(engine.state_digest("m"))
    assert engine.state_digest("m", like=old.hexdigest()) == old.hexdigest()
    assert engine.state_digest("m", like=engine.state_digest("m")) == engine.state_digest("m")
