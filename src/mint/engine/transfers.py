"""Transfers between the host and a device: numpy arrays there, in one copy for which the host does not wait; numbers
back, for which it may wait later; and tensors to where float64 is.

Apple's devices have no float64: the processor computes there what needs it. Drawn tokens come from sums in float64, and
the norms of gradients and steps, too.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

WITHOUT_FLOAT64 = frozenset({"mps"})
"""Types of devices, as torch names them."""


def upload(device: torch.device, *arrays: np.ndarray) -> list[Tensor]:
    """Arrays of one dtype as tensors of the same shapes on `device`. On a CPU they share the arrays' memory."""
    if device.type == "cpu":
        return list(map(torch.from_numpy, arrays))
    packed = torch.from_numpy(np.concatenate([array.reshape(-1) for array in arrays]))
    if device.type == "cuda":
        packed = packed.pin_memory()  # torch gives it to the next transfer only when this one is over
    parts = packed.to(device, non_blocking=True).split([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


class Readback:
    """The numbers of a tensor, on their way to the host, which may start more work before it asks for them."""

    def __init__(self, tensor: Tensor) -> None:
        """Starts the copy behind all work that is queued on the device's present stream."""
        self._copied: torch.cuda.Event | None = None
        if tensor.device.type != "cuda":
            self._host = tensor.cpu()
            return
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record()

    def wait(self) -> np.ndarray:
        """The numbers, once the copy is complete. Work that was queued after it is not waited for."""
        if self._copied is not None:
            self._copied.synchronize()
        found: np.ndarray = self._host.numpy()
        return found


def for_float64(tensor: Tensor) -> Tensor:
    """`tensor`, or a copy on the CPU where its device has no float64."""
    return tensor.cpu() if tensor.device.type in WITHOUT_FLOAT64 else tensor
