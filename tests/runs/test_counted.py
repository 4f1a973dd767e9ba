"""Numbers and their nouns in reports."""

from __future__ import annotations

import pytest

from mint.runs.terminal_text import counted


@pytest.mark.parametrize(
    ("number", "noun", "shown"),
    [(0, "step", "0 steps"), (1, "step", "1 step"), (1.0, "completion", "1 completion"), (12, "LoRA", "12 LoRAs")],
)
def test_one_thing_is_not_plural(number: float, noun: str, shown: str) -> None:
    assert counted(number, noun) == shown
