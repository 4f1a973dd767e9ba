"""A mixture of experts: a row's bits are its own, whoever else goes to the same experts and whatever their loras."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from decoders import new_lora, open_decoder
from engine_data import CROSS_ENTROPY, LORA, datum, take_gradient
from small_models import write_model
from torch import Tensor

from mint.engine.cpu.build import COMPILERS
from mint.engine.cpu.mixture_of_experts import NativeMixtureOfExperts
from mint.engine.lora import LoraRows, LoraWeights, SiteWeights, rows_of
from mint.engine.model.decoder import Decoder
from mint.engine.protocol import LoraSpec, ModelState, SampleJob, StopRule
from mint.engine.torch_engine import TorchEngine
from mint.models.folder import ModelFolder

WIDE: dict[str, Any] = {
    "hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 997,
    "num_experts": 20, "num_experts_per_tok": 8, "moe_intermediate_size": 100,
}  # fmt: skip
EVEN: dict[str, Any] = WIDE | {"moe_intermediate_size": 96}
"""Widths that the kernels in C are compiled for."""

NEEDS_COMPILER = pytest.mark.skipif(not any(shutil.which(name) for name in COMPILERS), reason="there is no C compiler")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
NATIVE = pytest.mark.parametrize("native", [False, pytest.param(True, marks=NEEDS_COMPILER)], ids=["torch", "native"])


@pytest.fixture(scope="module")
def compiled(native_folder: Path) -> Path:
    """Where kernels in C are kept."""
    return native_folder


def _decoder(place: Path, dtype: torch.dtype, compiled: Path | None, **changes: object) -> Decoder:
    """A random mixture; with the kernels in C, if they are `compiled` somewhere."""
    widths: dict[str, Any] = (WIDE if compiled is None else EVEN) | changes
    write_model(place, "tied", family="qwen3_moe", **widths)
    decoder = open_decoder(place, dtype, native=compiled)
    if compiled is not None and not isinstance(decoder.mixtures[0], NativeMixtureOfExperts):
        pytest.skip("this processor has no vectors of 16 numbers, or does not multiply bfloat16")
    return decoder


def _only_itself(layer: int, heads: Tensor, sinks: Tensor | None) -> Tensor:
    """An attention in which every row sees itself alone."""
    return heads[:, :6].flatten(1).contiguous()


@pytest.mark.parametrize("threads", [1, 2])
@NATIVE
@DTYPES
def test_a_row_does_not_depend_on_who_shares_its_experts(
    dtype: torch.dtype, native: bool, threads: int, tmp_path: Path, compiled: Path
) -> None:
    decoder = _decoder(tmp_path, dtype, compiled if native else None)
    generator = torch.Generator().manual_seed(0)
    loras: list[LoraWeights | None] = [None]
    for rank in (4, 16):
        own = new_lora(decoder, LoraSpec(rank, 0, False, True, False))
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


@NATIVE
@DTYPES
def test_a_layer_computed_again_for_its_gradient_gives_the_same_bits(
    dtype: torch.dtype, native: bool, tmp_path: Path, compiled: Path
) -> None:
    decoder = _decoder(tmp_path, dtype, compiled if native else None)
    generator = torch.Generator().manual_seed(0)
    weights = new_lora(decoder, LORA)
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


@NATIVE
def test_experts_without_rows_get_no_gradient(native: bool, tmp_path: Path, compiled: Path) -> None:
    """All positions hold one token, so in the first layer all go to the same two of six experts."""
    write_model(tmp_path, "tied", family="qwen3_moe", head_dim=32, moe_intermediate_size=32)
    engine = TorchEngine(dtype="float32", threads=1, device="cpu", native=compiled if native else None)
    engine.load_base("base", str(tmp_path))
    engine.create_model("m", "base", LORA)
    weights = engine.read_state("m").weights
    engine.write_state("m", ModelState({name: weight + 0.01 for name, weight in weights.items()}))  # B not zero
    engine.forward_backward("m", [datum([7] * 30)], CROSS_ENTROPY)
    gradients = take_gradient(engine, "m")
    prefix = "model.layers.0.mlp.experts"
    moved = {expert for expert in range(6) if np.abs(gradients[f"{prefix}.{expert}.up_proj.lora_B.weight"]).max() > 0}
    assert len(moved) == 2
    for expert in range(6):
        parts = [gradients[f"{prefix}.{expert}.{part}_proj.lora_A.weight"] for part in ("gate", "up", "down")]
        assert all((np.abs(part).max() > 0) == (expert in moved) for part in parts)


def _exact(
    x: Tensor, layer: dict[str, Tensor], site: dict[str, SiteWeights], scale: float, *, normed: bool, eps: float
) -> Tensor:
    """x + experts(norm(x)), expert by expert over all rows."""
    hidden = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * layer["post_attention_layernorm.weight"]
    best = (hidden @ layer["mlp.gate.weight"].t()).softmax(-1).topk(8, dim=-1)
    shares = best.values / best.values.sum(-1, keepdim=True) if normed else best.values
    for expert in range(20):
        own, loras = f"mlp.experts.{expert}", site[f"0.experts.{expert}.gate_up"]
        gate, up = (
            hidden @ (layer[f"{own}.{part}_proj.weight"] + scale * b @ a).t()
            for part, a, b in zip(("gate", "up"), loras.a.chunk(2), loras.bs, strict=True)
        )
        loras = site[f"0.experts.{expert}.down"]
        out = (F.silu(gate) * up) @ (layer[f"{own}.down_proj.weight"] + scale * loras.bs[0] @ loras.a).t()
        x = x + (shares * (best.indices == expert)).sum(-1, keepdim=True) * out
    return x


@NEEDS_COMPILER
@pytest.mark.parametrize("normed", [True, False])
@DTYPES
def test_native_mixtures_and_their_gradients_are_those_of_float64(
    dtype: torch.dtype, normed: bool, tmp_path: Path, compiled: Path
) -> None:
    decoder = _decoder(tmp_path, dtype, compiled, norm_topk_prob=normed)
    generator, prefix = torch.Generator().manual_seed(0), "model.layers.0."
    layer = {
        name.removeprefix(prefix): (part.read() if "norm" in name or "gate.weight" in name else part.read().to(dtype))
        for name, part in ModelFolder(tmp_path).tensors().items()
        if name.startswith(prefix)
    }
    lora = new_lora(decoder, LoraSpec(5, 0, False, True, False))
    lora.flat.normal_(0, 0.1, generator=generator)
    exact_sites = {
        name: SiteWeights(own.a.double().requires_grad_(), tuple(b.double().requires_grad_() for b in own.bs))
        for name, own in lora.sites.items()
    }
    lora.enable_gradient()
    x = torch.randn(70, 192, generator=generator)
    slope = torch.randn(70, 192, generator=generator)
    inputs = (x.clone().requires_grad_(), x.double().requires_grad_())
    found = decoder.mixtures[0](inputs[0], [LoraRows(0, 70, lora)])
    eps = decoder.config.rms_norm_eps
    doubles = {name: own.double() for name, own in layer.items()}
    expected = _exact(inputs[1], doubles, exact_sites, lora.scale, normed=normed, eps=eps)
    found.backward(slope)
    expected.backward(slope.double())
    near = 2e-5 if dtype == torch.float32 else 2e-2
    pairs = [(found, expected), (inputs[0].grad, inputs[1].grad)]
    for name, exact in exact_sites.items():
        if name.startswith("0."):
            own = lora.sites[name]
            pairs += [
                (mine.grad, theirs.grad) for mine, theirs in zip((own.a, *own.bs), (exact.a, *exact.bs), strict=True)
            ]
    largest = max(float(cast(Tensor, theirs).detach().abs().max()) for _, theirs in pairs[2:])
    for mine, theirs in pairs:
        mine, theirs = cast(Tensor, mine).detach().double(), cast(Tensor, theirs).detach()
        assert (mine - theirs).abs().max() <= near * max(float(theirs.abs().max()), 0.1 * largest)


@NEEDS_COMPILER
def test_native_mixtures_decode_and_score_as_transformers_does(tmp_path: Path, compiled: Path) -> None:
    reference = write_model(tmp_path, "untied", family="qwen3_moe", **EVEN)
    engine = TorchEngine(dtype="float32", threads=1, device="cpu", native=compiled)
    engine.load_base("base", str(tmp_path))
    prompts = np.random.default_rng(0).integers(2, 997, (5, 20))
    greedy = [SampleJob("base", None, prompt, 1, 12, 0.0, -1, 1.0, 0, StopRule()) for prompt in prompts]
    for prompt, result in zip(prompts, engine.sample(greedy), strict=True):
        sample = result.samples[0]
        whole = torch.from_numpy(np.concatenate([prompt, sample.tokens]))
        with torch.no_grad():
            logprobs = reference(whole[None]).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
        assert sample.tokens.tolist() == logprobs.argmax(-1).tolist()
        np.testing.assert_allclose(sample.logprobs, logprobs.max(-1).values.numpy(), atol=2e-5)


@NEEDS_COMPILER
def test_weights_that_have_diverged_are_routed_somewhere(tmp_path: Path, compiled: Path) -> None:
    """A row of NaN must neither crash nor touch the others."""
    decoder = _decoder(tmp_path, torch.float32, compiled)
    x = torch.randn(9, 192, generator=torch.Generator().manual_seed(0))
    broken = x.clone()
    broken[4, 7] = torch.nan
    with torch.no_grad():
        whole, found = (decoder.mixtures[1](rows, [LoraRows(0, 9, None)]) for rows in (x, broken))
    assert found[4].isnan().all()
    rest = [0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(found[rest], whole[rest])
