"""Text of reports: numbers with their nouns, and text from a model without its control characters."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

BLOCKS = "▁▂▃▄▅▆▇█"
COLORS = {"error": "red", "warning": "yellow", "info": "cyan"}
"""The colour of a finding by its severity, as rich names it."""


def one_line(text: str) -> str:
    """`text` on one line: line breaks as ⏎, tabs as ⇥, other unprintable characters by their code point."""
    return "".join(sign if sign.isprintable() else _shown(sign) for sign in text)


def counted(number: float, noun: str) -> str:
    """A number and what it counts: `1 step`, `12 steps`."""
    return f"{number:.0f} {noun}{'' if round(number) == 1 else 's'}"


def paragraph(text: str) -> str:
    """Same as `one_line`, but with line breaks, and tabs as four spaces."""
    return "\n".join(one_line(line.replace("\t", "    ")) for line in text.split("\n"))


def head(text: str, length: int) -> str:
    """The first `length` characters of `one_line`, with … if more follow; reads no more of a long text."""
    shown = one_line(text[:length])
    return f"{shown[:length]}…" if len(text) > length or len(shown) > length else shown


def tail(text: str, length: int) -> str:
    """The last `length` characters of `one_line`, with … if more come before."""
    shown = one_line(text[-length:])
    return f"…{shown[-length:]}" if len(text) > length or len(shown) > length else shown


def sparkline(values: list[float], width: int) -> str:
    """A curve of at most `width` blocks from the lowest to the highest value; a block shows the mean of its values."""
    if not values:
        return ""
    count = min(width, len(values))
    ends = [len(values) * place // count for place in range(count + 1)]
    means = [sum(values[first:last]) / (last - first) for first, last in itertools.pairwise(ends)]
    low = min(means)
    high = max(means)
    if high == low:
        return BLOCKS[0] * count
    return "".join(BLOCKS[round((mean - low) / (high - low) * (len(BLOCKS) - 1))] for mean in means)


def evaluation_name(row: Mapping[str, Any]) -> str:
    """Names what a row of `evaluations.jsonl` measured: a metric, or the reward at a temperature."""
    return row.get("metric") or temperature_name(row["temperature"])


def temperature_name(temperature: float) -> str:
    """`greedy`, or the temperature."""
    return "greedy" if temperature == 0 else f"temperature {temperature:g}"


def interval_text(row: Mapping[str, Any]) -> str:
    """A mean with its 95 % interval, from the fields `mean`, `low` and `high`."""
    return f"{row['mean']:.3f} ({row['low']:.3f} to {row['high']:.3f})"


def sample_lines(rows: Sequence[Mapping[str, Any]], count: int, step: int) -> list[str]:
    """At most `count` graded rollouts of a step for the terminal, with reward by part.

    They are drawn at random, whatever their rewards; the step is the seed, so that a repeated run shows the same ones.
    """
    graded = [row for row in rows if row.get("reward") is not None]
    drawn = random.Random(step).sample(graded, min(count, len(graded)))
    return [_sample_line(row) for row in drawn]


def _sample_line(row: Mapping[str, Any]) -> str:
    parts = "".join(f" {name} {value:+.2f}" for name, value in row["parts"].items())
    calls = f", {row['tool_calls']} tool calls" if row["tool_calls"] else ""
    prompt = tail(str(row["prompt"]), 60)
    text = head(str(row["text"]), 100)
    return f"{prompt} → {text}  [reward {row['reward']:.2f}{parts}; {len(row['tokens'])} tokens{calls}]"


def _shown(sign: str) -> str:
    if sign == "\n":
        return "⏎"
    if sign == "\t":
        return "⇥"
    code = ord(sign)
    if code < 0x20:
        return chr(0x2400 + code)  # the picture of a control character
    return f"⟨{code:X}⟩"
