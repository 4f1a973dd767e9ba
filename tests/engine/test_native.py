"""The kernels in C: the numbers of float64, the same bits in every company, and the whole engine on top of them."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_data import CROSS_ENTROPY, LORA, datum, flat, job, random_data, train
from small_models import FAMILIES, write_model
from torch import Tensor

from mint.engine.cpu.attention import (
    DecodedRows,
    NativePackedAttention,
    PackedRows,
    attend_packed,
    attend_packed_backward,
    attend_pages,
)
from mint.engine.cpu.build import COMPILERS
from mint.engine.cpu.kernels import HEAD_DIMS, NativeKernels
from mint.engine.cpu.operations import NativeOperations
from mint.engine.model.attention import PAGE_POSITIONS
from mint.engine.model.torch_operations import TorchOperations
from mint.engine.packing import Span, attention_blocks
from mint.engine.protocol import SampleResult
from mint.engine.torch_engine import TorchEngine

pytestmark = pytest.mark.skipif(not any(shutil.which(name) for name in COMPILERS), reason="there is no C compiler")

DTYPES = [torch.float32, torch.bfloat16]
SHAPE: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip


@pytest.fixture(scope="session")
def kernels(native_folder: Path) -> NativeKernels:
    return NativeKernels(native_folder)


@pytest.fixture(scope="session")
def operations(kernels: NativeKernels) -> NativeOperations:
    return NativeOperations(torch.float32, kernels)


def _attend_in_float64(
    heads: Tensor, query_heads: int, kv_heads: int, visible: np.ndarray, sinks: Tensor | None
) -> Tensor:
    """Plain masked attention of heads [T, H, D]; bool [T, T] says who sees whom; `sinks` have no value."""
    count, _, dim = heads.shape
    query, key, value = heads.split([query_heads, kv_heads, kv_heads], dim=1)
    scores = torch.einsum("tkgd,jkd->kgtj", query.view(count, kv_heads, -1, dim), key) / math.sqrt(dim)
    scores = scores.masked_fill(~torch.from_numpy(visible), -math.inf)
    if sinks is not None:
        added = sinks.to(scores.dtype).view(kv_heads, -1, 1, 1).expand(-1, -1, count, 1)
        scores = torch.cat([scores, added], dim=-1)
    shares = scores.softmax(-1)[..., :count]
    return torch.einsum("kgtj,jkd->tkgd", shares, value).reshape(count, -1)


def _spans() -> tuple[list[Span], np.ndarray]:
    """A prompt with three samples, and a sequence alone; and who sees whom."""
    spans, visible = [Span(0, 21)], np.zeros((90, 90), bool)
    spans += [Span(21, 38, (0, 21)), Span(38, 39, (0, 21)), Span(39, 57, (0, 21)), Span(57, 90)]
    for span in spans:
        for row in range(span.start, span.stop):
            visible[row, span.start : row + 1] = True
            visible[row, span.prefix[0] : span.prefix[1]] = True
    return spans, visible


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", sorted(HEAD_DIMS))
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize(
    ("query_heads", "kv_heads", "window"),
    [(4, 2, 0), (3, 3, 0), (6, 2, 0), (6, 1, 0), (10, 1, 0), (4, 2, 3), (6, 1, 17), (3, 3, 30)],
)
def test_attention_and_its_gradient_are_those_of_float64(
    kernels: NativeKernels, dim: int, query_heads: int, kv_heads: int, window: int, has_sinks: bool, dtype: torch.dtype
) -> None:
    spans, visible = _spans()
    sinks = torch.linspace(-4, 40, query_heads) if has_sinks else None
    for seen in visible:
        seen[np.flatnonzero(seen)[: -window if window else 0]] = False
    heads = torch.randn(90, query_heads + 2 * kv_heads, dim, generator=torch.Generator().manual_seed(dim)).to(dtype)
    exact = heads.double().requires_grad_()
    expected = _attend_in_float64(exact, query_heads, kv_heads, visible, sinks)
    slope = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected.backward(slope.double())
    own = heads.clone().requires_grad_()
    windows = {0: window} if window else {}
    attention = NativePackedAttention(kernels, attention_blocks(spans), query_heads, kv_heads, windows)
    found = attention(0, own, sinks)
    found.backward(slope)
    near: float = 1e-5 if dtype == torch.float32 else 1e-2
    assert exact.grad is not None and own.grad is not None
    torch.testing.assert_close(found.double(), expected.detach(), rtol=near, atol=near)
    # A gradient in bfloat16 is a sum of rounded shares; the float32 one is not.
    torch.testing.assert_close(own.grad.double(), exact.grad, rtol=near, atol=near if dtype == torch.float32 else 3e-2)
    error = (own.grad.double() - exact.grad).square().mean().sqrt() / exact.grad.square().mean().sqrt()
    assert error < (1e-6 if dtype == torch.float32 else 3e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 1, 9, 64, 100])
@pytest.mark.parametrize("sinks", [None, torch.tensor([-2.0, 0.3, 1.0, 5.0])], ids=["", "sinks"])
def test_a_token_alone_gets_the_bits_that_it_gets_among_others(
    kernels: NativeKernels, window: int, sinks: Tensor | None, dtype: torch.dtype
) -> None:
    """From pages, in any order of neighbours, and from packed rows."""
    count, kv_heads, dim = 150, 2, 32
    heads = torch.randn(count, 8, dim, generator=torch.Generator().manual_seed(3)).to(dtype)
    rows = PackedRows(4, kv_heads, np.arange(count), *(np.zeros(count, np.int64) for _ in range(3)))
    whole = attend_packed(kernels, rows, heads, window, sinks)
    pages = heads.new_zeros(2, 5, kv_heads, PAGE_POSITIONS, dim)
    table = np.array([[3, 0, 4]])
    for position in range(count):
        for plane in range(2):
            own = heads[position, 4 + plane * kv_heads :][:kv_heads]
            pages[plane, table[0, position // PAGE_POSITIONS], :, position % PAGE_POSITIONS] = own
    for wanted in (np.array([0]), np.array([63]), np.array([64]), np.array([149, 5, 15, 16, 128, 127])):
        decoded = DecodedRows(4, kv_heads, 1, PAGE_POSITIONS, np.repeat(table, len(wanted), axis=0), wanted)
        out = attend_pages(kernels, decoded, heads[wanted].contiguous(), pages[0], pages[1], window, sinks)
        assert torch.equal(out, whole[wanted])


def test_norms_heads_and_swiglu_are_those_of_float64(operations: NativeOperations) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(37, 96, generator=generator) * 5, torch.rand(96, generator=generator) + 0.5
    out, inverse = operations.rms_norm(x, weight, 1e-6)
    exact = (x.double().square().mean(1, keepdim=True) + 1e-6).rsqrt()
    torch.testing.assert_close(inverse.double(), exact, rtol=1e-6, atol=0)
    torch.testing.assert_close(out.double(), x.double() * exact * weight.double(), rtol=1e-6, atol=1e-6)
    added, _ = operations.rms_norm(x, weight, 1e-6, x)
    torch.testing.assert_close(added, out + x, rtol=1e-6, atol=1e-6)
    wide = torch.randn(37, 64, generator=generator) * torch.logspace(-3, 2, 37)[:, None]
    wide[0, 0], wide[1, 1] = 200.0, -200.0
    gate, up = wide.double().chunk(2, dim=1)
    torch.testing.assert_close(operations.swiglu(wide).double(), gate * gate.sigmoid() * up, rtol=2e-6, atol=1e-30)


def test_gelu_and_its_gradient_are_those_of_float64(kernels: NativeKernels) -> None:
    operations = NativeOperations(torch.float32, kernels, "gelu_tanh")
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(37, 64, generator=generator) * torch.logspace(-3, 15, 37)[:, None]
    slope, exact = torch.randn(37, 32, generator=generator), wide.double().requires_grad_()
    gate, up = exact.chunk(2, dim=1)
    gated = torch.nn.functional.gelu(gate, approximate="tanh") * up
    torch.testing.assert_close(operations.swiglu(wide).double(), gated.detach(), rtol=1e-5, atol=1e-6)
    (expected,) = _gradients_in_float64(gated, slope, exact)
    found = operations.swiglu_backward(slope, wide).double()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_clamped_swiglu_and_its_gradient_are_those_of_float64(kernels: NativeKernels) -> None:
    operations = NativeOperations(torch.float32, kernels, "clamped_swiglu")
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(37, 64, generator=generator) * torch.logspace(-3, 3, 37)[:, None]
    slope, exact = torch.randn(37, 32, generator=generator), wide.double().requires_grad_()
    gate, up = exact[:, ::2].clamp(max=7), exact[:, 1::2].clamp(-7, 7)
    gated = gate * (1.702 * gate).sigmoid() * (up + 1)
    (expected,) = _gradients_in_float64(gated, slope, exact)
    for own in (operations, TorchOperations(torch.float32, torch.device("cpu"), "clamped_swiglu")):
        torch.testing.assert_close(own.swiglu(wide).double(), gated.detach(), rtol=1e-5, atol=1e-6)
        again, active = own.swiglu_again(wide)
        assert torch.equal(again, own.swiglu(wide))
        for known in (None, active):
            found = own.swiglu_backward(slope.clone(), wide, known)
            torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("width", [64, 20])
def test_a_bias_is_added(operations: NativeOperations, width: int) -> None:
    x, bias = torch.randn(7, width), torch.randn(width)
    assert torch.equal(operations.add_bias(x, bias), x + bias)


@pytest.mark.parametrize("normed", [True, False])
def test_heads_are_biased_normed_and_turned_as_in_float64(operations: NativeOperations, *, normed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    qkv, bias = torch.randn(11, 8, 64, generator=generator), torch.randn(8 * 64, generator=generator)
    norms = torch.rand(6, 64, generator=generator) + 0.5 if normed else None
    angles = torch.rand(11, 1, 32, generator=generator) * 7
    exact = qkv.double() + bias.double().view(8, 64)
    turned, scale = exact[:, :6], None
    if norms is not None:
        scale = (turned.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        turned = turned * scale * norms.double()
    first, second = turned.chunk(2, dim=-1)
    cos, sin = angles.double().cos(), angles.double().sin()
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    heads, inverse = operations.finish_heads(qkv, bias, norms, angles.cos(), angles.sin(), eps=1e-6, rotated_heads=6)
    torch.testing.assert_close(heads.double(), torch.cat([turned, exact[:, 6:]], dim=1), rtol=1e-5, atol=1e-5)
    assert (inverse is None) == (scale is None)
    if inverse is not None and scale is not None:
        torch.testing.assert_close(inverse.double(), scale, rtol=1e-5, atol=0)


def _gradients_in_float64(value: Tensor, slope: Tensor, *leaves: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad((value * slope.double()).sum(), leaves))


def test_gradients_of_norms_and_swiglu_are_those_of_float64(operations: NativeOperations) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(37, 96, generator=generator) * 5, torch.rand(96, generator=generator) + 0.5
    slope, residual = (torch.randn(37, 96, generator=generator) for _ in range(2))
    out, inverse = operations.rms_norm(x, weight, 1e-6)
    assert torch.equal(operations.rms_norm_again(x, inverse, weight), out)
    exact = x.double().requires_grad_()
    normed = exact * (exact.square().mean(1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    (expected,) = _gradients_in_float64(normed, slope, exact)
    for added in (None, residual):
        found = operations.rms_norm_backward(slope, x, inverse, weight, added).double()
        whole = expected if added is None else expected + added.double()
        torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-6)
    wide = torch.randn(37, 64, generator=generator) * torch.logspace(-3, 2, 37)[:, None]
    wide[0, 0], wide[1, 1] = 200.0, -200.0
    slope, exact = torch.randn(37, 32, generator=generator), wide.double().requires_grad_()
    gate, up = exact.chunk(2, dim=1)
    (expected,) = _gradients_in_float64(gate * gate.sigmoid() * up, slope, exact)
    torch.testing.assert_close(operations.swiglu_backward(slope, wide).double(), expected, rtol=1e-5, atol=1e-6)


def test_rows_are_gated_by_one_number_each_as_in_float64(operations: NativeOperations) -> None:
    generator = torch.Generator().manual_seed(0)
    x, inputs = torch.randn(37, 32, generator=generator), torch.randn(37, 96, generator=generator)
    gate = torch.randn(96, generator=generator)
    expected = torch.sigmoid(inputs.double() @ gate.double())[:, None]
    for chosen in (operations, TorchOperations(torch.float32, torch.device("cpu"))):
        found, shares = chosen.gate_rows(x, inputs, gate)
        torch.testing.assert_close(shares.double(), expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found.double(), x.double() * expected, rtol=1e-5, atol=1e-6)
        for row in (0, 20, 36):
            own = slice(row, row + 1)
            assert torch.equal(chosen.gate_rows(x[own], inputs[own], gate)[0], found[own])


def test_columns_are_taken_in_any_order(operations: NativeOperations) -> None:
    x, order = torch.randn(9, 50), torch.randperm(50)[:37]
    assert torch.equal(operations.take_columns(x, order), x[:, order])
    with pytest.raises(IndexError):
        operations.take_columns(x, torch.tensor([3, 50]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [True, False])
def test_the_gradient_of_finished_heads_is_that_of_float64(
    operations: NativeOperations, *, normed: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    qkv, slope = torch.randn(11, 8, 64, generator=generator), torch.randn(11, 8, 64, generator=generator).to(dtype)
    norms = torch.rand(6, 64, generator=generator) + 0.5 if normed else None
    angles = torch.rand(11, 1, 32, generator=generator) * 7
    exact = qkv.double().requires_grad_()
    turned, inverse = exact[:, :6], None
    if norms is not None:
        scale = (turned.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        turned, inverse = turned * scale * norms.double(), scale.detach().float()
    first, second = turned.chunk(2, dim=-1)
    cos, sin = angles.double().cos(), angles.double().sin()
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    (expected,) = _gradients_in_float64(torch.cat([turned, exact[:, 6:]], dim=1), slope, exact)
    read = qkv if normed else None
    found = operations.finish_heads_backward(slope, read, inverse, norms, angles.cos(), angles.sin(), rotated_heads=6)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_the_gradient_of_attention_has_the_same_bits_for_any_number_of_threads(kernels: NativeKernels) -> None:
    rows = PackedRows(16, 4, np.arange(90), *(np.zeros(90, np.int64) for _ in range(3)))
    heads, slope = torch.randn(90, 24, 128), torch.randn(90, 16 * 128)
    found, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(attend_packed_backward(kernels, rows, heads, slope))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_what_is_not_finite_stays_so(kernels: NativeKernels) -> None:
    heads = torch.randn(20, 3, 32)
    heads[4, 1, 7] = math.nan
    rows = PackedRows(1, 1, np.arange(20), *(np.zeros(20, np.int64) for _ in range(3)))
    out = attend_packed(kernels, rows, heads)
    assert out[:4].isfinite().all() and out[4:].isnan().all()


def _engine(folder: Path, native: Path | None, dtype: str, threads: int = 1) -> TorchEngine:
    engine = TorchEngine(dtype=dtype, threads=threads, device="cpu", native=native)  # ty: ignore[invalid-argument-type]
    info = engine.load_base("base", str(folder))
    assert info.settings["attention"] == ("torch" if native is None else "native")
    engine.create_model("m", "base", LORA)
    train(engine, "m")
    engine.publish("m", "w")
    return engine


def _bits(result: SampleResult) -> list[tuple[bytes, bytes]]:
    return [(sample.tokens.tobytes(), sample.logprobs.tobytes()) for sample in result.samples]


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("family", "threads"), [*((family, 1) for family in FAMILIES), ("qwen3", 2)])
def test_the_engine_s_promises_hold_with_them(
    native_folder: Path, tmp_path: Path, family: str, dtype: str, threads: int
) -> None:
    """Sampler and trainer agree bit for bit, and company changes nothing."""
    write_model(tmp_path, "tied", family=family, **SHAPE)
    engine = _engine(tmp_path, native_folder, dtype, threads)
    rng = np.random.default_rng(5)
    jobs = [
        job(rng.integers(20, 90, size).tolist(), weights_id="w", num_samples=count, max_tokens=40, seed=size)
        for size, count in ((3, 1), (21, 4), (64, 2), (70, 8), (130, 1))
    ]
    together = engine.sample(jobs)
    for own, result in zip(jobs, together, strict=True):
        assert _bits(engine.sample([own])[0]) == _bits(result)
        for sample in result.samples:
            whole = np.concatenate([own.prompt, sample.tokens])
            passed = engine.forward("m", [datum(whole, prompt=len(own.prompt))], CROSS_ENTROPY)
            assert np.array_equal(passed.logprobs[0][len(own.prompt) - 1 :], sample.logprobs)


@pytest.mark.parametrize("family", FAMILIES)
def test_training_is_that_of_torch_s_own_operations(native_folder: Path, tmp_path: Path, family: str) -> None:
    write_model(tmp_path, "tied", family=family, **SHAPE)
    data = random_data(4, count=8, shared=12)
    engines = [_engine(tmp_path, native, "float32") for native in (None, native_folder)]
    passes = [engine.forward_backward("m", data, CROSS_ENTROPY) for engine in engines]
    for ours, theirs in zip(*(own.logprobs for own in passes), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-4)  # two steps of training lie before
    states = [engine.read_state("m").weights for engine in engines]
    distances = np.abs(flat(states[1]) - flat(states[0]))
    assert np.quantile(distances, 0.999) < 1e-5, np.sort(distances)[-20:]
    # Adam divides by the gradient's size: where that is near 0, a step of 1e-2 follows the last bits of the gradient.
    assert distances.max() < 1e-3


def test_a_model_of_other_widths_is_computed_without_them(native_folder: Path, tmp_path: Path) -> None:
    write_model(tmp_path, "untied")  # head dimension 8
    engine = TorchEngine(dtype="float32", threads=1, device="cpu", native=native_folder)
    assert engine.load_base("base", str(tmp_path)).settings["attention"] == "torch"
