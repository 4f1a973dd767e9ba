"""FlexAttention over packed rows: values and gradients are those of the definition, and any layout needs one kernel."""

from __future__ import annotations

import threading
from dataclasses import asdict
from typing import cast

import numpy as np
import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
from packed_layouts import LAYOUTS, attend_by_definition, lay_out
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._dynamo.testing import CompileCounterWithBackend

from mint.engine.cuda.attention import (
    MAX_COMPILED,
    TILE,
    FlexPackedAttention,
    Seen,
    compiled_attention,
    find_tiles,
    list_seen,
    padded_rows,
    within_window,
)
from mint.engine.cuda.fast_paths import FLEX, SPANS, Shapes, paths
from mint.engine.cuda.self_check import judge
from mint.engine.model.autograd import recomputed
from mint.engine.model.packed_attention import PackedAttention
from mint.engine.packing import Span, attention_blocks

QUERY_HEADS, KV_HEADS, SIZE = 4, 2, 16
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@pytest.fixture(autouse=True)
def _gradients_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch has them for a GPU's sake and refuses them on a CPU, where nobody would want to wait."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)


def _random_layout(seed: int) -> list[Span]:
    rng = np.random.default_rng(seed)
    groups = [(int(rng.integers(1, 200)), rng.integers(1, 150, int(rng.integers(0, 5))).tolist()) for _ in range(3)]
    return lay_out(groups)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("layout", "window"), [*((layout, 0) for layout in (*LAYOUTS, 0, 1)), (0, 33), (1, 150)])
