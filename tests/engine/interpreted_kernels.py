"""Triton's kernels compute what float64 says; to be run with TRITON_INTERPRET=1, as `test_cuda_kernels` does.

Triton decides when it is imported whether it interprets, so these tests have a process of their own. The interpreter
knows no products of bfloat16: float16 stands for it, as another type of two bytes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
from decoders import new_lora, open_decoder
from engine_data import CROSS_ENTROPY, random_data
from small_models import write_model
from triton.runtime import interpreter

from mint.engine.cuda.fast_paths import Shapes, fused_paths
from mint.engine.cuda.fused_passes import FusedPasses
from mint.engine.cuda.graph_step import SPLIT_PAGES, StepContext, StepGraphs
from mint.engine.cuda.grouped_experts import GroupedMixtureOfExperts
from mint.engine.cuda.invariant_kernels import InvariantKernels
from mint.engine.cuda.invariant_operations import InvariantOperations, InvariantPackedAttention
from mint.engine.cuda.kernels import MAX_PARTS, TritonKernels
from mint.engine.cuda.lora_slots import TILE_ROWS, LoraPart
from mint.engine.cuda.operations import CudaOperations
from mint.engine.cuda.plain_kernels import PlainKernels
from mint.engine.cuda.self_check import judge
from mint.engine.lora import LoraRows
from mint.engine.model.attention import PAGE_POSITIONS
from mint.engine.model.config import read_decoder_config
from mint.engine.model.decoder import Decoder
from mint.engine.model.linear import DenseMatrix
from mint.engine.model.packed_attention import PackedAttention
from mint.engine.model.weights import AttentionWeights, MixtureWeights
from mint.engine.packing import Span, attention_blocks
from mint.engine.protocol import LoraSpec, MicroBatching
from mint.engine.sampling.decode_step import EagerSteps
from mint.engine.sampling.kv_cache import KVCache
from mint.engine.sampling.prefill import PromptPart, run_prompts
from mint.engine.training_pass import run_pass
from mint.models.folder import ModelFolder

EXACT, KERNELS, FUSED, INVARIANT = PlainKernels(torch.float64), TritonKernels(), FusedPasses(), InvariantKernels()
CLOSE = {torch.float32: 3e-6, torch.float16: 4e-3}


def _random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _close(found: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    limit = CLOSE[dtype] * max(1.0, float(exact.abs().max()))
    torch.testing.assert_close(found.double(), exact.double(), rtol=0, atol=limit)


def _rows(lengths: list[int], *, groups: int, dim: int, side: int = 1, kv_heads: int = 2, seed: int = 0) -> StepContext:
    """Rows of so many keys, 0 for padding, in random pages of their own."""
    columns = -(-max(lengths) // PAGE_POSITIONS)
    table = np.random.default_rng(seed).permutation(len(lengths) * columns).reshape(columns, -1)
    slots = np.zeros((1, len(lengths)))
    inputs = np.concatenate([slots, np.array(lengths)[None] - 1, slots, table])
    angles = _random(1024, dim // 2, seed=9)
    splits = 1 << (-(-columns // SPLIT_PAGES) - 1).bit_length()
    heads = (groups * kv_heads, kv_heads, dim, side)
    return StepContext(torch.from_numpy(inputs).int(), angles.cos(), angles.sin(), *heads, eps=1e-6, splits=splits)


def _planes(rows: StepContext, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    count = rows.inputs[3:].numel()
    shape = (count, rows.kv_heads // rows.side_by_side, PAGE_POSITIONS, rows.side_by_side * rows.head_dim)
    return _random(*shape, seed=3, dtype=dtype), _random(*shape, seed=4, dtype=dtype)


def _lora(rows: int, parts: int, outputs: int, rank: int, slots: list[int] | None = None) -> LoraPart:
    """The slots of tiles of rows; of one tile, if none are given."""
    numbers = torch.tensor(slots or [1], dtype=torch.int32).repeat_interleave(TILE_ROWS)[:rows]
    down, bs = _random(2, rows, parts * rank, seed=5), _random(3, outputs, rank, seed=6)
    return LoraPart(down, bs, torch.tensor([0.7, 0.3, 1.1]), numbers)


@pytest.mark.parametrize(
    ("groups", "dim", "side", "dtype"),
    [
        (1, 32, 2, torch.float32),
        (2, 128, 1, torch.float16),
        (4, 64, 1, torch.float32),
        (8, 24, 2, torch.float16),
        (2, 8, 1, torch.float32),
    ],
)
def test_attention_over_pages_is_a_softmax_over_the_rows_own_keys(
    groups: int, dim: int, side: int, dtype: torch.dtype
) -> None:
    for lengths in ([1, 200, 64, 0, 65], [257, 3, 0, 600, 256]):
        rows = _rows(lengths, groups=groups, dim=dim, side=side)
        keys, values = _planes(rows, dtype)
        queries = _random(len(lengths), rows.query_heads, dim, seed=2, dtype=dtype)
        wide, narrow = KERNELS.attend(queries, rows, keys, values)
        exact, _ = EXACT.attend(queries, rows, keys, values)
        real = [index for index, length in enumerate(lengths) if length]
        _close(wide[real], exact[real], dtype)
        assert torch.equal(wide, narrow.float())
        assert wide.isfinite().all() or rows.splits > 1  # what padding computes, nobody reads


def test_a_rows_attention_has_the_same_bits_in_any_company() -> None:
    rows = _rows([257, 3, 0, 200, 600], groups=2, dim=32)
    keys, values = _planes(rows, torch.float32)
    queries = _random(5, rows.query_heads, 32, seed=2)
    together = KERNELS.attend(queries, rows, keys, values)[0]
    for chosen, splits in (([3], 1), ([1], 1), ([0, 3], 2), ([3, 4, 0], 8)):
        own = replace(rows, inputs=rows.inputs[:, chosen].contiguous(), splits=splits)
        assert torch.equal(KERNELS.attend(queries[chosen], own, keys, values)[0], together[chosen])


@pytest.mark.parametrize(
    ("dim", "side", "normed", "biased", "rank", "dtype"),
    [
        (32, 1, True, False, 4, torch.float32),
        (24, 2, False, True, 0, torch.float16),
        (16, 2, True, True, 3, torch.float16),
    ],
)
def test_heads_are_normed_and_turned_and_lie_in_their_pages(
    dim: int, side: int, normed: bool, biased: bool, rank: int, dtype: torch.dtype
) -> None:
    rows = _rows([1, 200, 64, 0, 65], groups=3, dim=dim, side=side)
    width = (rows.query_heads + 2 * rows.kv_heads) * dim
    empty = DenseMatrix(torch.zeros(1, 1))
    weights = AttentionWeights(
        qkv=empty,
        qkv_bias=_random(width, seed=7) if biased else None,
        head_norms=_random(rows.query_heads + rows.kv_heads, dim, seed=8) if normed else None,
        o=empty,
        sinks=None,
    )
    lora = _lora(5, 3, width, rank) if rank else None
    product = _random(5, width, seed=1, dtype=dtype)
    planes, expected = _planes(rows, dtype), _planes(rows, dtype)
    queries = KERNELS.heads(product, lora, weights, rows, *planes)
    exact = EXACT.heads(product, lora, weights, rows, *expected)
    real = [0, 1, 2, 4]
    _close(queries[real], exact[real], dtype)
    for found, plane, before in zip(planes, expected, _planes(rows, dtype), strict=True):
        _close(found, plane, dtype)
        assert torch.equal((found != before).any(-1), (plane != before).any(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rank", [0, 3, 32])
def test_kernels_equal_exact_norms_swiglu_and_sums(rank: int, dtype: torch.dtype) -> None:
    x, weight = _random(5, 70), _random(70, seed=1)
    for found, exact in zip(KERNELS.norm(x, weight, 1e-6, dtype), EXACT.norm(x, weight, 1e-6, dtype), strict=True):
        _close(found, exact, torch.float32 if found.dtype == torch.float32 else dtype)
    product, lora = _random(5, 140, seed=2, dtype=dtype), _lora(5, 2, 140, rank) if rank else None
    for found, exact in zip(KERNELS.swiglu(product, lora), EXACT.swiglu(product, lora), strict=True):
        _close(found, exact, torch.float32 if found.dtype == torch.float32 else dtype)
    product, lora = _random(5, 70, seed=2, dtype=dtype), _lora(5, 1, 70, rank) if rank else None
    _close(KERNELS.add(product, x, lora), EXACT.add(product, x, lora), torch.float32)


@pytest.mark.parametrize(("rank", "parts"), [(1, 1), (16, 3), (5, 2), (64, 1)])
@pytest.mark.parametrize("slots", [[0], [2, -1, 0], [-1, -1, 1, 1]])
@pytest.mark.parametrize("inner", [70, 257, 2100])
def test_each_tile_of_rows_has_its_own_lora_or_none(inner: int, slots: list[int], rank: int, parts: int) -> None:
    rows, width = TILE_ROWS * len(slots) - 7, 30 * parts
    x, product, residual = (_random(rows, n, seed=seed) for seed, n in enumerate((inner, width, width)))
    lora = _lora(rows, parts, width, rank, slots)
    a = _random(3, parts * rank + 2, inner, seed=4)[:, 2:]  # slots lie apart
    a = torch.empty_strided(a.shape, (a.shape[1] * inner + 96, inner, 1)).copy_(a)
    sums, exact = KERNELS.shrink(x, a, lora.slots), EXACT.shrink(x, a, lora.slots).sum(0)
    assert 1 <= len(sums) <= MAX_PARTS
    _close(sums.sum(0), exact, torch.float32)
    for index, slot in enumerate(lora.slots.tolist()):
        own = x[index].double() @ a[slot].double().T if slot >= 0 else torch.zeros(parts * rank)
        _close(exact[index], own, torch.float32)
    if parts == 1:
        _close(KERNELS.add(product, residual, lora), EXACT.add(product, residual, lora), torch.float32)
    if parts == 2:
        _close(KERNELS.swiglu(product, lora)[0], EXACT.swiglu(product, lora)[0], torch.float32)


def test_a_diverged_lora_spoils_no_row_of_another() -> None:
    lora = _lora(48, 1, 70, 4, [0, -1, 2])
    product, residual = _random(48, 70, seed=2), _random(48, 70)
    sound = KERNELS.add(product, residual, lora)
    lora.bs[0] = torch.nan
    found = KERNELS.add(product, residual, lora)
    assert found[:16].isnan().all() and torch.equal(found[16:], sound[16:])


@torch.inference_mode()
def test_a_whole_step_has_the_logits_of_the_decoders_forward(tmp_path: Path) -> None:
    write_model(tmp_path, "tied")
    decoder = open_decoder(tmp_path)
    pages = KVCache(decoder.config, decoder.dtype, decoder.device, 1 << 24)
    for layer in range(decoder.config.num_hidden_layers):
        for index, plane in enumerate(pages.planes(layer)):
            plane[:20].copy_(_random(*plane[:20].shape, seed=index))
    with torch.inference_mode(mode=False):
        loras = [new_lora(decoder, LoraSpec(rank, 0, True, rank > 2, True)) for rank in (5, 2)]
        for lora in loras:
            lora.flat.copy_(_random(len(lora.flat), seed=2) * 0.05)
    graphs = StepGraphs(decoder, pages, KERNELS, capture=False, buckets=(64,))
    table, positions, tokens = np.arange(15).reshape(3, 5), np.array([3, 300, 64]), np.array([5, 6, 7])
    runs = [LoraRows(0, 1, loras[0]), LoraRows(1, 2, None), LoraRows(2, 3, loras[1])]
    found = graphs.open(table, table[:, 0], positions, runs).run(tokens, positions)
    expected = EagerSteps(decoder, pages).open(table, table[:, 0], positions, runs).run(tokens, positions)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


@torch.inference_mode()
def test_experts_together_give_what_the_loop_over_experts_gives(tmp_path: Path) -> None:
    widths: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
    write_model(tmp_path, "tied", family="qwen3_moe", **widths)
    decoder = open_decoder(tmp_path)
    own, mixture = decoder.weights.layers[0], decoder.config.experts_of(0)
    assert isinstance(own.mlp, MixtureWeights) and own.mlp_norm is not None and mixture is not None
    shared = own.mlp, own.mlp_norm, 0, decoder.config, mixture, decoder.loras
    grouped = GroupedMixtureOfExperts(decoder.operations, KERNELS, *shared)
    lora = new_lora(decoder, LoraSpec(5, 0, True, True, True))
    lora.flat.copy_(_random(len(lora.flat), seed=2) * 0.1)
    x, runs = _random(21, decoder.config.hidden_size), [LoraRows(0, 9, None), LoraRows(9, 21, lora)]
    _close(grouped(x, runs), decoder.mixtures[0](x, runs), torch.float32)
    with torch.inference_mode(mode=False):
        loras = [new_lora(decoder, LoraSpec(rank, 0, True, True, False)) for rank in (5, 3)]
        for seed, own in enumerate(loras):
            own.flat.copy_(_random(len(own.flat), seed=seed) * 0.1)
    cache = KVCache(decoder.config, decoder.dtype, decoder.device, 1 << 22)
    positions, table = np.array([3, 0, 17]), np.arange(3)[:, None]
    runs = [LoraRows(0, 1, loras[0]), LoraRows(1, 2, None), LoraRows(2, 3, loras[1])]
    expected = EagerSteps(decoder, cache).open(table, table[:, 0], positions, runs).run(positions, positions)
    for layer in decoder.mixtures:
        mlp, norm = decoder.weights.layers[layer].mlp, decoder.weights.layers[layer].mlp_norm
        assert isinstance(mlp, MixtureWeights) and norm is not None
        decoder.mixtures[layer] = GroupedMixtureOfExperts(
            decoder.operations, KERNELS, mlp, norm, layer, decoder.config, mixture, decoder.loras
        )
    graphs = StepGraphs(decoder, cache, KERNELS, capture=False, buckets=(64,))
    found = graphs.open(table, table[:, 0], positions, runs).run(positions, positions)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@torch.inference_mode()
def test_experts_with_biases_together_give_what_the_loop_over_experts_gives(tmp_path: Path) -> None:
    write_model(tmp_path, "tied", family="gpt_oss", intermediate_size=40)
    decoder = open_decoder(tmp_path)
    own, mixture = decoder.weights.layers[0], decoder.config.experts_of(0)
    assert isinstance(own.mlp, MixtureWeights) and own.mlp_norm is not None and mixture is not None
    shared = own.mlp, own.mlp_norm, 0, decoder.config, mixture, decoder.loras
    grouped = GroupedMixtureOfExperts(decoder.operations, KERNELS, *shared)
    lora = new_lora(decoder, LoraSpec(5, 0, True, True, True))
    lora.flat.copy_(_random(len(lora.flat), seed=2) * 0.1)
    x, runs = _random(21, decoder.config.hidden_size), [LoraRows(0, 9, None), LoraRows(9, 21, lora)]
    _close(grouped(x, runs), decoder.mixtures[0](x, runs), torch.float32)


@pytest.mark.parametrize("width", [70, 64])
def test_fused_passes_compute_what_autograd_says_in_float64(width: int) -> None:
    x, weight, residual, grad = (
        _random(*shape, seed=seed) for seed, shape in enumerate([(5, width), (width,)] + [(5, width)] * 2)
    )
    exact = x.double().requires_grad_()
    normed = torch.nn.functional.rms_norm(exact, (width,), weight.double(), 1e-6)
    normed.backward(grad.double())
    assert exact.grad is not None
    found, inverse = FUSED.rms_norm(x, weight, 1e-6)
    _close(found, normed.detach(), torch.float32)
    _close(FUSED.rms_norm(x, weight, 1e-6, residual)[0], normed.detach() + residual, torch.float32)
    _close(FUSED.rms_norm_backward(grad, x, inverse, weight), exact.grad, torch.float32)
    _close(FUSED.rms_norm_backward(grad, x, inverse, weight, residual), exact.grad + residual, torch.float32)
    wide = _random(5, 2 * width, seed=4)
    exact = wide.double().requires_grad_()
    gate, up = exact.chunk(2, -1)
    inner = torch.nn.functional.silu(gate) * up
    inner.backward(grad.double())
    assert exact.grad is not None
    _close(FUSED.swiglu(wide), inner.detach(), torch.float32)
    _close(FUSED.swiglu_backward(grad, wide), exact.grad, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("normed", "biased"), [(True, False), (False, True), (True, True), (False, False)])
@pytest.mark.parametrize(("heads", "dim"), [(4, 24), (30, 32)])
def test_fused_heads_compute_what_autograd_says_in_float64(
    heads: int, dim: int, normed: bool, biased: bool, dtype: torch.dtype
) -> None:
    total = heads + 3
    qkv, grad = _random(5, total, dim), _random(5, total, dim, seed=1, dtype=dtype)
    bias = _random(total * dim, seed=2) if biased else None
    norms = _random(heads, dim, seed=3) if normed else None
    angles = _random(5, 1, dim // 2, seed=4)
    cos, sin = angles.cos(), angles.sin()
    shifted = qkv.double() if bias is None else qkv.double() + bias.view(total, dim)
    exact = shifted.detach().requires_grad_()
    turned = exact[:, :heads]
    if norms is not None:
        turned = turned * (turned.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * norms
    pairs = torch.view_as_complex(torch.stack(turned.chunk(2, -1), -1))
    pairs = pairs * torch.polar(torch.ones(()).double(), angles.double())
    out = torch.cat([torch.cat([pairs.real, pairs.imag], -1), exact[:, heads:]], 1)
    out.backward(grad.double())
    assert exact.grad is not None
    found, inverse = FUSED.finish_heads(qkv, bias, norms, cos, sin, eps=1e-6, rotated_heads=heads, dtype=dtype)
    assert found.dtype == dtype
    _close(found, out.detach(), dtype)
    _close(qkv, shifted, torch.float32)  # with the bias, as the backward needs it
    read = qkv if normed else None
    own = FUSED.finish_heads_backward(grad, read, inverse, norms, cos, sin, rotated_heads=heads)
    assert own.dtype == torch.float32
    _close(own, exact.grad, torch.float32)


def test_fused_passes_pass_the_self_check() -> None:
    shapes = Shapes(80, 1100, 4, 2, 24, 2, 1e-6, True, True, "float32", "cpu")
    faults = {path.case: judge(path, is_timed=False).fault for path in fused_paths(shapes, FUSED, (1, 3))}
    assert len(faults) == 12 and not any(faults.values()), faults


def test_a_model_trains_with_fused_passes_as_without(tmp_path: Path) -> None:
    write_model(tmp_path, "tied")
    folder = ModelFolder(tmp_path)
    config, cpu = read_decoder_config(folder.config), torch.device("cpu")
    found = []
    for fused in (None, FUSED):
        operations = CudaOperations(torch.float32, cpu, memory_bytes=1 << 34, fused=fused)
        decoder = Decoder(config, folder.tensors(), operations)
        lora = new_lora(decoder, LoraSpec(4, 0, True, True, True))
        lora.flat.copy_(_random(len(lora.flat), seed=2) * 0.05)
        gradient = lora.enable_gradient()
        batching = MicroBatching(64, recompute=False)
        data = random_data(0, count=2)
        result = run_pass(decoder, lora, data, CROSS_ENTROPY, gradient=gradient, micro_batching=batching)
        found.append((np.concatenate(result.logprobs), gradient))
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=0, atol=1e-5)
    _close(found[1][1], found[0][1], torch.float32)
    assert found[0][1].abs().max() > 0


def _widen_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies the bits of bfloat16 as integers. Widened to float32, each factor is the same number,
    and each product is exact."""
    plain = interpreter.InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        wide = [
            interpreter.TensorHandle((own.data.astype(np.uint32) << 16).view(np.float32), triton.language.float32)
            if own.dtype.scalar == triton.language.bfloat16
            else own
            for own in (a, b)
        ]
        return plain(self, *wide, *others)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("inner", "outputs"), [(150, 131), (64, 128), (5, 3)])
