"""Mutated output of a sandbox against everything that reads it here: nothing raises, and memory stays in proportion.

Each case mutates real answers of both kinds (values and errors) by bytes, lengths, repetition, nesting and splices, and
sends them through the header, the outcome, the grader's comparison, the texts and the log. Seeded, without a process.
"""

from __future__ import annotations

import json
import random
import tracemalloc
from typing import Any

import pytest

from mint.rl.tasks.tool_calls import as_text
from mint.runs.json_lines import encode_line
from mint.sandbox import Limits, same_value, value_text
from mint.sandbox.value_encoding import encode
from mint.sandbox.zygote_pool import read_header, read_outcome
from mint.types.tool_call_formats import parse_tool_calls

LIMITS = Limits()
NONCE = "0123456789abcdef"
VALUES: list[Any] = [
    None,
    True,
    -1,
    2**64,
    0.5,
    float("nan"),
    "é\ud800'",
    b"\x00",
    [1, [2]],
    ({"k": (1,)},),
    {1, 2},
    {"a": {}},
]
SPLICES = [
    b"[",
    b"]",
    b'"',
    b"\\",
    b"\\ud800",
    b"NaN",
    b"1e999",
    b"-0",
    b"null",
    b"\x00",
    b"\xff\xfe",
    b"\n",
    b" ",
    b"V ",
    b"E ",
]
SPLICES += [
    NONCE.encode() + b" V [true]\n",
    b'["list",999999999]',
    b'["dict",3]',
    b'["int","0x' + b"f" * 999,
    b"9" * 5000,
]
PEAK_PER_BYTE = 60
PEAK_BESIDE = 300_000
"""Bytes: exceptions, the longest texts that are shown, and the outcome of an answer that is void."""


def answer(rng: random.Random) -> bytes:
    lines = ["R ", "L "]
    for _ in range(rng.randrange(4)):
        value = rng.choice(VALUES)
        lines.append(rng.choice([f"V {encode(value, 200, 1000)}", f"E {json.dumps(repr(value))}"]))
    return "".join(f"{NONCE} {line}\n" for line in lines).encode()


def mutated(text: bytes, rng: random.Random) -> bytes:
    for _ in range(rng.choice([0, 1, 1, 2, 5])):
        place = rng.randrange(len(text) + 1)
        end = min(len(text), place + rng.randrange(40))
        match rng.randrange(6):
            case 0:
                text = text[:place] + bytes([rng.randrange(256)]) + text[place + 1 :]
            case 1:
                text = text[:place] + text[end:]
            case 2:
                text = text[:place]
            case 3:
                text = text[:end] + text[place:end] * rng.choice([1, 10, 1000]) + text[end:]
            case 4:
                text = text[:place] + rng.choice(SPLICES) * rng.choice([1, 1, 3, 3000]) + text[place:]
            case _:
                text = text[:place] + rng.choice(SPLICES) + text[end:]
        text = text[: LIMITS.output_bytes]
    return text


def read_all(results: bytes, header: bytes, rng: random.Random) -> set[str]:
    """Everything that the trainer does with an answer; which statuses it met."""
    try:
        facts = read_header(header, LIMITS.output_bytes)
    except ValueError:
        facts = {"ended": rng.choice(["exit", "wall", "output"]), "exit": rng.randrange(-70, 256)}
    count = rng.randrange(1, 4)
    outcome = read_outcome(facts, results, results[:500], NONCE, count, LIMITS, "zygote", 0.0)
    assert len(outcome.results) == count
    for result in outcome.results:
        same_value(result.value, rng.choice(VALUES))
        assert same_value(result.value, result.value)
        assert len(value_text(result.value, 300)) <= 301
        assert len(repr(result)) <= 2500
        as_text(result.value).encode(errors="replace")
        row = json.loads(encode_line({"value": result.value, "error": result.error, "stdout": outcome.stdout}))
        assert row["error"] == result.error
    for call in parse_tool_calls("<tool_call>" + results.decode(errors="replace") + "</tool_call>"):
        assert call.error is not None
    return {outcome.status}


def fuzz(cases: int, seed: int) -> set[str]:
    rng = random.Random(seed)
    header = json.dumps({"ended": "exit", "exit": 0, "results": 10, "stdout": 0}).encode()
    statuses: set[str] = set()
    tracemalloc.start()
    try:
        for _ in range(cases):
            results = mutated(answer(rng), rng)
            changed_header = mutated(header, rng)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            statuses |= read_all(results, changed_header, rng)
            peak = tracemalloc.get_traced_memory()[1] - before
            assert peak <= PEAK_PER_BYTE * (len(results) + len(changed_header)) + PEAK_BESIDE, (peak, results[:200])
    finally:
        tracemalloc.stop()
    return statuses


def test_no_output_of_a_sandbox_harms_its_reader() -> None:
    assert fuzz(600, seed=1) >= {"ok", "crashed", "output"}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 7))
def test_no_output_of_a_sandbox_harms_its_reader_in_20_000_cases(seed: int) -> None:
    fuzz(4_000, seed)
