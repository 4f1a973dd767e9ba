"""Sums RL: additions asked in a chat, for a small published instruct model.

SmolLM2-135M-Instruct answers in a sentence, and is right about once in ten times. RL teaches it to add.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from mint.recipes.datasets.arithmetic import Problem, is_heldout
from mint.recipes.question_task import Question, QuestionAdapter
from mint.rl import Reward, RLConfig

DEMO = RLConfig(
    base_model="HuggingFaceTB/SmolLM2-135M-Instruct",
    group_size=8,
    batch_size=16,
    steps=20,
    max_tokens=12,
    temperature=1.0,
    learning_rate=3e-4,
    lr_schedule="linear",
    heldout_size=128,
)

LARGEST = 49
NUMBER = re.compile(r"\d+")


class SumsAdapter(QuestionAdapter):
    """`What is 14 + 25? Reply with the number only.` → a reply whose last number is 39."""

    heldout_name = "sums held-out (1 in 8 by hash, never trained on)"
    reward_range = (0.0, 1.0)

    def __init__(self, *, seed: int = 0) -> None:
        """`seed` determines the order of the questions; the split does not depend on it."""
        super().__init__(prompt_style="chat")
        self.seed = seed

    def build_dataset(self) -> Sequence[Question]:
        """The training questions, in random order."""
        return self._questions(heldout=False)

    def build_heldout(self) -> Sequence[Question]:
        """The held-out questions, in random order."""
        return self._questions(heldout=True)

    def compute_reward(self, response: str, item: Question) -> Reward:
        """1 if the last number of the reply is the sum, else 0."""
        numbers = NUMBER.findall(response)
        return Reward(float(bool(numbers) and numbers[-1] == item.answer))

    def _questions(self, *, heldout: bool) -> list[Question]:
        problems = [Problem(a, "+", b) for a in range(1, LARGEST + 1) for b in range(1, LARGEST + 1)]
        side = [problem for problem in problems if is_heldout(problem) == heldout]
        random.Random(f"sums {self.seed} {heldout}").shuffle(side)
        return [
            Question(f"What is {problem.expression}? Reply with the number only.", problem.answer) for problem in side
        ]
