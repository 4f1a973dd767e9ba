"""Just hard enough: which items of the dataset to ask next, from how often each was solved so far.

Knows places in a dataset and success rates, nothing of prompts or policies. Items whose success rate lies in a band
carry most signal (an online difficulty filter, arXiv 2504.03380); solved ones are retired and re-tested now and then
(ScaleRL's no-positive-resampling, arXiv 2510.13786); too hard ones are tried again rarely.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

import numpy as np

Standing = Literal["unseen", "too_hard", "in_band", "solved", "retired"]
"""Of an item: never asked; below the band; in it; above it; above it by so much that it is the last to fill a batch."""

STANDINGS: tuple[Standing, ...] = ("unseen", "too_hard", "in_band", "solved", "retired")

Pool = Standing | Literal["resting"]
"""What picks are made from: `resting` are the items of the band that were asked a few steps ago."""

REST_STEPS = 8
"""Steps for which an item of the band rests: asked again and again, a few items are learned by heart, not the task."""

SPARE_ORDER: tuple[Pool, ...] = ("in_band", "unseen", "resting", "too_hard", "solved", "retired")
"""Where a pick comes from when its own kind has run out. A rare success on a hard item teaches more than a rare failure
on a solved one."""

EXPLORE_SHARE = 0.25
"""Of the picks that go to unseen items, while there are any and the band is not empty."""

HARD_SHARE = 0.05
"""Of the picks that go to items that were too hard."""

MEMORY = 0.5
"""Weight of an item's history against its newest success rate: a few visits decide, old policies fade."""

FIRST_WEIGHT = 2 / 3
"""Of an item's first success rate, the rest is a prior of 1/2: one lucky group retires nothing (0.95 takes three)."""

NEVER = 0
"""The step of an item that was not asked yet; steps count from 1."""


class Curriculum:
    """The success history of every item; `choose` reads it and `record` writes it. No choice depends on time or order
    of threads: the same seed, calls and records give the same items."""

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
        """`size` items; the band is [`low`, `high`]; items above it get `retest_share` of the picks while there are
        others, those from `retire_at` on even when the band runs dry."""
        self.size, self.seed = size, seed
        self.low, self.high, self.retire_at, self.retest_share = low, high, retire_at, retest_share
        self._success = np.full(size, np.nan)
        self._asked = np.full(size, NEVER, dtype=np.int64)
        self._draws = 0

    def choose(self, step: int, count: int) -> list[int]:
        """`count` places for `step`, none twice in a step while there are enough items; oldest first in each kind."""
        random = np.random.default_rng([self.seed, step, self._draws])
        self._draws += 1
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
        """The share of successes of one visit to `item` at `step`."""
        before = self._success[item]
        first = FIRST_WEIGHT * success_rate + (1 - FIRST_WEIGHT) / 2
        self._success[item] = first if np.isnan(before) else MEMORY * before + (1 - MEMORY) * success_rate
        self._asked[item] = max(self._asked[item], step)

    def standing(self, item: int) -> Standing:
        """Where `item` stands."""
        success = self._success[item]
        if np.isnan(success):
            return "unseen"
        if success < self.low:
            return "too_hard"
        if success <= self.high:
            return "in_band"
        return "solved" if success < self.retire_at else "retired"

    def metrics(self) -> dict[str, float]:
        """Items of each standing."""
        counts = dict.fromkeys(STANDINGS, 0)
        for item in range(self.size):
            counts[self.standing(item)] += 1
        return {f"curriculum/{name}": float(count) for name, count in counts.items()}

    def to_dict(self) -> dict[str, Any]:
        """For JSON; only items that were asked."""
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
        """Goes on from `to_dict`."""
        names = ("seed", "low", "high", "retire_at", "retest_share")
        curriculum = cls(state["size"], **{name: state[name] for name in names})
        curriculum._draws = state["draws"]
        for item, success, asked in state["items"]:
            curriculum._success[item] = np.nan if success is None else success
            curriculum._asked[item] = asked
        return curriculum

    def _pools(self, step: int | None, random: np.random.Generator) -> dict[Pool, list[int]]:
        """The items by standing, the next one last; without those that were asked in `step` already."""
        pools: dict[Pool, list[int]] = {name: [] for name in SPARE_ORDER}
        shuffled = random.permutation(self.size)
        for item in shuffled[np.argsort(-self._asked[shuffled], kind="stable")].tolist():
            if step is not None and self._asked[item] == step:
                continue
            standing = self.standing(item)
            rests = step is not None and standing == "in_band" and step - self._asked[item] < REST_STEPS
            pools["resting" if rests else standing].append(item)
        return pools

    def _pick(self, pools: Mapping[Pool, list[int]], draw: float) -> int:
        kinds = (*self._kinds(draw), *SPARE_ORDER)
        return next(pools[kind].pop() for kind in kinds if pools[kind])

    def _kinds(self, draw: float) -> tuple[Pool, ...]:
        """Which kinds a uniform draw from [0, 1) asks for first."""
        if draw < self.retest_share / 2:
            return ("solved", "retired")
        if draw < self.retest_share:
            return ("retired", "solved")
        if draw < self.retest_share + HARD_SHARE:
            return ("too_hard",)
        return ("unseen",) if draw < self.retest_share + HARD_SHARE + EXPLORE_SHARE else ()
