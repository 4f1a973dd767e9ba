"""Experts that are computed together give what the loop over experts gives, and nothing is read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from decoders import new_lora, open_decoder
from small_models import write_model
from torch import Tensor

from mint.engine.cuda.graph_step import StepGraphs
from mint.engine.cuda.grouped_experts import GroupedMixtureOfExperts, tile_pairs, tile_step_pairs, trained_tile_rows
from mint.engine.cuda.lora_slots import TILE_ROWS, common_spec
from mint.engine.cuda.plain_kernels import PlainKernels
from mint.engine.lora import LoraRows, LoraWeights
from mint.engine.model.decoder import Decoder
from mint.engine.model.weights import MixtureWeights
from mint.engine.protocol import LoraSpec
from mint.engine.sampling.decode_step import EagerSteps
from mint.engine.sampling.kv_cache import KVCache

WIDTHS: dict[str, Any] = {"num_experts": 20, "num_experts_per_tok": 4, "moe_intermediate_size": 40}
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


def _grouped(decoder: Decoder, layer: int) -> GroupedMixtureOfExperts:
    own, mixture = decoder.weights.layers[layer], decoder.config.experts_of(layer)
    assert isinstance(own.mlp, MixtureWeights) and own.mlp_norm is not None and mixture is not None
    assert GroupedMixtureOfExperts.fits(decoder.config, own.mlp)
    shared = own.mlp, own.mlp_norm, layer, decoder.config, mixture, decoder.loras
    return GroupedMixtureOfExperts(decoder.operations, PlainKernels(), *shared)


@pytest.mark.parametrize("count", [1, 5, 20])
@pytest.mark.parametrize("rows", [1, 17, 100])
def test_each_expert_has_its_pairs_in_tiles_of_its_own(rows: int, count: int) -> None:
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.rand(rows, count, generator=generator).topk(min(3, count)).indices
        if seed == 4:
            chosen = chosen[:, :1] * 0  # all rows go to one expert
        pairs = tile_pairs(chosen, count)
        assert pairs.places.unique().numel() == chosen.numel()
        assert torch.equal(pairs.experts[pairs.places].long(), chosen)
        starts = torch.cat([torch.zeros(1, dtype=torch.int32), pairs.ends[:-1]])
        assert not (pairs.ends % TILE_ROWS).any() and len(pairs.experts) >= int(pairs.ends[-1])
        for expert in range(count):
            inside = pairs.experts[starts[expert] : pairs.ends[expert]]
            assert (inside == expert).all() and len(inside) - int((chosen == expert).sum()) < TILE_ROWS
        assert (pairs.experts[int(pairs.ends[-1]) :] == -1).all()


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_together_give_what_the_loop_gives_with_any_loras(dtype: torch.dtype, tmp_path: Path) -> None:
    write_model(tmp_path, "tied", family="qwen3_moe", **WIDTHS)
    decoder = open_decoder(tmp_path, dtype)
    loop, generator = decoder.mixtures[0], torch.Generator().manual_seed(0)
    loras = [new_lora(decoder, LoraSpec(rank, 0, True, rank > 2, False)) for rank in (5, 2)]
    for lora in loras:
        lora.flat.copy_(torch.randn(lora.flat.shape, generator=generator) * 0.1)
    for runs in (
        [LoraRows(0, 1, None)],
        [LoraRows(0, 33, loras[0])],
        [LoraRows(0, 7, loras[0]), LoraRows(7, 8, None), LoraRows(8, 40, loras[1]), LoraRows(40, 64, loras[0])],
    ):
        x = torch.randn(runs[-1].stop, decoder.config.hidden_size, generator=generator)
        expected = loop(x, runs)
        found = _grouped(decoder, 0)(x, runs)
        torch.testing.assert_close(found, expected, rtol=0, atol=CLOSE[dtype] * float(expected.abs().max()))
        # what the loop reads afterwards are views of the same numbers
        assert torch.equal(loop(x, runs), expected)


JOINT = {
    "gpt_oss": {"num_local_experts": 20, "num_experts_per_tok": 4, "intermediate_size": 40},
    "qwen3_5_moe_text": WIDTHS,
}
"""Families whose experts have gate and up in one layer; those of GPT-OSS have biases and a clamped SwiGLU."""


def _loras(decoder: Decoder, generator: torch.Generator) -> list[LoraWeights]:
    """Three, of which the second does not train the experts."""
    specs = [LoraSpec(rank, 0, True, mlp, False) for rank, mlp in ((5, True), (2, False), (3, True))]
    with torch.inference_mode(mode=False):
        loras = [new_lora(decoder, spec) for spec in specs]
        for lora in loras:
            lora.flat.copy_(torch.randn(lora.flat.shape, generator=generator) * 0.1)
    return loras


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", JOINT)
def test_experts_with_gate_and_up_in_one_layer_give_what_the_loop_gives(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    write_model(tmp_path, "tied", family=family, **JOINT[family])
    decoder = open_decoder(tmp_path, dtype)
    loop, generator = decoder.mixtures[0], torch.Generator().manual_seed(0)
    norm = decoder.weights.layers[0].mlp_norm
    assert norm is not None
    norm.mul_(8)  # so that some gates and ups are clamped
    first, second, third = _loras(decoder, generator)
    for runs in (
        [LoraRows(0, 1, None)],
        [LoraRows(0, 33, first)],
        [LoraRows(0, 7, first), LoraRows(7, 8, None), LoraRows(8, 40, second), LoraRows(40, 64, third)],
    ):
        x = torch.randn(runs[-1].stop, decoder.config.hidden_size, generator=generator)
        expected = loop(x, runs)
        found = _grouped(decoder, 0)(x, runs)
        added = float((expected - x).abs().max())
        torch.testing.assert_close(found, expected, rtol=0, atol=CLOSE[dtype] * added)
        assert torch.equal(loop(x, runs), expected)


@torch.inference_mode()
def test_decoding_gpt_oss_has_the_logits_of_the_loop(tmp_path: Path) -> None:
    write_model(tmp_path, "tied", family="gpt_oss", **JOINT["gpt_oss"])
    loop, decoder = open_decoder(tmp_path), open_decoder(tmp_path)
    decoder.mixtures = {layer: _grouped(decoder, layer) for layer in decoder.mixtures}
    loras = _loras(decoder, torch.Generator().manual_seed(0))
    for chosen in ([None], [loras[0]], [loras[0], None, loras[1], loras[2]]):
        runs = [LoraRows(3 * place, 3 * place + 3, lora) for place, lora in enumerate(chosen)]
        count = runs[-1].stop
        found, expected = (_decoded(own, count, runs) for own in (decoder, loop))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def _decoded(decoder: Decoder, count: int, runs: list[LoraRows]) -> Tensor:
    """The logits of `count` sequences after three steps."""
    cache = KVCache(decoder.config, decoder.dtype, decoder.device, 1 << 24)
    rows = np.arange(count)
    step = EagerSteps(decoder, cache).open(rows[:, None], rows, np.zeros_like(rows), runs)
    return torch.stack([step.run((rows * 7 + at) % 90, np.full_like(rows, at)) for at in range(3)])


@torch.inference_mode()
@pytest.mark.parametrize("loras", [0, 1, 3])
@pytest.mark.parametrize("family", JOINT)
def test_they_read_nothing_back(family: str, loras: int, tmp_path: Path) -> None:
    write_model(tmp_path, "tied", family=family, **JOINT[family])
    decoder = open_decoder(tmp_path, torch.bfloat16, device="meta")  # tensors without data cannot be read
    own = [new_lora(decoder, LoraSpec(4, 0, True, True, False)) for _ in range(loras)] or [None]
    runs = [LoraRows(8 * place, 8 * place + 8, lora) for place, lora in enumerate(own)]
    x = torch.zeros(runs[-1].stop, decoder.config.hidden_size, device="meta")
    assert _grouped(decoder, 0)(x, runs).is_meta
    with pytest.raises(NotImplementedError):  # as the loop would
        decoder.mixtures[0](x, runs)


def test_with_a_gradient_it_is_the_loop(tmp_path: Path) -> None:
    write_model(tmp_path, "tied", family="qwen3_moe", **WIDTHS)
    decoder = open_decoder(tmp_path, torch.float32)
    loop = decoder.mixtures[0]
    x = torch.randn(9, decoder.config.hidden_size, generator=torch.Generator().manual_seed(0))

    def gradient(mixture: Any) -> Tensor:
        own = x.clone().requires_grad_()
        mixture(own, [LoraRows(0, 9, None)]).square().sum().backward()
        assert own.grad is not None
        return own.grad

    assert torch.equal(gradient(_grouped(decoder, 0)), gradient(loop))


@torch.inference_mode()
def test_nothing_is_read_back_from_the_device() -> None:
    pairs = tile_pairs(torch.zeros(64, 4, dtype=torch.int64, device="meta"), 20)
    assert pairs.experts.is_meta and pairs.experts.shape == ((64 * 4 + 20 * 15) // 16 * 16,)


@pytest.mark.parametrize("loras", [0, 3])
def test_each_expert_has_its_pairs_of_each_lora_in_tiles_of_their_own(loras: int) -> None:
    count, rows = 7, 50
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.rand(rows, count, generator=generator).topk(3).indices
        slots = torch.randint(-1, max(0, loras), (rows,), generator=generator).int()
        is_padding = torch.rand(rows, generator=generator) < 0.3
        pairs = tile_step_pairs(chosen, slots, is_padding, count, loras)
        assert pairs.places.unique().numel() == chosen.numel()
        real = pairs.places[~is_padding]
        assert torch.equal(pairs.experts[real].long(), chosen[~is_padding])
        assert torch.equal(pairs.slots[real], slots[~is_padding][:, None].expand_as(real))
        assert (pairs.places[is_padding] >= pairs.ends[-1]).all() and (pairs.experts[pairs.ends[-1] :] == -1).all()
        starts = torch.cat([torch.zeros(1, dtype=torch.int32), pairs.ends[:-1]])
        for expert in range(count):
            assert (pairs.experts[starts[expert] : pairs.ends[expert]] == expert).all()
        assert (pairs.slots.view(-1, TILE_ROWS) == pairs.slots.view(-1, TILE_ROWS)[:, :1]).all()


def _grouped_decoder(folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Decoder:
    write_model(folder, "tied", family="qwen3_moe", **WIDTHS)
    decoder = open_decoder(folder, dtype, device=device)
    decoder.mixtures = {layer: _grouped(decoder, layer) for layer in decoder.mixtures}
    return decoder


@torch.inference_mode()
def test_a_step_with_several_loras_has_the_logits_of_the_loop_over_experts(tmp_path: Path) -> None:
    write_model(tmp_path, "tied", family="qwen3_moe", **WIDTHS)
    loop, decoder = open_decoder(tmp_path, torch.float32), _grouped_decoder(tmp_path)
    generator, rng = torch.Generator().manual_seed(0), np.random.default_rng(0)
    with torch.inference_mode(mode=False):
        loras = [
            new_lora(decoder, LoraSpec(rank, 0, attn, True, False)) for rank, attn in ((5, True), (2, False), (3, True))
        ]
        for lora in loras:
            lora.flat.copy_(torch.randn(lora.flat.shape, generator=generator) * 0.1)
    cache = KVCache(decoder.config, decoder.dtype, decoder.device, 1 << 24)
    for layer in range(decoder.config.num_hidden_layers):
        for plane in cache.planes(layer):
            plane[:64].copy_(torch.randn(plane[:64].shape, generator=generator))
    graphs = StepGraphs(decoder, cache, PlainKernels(), capture=False, buckets=(64,))
    for chosen in ([None], [loras[0]], [loras[0], None, loras[1], loras[2]], [loras[2], loras[0]]):
        ends = np.cumsum(rng.integers(1, 12, len(chosen))).tolist()
        runs = [LoraRows(a, b, lora) for a, b, lora in zip([0, *ends], ends, chosen, strict=False)]
        table, positions = rng.permutation(64)[: ends[-1]][:, None], rng.integers(0, 60, ends[-1])
        tokens = rng.integers(0, decoder.config.vocab_size, ends[-1])
        found = graphs.open(table, table[:, 0], positions, runs).run(tokens, positions)
        expected = EagerSteps(loop, cache).open(table, table[:, 0], positions, runs).run(tokens, positions)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@torch.inference_mode()
def test_a_captured_step_with_experts_waits_for_nothing(tmp_path: Path) -> None:
    decoder = _grouped_decoder(tmp_path, torch.bfloat16, "meta")  # tensors without data cannot be read
    cache = KVCache(decoder.config, decoder.dtype, decoder.device, 1 << 24)
    graphs = StepGraphs(decoder, cache, PlainKernels(), capture=False, buckets=(64,))
    loras = [new_lora(decoder, LoraSpec(4, 0, True, True, False)) for _ in range(3)]
    kind = common_spec(loras)
    graphs.place(kind, loras)
    inputs = torch.zeros((5, 64), dtype=torch.int32, device="meta")
    rules = torch.zeros((4, 64), dtype=torch.float64, device="meta")
    runs = [LoraRows(0, 64, loras[0])]
    assert graphs.drawn(inputs, 1, kind, runs, rules, is_restricted=True).is_meta


@pytest.mark.parametrize("rows", [1, 33, 900])
@pytest.mark.parametrize("trains_experts", [True, False])
@pytest.mark.parametrize("family", ["qwen3_moe", *JOINT])
def test_a_gradient_through_experts_together_is_that_of_the_loop(
    family: str, trains_experts: bool, rows: int, tmp_path: Path
) -> None:
    write_model(tmp_path, "tied", family=family, **(JOINT.get(family) or WIDTHS))
    decoder, generator = open_decoder(tmp_path), torch.Generator().manual_seed(0)
    lora = new_lora(decoder, LoraSpec(5, 0, True, trains_experts, False))
    lora.flat.copy_(torch.randn(lora.flat.shape, generator=generator) * 0.1)
    gradient = lora.enable_gradient()
    x = torch.randn(rows, decoder.config.hidden_size, generator=generator)
    weights = torch.randn(x.shape, generator=generator)
    found = []
    for mixture in (decoder.mixtures[0], _grouped(decoder, 0)):
        gradient.zero_()
        own = x.clone().requires_grad_()
        out = mixture(own, [LoraRows(0, rows, lora)])
        for _ in range(2):  # gradients are added to those that are there
            (out * weights).sum().backward(retain_graph=True)
        assert own.grad is not None
        found.append((out.detach(), own.grad, gradient.clone()))
    assert bool(found[0][2].any()) == trains_experts
    for expected, together in zip(*found, strict=True):
        torch.testing.assert_close(together, expected, rtol=0, atol=2e-5 * max(1e-3, float(expected.abs().max())))


def test_a_base_in_bfloat16_has_nearly_the_gradient_of_the_loop(tmp_path: Path) -> None:
    write_model(tmp_path, "tied", family="qwen3_moe", **WIDTHS)
    decoder, generator = open_decoder(tmp_path, torch.bfloat16), torch.Generator().manual_seed(0)
    lora = new_lora(decoder, LoraSpec(4, 0, True, True, False))
    lora.flat.copy_(torch.randn(lora.flat.shape, generator=generator) * 0.1)
    gradient = lora.enable_gradient()
    x = torch.randn(70, decoder.config.hidden_size, generator=generator)
    found = []
    for mixture in (decoder.mixtures[0], _grouped(decoder, 0)):
        gradient.zero_()
        mixture(x, [LoraRows(0, len(x), lora)]).square().sum().backward()  # x needs no gradient, the lora does
        found.append(gradient.clone())
    assert torch.nn.functional.cosine_similarity(*found, dim=0) > 0.999
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=3e-2 * float(found[0].abs().max()))


def test_tiles_of_training_grow_with_the_pairs_and_add_at_most_a_quarter() -> None:
    for pairs, count in ((8, 128), (2048, 128), (8192, 8), (131072, 128), (131072, 4)):
        rows = trained_tile_rows(pairs, count)
        assert rows in (16, 32, 64, 128)
        assert rows == 16 or count * (rows - 1) <= pairs / 4
