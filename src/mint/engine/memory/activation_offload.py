"""Keeps the saved inputs of layers off the device between forward and backward: the same bits, in the host's memory.

With activation recomputation, a layer keeps its input alone for the backward: 4 bytes for each hidden number, row and
layer, which at long contexts is most of what a pass takes. On a GPU these go to pinned memory of the host by a stream
of their own, so that copies run beside the layers, and the input of the layer below comes back while one is computed.
On a CPU they go to a file without a name in the folder for temporary files (`TMPDIR`), which should be on a disk.

Chen et al. 2016 (arXiv:1604.06174) is the recomputation, ZeRO-Offload (Ren et al. 2021, arXiv:2101.06840) the offload.
The path of a GPU was not run on one.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from typing import IO, Any, Protocol

import torch
from torch import Tensor


class _Place(Protocol):
    """Where tensors are kept; a handle is valid for one `load`."""

    def store(self, x: Tensor) -> Any: ...

    def load(self, handle: Any) -> Tensor: ...


@contextmanager
def offloaded(device: torch.device) -> Generator[None]:
    """Within it, what autograd saves for a backward is kept outside of the memory of `device`."""
    place: _Place = _PinnedMemory(device) if device.type == "cuda" else _TemporaryFile(device)
    with torch.autograd.graph.saved_tensors_hooks(place.store, place.load):
        yield


class _TemporaryFile:
    """A file without a name; it ends with the graph whose tensors it has."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._file: IO[bytes] = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  it lives as long as the graph
        self._end = 0

    def store(self, x: Tensor) -> tuple[int, torch.Size, torch.dtype]:
        held = x.detach().cpu().contiguous()
        own = memoryview(held.view(-1).view(torch.uint8).numpy())
        start = self._end
        while own:  # the system writes some GiB at once, at most
            written = os.pwrite(self._file.fileno(), own, self._end)
            own, self._end = own[written:], self._end + written
        return start, x.shape, x.dtype

    def load(self, handle: tuple[int, torch.Size, torch.dtype]) -> Tensor:
        start, shape, dtype = handle
        found = torch.empty(shape, dtype=dtype)
        own = memoryview(found.view(-1).view(torch.uint8).numpy())
        while own:
            read = os.preadv(self._file.fileno(), [own], start)
            if not read:
                raise OSError("the file of offloaded activations was cut short")
            own, start = own[read:], start + read
        return found.to(self._device)


class _PinnedMemory:
    """Pinned memory of the host, and a stream for copies."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._hosts: list[Tensor | None] = []
        self._coming: dict[int, tuple[Tensor, torch.cuda.Event]] = {}

    def store(self, x: Tensor) -> int:
        host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            host.copy_(x.detach(), non_blocking=True)
        x.record_stream(self._stream)  # its memory is not given away before it is copied
        self._hosts.append(host)
        return len(self._hosts) - 1

    def load(self, handle: int) -> Tensor:
        found, copied = self._coming.pop(handle, None) or self._start(handle)
        if handle > 0 and self._hosts[handle - 1] is not None:
            self._coming[handle - 1] = self._start(handle - 1)  # the backward needs it next
        present = torch.cuda.current_stream(self._device)
        present.wait_event(copied)
        found.record_stream(present)
        return found

    def _start(self, handle: int) -> tuple[Tensor, torch.cuda.Event]:
        host = self._hosts[handle]
        if host is None:
            raise RuntimeError("an offloaded activation was asked for twice")
        self._hosts[handle] = None
        with torch.cuda.stream(self._stream):
            found = host.to(self._device, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        return found, copied
