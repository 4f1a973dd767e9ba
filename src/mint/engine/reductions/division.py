"""Who computes which micro-batches of a pass: one process all of them, or several processes a range each.

The processes of a group run every pass together, each with the same request. What they exchange is what `Division` has.
Knows vectors, not models. `mint.cluster` has the division among several.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np
from torch import Tensor

from mint.engine.lora import LoraWeights
from mint.engine.model.weights import LayerSource
from mint.engine.reductions.chunk_sums import Chunks, LocalChunks
from mint.engine.reductions.gradient_sum import whole_sum
from mint.engine.reductions.state_division import Bounds, StateDivision


class PassOutcome(IntEnum):
    """How a process has ended its part of a pass; the larger is the worse."""

    DONE = 0
    OUT_OF_MEMORY = 1
    FAILED = 2


class Division(Protocol):
    """The division of one pass. All processes call the same methods in the same order."""

    @property
    def own(self) -> range:
        """The micro-batches that this process computes."""
        ...

    @property
    def is_shared(self) -> bool:
        """Whether there are other processes: the same for all of them."""
        ...

    @property
    def most(self) -> int:
        """How many micro-batches the process computes that has most of them."""
        ...

    def total(self, sums: Mapping[range, Tensor], size: int, state: StateDivision | None) -> Tensor:
        """The sum of the gradients of all micro-batches, float32 [size], from the `partial_sums` of `own`; or of a
        model that is divided by `state`, the part of the sum that this process keeps.

        May overwrite the vectors in `sums`.
        """
        ...

    def join(self, values: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
        """The float64 values of all micro-batches in order, from the `values` of `own`.

        `lengths` are the numbers of values of all micro-batches.
        """
        ...


class Peers(Protocol):
    """The processes that run a pass together."""

    def divide(self, costs: Sequence[int]) -> Division:
        """Divides micro-batches, of which each takes a time in proportion to its cost."""
        ...

    def worst(self, own: PassOutcome) -> PassOutcome:
        """The worst outcome of all processes; each calls this once in every pass, also one that has failed."""
        ...

    def begin(self, most: int, source: LayerSource | None, lora: LoraWeights, *, with_gradient: bool) -> None:
        """Before the first micro-batch of a pass with `lora`; no process computes more than `most` of them."""
        ...

    def micro_batch(self) -> AbstractContextManager[None]:
        """Around each micro-batch that this process computes."""
        ...

    def layer_source(self) -> LayerSource | None:
        """For the layers of one more base; None: their matrices stay where they were loaded."""
        ...

    def chunks(self, count: int) -> Chunks:
        """Divides the layers of one more base, which are cut into `count` chunks.

        Raises:
            InvalidRequestError: there are fewer chunks than processes that divide them.
        """
        ...

    def divide_state(self, bounds: Bounds) -> StateDivision | None:
        """Divides the vectors of one more model, whose blocks have these bounds; None: each process keeps all."""
        ...


class Alone:
    """One process, which computes everything."""

    def divide(self, costs: Sequence[int]) -> Division:
        return _Undivided(range(len(costs)))

    def worst(self, own: PassOutcome) -> PassOutcome:
        return own

    def begin(self, most: int, source: LayerSource | None, lora: LoraWeights, *, with_gradient: bool) -> None:
        pass

    def micro_batch(self) -> AbstractContextManager[None]:
        return nullcontext()

    def layer_source(self) -> LayerSource | None:
        return None

    def chunks(self, count: int) -> Chunks:
        return LocalChunks(count)

    def divide_state(self, bounds: Bounds) -> StateDivision | None:
        return None


@dataclass(frozen=True)
class _Undivided:
    own: range
    is_shared: bool = False

    @property
    def most(self) -> int:
        return len(self.own)

    def total(self, sums: Mapping[range, Tensor], size: int, state: StateDivision | None) -> Tensor:
        whole = whole_sum(len(self.own), sums)
        return whole if state is None else whole[state.own]

    def join(self, values: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
        return values


ALONE = Alone()


class PeerFailedError(RuntimeError):
    """Another process of the group has failed, and raises the error that says why."""
