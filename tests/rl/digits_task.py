"""A task that any policy can climb, and whose rewards differ within a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mint.rl import RLAdapter


class ManyDigits(RLAdapter):
    """More digits, more reward."""

    def build_dataset(self) -> Sequence[str]:
        return ["1 + 1", "2 + 2", "3 + 3"]

    def make_prompt(self, item: str, tokenizer: Any) -> list[int]:
        return tokenizer.encode(f"Q: What is {item}?\nA:")

    def compute_reward(self, response: str, item: str) -> float:
        return sum(character.isdigit() for character in response) / 16
