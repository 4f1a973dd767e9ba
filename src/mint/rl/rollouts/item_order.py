"""Which items of the dataset come next: a shuffled walk, or the curriculum's choice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mint.rl.config import RLConfig
from mint.rl.rollouts.curriculum import Curriculum


class ItemOrder:
    """Walks through the dataset, shuffled anew by (seed, epoch), or asks the curriculum."""

    def __init__(self, size: int, config: RLConfig) -> None:
        """`size` is the number of items in the dataset."""
        self.size = size
        self.config = config
        self.drawn = 0
        self.curriculum = Curriculum(
            size,
            seed=config.seed,
            low=config.curriculum_low,
            high=config.curriculum_high,
            retire_at=config.curriculum_retire_at,
            retest_share=config.curriculum_retest_share,
        )

    def take(self, step: int, count: int) -> list[int]:
        """The places in the dataset of the next `count` items."""
        first, self.drawn = self.drawn, self.drawn + count
        if self.config.curriculum:
            return self.curriculum.choose(step, count)
        # An order depends on seed and epoch alone, so `drawn` is all that a resumed run needs.
        places = range(first, first + count)
        orders = {
            epoch: np.random.default_rng([self.config.seed, epoch]).permutation(self.size)
            for epoch in {place // self.size for place in places}
        }
        return [int(orders[place // self.size][place % self.size]) for place in places]

    def to_dict(self) -> dict[str, Any]:
        """The state that a resumed run needs, for JSON."""
        return {"drawn": self.drawn, "curriculum": self.curriculum.to_dict()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from the state of `to_dict`."""
        self.drawn = int(state["drawn"])
        self.curriculum = Curriculum.from_dict(state["curriculum"])
