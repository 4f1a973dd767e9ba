"""Products in C: against float64, and the same bits whatever other rows are in the batch."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from mint.engine.cpu.build import COMPILERS
from mint.engine.cpu.kernels import NativeKernels
from mint.engine.cpu.loras import NativeLoras, groups_of
from mint.engine.cpu.panels import NativeProducts, PanelMatrix, even_block_rows
from mint.engine.lora import SiteLora, SiteWeights

pytestmark = pytest.mark.skipif(not any(shutil.which(name) for name in COMPILERS), reason="there is no C compiler")

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module")
def products(native_folder: Path) -> NativeProducts:
    return NativeProducts(NativeKernels(native_folder))


COMPANIES = [*((7, count) for count in range(1, 21)), (0, 1), (130, 1), (60, 63), (1, 64), (9, 65), (2, 127), (0, 131)]


@pytest.fixture(scope="module", params=DTYPES, ids=["float32", "bfloat16"])
def loras(native_folder: Path, request: pytest.FixtureRequest) -> NativeLoras:
    """For a base in either dtype."""
    return NativeLoras(NativeKernels(native_folder), request.param)


def _add(loras: NativeLoras, out: torch.Tensor, x: torch.Tensor, lora: SiteWeights, scale: float) -> None:
    """One lora for all rows."""
    loras.add(out, x, [SiteLora(slice(0, len(x)), lora, scale)])


def _packed(products: NativeProducts, weight: torch.Tensor) -> PanelMatrix:
    panels = products.pack(weight)
    if panels is None:
        pytest.skip("this processor has no vectors of 16 numbers, or does not multiply bfloat16")
    return PanelMatrix(products, panels)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 32), (112, 96), (320, 4128)])
def test_products_are_sums_in_float32_and_a_row_s_are_the_same_in_every_company(
    products: NativeProducts, outputs: int, inputs: int, dtype: torch.dtype, threads: int
) -> None:
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(inputs)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    packed = _packed(products, weight)
    assert torch.equal(packed.dense(), weight)
    x, residual = torch.randn(1000, inputs, generator=generator), torch.randn(1000, outputs, generator=generator)
    whole, added = packed.product(x), packed.product(x, residual)
    exact = x.to(dtype).double() @ weight.double().t()
    rtol = 1e-5 if dtype == torch.float32 else 1e-4
    torch.testing.assert_close(whole.double(), exact, rtol=rtol, atol=5e-7 * inputs)
    torch.testing.assert_close(added.double(), exact + residual, rtol=rtol, atol=5e-7 * inputs)
    for start, count in COMPANIES:
        rows = slice(start, start + count)
        assert torch.equal(packed.product(x[rows]), whole[rows]), f"{count} rows from {start}"
        assert torch.equal(packed.product(x[rows], residual[rows]), added[rows]), f"{count} rows from {start}"


@pytest.mark.parametrize(("outputs", "inputs"), [(16, 32), (320, 4128)])
def test_rows_that_are_rounded_already_give_the_same_product(
    products: NativeProducts, outputs: int, inputs: int
) -> None:
    packed = _packed(products, torch.randn(outputs, inputs).bfloat16())
    x, residual = torch.randn(131, inputs), torch.randn(131, outputs)
    assert torch.equal(packed.product(x.bfloat16(), residual), packed.product(x, residual))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_of_threads_changes_no_bit(products: NativeProducts, dtype: torch.dtype) -> None:
    x, packed, found = torch.randn(70, 2112), _packed(products, torch.randn(352, 2112).to(dtype)), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        transposed = packed.transposed()
        assert transposed is not None
        found.append((packed.product(x), transposed.product(packed.product(x))))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("rows", [0, 1, 31, 32, 65, 288, 289, 1528, 5000])
def test_blocks_of_rows_are_even_and_as_many_for_each_thread(rows: int) -> None:
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        size = even_block_rows(rows, most=288)
        blocks = -(-rows // size)
        assert size <= 288
        assert blocks % threads == 0 or size == 32
        assert blocks * size - rows < blocks or size == 32


def test_several_groups_of_a_gradient_are_an_even_number() -> None:
    counts = {groups_of(rows) for rows in range(1, 4000)}
    assert counts == {1, 2, 4, 6, 8}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(32, 32), (64, 96), (160, 448)])
def test_a_turned_matrix_gives_the_gradient(
    products: NativeProducts, outputs: int, inputs: int, dtype: torch.dtype
) -> None:
    weight, grad = torch.randn(outputs, inputs).to(dtype), torch.randn(37, outputs)
    transposed = _packed(products, weight).transposed()
    assert transposed is not None
    assert torch.equal(transposed.dense(), weight.t())
    exact = grad.to(dtype).double() @ weight.double()
    torch.testing.assert_close(transposed.product(grad).double(), exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("outputs", "inputs"), [(32, 32), (2080, 160), (1056, 352)])
@pytest.mark.parametrize("rows", [1, 37, 401])
def test_a_gradient_without_a_transpose_is_that_of_float64_and_a_row_s_is_the_same_in_every_company(
    products: NativeProducts, outputs: int, inputs: int, rows: int
) -> None:
    weight, grad = torch.randn(outputs, inputs).bfloat16(), torch.randn(rows, outputs)
    panels, found = _packed(products, weight).panels, []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        gradient = products.gradient(panels, grad)
        if gradient is None:
            pytest.skip("the processor has no AMX")
        found.append(gradient)
    assert torch.equal(*found)
    exact = grad.bfloat16().double() @ weight.double()
    torch.testing.assert_close(found[0].double(), exact, rtol=1e-4, atol=1e-6 * outputs)
    logits = torch.empty(rows, 3 * outputs, dtype=torch.bfloat16)
    logits[:, :outputs] = grad
    apart = products.gradient(panels, logits[:, :outputs])
    assert apart is not None and torch.equal(apart, found[0])
    if rows > 1:
        grad[0] = torch.nan
        others = products.gradient(panels, grad)
        assert others is not None and torch.equal(others[1:], found[0][1:])


def test_a_transpose_that_does_not_fit_is_not_made(products: NativeProducts) -> None:
    assert _packed(products, torch.zeros(48, 64, dtype=torch.bfloat16)).transposed() is None


def test_they_say_which_matrices_do_not_fit(products: NativeProducts) -> None:
    for shape in ((100, 64), (64, 48), (64, 33)):
        assert products.pack(torch.zeros(shape, dtype=torch.bfloat16)) is None
    for shape in ((100, 64), (64, 40), (64, 33)):
        assert products.pack(torch.zeros(shape)) is None
    assert products.pack(torch.zeros(64, 64, dtype=torch.float64)) is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_stays_so(products: NativeProducts, dtype: torch.dtype) -> None:
    packed = _packed(products, torch.ones(16, 32, dtype=dtype))
    x = torch.ones(3, 32)
    x[0, 5], x[1, 7] = torch.nan, torch.inf
    product = packed.product(x)
    assert product[0].isnan().all() and product[1].isinf().all() and product[2].eq(32).all()


@pytest.mark.parametrize(
    ("inputs", "outputs", "rank"),
    [(16, (16,), 1), (64, (48, 16), 5), (144, (32, 16, 16), 16), (512, (16,), 24), (1040, (528, 16, 32), 16)],
)
def test_a_lora_s_part_is_that_of_float64_and_a_row_s_is_the_same_in_every_company(
    loras: NativeLoras, inputs: int, outputs: tuple[int, ...], rank: int
) -> None:
    generator = torch.Generator().manual_seed(rank)
    a = torch.randn(rank * len(outputs), inputs, generator=generator)
    bs = [torch.randn(size, rank, generator=generator) for size in outputs]
    lora = SiteWeights(a, tuple(bs))
    if not loras.fits(lora):
        pytest.skip("this processor has no vectors of 16 numbers")
    x, before = torch.randn(131, inputs, generator=generator), torch.randn(131, sum(outputs), generator=generator)
    whole = before.clone()
    _add(loras, whole, x, lora, 0.75)
    down = (x.double() @ a.double().t()).split(rank, dim=1)
    parts = [own @ b.double().t() for own, b in zip(down, bs, strict=True)]
    exact = before + 0.75 * torch.cat(parts, dim=1)
    _assert_near(whole, exact, loras, added_to=before)
    for start, count in (
        (0, 1),
        (130, 1),
        (5, 2),
        (7, 3),
        (1, 4),
        (2, 7),
        (3, 8),
        (60, 15),
        (9, 64),
        (1, 65),
        (0, 100),
    ):
        own = before[start : start + count].clone()
        _add(loras, own, x[start : start + count], lora, 0.75)
        assert torch.equal(own, whole[start : start + count]), f"{count} rows from {start}"


@pytest.mark.parametrize("rows", [1, 35, 36, 191, 1000])
@pytest.mark.parametrize(
    ("inputs", "outputs", "rank"),
    [(16, (16,), 1), (64, (48, 16), 5), (144, (32, 16, 16), 16), (80, (80,), 40), (1040, (528,), 64)],
)
def test_a_lora_s_gradients_are_those_of_float64_with_any_number_of_threads(
    loras: NativeLoras, inputs: int, outputs: tuple[int, ...], rank: int, rows: int
) -> None:
    generator = torch.Generator().manual_seed(rank + rows)
    x, grad = torch.randn(rows, inputs, generator=generator), torch.randn(rows, sum(outputs), generator=generator)
    a = torch.randn(rank * len(outputs), inputs, generator=generator)
    bs = [torch.randn(size, rank, generator=generator) for size in outputs]
    lora = SiteWeights(a, tuple(bs))
    if not loras.fits(lora):
        pytest.skip("this processor has no vectors of 16 numbers")
    leaves = [part.double().requires_grad_() for part in (x, a, *bs)]
    down = (leaves[0] @ leaves[1].t()).split(rank, dim=1)
    added = torch.cat([own @ b.t() for own, b in zip(down, leaves[2:], strict=True)], dim=1)
    (0.75 * added).backward(grad.double())
    before, found = torch.randn(x.shape, generator=generator), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        grad_x = before.clone()
        found.append([*loras.gradient(grad, x, lora, 0.75, grad_x), grad_x])
        alone = loras.gradient(grad, x, lora, 0.75)
        assert all(map(torch.equal, found[-1], alone))  # not asking for x's changes none
    assert all(map(torch.equal, *found))
    expected = [leaf.grad for leaf in leaves]
    assert expected[0] is not None
    for ours, theirs in zip(found[0], [*expected[1:], before + expected[0]], strict=True):
        assert theirs is not None
        _assert_near(ours, theirs, loras)


@pytest.mark.parametrize("rows", [1, 23, 24, 107, 217])
@pytest.mark.parametrize(
    ("inputs", "outputs", "rank"),
    [(16, (16,), 1), (48, (48, 304), 5), (96, (32, 16, 16), 16), (160, (80,), 40), (1040, (528, 256), 33)],
)
def test_a_lora_of_whole_numbers_is_computed_exactly(
    loras: NativeLoras, inputs: int, outputs: tuple[int, ...], rank: int, rows: int
) -> None:
    """All factors, and what lies between two products, are whole numbers below 256, which bfloat16 holds: whatever is
    paired, no product or sum is rounded."""
    generator = torch.Generator().manual_seed(rows + rank)

    def draw(*shape: int, share: float = 1.0) -> torch.Tensor:
        whole = torch.randint(-1, 2, shape, generator=generator).float()
        return whole * (torch.rand(shape, generator=generator) < share)

    lora = SiteWeights(draw(rank * len(outputs), inputs), tuple(draw(size, rank) for size in outputs))
    if not loras.fits(lora):
        pytest.skip("this processor has no vectors of 16 numbers")
    x, grad = draw(rows, inputs, share=0.5), draw(rows, sum(outputs), share=0.5)
    leaves = [part.double().requires_grad_() for part in (x, lora.a, *lora.bs)]
    down = (leaves[0] @ leaves[1].t()).split(rank, dim=1)
    exact = torch.cat([own @ b.t() for own, b in zip(down, leaves[2:], strict=True)], dim=1)
    exact.backward(grad.double())
    assert max(float(own.detach().abs().max()) for own in down) < 256
    out, grad_x = torch.ones(rows, sum(outputs)), torch.ones(rows, inputs)
    _add(loras, out, x, lora, 1.0)
    found = [*loras.gradient(grad, x, lora, 1.0, grad_x), grad_x - 1]
    assert torch.equal(out.double() - 1, exact.detach())
    for ours, leaf in zip(found, [*leaves[1:], leaves[0]], strict=True):
        assert leaf.grad is not None and torch.equal(ours.double(), leaf.grad)


def test_what_x_gets_for_a_row_is_the_same_in_every_company(loras: NativeLoras) -> None:
    x, grad, a, b = torch.randn(200, 80), torch.randn(200, 48), torch.randn(12, 80), torch.randn(48, 12)
    lora = SiteWeights(a, (b,))
    if not loras.fits(lora):
        pytest.skip("this processor has no vectors of 16 numbers")
    whole = torch.ones(200, 80)
    loras.gradient(grad, x, lora, 0.5, whole)
    for start, count in ((0, 1), (7, 5), (30, 36), (3, 61)):
        rows = slice(start, start + count)
        own = torch.ones(count, 80)
        loras.gradient(grad[rows], x[rows], lora, 0.5, own)
        assert torch.equal(own, whole[rows])


@pytest.mark.parametrize("inputs", [80, 1040])
def test_a_lora_takes_rows_in_bfloat16(loras: NativeLoras, inputs: int) -> None:
    x, grad = torch.randn(131, inputs).bfloat16(), torch.randn(131, 48)
    lora = SiteWeights(torch.randn(12, inputs), (torch.randn(48, 12),))
    if not loras.fits(lora):
        pytest.skip("this processor has no vectors of 16 numbers")
    found = []
    for rows in (x, x.float()):
        out, grad_x = torch.ones(131, 48), torch.ones(131, inputs)
        _add(loras, out, rows, lora, 0.5)
        found.append([out, *loras.gradient(grad, rows, lora, 0.5, grad_x), grad_x])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("rank", [1, 5, 16, 32, 40])
@pytest.mark.parametrize("inputs", [80, 1040])
def test_a_lora_that_is_rounded_already_adds_the_same_bits(loras: NativeLoras, inputs: int, rank: int) -> None:
    if not loras.rounds:
        pytest.skip("factors are not rounded")
    a, bs = torch.randn(2 * rank, inputs), (torch.randn(48, rank), torch.randn(528, rank))
    whole = SiteWeights(a, bs)
    rounded = SiteWeights(a.bfloat16(), tuple(b.bfloat16() for b in bs))
    for rows in (1, 3, 23, 24, 131):
        x, found = torch.randn(rows, inputs), []
        for lora in (whole, rounded):
            out = torch.ones(rows, 576)
            _add(loras, out, x, lora, 0.75)
            found.append(out)
        assert torch.equal(*found), f"{rows} rows"


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("counts", [[1] * 64, [32, 1, 8, 7, 300], [3]])
def test_several_loras_add_to_their_own_rows_what_each_adds_alone(
    loras: NativeLoras, counts: list[int], threads: int
) -> None:
    generator = torch.Generator().manual_seed(len(counts))
    inputs, outputs, stop = 1024, (64, 528), 2
    found = []
    for index, count in enumerate(counts):
        rank = (16, 5, 8, 32)[index % 4]
        drawn = [torch.randn(2 * rank, inputs, generator=generator)]
        drawn += [torch.randn(size, rank, generator=generator) for size in outputs]
        if loras.rounds and index % 3:
            drawn = [matrix.bfloat16() for matrix in drawn]
        start, stop = stop, stop + count
        found.append(SiteLora(slice(start, stop), SiteWeights(drawn[0], tuple(drawn[1:])), 0.5 + index))
        stop += index % 2  # a row without a lora
    if not loras.fits(found[0].weights):
        pytest.skip("this processor has no vectors of 16 numbers")
    x = torch.randn(stop + 3, inputs, generator=generator)
    out = torch.randn(len(x), sum(outputs), generator=generator)
    alone = out.clone()
    for rows, weights, scale in found:
        _add(loras, alone[rows], x[rows], weights, scale)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    loras.add(out, x, found)
    torch.set_num_threads(before)
    assert torch.equal(out, alone)


def _assert_near(
    ours: torch.Tensor, exact: torch.Tensor, loras: NativeLoras, added_to: torch.Tensor | None = None
) -> None:
    """As sums in float32 are; or, where factors are rounded to bfloat16, as products of such factors are. What it was
    `added_to` does not count."""
    error = (ours - exact).double()
    size = exact.double() if added_to is None else exact.double() - added_to
    if loras.rounds:
        assert float(error.square().mean().sqrt()) <= 6e-3 * float(size.square().mean().sqrt())
        assert float(error.abs().max()) <= 2e-2 * float(size.abs().max())
    else:
        assert float(error.abs().max()) <= 3e-6 * float(exact.abs().max())


def test_loras_of_other_widths_are_not_added(loras: NativeLoras) -> None:
    assert not loras.fits(SiteWeights(torch.zeros(4, 24), (torch.zeros(16, 4),)))
    assert not loras.fits(SiteWeights(torch.zeros(4, 32), (torch.zeros(12, 4),)))