def test_a_row_of_a_product_is_right_and_has_the_same_bits_in_any_company(
    inner: int, outputs: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    _widen_bfloat16(monkeypatch)
    x, weight = _random(70, inner, dtype=dtype), _random(outputs, inner, seed=1, dtype=dtype)
    exact = x.double() @ weight.double().t()
    for rounded in (torch.float32, dtype):
        together = INVARIANT.product(x, weight, rounded)
        limit = 3e-6 if rounded == torch.float32 else torch.finfo(rounded).eps
        torch.testing.assert_close(together.double(), exact, rtol=0, atol=limit * float(exact.abs().max()))
        for own in ([0], [69], [64, 3], list(range(65)), torch.randperm(70).tolist()):
            assert torch.equal(INVARIANT.product(x[own], weight, rounded), together[own])
    assert torch.equal(INVARIANT.linear(x, weight.t().contiguous().t()), INVARIANT.product(x, weight, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_attention_is_right_and_has_the_same_bits_in_any_company(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    _widen_bfloat16(monkeypatch)
    cpu = torch.device("cpu")

    def attend(spans: list[Span], heads: torch.Tensor) -> torch.Tensor:
        return InvariantPackedAttention(attention_blocks(spans), 6, 2, cpu, INVARIANT, PackedAttention)(0, heads)

    heads = _random(90, 10, 24, dtype=dtype)
    spans = [Span(0, 3), Span(3, 70), Span(70, 80, (3, 70)), Span(80, 90)]
    together = attend(spans, heads)
    exact = PackedAttention(attention_blocks(spans), 6, 2, cpu)(0, heads.double())
    limit = 3e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(together.double(), exact, rtol=0, atol=limit)
    assert torch.equal(attend([Span(0, 77)], heads[3:80])[67:], together[70:80])
    assert torch.equal(attend([Span(67, 77, (0, 67))], heads[3:80]), together[70:80])
    assert torch.equal(attend([Span(0, 10)], heads[80:]), together[80:])


def test_a_lora_beside_one_of_a_larger_rank_has_the_same_bits() -> None:
    product, residual, own = _random(16, 70, seed=2), _random(16, 70), _lora(16, 1, 70, 5)
    wide = replace(
        own,
        down=torch.nn.functional.pad(own.down, (0, 27)),
        bs=torch.nn.functional.pad(own.bs, (0, 27)).contiguous(),
    )
    assert torch.equal(KERNELS.add(product, residual, wide), KERNELS.add(product, residual, own))


@torch.inference_mode()
def test_a_sequence_is_prefilled_and_decoded_with_the_same_bits_in_any_company(tmp_path: Path) -> None:
    write_model(tmp_path, "tied")
    folder, cpu = ModelFolder(tmp_path), torch.device("cpu")
    operations = InvariantOperations(
        torch.float32, cpu, "silu", INVARIANT, FUSED, trained_attention=PackedAttention, memory_bytes=1 << 34
    )
    decoder = Decoder(read_decoder_config(folder.config), folder.tensors(), operations)
    plain = open_decoder(tmp_path)
    with torch.inference_mode(mode=False):
        loras = [new_lora(decoder, LoraSpec(rank, seed, True, rank > 2, True)) for seed, rank in enumerate((5, 2))]
        for lora in loras:
            lora.flat.copy_(_random(len(lora.flat), seed=2) * 0.05)
    prompts = [np.arange(5, 5 + count) for count in (70, 3, 20)]
    weights = [loras[0], None, loras[1]]

    def sample(model: Decoder, order: list[int], cached: int = 0) -> torch.Tensor:
        """Hidden states of the first prompt's end, and its next logits, beside others."""
        cache = KVCache(model.config, model.dtype, cpu, 1 << 22)
        table = np.arange(2 * len(order)).reshape(len(order), 2)
        parts = [PromptPart(prompts[own], 0, table[place], weights[own]) for place, own in enumerate(order)]
        place = order.index(0)
        if cached:
            run_prompts(model, cache, [replace(parts[place], tokens=prompts[0][:cached])])
            parts[place] = replace(parts[place], start=cached)
        hidden = run_prompts(model, cache, parts)
        end = sum(len(part.tokens) - part.start for part in parts[: place + 1])
        positions = np.array([len(prompts[own]) for own in order])
        runs = [LoraRows(row, row + 1, weights[own]) for row, own in enumerate(order)]
        steps = EagerSteps(model, cache) if model is plain else StepGraphs(model, cache, INVARIANT, capture=False)
        logits = steps.open(table, table[:, 0], positions, runs).run(positions, positions)
        return torch.cat([hidden[end - 1], logits[place]])

    alone = sample(decoder, [0])
    torch.testing.assert_close(alone, sample(plain, [0]), rtol=0, atol=5e-5)
    for order, cached in (([1, 0], 0), ([2, 1, 0], 0), ([0, 2], 66)):
        assert torch.equal(sample(decoder, order, cached), alone), order
