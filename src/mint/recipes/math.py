"""Math RL: questions with one right answer, by exact match or by math-verify.

Without your own problems these are arithmetic questions. A hash of the problem (`arithmetic.is_heldout`) separates the
held-out questions from the training ones; the bundled model never saw the held-out ones in the question format. Your
own problems are split by a hash of their text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from mint.errors import InvalidRequestError
from mint.recipes.datasets.arithmetic import Problem, draw_problems
from mint.recipes.question_task import Prompt, PromptStyle, Question, checked_prompt_style, encode_prompt, one_side
from mint.rl import Reward, RLAdapter, RLConfig
from mint.rl.tasks.math_grader import MathGrader, exact_match

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
"""Tuned for the bundled model; small models need a larger learning rate than the default 2e-5."""

GraderName = Literal["exact", "math-verify"]
HELDOUT_SHARE = 1 / 8


class MathAdapter(RLAdapter):
    """`Q: What is 34 + 58?` → ` 92`, or your own problems."""

    heldout_name = "arithmetic held-out (1 in 8 problems by hash, never trained on)"
    reward_range = (0.0, 1.0)

    def __init__(
        self,
        *,
        seed: int = 0,
        heldout_size: int = 512,
        train_size: int = 8192,
        grader: GraderName = "exact",
        problems: Iterable[tuple[Prompt, str]] | None = None,
        heldout_problems: Iterable[tuple[Prompt, str]] | None = None,
        prompt_style: PromptStyle = "plain",
    ) -> None:
        """`seed` draws the arithmetic questions; the split does not depend on it.

        Args:
            grader: `exact`: the completion is the answer and nothing else. `math-verify`: its final answer equals the
                answer, in any notation.
            problems: `(prompt, answer)` pairs instead of arithmetic; a prompt is a text or a list of messages.
            heldout_problems: Their held-out set; None holds out 1 in 8 of `problems` by a hash of the prompt.
            prompt_style: How the prompts of `problems` are encoded: `plain`, or `chat` with the chat template.

        Raises:
            InvalidRequestError: the grader is unknown, or held-out problems were given without problems.
            MissingExtraError: math-verify is asked for and not installed.
        """
        if grader not in ("exact", "math-verify"):
            raise InvalidRequestError(
                "is not a grader", field="grader", value=grader, remedy="Choose exact or math-verify"
            )
        if problems is None and heldout_problems is not None:
            raise InvalidRequestError(
                "were given without problems", field="heldout_problems", value=heldout_problems, remedy="Give both"
            )
        self.seed = seed
        self.heldout_size = heldout_size
        self.train_size = train_size
        self.prompt_style: PromptStyle = checked_prompt_style(prompt_style)
        self._grader = MathGrader() if grader == "math-verify" else None
        self._problems = None if problems is None else [Question(*pair) for pair in problems]
        self._heldout = None if heldout_problems is None else [Question(*pair) for pair in heldout_problems]
        if problems is not None:
            self.heldout_name = "held-out problems (never trained on)"

    def build_dataset(self) -> Sequence[Problem | Question]:
        """Training questions."""
        if self._problems is None:
            return draw_problems(self.seed, self.train_size, heldout=False)
        if self._heldout is None:
            return one_side(self._problems, heldout=False, share=HELDOUT_SHARE)
        return self._problems

    def build_heldout(self) -> Sequence[Problem | Question]:
        """Held-out questions."""
        if self._problems is None:
            return draw_problems(self.seed, self.heldout_size, heldout=True)
        if self._heldout is None:
            return one_side(self._problems, heldout=True, share=HELDOUT_SHARE)
        return self._heldout

    def item_key(self, item: Problem | Question) -> str:
        """The question without its answer."""
        return item.question if isinstance(item, Problem) else item.text

    def demonstrate(self, item: Problem | Question) -> str | None:
        """The answer, after a space if the prompt is plain text."""
        plain = isinstance(item, Problem) or self.prompt_style == "plain"
        return f" {item.answer}" if plain else item.answer

    def make_prompt(self, item: Problem | Question, tokenizer: Any) -> list[int]:
        """The question as plain text, or in `prompt_style`."""
        if isinstance(item, Problem):
            return tokenizer.encode(item.question)
        return encode_prompt(item.prompt, tokenizer, self.prompt_style)

    def compute_reward(self, response: str, item: Problem | Question) -> Reward:
        """1 if the answer is right, 0 otherwise; `info` names the method that decided."""
        if self._grader is None:
            return Reward(float(exact_match(response, item.answer)), info={"graded_by": "exact"})
        comparison = self._grader.compare(response, item.answer)
        return Reward(float(comparison.equal), info={"graded_by": comparison.decided_by})

    def close(self) -> None:
        """Ends the grader's processes."""
        if self._grader is not None:
            self._grader.close()
