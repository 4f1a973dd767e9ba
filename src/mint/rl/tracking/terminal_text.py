"""What a model or a stranger wrote, made harmless for a terminal: every sign is shown, none obeyed. No colours."""

from __future__ import annotations

import itertools

BLOCKS = "▁▂▃▄▅▆▇█"


def one_line(text: str) -> str:
    """`text` on one line: line breaks as ⏎, tabs as ⇥, everything else that has no shape of its own by its number."""
    return "".join(sign if sign.isprintable() else _shown(sign) for sign in text)


def paragraph(text: str) -> str:
    """The same, with line breaks kept and tabs as four spaces."""
    return "\n".join(one_line(line.replace("\t", "    ")) for line in text.split("\n"))


def head(text: str, length: int) -> str:
    """The first `length` signs of `one_line`, with … where more follow. Reads no more of a long text than that."""
    shown = one_line(text[:length])
    return f"{shown[:length]}…" if len(text) > length or len(shown) > length else shown


def tail(text: str, length: int) -> str:
    """The last `length` signs of `one_line`, with … where more come before."""
    shown = one_line(text[-length:])
    return f"…{shown[-length:]}" if len(text) > length or len(shown) > length else shown


def sparkline(values: list[float], width: int) -> str:
    """A curve of at most `width` blocks from the least to the greatest; neighbours share a block by their mean."""
    if not values:
        return ""
    count = min(width, len(values))
    ends = [len(values) * place // count for place in range(count + 1)]
    means = [sum(values[first:last]) / (last - first) for first, last in itertools.pairwise(ends)]
    low, high = min(means), max(means)
    if high == low:
        return BLOCKS[0] * count
    return "".join(BLOCKS[round((mean - low) / (high - low) * (len(BLOCKS) - 1))] for mean in means)


def _shown(sign: str) -> str:
    if sign == "\n":
        return "⏎"
    if sign == "\t":
        return "⇥"
    code = ord(sign)
    if code < 0x20:
        return chr(0x2400 + code)  # the picture of a control character
    return f"⟨{code:X}⟩"
