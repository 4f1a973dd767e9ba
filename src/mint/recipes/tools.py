"""Tools RL: a question, a calculator call, an answer; and a search over local documents as a second example.

The held-out questions share no operands with the training ones (`arithmetic.is_heldout`), and the bundled model never
saw them. It was trained to guess as often as to call the calculator; RL teaches it to call.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mint.recipes.datasets.arithmetic import Problem, is_heldout
from mint.recipes.datasets.calculator_questions import SHORT_SYSTEM, draw_message, draw_tool_problem
from mint.rl import MessageEnvAdapter, RLConfig
from mint.rl.message_env import Message, MessageEnv
from mint.rl.tasks.calculator import calculator
from mint.rl.tasks.search import Search
from mint.rl.tasks.tool_calls import tool
from mint.rl.tasks.tool_env import Costs, ToolEnv

DEMO = RLConfig(
    base_model="mint/tiny",
    group_size=8,
    batch_size=16,
    steps=20,
    max_tokens=48,
    max_turns=3,
    temperature=1.0,
    learning_rate=2e-3,
    lr_schedule="linear",
)
"""Tuned for the bundled model; small models need a larger learning rate than the default 2e-5."""

COSTS = Costs(per_violation=0.2, at_most=0.5)
"""A malformed call, an unknown tool or bad arguments cost a fifth of the answer's reward."""


@dataclass(frozen=True)
class CalculatorQuestion:
    """A question; `described`: the chat template describes the calculator, else the system message only mentions it."""

    problem: Problem
    text: str
    described: bool


def draw_questions(seed: int, count: int, *, heldout: bool) -> list[CalculatorQuestion]:
    """Questions from one side of the split, alternately undescribed and described."""
    rng = random.Random(f"tools {seed} {heldout}")
    questions: list[CalculatorQuestion] = []
    while len(questions) < count:
        problem = draw_tool_problem(rng)
        if is_heldout(problem) == heldout:
            message, _ = draw_message(problem, rng)
            questions.append(CalculatorQuestion(problem, message, described=len(questions) % 2 == 1))
    return questions


class ToolsAdapter(MessageEnvAdapter):
    """`What is 34 + 58?` → a calculator call → its result → `The answer is 92.`"""

    heldout_name = "calculator questions held-out (1 in 8 pairs of operands by hash, never trained on)"

    def __init__(self, *, seed: int = 0, heldout_size: int = 512, train_size: int = 8192, costs: Costs = COSTS) -> None:
        """`seed` draws the questions; the split does not depend on it."""
        self.seed = seed
        self.heldout_size = heldout_size
        self.train_size = train_size
        self.costs = costs
        self.reward_range = costs.range_of((0.0, 1.0))

    def build_dataset(self) -> Sequence[CalculatorQuestion]:
        """Training questions."""
        return draw_questions(self.seed, self.train_size, heldout=False)

    def build_heldout(self) -> Sequence[CalculatorQuestion]:
        """Held-out questions."""
        return draw_questions(self.seed, self.heldout_size, heldout=True)

    def make_env(self, item: CalculatorQuestion) -> MessageEnv:
        """The question and the calculator."""
        system = [] if item.described else [{"role": "system", "content": SHORT_SYSTEM}]
        return ToolEnv(
            [*system, {"role": "user", "content": item.text}],
            [calculator],
            lambda text, results: 1.0 if states(text, item.problem.answer) else 0.0,
            costs=self.costs,
            describe_tools=item.described,
        )


def states(text: str, answer: str) -> bool:
    """Whether `answer` is the only number in `text`."""
    return re.findall(r"-?\d+", text) == [answer]


DOCUMENTS = (
    "The library of Velm opens at nine and closes at six. It is closed on Sundays.",
    "The ferry from Velm to Orst sails four times a day and takes 50 minutes.",
    "Orst has a market on Tuesdays. Its tower was built in 1674.",
    "The river Tay-Lin is 312 kilometres long and ends in the bay of Orst.",
)
FACTS = (
    ("In which year was the tower of Orst built?", "1674"),
    ("How many minutes does the ferry from Velm to Orst take?", "50"),
    ("How long is the river Tay-Lin, in kilometres?", "312"),
)


class SearchAdapter(MessageEnvAdapter):
    """A question with its answer in one of a few local documents; for models that can read (`mint/tiny` cannot).

    Give your own `documents` (texts, or a folder) and `facts` (question, answer).
    """

    costs = Costs(per_call=0.05, per_violation=0.2, at_most=0.5)
    reward_range = costs.range_of((0.0, 1.0))
    success_reward = 0.9

    def __init__(self, documents: Any = DOCUMENTS, facts: Sequence[tuple[str, str]] = FACTS) -> None:
        """One search index serves all episodes."""
        self._search = tool(Search(documents).search)
        self._facts = facts

    def build_dataset(self) -> Sequence[tuple[str, str]]:
        """The questions with their answers."""
        return self._facts

    def make_env(self, item: tuple[str, str]) -> MessageEnv:
        """The question with the search tool. An answer is rewarded only if a search result contains it."""
        question, answer = item

        def grade(text: str, results: Sequence[Message]) -> float:
            shown = any(result["trace"]["ok"] and answer in result["content"] for result in results)
            return 1.0 if shown and states(text, answer) else 0.0

        return ToolEnv([{"role": "user", "content": question}], [self._search], grade, costs=self.costs)
