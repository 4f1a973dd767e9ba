"""The states of delta nets, one slot for each sequence and for each prefix that is kept; shared by reference counts.

A slot has the state of all delta nets of a base model after some token. It does not grow with the sequence.

Letters: S slots · K rows of the convolution · C its channels · N value heads · F and D their key and value dimension.
"""

from __future__ import annotations

import numpy as np
import torch

from mint.engine.model.config import DeltaNetConfig
from mint.engine.model.delta_net import RecurrentStates
from mint.engine.sampling.counted_slots import CountedSlots
from mint.engine.sampling.kv_cache import zeros


class StateCache(CountedSlots):
    """States of one base model. A sequence writes its own slot; a slot with several holders is only read."""

    def __init__(self, net: DeltaNetConfig, device: torch.device, limit_bytes: int) -> None:
        """As many slots as fit into `limit_bytes`."""
        layers = sorted(net.layers)
        self.slot_bytes = len(layers) * net.state_entries * 4
        super().__init__(max(1, limit_bytes // self.slot_bytes))
        self._places = {layer: place for place, layer in enumerate(layers)}
        shapes = (net.taps - 1, net.channels), (net.value_heads, net.key_dim, net.value_dim)
        self._windows, self._heads = (
            zeros((len(layers), self.count, *shape), torch.float32, device) for shape in shapes
        )

    def of_layer(self, layer: int) -> RecurrentStates:
        """Windows [S, K - 1, C] and heads [S, N, F, D], which a forward reads and writes."""
        place = self._places[layer]
        return RecurrentStates(self._windows[place], self._heads[place])

    def copy(self, source: int, targets: np.ndarray) -> None:
        """Copies a slot into others."""
        for part in (self._windows, self._heads):
            for target in targets.tolist():
                part[:, target].copy_(part[:, source])

    def clear(self, slots: np.ndarray) -> None:
        """Nothing: a new sequence reads no slot before it has written it."""
