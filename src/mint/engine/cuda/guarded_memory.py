"""Memory with guards around it: shows writes out of bounds, and results that nobody has written.

A kernel that writes behind its result changes memory of somebody else, and the result itself is right. One that leaves
a part of its result out returns what an earlier tensor has left there, which may happen to be right. So every tensor
that is made empty lies between two guards, and is full of NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override  # a dependency of torch; in typing from Python 3.12 on

GUARD_BYTES = 1 << 16
"""On each side of a tensor; several rows of a result."""

_MAKERS = (torch.ops.aten.empty.memory_format, torch.ops.aten.new_empty.default, torch.ops.aten.empty_like.default)


class GuardedMemory(TorchDispatchMode):
    """While it is entered, empty tensors of floating point have guards."""

    def __init__(self) -> None:
        super().__init__()
        self._guards: list[Tensor] = []

    @override
    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func not in _MAKERS or not made.is_floating_point():
            return made
        guard = GUARD_BYTES // made.element_size()
        whole = torch.full((made.numel() + 2 * guard,), torch.nan, dtype=made.dtype, device=made.device)
        self._guards += [whole[:guard], whole[-guard:]]
        return whole[guard:-guard].view(made.shape)

    def overwritten(self) -> Tensor:
        """How many numbers of the guards were written, int64 []."""
        return sum((guard.isfinite().sum() for guard in self._guards), torch.zeros((), dtype=torch.int64))
