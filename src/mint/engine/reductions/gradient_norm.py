"""The norm of a gradient or of a step, from the norms of fixed blocks.

Each block is squared and summed alone, and the sums of all blocks are added exactly. So the norm depends neither on the
number of threads nor on who holds which blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mint.engine.state_digest import BLOCK
from mint.engine.transfers import for_float64


def norm_of(sums: Sequence[float]) -> float:
    """The Euclidean norm of a vector, in float64, from the `square_sums` of all its blocks."""
    return math.sqrt(math.fsum(sums))


def square_sums(vector: Tensor) -> Tensor:
    """For each block of 65,536 numbers the sum of their squares, in float64, where no square of a float32 overflows."""
    vector = for_float64(vector)
    blocks = vector.split(BLOCK)
    if vector.device.type == "cpu":
        # With numpy: torch divides the sum over one long vector among its threads, which changes its last bits.
        sums = [np.square(block.numpy(), dtype=np.float64).sum() for block in blocks]
        return torch.tensor(sums, dtype=torch.float64)
    # One block at a time: how a GPU adds up a row depends on the number of rows.
    return torch.stack([block.double().square_().sum() for block in blocks])


def older_gradient_norm(gradient: Tensor) -> float:
    """The norm as mint computed it while it summed micro-batches one after the other: for journals of that time."""
    return float(torch.linalg.vector_norm(for_float64(gradient), dtype=torch.float64))
