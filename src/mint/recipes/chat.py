"""Chat RL: one short reply to one message about a thing, through the tokenizer's chat template.

The reward is a rubric of named parts, optionally combined with a pairwise judge that compares the replies of a group.
Held-out questions are scored by the rubric alone.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

from mint.errors import InvalidRequestError
from mint.recipes.datasets.chat_questions import RUBRIC, ChatQuestion, questions
from mint.recipes.question_task import encode_prompt
from mint.rl import PairwiseJudge, Reward, RLAdapter, RLConfig
from mint.rl.adapter import Graded
from mint.rl.tasks.penalties import Penalty, penalized

DEMO = RLConfig(
    base_model="mint/tiny",
    group_size=8,
    batch_size=16,
    steps=20,
    max_tokens=48,
    temperature=1.0,
    learning_rate=3e-3,
    lr_schedule="linear",
)
"""Tuned for the bundled model; small models need a larger learning rate than the default 2e-5."""


class ChatAdapter(RLAdapter):
    """`Do you like the fox?` → `The fox is a quick animal.`"""

    heldout_name = "chat held-out (message and thing never seen together)"
    reward_range = (0.0, 1.0)

    def __init__(
        self,
        *,
        seed: int = 0,
        judge: PairwiseJudge | None = None,
        judge_share: float = 0.5,
        penalties: Mapping[str, Penalty] | None = None,
    ) -> None:
        """`seed` determines the order of the questions; the split does not depend on it.

        Args:
            judge: Compares the replies of a training group.
            judge_share: The judge's share of the training reward; the rest is the rubric's. 1 is the judge alone.
            penalties: Subtracted from every reward, by name.

        Raises:
            InvalidRequestError: `judge_share` is not in (0, 1].
        """
        if not 0 < judge_share <= 1:
            raise InvalidRequestError("is not in (0, 1]", field="judge_share", value=judge_share, remedy="Try 0.5")
        self.seed = seed
        self.judge = judge
        self.judge_share = judge_share
        self.penalties = dict(penalties or {})

    def build_dataset(self) -> Sequence[ChatQuestion]:
        """All training questions, with and without a system message."""
        return self._shuffled(questions(heldout=False))

    def build_heldout(self) -> Sequence[ChatQuestion]:
        """All held-out questions: 87 pairs of message and thing, each with and without a system message."""
        return self._shuffled(questions(heldout=True))

    def item_key(self, item: ChatQuestion) -> str:
        """The message, because it is the same question with and without a system message."""
        return item.text

    def make_prompt(self, item: ChatQuestion, tokenizer: Any) -> list[int]:
        """The conversation in the chat template, up to the reply."""
        return encode_prompt(item.messages, tokenizer, "chat")

    def compute_reward(self, response: str, item: ChatQuestion) -> Reward:
        """The parts of the rubric, minus the penalties."""
        return penalized(RUBRIC(response, item), response, item, self.penalties)

    def compute_group_rewards(
        self, responses: Sequence[str], item: ChatQuestion
    ) -> Awaitable[Sequence[Graded | None]] | None:
        """Rubric and judge; None for a reply that the judge could not compare with any other."""
        return None if self.judge is None else self._judged(self.judge, responses, item)

    def close(self) -> None:
        """Ends the judge's threads and connections."""
        if self.judge is not None:
            self.judge.close()

    async def _judged(
        self, judge: PairwiseJudge, responses: Sequence[str], item: ChatQuestion
    ) -> Sequence[Graded | None]:
        verdicts = await judge.judge(item.text, responses)
        return [
            None if verdict is None else self._mixed(response, item, verdict)
            for response, verdict in zip(responses, verdicts, strict=True)
        ]

    def _mixed(self, response: str, item: ChatQuestion, verdict: Reward) -> Reward:
        rubric = RUBRIC(response, item)
        rest = 1 - self.judge_share
        parts = {name: rest * part for name, part in rubric.parts.items()}
        parts["judge"] = self.judge_share * verdict.value
        mixed = Reward(sum(parts.values()), parts, {**verdict.info, "rubric": rubric.value}, rubric.grader_seconds)
        return penalized(mixed, response, item, self.penalties)

    def _shuffled(self, asked: list[ChatQuestion]) -> list[ChatQuestion]:
        return random.Random(f"chat {self.seed}").sample(asked, len(asked))
