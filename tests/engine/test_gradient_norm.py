"""The norm of a gradient: right, and the same for every division into blocks and every number of threads."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from mint.engine.reductions.gradient_norm import norm_of, older_gradient_norm, square_sums
from mint.engine.state_digest import BLOCK

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def _norm(gradient: torch.Tensor) -> float:
    return norm_of(square_sums(gradient).tolist())


def _gradient(size: int, device: str = "cpu") -> torch.Tensor:
    rng = np.random.default_rng(size)
    drawn = rng.normal(size=size) * 10.0 ** rng.uniform(-6, 3, size)
    return torch.from_numpy(drawn.astype(np.float32)).to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5])
def test_the_norm_is_the_exact_one(size: int, device: str) -> None:
    gradient = _gradient(size, device)
    exact = math.sqrt(math.fsum(value * value for value in gradient.tolist()))
    assert _norm(gradient) == pytest.approx(exact, rel=1e-14)
    assert older_gradient_norm(gradient) == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("device", DEVICES)
def test_whoever_holds_some_blocks_finds_their_sums(device: str) -> None:
    gradient = _gradient(5 * BLOCK + 11, device)
    whole = square_sums(gradient)
    assert len(whole) == 6
    for cut in range(1, 6):
        parts = torch.cat([square_sums(gradient[: cut * BLOCK]), square_sums(gradient[cut * BLOCK :])])
        assert torch.equal(parts, whole)
        assert norm_of(parts.flip(0).tolist()) == _norm(gradient)


def test_the_norm_does_not_depend_on_the_number_of_threads() -> None:
    program = (
        "import sys, torch; from mint.engine.reductions.gradient_norm import norm_of, square_sums;"
        "torch.set_num_threads(int(sys.argv[1]));"
        "drawn = torch.randn(300_000, generator=torch.Generator().manual_seed(1));"
        "print(norm_of(square_sums(drawn).tolist()).hex())"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", program, threads], capture_output=True, text=True, check=True, timeout=120
        ).stdout
        for threads in ("1", "4")
    }
    assert len(found) == 1


@pytest.mark.parametrize("device", DEVICES)
def test_a_norm_beyond_float32_and_one_that_is_not_finite(device: str) -> None:
    gradient = torch.full((BLOCK + 1,), 3e38, device=device)
    assert _norm(gradient) == pytest.approx(float(np.float32(3e38)) * math.sqrt(BLOCK + 1), rel=1e-12)
    gradient[3] = float("-inf")
    assert _norm(gradient) == float("inf")
    gradient[BLOCK] = float("nan")
    assert math.isnan(_norm(gradient))
    assert _norm(torch.zeros(10, device=device)) == 0.0
