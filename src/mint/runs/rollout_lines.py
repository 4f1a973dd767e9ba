"""The lines of `rollouts.jsonl`, read without decoding more of them than is asked for.

`tokens` and `logprobs` are most of a line and stand next to each other near its end. A quote inside a JSON string is
escaped, so the bytes of a key with its quotes occur only where it is a key.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mint.runs.json_lines import decode_line, read_lines

ROLLOUTS = "rollouts.jsonl"
TOKENS = b', "tokens": ['
LOGPROBS = b'], "logprobs": ['


def light_row(line: bytes) -> dict[str, Any]:
    """A row without decoding its `tokens` and `logprobs`: several times faster than JSON.

    `tokens` becomes a range of the same length, `logprobs` an empty tuple.

    Raises:
        ValueError: the line is not JSON.
    """
    start = line.find(TOKENS)
    if start < 0:
        return decode_line(line)
    first = start + len(TOKENS)
    end = line.find(b"]", first)
    if end < 0 or not line.startswith(LOGPROBS, end):
        return decode_line(line)
    last = line.find(b"]", end + len(LOGPROBS))
    row = decode_line(line[:start] + line[last + 1 :])
    length = line.count(b",", first, end) + 1 if end > first else 0
    return {**row, "tokens": range(length), "logprobs": ()}


def token_count(line: bytes) -> int:
    """The number of tokens of a row, without decoding it; 0 if the line is not written as a run writes it."""
    start = line.find(TOKENS)
    end = line.find(b"]", start)
    return line.count(b",", start + len(TOKENS), end) + 1 if start >= 0 and end > start + len(TOKENS) else 0


def shortened_row(line: bytes, most: int) -> dict[str, Any]:
    """A row with the first `most` of its `tokens` and `logprobs`, without decoding the others. `most` is at least 1.

    Raises:
        ValueError: the line is not JSON.
    """
    start = line.find(TOKENS)
    first = start + len(TOKENS)
    end = line.find(b"]", first)
    if start < 0 or end < 0 or not line.startswith(LOGPROBS, end):
        return decode_line(line)
    last = line.find(b"]", end + len(LOGPROBS))
    tokens = b",".join(line[first:end].split(b",", most)[:most])
    logprobs = b",".join(line[end + len(LOGPROBS) : last].split(b",", most)[:most])
    return decode_line(line[:first] + tokens + LOGPROBS + logprobs + line[last:])


def row_head(line: bytes) -> dict[str, Any]:
    """The fields before `tokens`; the line may have been cut after that key. Empty if it is not JSON."""
    cut = line.find(TOKENS)
    try:
        row = decode_line(line if cut < 0 else line[:cut] + b"}")
    except ValueError:
        return {}
    return row if isinstance(row, dict) else {}


def scan_steps(path: Path, start: int = 0) -> Iterator[tuple[int, list[dict[str, Any]], list[int], int]]:
    """The steps of `rollouts.jsonl` from byte `start` on: step, light rows, bytes of each line, offset of the first.

    Stops at a line that cannot be read, because the step of what follows is unknown.
    """
    step = 0
    rows: list[dict[str, Any]] = []
    sizes: list[int] = []
    for line in read_lines(path, start):
        try:
            row = light_row(line)
            row_step = int(row["step"])
        except (ValueError, KeyError, TypeError):
            break
        if rows and row_step != step:
            yield step, rows, sizes, start
            start += sum(sizes)
            rows = []
            sizes = []
        step = row_step
        rows.append(row)
        sizes.append(len(line))
    if rows:
        yield step, rows, sizes, start
