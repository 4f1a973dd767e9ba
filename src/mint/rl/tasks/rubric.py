"""A rubric: named, weighted functions whose contributions add up to one reward.

Each function takes `(response, item)` and returns how far its part holds, from 0 to 1.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from mint.errors import InvalidRequestError, MintError
from mint.rl.reward import Reward, RewardRange, UnsupportedError

PartFunction = Callable[[str, Any], float]
"""`(response, item)` → how far this part holds, in [0, 1]; a bool is 0 or 1."""

DECIMALS = 9
"""Sums are rounded to so many decimals, so that parts that all hold give exactly the sum of the weights as written."""


class RubricError(MintError):
    """A part of a rubric raised, or returned something outside [0, 1]; the message names the part."""


class Rubric:
    """`Rubric({"names_thing": (0.3, names_thing), …})(response, item)` is a `Reward` with a part per name.

    A part with a negative weight is a penalty.
    """

    def __init__(
        self, parts: Mapping[str, tuple[float, PartFunction]], *, reward_range: RewardRange = (0.0, 1.0)
    ) -> None:
        """The weighted sum must always lie within `reward_range`.

        Raises:
            InvalidRequestError: no parts, or the weights can leave the range.
        """
        self.parts = dict(parts)
        self.reward_range = reward_range
        weights = [weight for weight, _ in self.parts.values()]
        lowest = round(math.fsum(weight for weight in weights if weight < 0), DECIMALS)
        highest = round(math.fsum(weight for weight in weights if weight > 0), DECIMALS)
        low, high = reward_range
        if not weights or not low <= lowest or not highest <= high:
            raise InvalidRequestError(
                f"can give {lowest:g} to {highest:g}, but the range is {low:g} to {high:g}",
                field="Rubric.parts",
                value=dict(zip(self.parts, weights, strict=True)),
                remedy="Scale the weights, or declare the range with reward_range=(low, high)",
            )

    def __call__(self, response: str, item: Any) -> Reward:
        """The reward of one response, with the time of each part.

        Raises:
            RubricError: a part failed; the message names it.
            UnsupportedError: a part cannot judge this response on this machine.
        """
        parts: dict[str, float] = {}
        seconds: dict[str, float] = {}
        for name, (weight, _) in self.parts.items():
            began = time.perf_counter()
            parts[name] = weight * self._share(name, response, item)
            seconds[name] = time.perf_counter() - began
        return Reward(round(math.fsum(parts.values()), DECIMALS), parts, grader_seconds=seconds)

    def _share(self, name: str, response: str, item: Any) -> float:
        try:
            share = float(self.parts[name][1](response, item))
        except UnsupportedError:
            raise
        except Exception as error:
            message = f"part {name!r} of the rubric raised {type(error).__name__}: {error}"
            raise RubricError(message) from error
        if not 0 <= share <= 1:
            raise RubricError(
                f"part {name!r} of the rubric gave {share:g}",
                remedy="Return how far the part holds, from 0 to 1; it is multiplied by its weight",
            )
        return share