def test_values_and_gradients_are_those_of_the_definition(layout: str | int, window: int, device: str) -> None:
    spans = lay_out(LAYOUTS[layout]) if isinstance(layout, str) else _random_layout(layout)
    blocks, generator = attention_blocks(spans), torch.Generator().manual_seed(0)
    drawn = torch.randn(spans[-1].stop, QUERY_HEADS + 2 * KV_HEADS, SIZE, generator=generator)
    grad = torch.randn(spans[-1].stop, QUERY_HEADS * SIZE, generator=generator)
    exact = drawn.double().requires_grad_()
    expected = attend_by_definition(exact, spans, KV_HEADS, window)
    expected.backward(grad.double())
    windows = {1: window} if window else {}
    for kind in (FlexPackedAttention, PackedAttention):
        heads = drawn.to(device, copy=True).requires_grad_()
        out = kind(blocks, QUERY_HEADS, KV_HEADS, heads.device, windows)(1, heads)
        out.backward(grad.to(device))
        assert heads.grad is not None and exact.grad is not None
        torch.testing.assert_close(out.cpu().double(), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(heads.grad.cpu().double(), exact.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_that_are_only_read_are_seen_and_have_no_result(device: str) -> None:
    """As in a prefill of what follows a kept prefix."""
    spans = [Span(300, 340, (0, 170)), Span(340, 500, (170, 300)), Span(500, 511)]
    heads = torch.randn(511, QUERY_HEADS + 2 * KV_HEADS, SIZE, generator=torch.Generator().manual_seed(0))
    heads[:300, :QUERY_HEADS] = torch.nan
    arguments = (attention_blocks(spans), QUERY_HEADS, KV_HEADS)
    out = FlexPackedAttention(*arguments, torch.device(device))(0, heads.to(device)).cpu()
    expected = PackedAttention(*arguments, torch.device("cpu"))(0, heads)
    assert out.shape == (211, QUERY_HEADS * SIZE)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_what_is_not_finite_in_one_sequence_stays_there(poison: float, device: str) -> None:
    spans = lay_out([(40, [31, 30]), (20, [])])
    heads = torch.randn(121, QUERY_HEADS + 2 * KV_HEADS, SIZE, generator=torch.Generator().manual_seed(0))
    arguments = (attention_blocks(spans), QUERY_HEADS, KV_HEADS)
    expected = PackedAttention(*arguments, torch.device("cpu"))(0, heads)
    heads[50] = poison
    out = FlexPackedAttention(*arguments, torch.device(device))(0, heads.to(device)).cpu()
    torch.testing.assert_close(out[:50], expected[:50], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out[71:], expected[71:], rtol=1e-5, atol=1e-5)
    assert out[50:71].isnan().all()


@pytest.mark.parametrize("window", [0, 1, 50, 200])
@pytest.mark.parametrize("layout", [*LAYOUTS, *range(20)])
def test_tiles_are_exactly_those_in_which_something_is_seen(layout: str | int, window: int) -> None:
    spans = lay_out(LAYOUTS[layout]) if isinstance(layout, str) else _random_layout(layout)
    count = padded_rows(spans[-1].stop)
    seen = np.zeros((count, count), bool)
    for span in spans:
        for row in range(span.start, span.stop):
            seen[row, span.start : row + 1] = True
            seen[row, slice(*span.prefix)] = True
            seen[row, np.flatnonzero(seen[row])[: -window if window else 0]] = False
    tiles = seen.reshape(count // TILE, TILE, count // TILE, TILE).transpose(0, 2, 1, 3).reshape(-1, TILE * TILE)
    found = list_seen(attention_blocks(spans), count)
    found = find_tiles(within_window(found, window) if window else found)
    assert ((found.partial | found.full).ravel() == tiles.any(1)).all()
    # All is seen; where a prefix ends within a tile and its first span begins there, that is not noticed.
    assert not (found.full.ravel() & ~tiles.all(1)).any() and not (found.partial & found.full).any()
    if layout == "nothing shared" and not window:
        assert (found.full.ravel() == tiles.all(1)).all()


def test_any_layout_of_a_padded_size_uses_the_same_kernels_and_too_many_sizes_are_an_error() -> None:
    """Up to where torch would write kernels: of forward and backward, their operations run as they are."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(torch_flex.flex_attention, backend=counter, dynamic=False, fullgraph=True)

    def train(rows: int) -> None:
        spans, generator = lay_out([(rows - 60, [20, 40])]), torch.Generator().manual_seed(rows)
        heads = torch.randn(rows, QUERY_HEADS + 2 * KV_HEADS, SIZE, generator=generator).requires_grad_()
        exact = heads.detach().double().requires_grad_()
        attention = FlexPackedAttention(attention_blocks(spans), QUERY_HEADS, KV_HEADS, torch.device("cpu"))
        attention.attend = compiled
        out, expected = attention(0, heads), attend_by_definition(exact, spans, KV_HEADS)
        torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
        out.sum().backward()
        expected.sum().backward()
        assert heads.grad is not None and exact.grad is not None
        torch.testing.assert_close(heads.grad.double(), exact.grad, rtol=1e-4, atol=1e-4)

    try:
        for rows in (130, 256, 300, 140):
            train(rows)
        assert counter.frame_count == 2
        with torch._dynamo.config.patch(recompile_limit=2), pytest.raises(FailOnRecompileLimitHit):
            train(100)  # uncompiled, it would write all scores out
    finally:
        torch._dynamo.reset()


def test_a_forward_that_is_computed_again_in_another_thread_may_compile_as_many_sizes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Settings of torch's compiler belong to a thread. On a GPU a backward runs in one of autograd's own, and it
    compiles there what was compiled without a gradient in the forward."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(torch_flex.flex_attention, backend=counter, dynamic=False, fullgraph=True)
    monkeypatch.setattr("mint.engine.cuda.attention._compiled", lambda: compiled)
    attend = compiled_attention()
    errors: list[BaseException] = []
    limits: list[int] = []

    def run_backward(out: torch.Tensor) -> None:
        try:
            out.sum().backward()
        except BaseException as error:
            errors.append(error)
        limits.extend((torch._dynamo.config.recompile_limit, torch._dynamo.config.accumulated_recompile_limit))

    sizes = range(16, 176, 16)
    try:
        for size in sizes:
            x = torch.randn(1, 2, size, SIZE, requires_grad=True)
            out = recomputed(lambda own: cast(torch.Tensor, attend(own, own, own)), x)
            thread = threading.Thread(target=run_backward, args=(out,))
            thread.start()
            thread.join()
            assert not errors and x.grad is not None, (size, errors)
    finally:
        torch._dynamo.reset()
    assert counter.frame_count == 2 * len(sizes)  # without a gradient, and with one
    assert limits == [MAX_COMPILED] * 2 * len(sizes)


def test_it_passes_the_self_check_and_a_wrong_mask_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = Shapes(64, 96, QUERY_HEADS, KV_HEADS, SIZE, 1, 1e-6, True, True, "float32", "cpu", (FLEX,))
    # On a CPU the memory is that of the process, and its allocator takes new pages while old ones are scattered.
    monkeypatch.setattr("mint.engine.cuda.self_check.LEAST_LEAK_BYTES", 32 << 20)
    verdicts = [judge(path, is_timed=False) for path in paths(asdict(shapes))]
    assert [verdict.fault for verdict in verdicts] == [None] * 2 * len(SPANS)  # with and without a gradient
    monkeypatch.setattr(
        "mint.engine.cuda.attention.list_seen", lambda blocks, padded: _ahead(list_seen(blocks, padded))
    )
    faults = [judge(path, is_timed=False).fault for path in paths(asdict(shapes))]
    assert all(fault is not None and "differs by" in fault for fault in faults[2:])


def _ahead(seen: Seen) -> Seen:
    """As if the first row of each span could not be seen."""
    return Seen(seen.own + 1, seen.first, seen.stop)
