"""Torch's `meta`, whose tensors have shapes and no numbers, as a device that is not the CPU."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

META = torch.device("meta")
COPIES = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}


class OneDevice(TorchDispatchMode):
    """Refuses operations on tensors of several devices; counts copies between them, and gives ones for what is read.
    Notes the operations of `meta`, with the dtypes of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.operations: dict[str, set[torch.dtype]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        devices = [leaf.device.type for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func is torch.ops.aten._local_scalar_dense.default and devices == ["meta"]:
            self.counts["read"] += 1
            return 1.0
        if func is torch.ops.aten._to_copy.default and "device" in kwargs:
            source, target = devices[0], torch.device(kwargs["device"]).type
            if source != target:
                self.counts["read" if target == "cpu" else "uploaded"] += 1
            if (source, target) == ("meta", "cpu"):
                return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        elif func not in COPIES and len(set(devices)) > 1:
            raise AssertionError(f"{func} of tensors on {devices}")
        found = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor) and leaf.is_meta]
        if "meta" in devices or made:
            self.operations.setdefault(func.name(), set()).update(leaf.dtype for leaf in made)
        return found
