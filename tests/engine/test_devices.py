"""A training step with all of its tensors on a device that is not the CPU: torch's `meta`, which has shapes and no
numbers, stands for a GPU, so that a forgotten transfer shows without one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from decoders import new_lora
from engine_data import ADAM, CROSS_ENTROPY, random_data
from one_device import META, OneDevice
from small_models import write_model
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import scaled_dot_product_attention

from mint.engine.cuda.attention import FlexPackedAttention
from mint.engine.model.config import Windows, read_decoder_config
from mint.engine.model.decoder import Decoder
from mint.engine.model.torch_operations import TorchOperations
from mint.engine.optimizer import AdamState, step_adam
from mint.engine.packing import AttentionBlock, pack
from mint.engine.protocol import LoraSpec, MicroBatching
from mint.engine.training_pass import run_pass
from mint.models.folder import ModelFolder

ALL = LoraSpec(rank=4, seed=0, train_attn=True, train_mlp=True, train_unembed=True)
FROZEN_UNEMBEDDING = LoraSpec(rank=4, seed=0, train_attn=True, train_mlp=True, train_unembed=False)


def test_the_guard_refuses_what_a_gpu_would() -> None:
    with OneDevice():
        index, wide = torch.zeros(2, dtype=torch.int64), torch.zeros(3, 3, device=META)
        for mixed in (lambda: wide[index], lambda: wide @ torch.ones(3, 3), lambda: wide.add_(torch.ones(3, 3))):
            with pytest.raises(AssertionError, match="of tensors on"):
                mixed()


def _attend(query: Tensor, key: Tensor, value: Tensor, *, block_mask: BlockMask, enable_gqa: bool) -> Tensor:
    """`flex_attention` by definition: torch's own does not run under a guard like this."""
    places = torch.arange(query.shape[2], device=query.device)
    mask = block_mask.mask_mod(places, places, places[:, None], places[None])
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=enable_gqa)


class _MetaOperations(TorchOperations):
    """As on a GPU."""

    max_rows = 64

    def packed_attention(
        self, blocks: Sequence[AttentionBlock], query_heads: int, kv_heads: int, windows: Windows
    ) -> FlexPackedAttention:
        attention = FlexPackedAttention(blocks, query_heads, kv_heads, self.device)
        attention.attend = _attend
        return attention


@pytest.fixture
def make_decoder(tmp_path: Path) -> Callable[[str, torch.dtype], Decoder]:
    """A decoder on `meta` that attends as one on a GPU does."""

    def make(family: str, dtype: torch.dtype) -> Decoder:
        write_model(tmp_path, "tied", family=family)
        folder = ModelFolder(tmp_path)
        config = read_decoder_config(folder.config)
        return Decoder(config, folder.tensors(), _MetaOperations(dtype, META))

    return make


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("spec", [ALL, FROZEN_UNEMBEDDING], ids=["all", "frozen unembedding"])
@pytest.mark.parametrize(("family", "dtype"), [("qwen3", torch.bfloat16), ("qwen2", torch.float32)])
def test_a_training_step_mixes_no_devices(
    family: str, dtype: torch.dtype, spec: LoraSpec, recompute: bool, make_decoder: Callable[..., Decoder]
) -> None:
    decoder = make_decoder(family, dtype)
    lora = new_lora(decoder, spec)
    gradient, state = lora.enable_gradient(), AdamState.fresh(lora.flat)
    data = random_data(0, count=12, shared=16)
    batches = len(pack(data, 64))
    assert batches > 2
    micro_batching = MicroBatching(64, recompute)
    with OneDevice() as mode:
        result = run_pass(decoder, lora, data, CROSS_ENTROPY, gradient=gradient, micro_batching=micro_batching)
    assert [row.shape for row in result.logprobs] == [datum.targets.shape for datum in data]
    assert mode.counts["read"] == batches  # the host waits once in a micro-batch
    assert mode.counts["uploaded"] <= batches * 12
    with OneDevice() as mode:
        step_adam(lora.flat, gradient, state, ADAM)
    assert mode.counts["read"] <= 2
