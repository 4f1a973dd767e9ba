"""A mixture of experts: a row's bits are its own, whoever else goes to the same experts and whatever their loras."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_data import CROSS_ENTROPY, LORA, datum
from small_models import write_model
from torch import Tensor

from mint.engine.decoder import Decoder
from mint.engine.decoder_config import read_decoder_config
from mint.engine.lora import LoraWeights, rows_of
from mint.engine.protocol import LoraSpec
from mint.engine.torch_engine import TorchEngine
from mint.models.folder import ModelFolder

WIDE: dict[str, Any] = {
    "hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 997,
    "num_experts": 20, "num_experts_per_tok": 8, "moe_intermediate_size": 100,
}  # fmt: skip


def _only_itself(layer: int, heads: Tensor) -> Tensor:
    """An attention in which every row sees itself alone."""
    return heads[:, :6].flatten(1)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_row_does_not_depend_on_who_shares_its_experts(dtype: torch.dtype, threads: int, tmp_path: Path) -> None:
    write_model(tmp_path, "tied", family="qwen3_moe", **WIDE)
    folder = ModelFolder(tmp_path)
    config = read_decoder_config(folder.config)
    decoder = Decoder(config, folder.tensors(), dtype=dtype, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    loras: list[LoraWeights | None] = [None]
    for rank in (4, 16):
        own = LoraWeights(config, LoraSpec(rank, 0, False, True, False), torch.device("cpu"))
        own.flat.normal_(0, 0.05, generator=generator)
        loras.append(own)
    tokens = torch.randint(0, 997, (120,), generator=generator)
    whose = torch.randint(0, 3, (120,), generator=generator).sort().values

    def forward(rows: Tensor) -> Tensor:
        runs = rows_of([loras[index] for index in whose[rows].tolist()])
        with torch.no_grad():
            return decoder.forward(tokens[rows], rows, _only_itself, runs)

    torch.set_num_threads(threads)
    whole = forward(torch.arange(120))
    for size in (1, 2, 3, 7, 16, 40, 90) if threads == 1 else (1, 5, 40):
        for _ in range(4 if threads == 1 else 1):
            rows = torch.randperm(120, generator=generator)[:size].sort().values
            assert torch.equal(forward(rows), whole[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_layer_computed_again_for_its_gradient_gives_the_same_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    write_model(tmp_path, "tied", family="qwen3_moe", **WIDE)
    folder = ModelFolder(tmp_path)
    config = read_decoder_config(folder.config)
    decoder = Decoder(config, folder.tensors(), dtype=dtype, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    weights = LoraWeights(config, LORA, torch.device("cpu"))
    weights.flat.normal_(0, 0.05, generator=generator)
    gradient = weights.enable_gradient()
    tokens = torch.randint(0, 997, (50,), generator=generator)
    found = []
    for recompute in (False, True):
        gradient.zero_()
        runs = rows_of([weights] * 50)
        hidden = decoder.forward(tokens, torch.arange(50), _only_itself, runs, recompute=recompute)
        hidden.backward(torch.randn(50, 192, generator=torch.Generator().manual_seed(1)))
        found.append(gradient.clone())
    assert torch.equal(*found) and found[0].abs().max() > 0


def test_experts_without_rows_get_no_gradient(tmp_path: Path) -> None:
    """All positions hold one token, so in the first layer all go to the same two of six experts."""
    write_model(tmp_path, "tied", family="qwen3_moe")
    engine = TorchEngine(dtype="float32", threads=1, device="cpu")
    engine.load_base("base", str(tmp_path))
    engine.create_model("m", "base", LORA)
    model = engine._models["m"]
    model.weights.flat.add_(0.01)  # B is no longer zero
    engine.forward_backward("m", [datum([7] * 30)], CROSS_ENTROPY)
    gradients = model.weights.named(model.gradient)
    prefix = "model.layers.0.mlp.experts"
    moved = {expert for expert in range(6) if np.abs(gradients[f"{prefix}.{expert}.up_proj.lora_B.weight"]).max() > 0}
    assert len(moved) == 2
    for expert in range(6):
        parts = [gradients[f"{prefix}.{expert}.{part}_proj.lora_A.weight"] for part in ("gate", "up", "down")]
        assert all((np.abs(part).max() > 0) == (expert in moved) for part in parts)
