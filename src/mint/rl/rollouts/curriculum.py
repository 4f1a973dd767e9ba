"""A curriculum: chooses the next items of the dataset by how often each was solved so far.

Knows places in a dataset and success rates, nothing of prompts or policies. Items with a success rate inside a band
carry most signal (an online difficulty filter, arXiv 2504.03380); solved ones are retired and tested again now and then
(ScaleRL's no-positive-resampling, arXiv 2510.13786); too hard ones are tried again rarely.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

import numpy as np

ItemState = Literal["unseen", "too_hard", "in_band", "solved", "retired"]
"""State of an item: never asked; below the band; in it; above it; so far above it that it is chosen last."""

ITEM_STATES: tuple[ItemState, ...] = ("unseen", "too_hard", "in_band", "solved", "retired")

Pool = ItemState | Literal["resting"]
"""A pool to choose from: `resting` are items of the band that were asked a few steps ago."""

REST_STEPS = 8
"""Steps for which an item of the band rests, so that the policy does not memorize a few items."""

SPARE_ORDER: tuple[Pool, ...] = ("in_band", "unseen", "resting", "too_hard", "solved", "retired")
"""The order of pools to choose from when the wanted one is empty. A rare success on a hard item teaches more than a
rare failure on a solved one."""

EXPLORE_SHARE = 0.25
"""Share of the choices that go to unseen items, while there are any and the band is not empty."""

HARD_SHARE = 0.05
"""Share of the choices that go to items that were too hard."""

MEMORY = 0.5
"""Weight of an item's past success rate against its newest one; old policies count less and less."""

FIRST_WEIGHT = 2 / 3
"""Weight of an item's first success rate; the rest is a prior of 1/2, so that one lucky group retires nothing."""

NEVER = 0
"""The step of an item that was not asked yet; real steps count from 1."""


class Curriculum:
    """The success history of every item. Choices depend on the seed, the calls and the recorded rates alone."""

    def __init__(
        self,
        size: int,
        *,
        seed: int,
        low: float = 0.2,
        high: float = 0.8,
        retire_at: float = 0.95,
        retest_share: float = 0.05,
    ) -> None:
        """`size` items; the band is [`low`, `high`]; items above it get `retest_share` of the choices while there are
        others, those from `retire_at` on even if the band is empty."""
        self.size = size
        self.seed = seed
        self.low = low
        self.high = high
        self.retire_at = retire_at
        self.retest_share = retest_share
        self._success = np.full(size, np.nan)
        self._asked = np.full(size, NEVER, dtype=np.int64)
        self._draws = 0

    def choose(self, step: int, count: int) -> list[int]:
        """`count` places for `step`; in each pool, those that were asked longest ago come first.

        No place comes twice in a step while there are enough items.
        """
        random = np.random.default_rng([self.seed, step, self._draws])
        self._draws += 1  # a refill of the same step draws from another stream
        chosen: list[int] = []
        while len(chosen) < count:
            pools = self._pools(step, random)
            if not any(pools.values()):
                pools = self._pools(None, random)
            wanted = random.random(count - len(chosen))
            taken = [self._pick(pools, float(draw)) for draw in wanted if any(pools.values())]
            self._asked[taken] = step
            chosen += taken
        return chosen

    def record(self, item: int, success_rate: float, step: int) -> None:
        """Records the success rate of one group of `item` at `step`."""
        before = self._success[item]
        first = FIRST_WEIGHT * success_rate + (1 - FIRST_WEIGHT) / 2
        self._success[item] = first if np.isnan(before) else MEMORY * before + (1 - MEMORY) * success_rate
        self._asked[item] = max(self._asked[item], step)

    def state_of(self, item: int) -> ItemState:
        """The state of `item`."""
        success = self._success[item]
        if np.isnan(success):
            return "unseen"
        if success < self.low:
            return "too_hard"
        if success <= self.high:
            return "in_band"
        return "solved" if success < self.retire_at else "retired"

    def metrics(self) -> dict[str, float]:
        """The number of items in each state."""
        counts = dict.fromkeys(ITEM_STATES, 0)
        for item in range(self.size):
            counts[self.state_of(item)] += 1
        return {f"curriculum/{name}": float(count) for name, count in counts.items()}

    def to_dict(self) -> dict[str, Any]:
        """The state for JSON, with the items that were asked."""
        asked = np.flatnonzero((self._asked != NEVER) | ~np.isnan(self._success))
        return {
            "size": self.size,
            "seed": self.seed,
            "low": self.low,
            "high": self.high,
            "retire_at": self.retire_at,
            "retest_share": self.retest_share,
            "draws": self._draws,
            "items": [
                [
                    int(item),
                    None if np.isnan(self._success[item]) else float(self._success[item]),
                    int(self._asked[item]),
                ]
                for item in asked
            ],
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Self:
        """Continues from the state of `to_dict`."""
        names = ("seed", "low", "high", "retire_at", "retest_share")
        curriculum = cls(state["size"], **{name: state[name] for name in names})
        curriculum._draws = state["draws"]
        for item, success, asked in state["items"]:
            curriculum._success[item] = np.nan if success is None else success
            curriculum._asked[item] = asked
        return curriculum

    def _pools(self, step: int | None, random: np.random.Generator) -> dict[Pool, list[int]]:
        """The items by state, the next one last, without those that were asked in `step`."""
        pools: dict[Pool, list[int]] = {name: [] for name in SPARE_ORDER}
        shuffled = random.permutation(self.size)
        for item in shuffled[np.argsort(-self._asked[shuffled], kind="stable")].tolist():
            if step is not None and self._asked[item] == step:
                continue
            state = self.state_of(item)
            rests = step is not None and state == "in_band" and step - self._asked[item] < REST_STEPS
            pools["resting" if rests else state].append(item)
        return pools

    def _pick(self, pools: Mapping[Pool, list[int]], draw: float) -> int:
        kinds = (*self._kinds(draw), *SPARE_ORDER)
        return next(pools[kind].pop() for kind in kinds if pools[kind])

    def _kinds(self, draw: float) -> tuple[Pool, ...]:
        """The pools that a uniform draw from [0, 1) tries first."""
        if draw < self.retest_share / 2:
            return ("solved", "retired")
        if draw < self.retest_share:
            return ("retired", "solved")
        if draw < self.retest_share + HARD_SHARE:
            return ("too_hard",)
        return ("unseen",) if draw < self.retest_share + HARD_SHARE + EXPLORE_SHARE else ()
