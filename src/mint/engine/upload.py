"""Copies numpy arrays to a device: all that some work needs in one transfer, for which the host does not wait."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def upload(device: torch.device, *arrays: np.ndarray) -> list[Tensor]:
    """Arrays of one dtype as tensors of the same shapes on `device`. On a CPU they share the arrays' memory."""
    if device.type == "cpu":
        return list(map(torch.from_numpy, arrays))
    packed = torch.from_numpy(np.concatenate([array.reshape(-1) for array in arrays]))
    if device.type == "cuda":
        packed = packed.pin_memory()  # torch gives it to the next transfer only when this one is over
    parts = packed.to(device, non_blocking=True).split([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]
