"""Products in C: against float64, and in any company of rows."""

from __future__ import annotations

import shutil

import pytest
import torch

from mint.engine.native import NativeKernels
from mint.engine.native_build import COMPILERS
from mint.engine.native_products import NativeProducts

pytestmark = pytest.mark.skipif(not any(shutil.which(name) for name in COMPILERS), reason="there is no C compiler")


@pytest.fixture(scope="module")
def products(tmp_path_factory: pytest.TempPathFactory) -> NativeProducts:
    return NativeProducts(NativeKernels(tmp_path_factory.mktemp("native")))


@pytest.mark.parametrize(("outputs", "inputs"), [(16, 32), (112, 96), (320, 4128)])
def test_products_are_sums_in_float32_and_a_row_s_are_the_same_in_every_company(
    products: NativeProducts, outputs: int, inputs: int
) -> None:
    generator = torch.Generator().manual_seed(inputs)
    weight = torch.randn(outputs, inputs, generator=generator).bfloat16()
    packed = products.pack(weight)
    if packed is None:
        pytest.skip("this processor does not multiply bfloat16")
    assert torch.equal(packed.dense(), weight)
    x, residual = torch.randn(131, inputs, generator=generator), torch.randn(131, outputs, generator=generator)
    whole, added = packed.product(x), packed.product(x, residual)
    exact = x.bfloat16().double() @ weight.double().t()
    torch.testing.assert_close(whole.double(), exact, rtol=1e-4, atol=1e-6 * inputs)
    torch.testing.assert_close(added.double(), exact + residual, rtol=1e-4, atol=1e-6 * inputs)
    for start, count in ((0, 1), (130, 1), (5, 2), (7, 3), (1, 4), (2, 7), (3, 8), (60, 15), (0, 16), (9, 21), (0, 64)):
        rows = slice(start, start + count)
        assert torch.equal(packed.product(x[rows]), whole[rows]), f"{count} rows from {start}"
        assert torch.equal(packed.product(x[rows], residual[rows]), added[rows]), f"{count} rows from {start}"


def test_they_say_which_matrices_do_not_fit(products: NativeProducts) -> None:
    for shape in ((100, 64), (64, 48), (64, 33)):
        assert products.pack(torch.zeros(shape, dtype=torch.bfloat16)) is None
    assert products.pack(torch.zeros(64, 64)) is None


def test_what_is_not_finite_stays_so(products: NativeProducts) -> None:
    packed = products.pack(torch.ones(16, 32, dtype=torch.bfloat16))
    if packed is None:
        pytest.skip("this processor does not multiply bfloat16")
    x = torch.ones(3, 32)
    x[0, 5], x[1, 7] = torch.nan, torch.inf
    product = packed.product(x)
    assert product[0].isnan().all() and product[1].isinf().all() and product[2].eq(32).all()


@pytest.mark.parametrize(("inputs", "outputs", "rank"), [(16, (16,), 1), (64, (48, 16), 5), (1040, (528, 16, 32), 16)])
def test_a_lora_s_part_is_that_of_float64_and_a_row_s_is_the_same_in_every_company(
    products: NativeProducts, inputs: int, outputs: tuple[int, ...], rank: int
) -> None:
    generator = torch.Generator().manual_seed(rank)
    a = torch.randn(rank * len(outputs), inputs, generator=generator)
    bs = [torch.randn(size, rank, generator=generator) for size in outputs]
    if not products.adds_lora(a, bs):
        pytest.skip("this processor has no vectors of 16 numbers")
    x, before = torch.randn(131, inputs, generator=generator), torch.randn(131, sum(outputs), generator=generator)
    whole = before.clone()
    products.add_lora(whole, x, a, bs, 0.75)
    down = (x.double() @ a.double().t()).split(rank, dim=1)
    parts = [own @ b.double().t() for own, b in zip(down, bs, strict=True)]
    exact = before + 0.75 * torch.cat(parts, dim=1)
    torch.testing.assert_close(whole.double(), exact, rtol=1e-5, atol=1e-5 * (inputs * rank) ** 0.5)
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
        products.add_lora(own, x[start : start + count], a, bs, 0.75)
        assert torch.equal(own, whole[start : start + count]), f"{count} rows from {start}"


def test_loras_of_other_widths_are_not_added(products: NativeProducts) -> None:
    assert not products.adds_lora(torch.zeros(4, 24), [torch.zeros(16, 4)])
    assert not products.adds_lora(torch.zeros(4, 32), [torch.zeros(12, 4)])
