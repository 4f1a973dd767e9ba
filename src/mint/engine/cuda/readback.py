"""Copies a tensor to the host without a wait: the host may start more work before it asks for the numbers."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class Readback:
    """The numbers of a tensor, on their way to the host."""

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
