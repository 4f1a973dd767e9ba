"""Math RL: arithmetic questions, exact match.

The held-out questions are disjoint from the training ones by construction (`arithmetic.is_heldout`, a hash of the
problem), and the bundled model never saw them in the question format either.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from mint.recipes.arithmetic import Problem, draw_problems
from mint.rl import RLAdapter, RLConfig

DEMO = RLConfig(
    base_model="mint/tiny",
    group_size=8,
    batch_size=32,
    steps=80,
    max_tokens=8,
    temperature=1.0,
    learning_rate=3e-3,
    lr_schedule="linear",
)
"""Tuned for the bundled model: small models want a larger learning rate than the table's 2e-5."""

WHOLE_NUMBER = re.compile(r"-?[0-9]+")


class MathAdapter(RLAdapter):
    """`Q: What is 34 + 58?` → ` 92`."""

    heldout_name = "arithmetic held-out (1 in 8 problems by hash, never trained on)"

    def __init__(self, *, seed: int = 0, heldout_size: int = 512, train_size: int = 8192) -> None:
        """`seed` draws the questions; the split itself does not depend on it."""
        self.seed, self.heldout_size, self.train_size = seed, heldout_size, train_size

    def build_dataset(self) -> Sequence[Problem]:
        """Training questions."""
        return draw_problems(self.seed, self.train_size, heldout=False)

    def build_heldout(self) -> Sequence[Problem]:
        """Held-out questions."""
        return draw_problems(self.seed, self.heldout_size, heldout=True)

    def make_prompt(self, sample: Problem, tokenizer: Any) -> list[int]:
        """The question as plain text."""
        return tokenizer.encode(sample.question)

    def compute_reward(self, response: str, sample: Problem) -> float:
        """1 if the completion is the answer and nothing else, 0 otherwise."""
        return 1.0 if exact_match(response, sample.answer) else 0.0


def exact_match(response: str, answer: str) -> bool:
    """Whether `response`, white space at its ends aside, is the whole number `answer` (no leading zeros)."""
    text = response.strip()
    return bool(WHOLE_NUMBER.fullmatch(text)) and text == answer
