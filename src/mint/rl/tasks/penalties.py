"""Named penalties: costs that are subtracted from a reward, as negative parts.

A penalty is a function of `(response, item)` that returns a cost of 0 or more.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from mint.errors import InvalidRequestError, MintError
from mint.rl.reward import Reward
from mint.types.tool_call_formats import OPENING_MARKS, SYNTAX, ToolCallFormat, parse_tool_calls

Penalty = Callable[[str, Any], float]
"""`(response, item)` → cost, 0 for none."""

CLIPPED = "clipped"
"""The part that raises a reward to the low end of its range."""


class PenaltyError(MintError):
    """A penalty raised, or returned something that is no cost; the message names it."""


def verbosity(
    limit: int, *, slope: float = 0.02, most: float = 1.0, unit: Literal["words", "characters"] = "words"
) -> Penalty:
    """Soft length penalty: nothing up to `limit`, `slope` per unit above it, at most `most`."""
    _check("slope", slope)
    return lambda response, _: min(most, slope * max(0, len(response.split() if unit == "words" else response) - limit))


def forbidden(patterns: Sequence[str], *, cost: float = 1.0) -> Penalty:
    """`cost` once, if any of the regular expressions is found (case is ignored)."""
    _check("cost", cost)
    found = [re.compile(pattern, re.IGNORECASE) for pattern in patterns]
    return lambda response, _: cost if any(pattern.search(response) for pattern in found) else 0.0


def tool_spam(
    limit: int,
    *,
    cost: float = 0.1,
    most: float = 1.0,
    pattern: str | None = None,
    written_as: ToolCallFormat | None = None,
) -> Penalty:
    """`cost` for each tool call over `limit`, at most `most`.

    Calls that cannot be read count, too. `written_as` names the format of the calls; without it, they are counted in
    every format that marks its calls, and the highest count holds. `pattern` counts the matches of a regular expression
    instead.
    """
    _check("cost", cost)
    if written_as is not None and written_as not in SYNTAX:
        raise InvalidRequestError(
            "is not a format of tool calls",
            field="tool_spam.written_as",
            value=written_as,
            remedy=f"The formats are {', '.join(SYNTAX)}",
        )
    matches = None if pattern is None else re.compile(pattern)

    def calls(response: str) -> int:
        if matches is not None:
            return len(matches.findall(response))
        if written_as is not None:
            return len(parse_tool_calls(response, written_as))
        marked = [name for name, marks in OPENING_MARKS.items() if any(mark in response for mark in marks)]
        return max((len(parse_tool_calls(response, name)) for name in marked), default=0)

    return lambda response, _: min(most, cost * max(0, calls(response) - limit))


def repetition(*, n: int = 3, cost: float = 1.0) -> Penalty:
    """`cost` times the share of the response's word n-grams that are repeats of earlier ones."""
    _check("cost", cost)

    def penalty(response: str, _: Any) -> float:
        words = response.lower().split()
        grams = [tuple(words[start : start + n]) for start in range(len(words) - n + 1)]
        return cost * (1 - len(set(grams)) / len(grams)) if grams else 0.0

    return penalty


def penalized(
    reward: float | Reward, response: str, item: Any, penalties: Mapping[str, Penalty], *, low: float = 0.0
) -> Reward:
    """`reward` minus each penalty, but not below `low`; the part `clipped` makes up the difference.

    Raises:
        PenaltyError: a penalty failed; the message names it.
    """
    earned = reward if isinstance(reward, Reward) else Reward(reward)
    parts = dict(earned.parts) or {"reward": float(earned.value)}
    for name, penalty in penalties.items():
        if name in parts:
            raise PenaltyError(f"the reward already has a part {name!r}", remedy="Give the penalty another name")
        parts[name] = -_cost(name, penalty, response, item)
    total = earned.value + math.fsum(parts[name] for name in penalties)
    if total < low:
        parts[CLIPPED] = low - total
        total = low
    return replace(earned, value=total, parts=parts)


def with_penalties(
    reward: Callable[[str, Any], float | Reward], penalties: Mapping[str, Penalty], *, low: float = 0.0
) -> Callable[[str, Any], Reward]:
    """A reward function that subtracts `penalties` from `reward`; `low` is the low end of the declared range."""
    return lambda response, item: penalized(reward(response, item), response, item, penalties, low=low)


def _cost(name: str, penalty: Penalty, response: str, item: Any) -> float:
    try:
        cost = float(penalty(response, item))
    except Exception as error:
        raise PenaltyError(f"penalty {name!r} raised {type(error).__name__}: {error}") from error
    if not (math.isfinite(cost) and cost >= 0):
        raise PenaltyError(f"penalty {name!r} gave {cost:g}", remedy="Return a finite number of 0 or more")
    return cost


def _check(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise InvalidRequestError(
            "is not a cost", field=name, value=value, remedy="Give 0 or more; it is subtracted from the reward"
        )
