"""What a grader returns or raises: a reward with named parts, or that it cannot judge."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mint.errors import InvalidRequestError, MintError

PARTS_TOLERANCE = 1e-6


class UnsupportedError(MintError):
    """Raised by a grader that cannot judge a completion on this machine; the completion is left out of its group."""


@dataclass(frozen=True)
class Reward:
    """A reward with its parts.

    `parts` are contributions by name and add up to `value` (a penalty is a negative part); `info` holds facts about
    the grading (which engine, what failed) and is logged with the rollout. `grader_seconds` is the time that each of
    several graders took, by name: their means of a step are in its metrics.
    """

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)
    grader_seconds: Mapping[str, float] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        total = sum(self.parts.values())
        if self.parts and not math.isclose(total, self.value, rel_tol=0, abs_tol=PARTS_TOLERANCE):
            raise InvalidRequestError(
                f"add up to {total:g}, but the value is {self.value:g}",
                field="Reward.parts",
                value=dict(self.parts),
                remedy="Give each part as its contribution to the value, penalties as negative numbers",
            )


RewardRange = tuple[float, float]
