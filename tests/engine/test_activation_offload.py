"""Activations that are offloaded between forward and backward: the same bits, and nothing of them stays in memory."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from engine_data import ADAM, CROSS_ENTROPY, LORA, random_data
from small_models import write_model

from mint.engine.memory.activation_offload import offloaded
from mint.engine.model.autograd import backward
from mint.engine.torch_engine import TorchEngine


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_a_training_run_has_the_same_bits_with_and_without_offload(
    family: str, dtype: str, tmp_path: Path, device: str
) -> None:
    write_model(tmp_path, "tied", family=family)
    digests, logprobs = set(), set()
    result = None
    for offload in (False, True):
        engine = TorchEngine(
            dtype="float32" if dtype == "float32" else "bfloat16",
            threads=1,
            device=device,
            recompute=True,
            offload_activations=offload,
        )
        assert engine.load_base("base", str(tmp_path)).settings["offload_activations"] is offload
        engine.create_model("m", "base", LORA)
        for step in range(3):
            result = engine.forward_backward("m", random_data(step, count=4, shared=9), CROSS_ENTROPY)
            engine.optim_step("m", ADAM)
        assert result is not None
        logprobs.add(np.concatenate(result.logprobs).tobytes())
        digests.add(engine.state_digest("m"))
    assert len(digests) == len(logprobs) == 1


def test_what_autograd_saves_comes_back_as_it_was_and_is_not_kept(device: str) -> None:
    found: list[torch.Tensor] = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x + 1

        @staticmethod
        def backward(ctx: torch.autograd.function.FunctionCtx, *grads: torch.Tensor) -> torch.Tensor:
            found.extend(ctx.saved_tensors)
            return grads[0]

    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(5, 7, generator=generator).to(device, dtype).t()  # not contiguous
        for dtype in (torch.float32, torch.bfloat16)
    ]
    leaves = [own.clone().requires_grad_() for own in tensors]
    with offloaded(torch.device(device)):
        outs = [cast(torch.Tensor, Probe.apply(leaf)) for leaf in leaves]
    for out in reversed(outs):
        backward(out, torch.ones_like(out))
    for own, back, leaf in zip(tensors, reversed(found), leaves, strict=True):
        assert torch.equal(own, back) and back.dtype == own.dtype and back.device == own.device
        assert back.data_ptr() != leaf.data_ptr()
