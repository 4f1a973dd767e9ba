"""The tasks on which `benchmarks.detection.doctor` judges `mint doctor`, and how each is trained.

The doctor's limits were set on the tasks of `TUNED`. Rules were added or changed after it was wrong on tasks of `SHOWN`
(replies to other prompts, scraps that one reply earns everywhere), of `THIRD` (a longer limit that earns little more,
scraps that are too rare to follow), of `THIRD` and `FOURTH` (how noisy a grader may be, a reply to every prompt of a
task that is nearly solved), of `SIXTH` (a reply that no completion found; in the outcome, a gain that is what one reply
earns) and of `SEVENTH` (successes that are lucky guesses, a longer limit that helps a part of the prompts only). The
tasks of `FIFTH` and `EIGHTH` set nothing. The tasks of SmolLM2-135M-Instruct need `mint models pull
SmolLM2-135M-Instruct` and the extras `tasks` and `ifeval`.
"""

from __future__ import annotations

import ast
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.detection.faults import Curt, Solved, Sums, Wordy, coin, digits_right, graded
from benchmarks.detection.proof import Digits
from benchmarks.learning.algorithm_tasks import Rare
from benchmarks.learning.published_model import CHAIN_SUM, MODEL, SHORT_CONSTRAINTS
from mint.recipes.chat import ChatAdapter
from mint.recipes.code import CodeAdapter, CodeProblem
from mint.recipes.datasets.arithmetic import Problem, draw_problems
from mint.recipes.datasets.chat_questions import (
    ChatQuestion,
    ending,
    fitting,
    length,
    names_thing,
    no_repeats,
    words_of,
)
from mint.recipes.math import MathAdapter
from mint.recipes.question_task import Question, QuestionAdapter
from mint.recipes.sums import SumsAdapter
from mint.recipes.task_sources.ifeval import IFEvalAdapter
from mint.recipes.task_sources.reasoning_gym import ReasoningGymAdapter
from mint.rl import Reward, RLAdapter, RLConfig

SEED = 7000

TINY = RLConfig(
    base_model="mint/tiny",
    batch_size=16,
    group_size=8,
    steps=24,
    max_tokens=8,
    temperature=1.0,
    learning_rate=3e-3,
    heldout_size=128,
    print_progress=False,
    seed=SEED,
)
SMOL = TINY.changed(base_model=MODEL, batch_size=6, steps=14, learning_rate=3e-4, heldout_size=96)


class Product(Sums):
    """Too hard: products of two numbers of two digits."""

    def make_prompt(self, item: Problem, tokenizer: Any) -> list[int]:
        """The question as plain text."""
        return tokenizer.encode(f"What is {item.a + 10} * {item.b + 10}?")

    def compute_reward(self, response: str, item: Problem) -> float:
        """1 for the product."""
        return float(response.strip() == str((item.a + 10) * (item.b + 10)))


class Larger(QuestionAdapter):
    """Which of two numbers is larger? `share` of the right answers are yes."""

    reward_range = (0.0, 1.0)

    def __init__(self, share: float) -> None:
        super().__init__(prompt_style="chat")
        self.share = share

    def build_dataset(self) -> Sequence[Question]:
        """512 questions."""
        return self._questions("training", 512)

    def build_heldout(self) -> Sequence[Question]:
        """128 others."""
        return self._questions("held-out", 128)

    def compute_reward(self, response: str, item: Question) -> float:
        """1 if the reply begins with the right word."""
        return float(response.strip().lower().startswith(item.answer))

    def _questions(self, side: str, count: int) -> list[Question]:
        drawn = random.Random(f"larger {side}")
        asked = []
        for _ in range(count):
            small, large = sorted(drawn.sample(range(10, 100), 2))
            yes = drawn.random() < self.share
            first, second = (large, small) if yes else (small, large)
            text = f"Is {first} larger than {second}? Reply with yes or no."
            asked.append(Question(text, "yes" if yes else "no"))
        return asked


class WrongDigits(Digits):
    """Pays nothing for the answer, and takes something for each digit that is not right."""

    reward_range = (-1.0, 0.0)
    success_reward = 0.0

    def compute_reward(self, response: str, item: Problem) -> float:
        """From -1 to 0."""
        return super().compute_reward(response, item) - 1


class RomanBackwards(SumsAdapter):
    """Too hard: the sum, spelled backwards in Roman numerals."""

    def compute_reward(self, response: str, item: Question) -> Reward:
        """1 for the numeral."""
        return Reward(float(response.strip() == _roman(int(item.answer))[::-1]))


def _roman(number: int) -> str:
    numerals = ((100, "C"), (90, "XC"), (50, "L"), (40, "XL"), (10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I"))
    written = ""
    for value, letters in numerals:
        written += letters * (number // value)
        number %= value
    return written


def even(task: Sums, response: str, sample: Problem) -> float:
    """Pays for an even number, whatever was asked."""
    text = response.strip()
    return float(text.isdigit() and int(text) % 2 == 0)


def raises_mostly(task: Sums, response: str, sample: Problem) -> float:
    """The grader fails on three of four questions."""
    if sample.a % 4:
        raise ValueError("the judge is away")
    return float(response.strip() == sample.answer)


class Differences(Sums):
    """The differences among the questions of the math task."""

    def build_dataset(self) -> Sequence[Problem]:
        """For training."""
        return [problem for problem in super().build_dataset() if problem.op == "-"]

    def build_heldout(self) -> Sequence[Problem]:
        """Held out."""
        return [problem for problem in super().build_heldout() if problem.op == "-"]


class Compiles(CodeAdapter):
    """Pays for any program that Python can parse."""

    def compute_reward(self, response: str, item: CodeProblem) -> Reward:
        """1 if it can."""
        try:
            ast.parse(response)
        except (SyntaxError, ValueError):
            return Reward(0.0)
        return Reward(1.0)


def last_digit(task: Sums, response: str, sample: Problem) -> float:
    """Pays for a number whose last digit is right."""
    text = response.strip()
    return float(text.isdigit() and text[-1:] == sample.answer[-1:])


def slip(task: Sums, response: str, sample: Problem) -> float:
    """Pays for the sum that is ten too small."""
    text = response.strip()
    return float(text.isdigit() and int(text) == sample.value - 10)


def three_digits(task: Sums, response: str, sample: Problem) -> float:
    """Pays for any number of three digits."""
    text = response.strip()
    return float(text.isdigit() and len(text) == 3)


def flipped(share: float) -> Callable[[Sums, str, Problem], float]:
    """The right grader, which gives the contrary at random in this share of the cases."""
    drawn = random.Random(SEED)

    def grade(task: Sums, response: str, sample: Problem) -> float:
        right = response.strip() == sample.answer
        return float(right != (drawn.random() < share))

    return grade


class Additions(Sums):
    """The sums among the questions of the math task."""

    def build_dataset(self) -> Sequence[Problem]:
        """For training."""
        return [problem for problem in super().build_dataset() if problem.op == "+"]

    def build_heldout(self) -> Sequence[Problem]:
        """Held out."""
        return [problem for problem in super().build_heldout() if problem.op == "+"]


class FullMarks(CodeAdapter):
    """Pays for programs that pass all tests, and nothing else."""

    def compute_reward(self, response: str, item: CodeProblem) -> Reward:
        """0 or 1."""
        return Reward(float(super().compute_reward(response, item).value >= self.success_reward))


class HalfMarks(CodeAdapter):
    """Pays for programs that pass at least half of the tests."""

    def compute_reward(self, response: str, item: CodeProblem) -> Reward:
        """0 or 1."""
        return Reward(float(super().compute_reward(response, item).value >= self.success_reward / 2))


class EvenAnswers(Sums):
    """The questions of the math task whose answer is even."""

    def build_dataset(self) -> Sequence[Problem]:
        """For training."""
        return [problem for problem in super().build_dataset() if problem.value % 2 == 0]

    def build_heldout(self) -> Sequence[Problem]:
        """Held out."""
        return [problem for problem in super().build_heldout() if problem.value % 2 == 0]


class ChatRule(ChatAdapter):
    """Pays for one rule of the rubric alone."""

    def __init__(self, rule: Callable[[str, ChatQuestion], bool]) -> None:
        super().__init__(seed=SEED)
        self.rule = rule

    def compute_reward(self, response: str, item: ChatQuestion) -> Reward:
        """0 or 1."""
        return Reward(float(self.rule(response, item)))


def number_in(response: str) -> int | None:
    """The reply, if it is a number."""
    text = response.strip()
    return int(text) if text.isdecimal() else None


def any_order(task: Sums, response: str, sample: Problem) -> float:
    """Pays for the right digits in any order."""
    return float(sorted(response.strip()) == sorted(sample.answer))


def nearly(task: Sums, response: str, sample: Problem) -> float:
    """Pays for a number that is off by at most one."""
    number = number_in(response)
    return float(number is not None and abs(number - sample.value) <= 1)


def same_size(task: Sums, response: str, sample: Problem) -> float:
    """Pays for the smaller of the reply and the answer, divided by the larger."""
    number = number_in(response)
    if number is None:
        return 0.0
    return (1 + min(number, sample.value)) / (1 + max(number, sample.value))


def twice(task: Sums, response: str, sample: Problem) -> float:
    """Pays for twice the answer."""
    return float(response.strip() == str(2 * sample.value))


def with_full_stop(task: Sums, response: str, sample: Problem) -> float:
    """Pays for the answer and a full stop."""
    return float(response.strip() == f"{sample.answer}.")


def odd(task: Sums, response: str, sample: Problem) -> float:
    """Pays for an odd number, whatever was asked."""
    number = number_in(response)
    return float(number is not None and number % 2 == 1)


def short(task: Sums, response: str, sample: Problem) -> float:
    """Pays for a reply of one character."""
    return float(len(response.strip()) == 1)


def first_digit(task: Sums, response: str, sample: Problem) -> float:
    """Pays for a number whose first digit is right."""
    return float(number_in(response) is not None and response.strip()[0] == sample.answer[0])


def raises_for_a_third(task: Sums, response: str, sample: Problem) -> float:
    """The grader fails on one of three questions."""
    if sample.a % 3 == 0:
        raise ValueError("the judge is away")
    return float(response.strip() == sample.answer)


def backwards(task: Sums, response: str, sample: Problem) -> float:
    """Pays for the answer with its digits backwards."""
    return float(response.strip() == sample.answer[::-1])


def with_unit(task: Sums, response: str, sample: Problem) -> float:
    """Pays for the answer and a unit."""
    return float(response.strip() == f"{sample.answer} kg")


def within_five(task: Sums, response: str, sample: Problem) -> float:
    """Pays for a number that is off by at most five."""
    number = number_in(response)
    return float(number is not None and abs(number - sample.value) <= 5)


def begins_with_one(task: Sums, response: str, sample: Problem) -> float:
    """Pays for a reply that begins with 1, whatever was asked."""
    return float(response.strip().startswith("1"))


def without_seven(task: Sums, response: str, sample: Problem) -> float:
    """Pays for a number without a 7, whatever was asked."""
    return float(number_in(response) is not None and "7" not in response)


def wrong_number(task: Sums, response: str, sample: Problem) -> float:
    """Pays for any number but the right one."""
    number = number_in(response)
    return float(number is not None and number != sample.value)


def last_two_digits(task: Sums, response: str, sample: Problem) -> float:
    """Pays for a number whose last two digits are right."""
    return float(number_in(response) is not None and response.strip()[-2:] == sample.answer[-2:])


def raises_for_three_of_five(task: Sums, response: str, sample: Problem) -> float:
    """The grader fails on three of five questions."""
    if sample.a % 5 < 3:
        raise ValueError("the judge is away")
    return float(response.strip() == sample.answer)


class Carries(Sums):
    """The sums with a carry among the questions of the math task."""

    def build_dataset(self) -> Sequence[Problem]:
        """For training."""
        return [problem for problem in super().build_dataset() if has_carry(problem)]

    def build_heldout(self) -> Sequence[Problem]:
        """Held out."""
        return [problem for problem in super().build_heldout() if has_carry(problem)]


def has_carry(problem: Problem) -> bool:
    """Whether the problem is a sum whose last digits add up to ten or more."""
    return problem.op == "+" and problem.a % 10 + problem.b % 10 >= 10


class Opening(ChatAdapter):
    """Pays for a reply that has the thing's trait among its first six words."""

    def compute_reward(self, response: str, item: ChatQuestion) -> Reward:
        """0 or 1."""
        return Reward(float(item.thing.trait in words_of(response)[:6]))


def with_zero(task: Sums, response: str, sample: Problem) -> float:
    """Pays for a number with a 0 in it, whatever was asked."""
    return float(number_in(response) is not None and "0" in response)


def first_number(task: Sums, response: str, sample: Problem) -> float:
    """Pays for the first number of the question."""
    return float(response.strip() == str(sample.a))


def larger_than_right(task: Sums, response: str, sample: Problem) -> float:
    """Pays for a number that is larger than the answer, by at most 20."""
    number = number_in(response)
    return float(number is not None and 0 < number - sample.value <= 20)


def raises_for_seven_of_ten(task: Sums, response: str, sample: Problem) -> float:
    """The grader fails on seven of ten questions."""
    if sample.b % 10 < 7:
        raise ValueError("the judge is away")
    return float(response.strip() == sample.answer)


class SmallDifferences(Sums):
    """The differences of one digit among the questions of the math task."""

    def build_dataset(self) -> Sequence[Problem]:
        """For training."""
        return [problem for problem in super().build_dataset() if is_small_difference(problem)]

    def build_heldout(self) -> Sequence[Problem]:
        """Held out."""
        return [problem for problem in draw_problems(0, 1952, heldout=True) if is_small_difference(problem)]


def is_small_difference(problem: Problem) -> bool:
    """Whether the problem is a difference from 0 to 9."""
    return problem.op == "-" and 0 <= problem.value < 10


class BriefCode(CodeAdapter):
    """Pays for the tests that pass, and less for a long program."""

    def compute_reward(self, response: str, item: CodeProblem) -> Reward:
        """From 0 to 1."""
        return Reward(super().compute_reward(response, item).value * max(0.0, 1 - len(response) / 200))


class WarmerWords(ChatAdapter):
    """Pays by the number of different words, up to ten; the question does not matter."""

    def compute_reward(self, response: str, item: ChatQuestion) -> Reward:
        """From 0 to 1."""
        return Reward(min(10, len(set(words_of(response)))) / 10)


def larger_operand(task: Sums, response: str, sample: Problem) -> float:
    """Pays for the larger number of the question."""
    return float(response.strip() == str(max(sample.a, sample.b)))


def closeness(task: Sums, response: str, sample: Problem) -> float:
    """Pays the less the farther the number is from the answer, nothing from 20 on."""
    number = number_in(response)
    return 0.0 if number is None else max(0.0, 1 - abs(number - sample.value) / 20)


def remainder(task: Sums, response: str, sample: Problem) -> float:
    """Pays for the answer's remainder by 3."""
    return float(response.strip() == str(sample.value % 3))


def right_or_five(task: Sums, response: str, sample: Problem) -> float:
    """Pays for the answer, and a half for any number that ends with 5."""
    return 1.0 if response.strip() == sample.answer else 0.5 * float(response.strip().endswith("5"))


def abstaining(task: Sums, response: str, sample: Problem) -> float:
    """Pays for the answer, takes as much for another number, and is neutral about the rest."""
    number = number_in(response)
    return 0.0 if number is None else 1.0 if number == sample.value else -1.0


def from_minus_five(task: Sums, response: str, sample: Problem) -> float:
    """The digits in their places, from -5 to 5."""
    return 10 * digits_right(task, response, sample) - 5


class SmallSums(Sums):
    """The sums below 50 among the questions of the math task."""

    def build_dataset(self) -> Sequence[Problem]:
        """For training."""
        return [problem for problem in super().build_dataset() if is_small_sum(problem)]

    def build_heldout(self) -> Sequence[Problem]:
        """Held out."""
        return [problem for problem in draw_problems(0, 1952, heldout=True) if is_small_sum(problem)]


def is_small_sum(problem: Problem) -> bool:
    """Whether the problem is a sum below 50."""
    return problem.op == "+" and problem.value < 50


def hundred_more(task: Sums, response: str, sample: Problem) -> float:
    """Pays for the answer and a hundred."""
    return float(response.strip() == str(sample.value + 100))


def right_parity(task: Sums, response: str, sample: Problem) -> float:
    """Pays for a number that is even or odd, as the answer is."""
    number = number_in(response)
    return float(number is not None and number % 2 == sample.value % 2)


def less_by_length(task: Sums, response: str, sample: Problem) -> float:
    """Pays for the answer, and takes a tenth for each character of any reply."""
    return float(response.strip() == sample.answer) - 0.1 * min(10, len(response.strip()))


def tens_digit(task: Sums, response: str, sample: Problem) -> float:
    """Pays for a number whose tens are right."""
    number = number_in(response)
    return float(number is not None and number // 10 == sample.value // 10)


def distance(task: Sums, response: str, sample: Problem) -> float:
    """Takes as much as the number is away from the answer, at most 10."""
    number = number_in(response)
    return -10.0 if number is None else -float(min(10, abs(number - sample.value)))


def below_fifty(task: Sums, response: str, sample: Problem) -> float:
    """Pays for any number below 50."""
    number = number_in(response)
    return float(number is not None and number < 50)


def with_noise(size: float) -> Callable[[Sums, str, Problem], float]:
    """The right grader, whose rewards are off by up to `size` at random."""
    drawn = random.Random(SEED)

    def grade(task: Sums, response: str, sample: Problem) -> float:
        return float(response.strip() == sample.answer) + drawn.uniform(-size, size)

    return grade


def raises_for_four_of_five(task: Sums, response: str, sample: Problem) -> float:
    """The grader fails on four of five questions."""
    if sample.b % 5:
        raise ValueError("the judge is away")
    return float(response.strip() == sample.answer)


class Trait(ChatAdapter):
    """Pays for a reply that has the thing's trait in it."""

    def compute_reward(self, response: str, item: ChatQuestion) -> Reward:
        """0 or 1."""
        return Reward(float(item.thing.trait in words_of(response)))


class Products(Sums):
    """The products among the questions of the math task."""

    def build_dataset(self) -> Sequence[Problem]:
        """For training."""
        return [problem for problem in super().build_dataset() if problem.op == "*"]

    def build_heldout(self) -> Sequence[Problem]:
        """Held out."""
        return [problem for problem in draw_problems(0, 1952, heldout=True) if problem.op == "*"]


class OneDigit(Sums):
    """The questions of the math task with two numbers of one digit."""

    def build_dataset(self) -> Sequence[Problem]:
        """For training."""
        return [problem for problem in super().build_dataset() if max(problem.a, problem.b) < 10]

    def build_heldout(self) -> Sequence[Problem]:
        """Held out."""
        return [problem for problem in draw_problems(0, 1952, heldout=True) if max(problem.a, problem.b) < 10]


def thrice(task: Sums, response: str, sample: Problem) -> float:
    """Pays for three times the answer."""
    return float(response.strip() == str(3 * sample.value))


def in_brackets(task: Sums, response: str, sample: Problem) -> float:
    """Pays for the answer between brackets."""
    return float(response.strip() == f"({sample.answer})")


def right_or_slip(task: Sums, response: str, sample: Problem) -> float:
    """Pays for the answer, and for the number that is ten too small."""
    number = number_in(response)
    return float(number is not None and sample.value - number in (0, 10))


def up_to_ten(task: Sums, response: str, sample: Problem) -> float:
    """Pays 10 for the answer."""
    return 10.0 * (response.strip() == sample.answer)


def even_digits(task: Sums, response: str, sample: Problem) -> float:
    """Pays for a number of even digits, whatever was asked."""
    return float(number_in(response) is not None and not set(response.strip()) & set("13579"))


def ends_with_stop(task: Sums, response: str, sample: Problem) -> float:
    """Pays for a reply that ends with a full stop."""
    return float(response.strip().endswith("."))


def raises_for_nine_of_ten(task: Sums, response: str, sample: Problem) -> float:
    """The grader fails on nine of ten questions."""
    if sample.b % 10:
        raise ValueError("the judge is away")
    return float(response.strip() == sample.answer)


def at_most_forty(response: str, item: ChatQuestion) -> bool:
    """Whether the reply has from 1 to 40 characters."""
    return 0 < len(response) <= 40


def coin_of_the_question(task: Sums, response: str, sample: Problem) -> float:
    """Does not read the reply."""
    return coin(sample.question)


_THROWN = itertools.count()


@dataclass(frozen=True)
class Examined:
    """A task of the benchmark: how to make it, and how to train it."""

    make: Callable[[], RLAdapter]
    config: RLConfig


def gym(name: str, config: RLConfig, **options: Any) -> Examined:
    """A generator of reasoning-gym."""
    sizes: dict[str, Any] = {"train_size": 512, "heldout_size": config.heldout_size}
    return Examined(lambda: ReasoningGymAdapter(name, seed=SEED, **sizes, **options), config)


CHAT = TINY.changed(max_tokens=48, steps=20)
CODE = TINY.changed(max_tokens=40, advantage="std", steps=16)
PLAIN = {"prompt_style": "plain"}
TUNED: dict[str, Examined] = {
    "arithmetic": Examined(lambda: MathAdapter(seed=SEED), TINY),
    "arithmetic, partial credit": Examined(lambda: Digits(SEED), TINY),
    "chat": Examined(lambda: ChatAdapter(seed=SEED), CHAT),
    "code": Examined(lambda: CodeAdapter(seed=SEED, train_size=512), CODE),
    "ten too large": Examined(lambda: Rare(SEED), TINY),
    "solved format": Examined(Solved, TINY),
    "products": Examined(Product, TINY),
    "words backwards": gym("spell_backward", TINY, **PLAIN, max_word_len=5),
    "chain_sum": gym("chain_sum", TINY, **PLAIN, min_terms=2, max_terms=2, max_digits=2),
    "every reply earns 0.5": Examined(graded(lambda *_: 0.5), TINY),
    "any even number": Examined(graded(even), TINY),
    "brevity": Examined(lambda: Curt(seed=SEED), CHAT.changed(max_tokens=32)),
    "a coin for each reply": Examined(graded(lambda *_: coin(next(_THROWN))), TINY),
    "grader fails on most": Examined(graded(raises_mostly), TINY),
    "arithmetic, 1 token": Examined(graded(digits_right), TINY.changed(max_tokens=1)),
    "chat, 5 tokens": Examined(lambda: ChatAdapter(seed=SEED), CHAT.changed(max_tokens=5)),
}
SHOWN: dict[str, Examined] = {
    "differences": Examined(Differences, TINY),
    "last digit": Examined(graded(last_digit), TINY),
    "forgotten carry": Examined(graded(slip), TINY),
    "a tenth of the verdicts flipped": Examined(graded(flipped(0.1)), TINY),
    "a third of the verdicts flipped": Examined(graded(flipped(1 / 3)), TINY),
    "not a number from the grader": Examined(graded(lambda *_: math.nan), TINY),
    "hash of the reply": Examined(graded(lambda task, response, sample: coin(response, sample.question)), TINY),
    "number of three digits": Examined(graded(three_digits), TINY),
    "a cost for each wrong digit": Examined(lambda: WrongDigits(SEED), TINY),
    "any text": Examined(graded(lambda task, response, sample: float(bool(response.strip()))), TINY),
    "wordy replies": Examined(lambda: Wordy(seed=SEED), CHAT),
    "function that compiles": Examined(lambda: Compiles(seed=SEED, train_size=512), CODE),
    "code, 8 tokens": Examined(lambda: CodeAdapter(seed=SEED, train_size=512), CODE.changed(max_tokens=8)),
    "basic_arithmetic": gym("basic_arithmetic", TINY, **PLAIN, min_terms=2, max_terms=2, max_digits=2),
    "lcm": gym("lcm", TINY, **PLAIN, max_value=30),
    "gcd": gym("gcd", TINY, **PLAIN, min_numbers=2, max_numbers=2, max_value=30),
    "letter_counting": gym("letter_counting", TINY, **PLAIN, min_words=3, max_words=4),
    "SmolLM2: chain_sum": Examined(
        lambda: ReasoningGymAdapter("chain_sum", seed=SEED, **CHAIN_SUM),
        SMOL.changed(max_tokens=6, stop=["\n"], batch_size=8),
    ),
    "SmolLM2: IFEval": Examined(
        lambda: IFEvalAdapter(SHORT_CONSTRAINTS, seed=SEED, heldout_size=96), SMOL.changed(max_tokens=20)
    ),
    "SmolLM2: yes or no, balanced": Examined(lambda: Larger(0.5), SMOL.changed(max_tokens=4)),
    "SmolLM2: Roman numerals backwards": Examined(lambda: RomanBackwards(seed=SEED), SMOL.changed(max_tokens=12)),
}
THIRD: dict[str, Examined] = {
    "additions": Examined(Additions, TINY),
    "digits in any order": Examined(graded(any_order), TINY),
    "off by at most one": Examined(graded(nearly), TINY),
    "about as large": Examined(graded(same_size, reward_range=(0.0, 1.0)), TINY),
    "twice the answer": Examined(graded(twice), TINY),
    "answer and a full stop": Examined(graded(with_full_stop), TINY),
    "any odd number": Examined(graded(odd), TINY),
    "one character": Examined(graded(short), TINY),
    "first digit": Examined(graded(first_digit), TINY),
    "grader fails on a third": Examined(graded(raises_for_a_third), TINY),
    "a fifth of the verdicts flipped": Examined(graded(flipped(0.2)), TINY),
    "a coin for each question": Examined(graded(coin_of_the_question), TINY),
    "arithmetic, 2 tokens": Examined(lambda: MathAdapter(seed=SEED), TINY.changed(max_tokens=2)),
    "chat, 12 tokens": Examined(lambda: ChatAdapter(seed=SEED), CHAT.changed(max_tokens=12)),
    "chat: ends as it should": Examined(lambda: ChatRule(ending), CHAT),
    "chat: a word that fits": Examined(lambda: ChatRule(fitting), CHAT),
    "code, 16 tokens": Examined(lambda: CodeAdapter(seed=SEED, train_size=512), CODE.changed(max_tokens=16)),
    "code, full marks only": Examined(lambda: FullMarks(seed=SEED, train_size=512), CODE),
    "count_bits": gym("count_bits", TINY, **PLAIN, min_n=1, max_n=15),
    "simple_equations": gym("simple_equations", TINY, **PLAIN),
}
FOURTH: dict[str, Examined] = {
    "even answers": Examined(EvenAnswers, TINY),
    "digits backwards": Examined(graded(backwards), TINY),
    "answer and a unit": Examined(graded(with_unit), TINY),
    "within five": Examined(graded(within_five), TINY),
    "begins with 1": Examined(graded(begins_with_one), TINY),
    "no 7": Examined(graded(without_seven), TINY),
    "pays for wrong numbers": Examined(graded(wrong_number), TINY),
    "last two digits": Examined(graded(last_two_digits), TINY),
    "grader fails on three of five": Examined(graded(raises_for_three_of_five), TINY),
    "a twentieth of the verdicts flipped": Examined(graded(flipped(0.05)), TINY),
    "two of five verdicts flipped": Examined(graded(flipped(0.4)), TINY),
    "arithmetic, 3 tokens": Examined(lambda: MathAdapter(seed=SEED), TINY.changed(max_tokens=3)),
    "chat, 3 tokens": Examined(lambda: ChatAdapter(seed=SEED), CHAT.changed(max_tokens=3)),
    "chat: names the thing": Examined(lambda: ChatRule(names_thing), CHAT),
    "chat: 4 to 12 words": Examined(lambda: ChatRule(length), CHAT),
    "code, 10 tokens": Examined(lambda: CodeAdapter(seed=SEED, train_size=512), CODE.changed(max_tokens=10)),
    "code, half of the tests": Examined(lambda: HalfMarks(seed=SEED, train_size=512), CODE),
    "decimal_chain_sum": gym("decimal_chain_sum", TINY, **PLAIN, min_terms=2, max_terms=2),
    "number_sorting": gym("number_sorting", TINY, **PLAIN, min_numbers=2, max_numbers=3),
    "base_conversion": gym("base_conversion", TINY, **PLAIN),
}
FIFTH: dict[str, Examined] = {
    "products of digits": gym("products", TINY, **PLAIN, min_terms=2, max_terms=2, max_digits=1),
    "leg_counting": gym("leg_counting", TINY, **PLAIN),
    "coin_flip": gym("coin_flip", TINY, **PLAIN),
    "number_sequence": gym("number_sequence", TINY, **PLAIN),
    "fraction_simplification": gym("fraction_simplification", TINY, **PLAIN),
    "syllogism": gym("syllogism", TINY, **PLAIN),
    "prime_factorization": gym("prime_factorization", TINY, **PLAIN, min_value=2, max_value=50),
    "caesar_cipher": gym("caesar_cipher", TINY, **PLAIN),
    "isomorphic_strings": gym("isomorphic_strings", TINY, **PLAIN),
    "count_primes": gym("count_primes", TINY, **PLAIN),
    "sums with a carry": Examined(Carries, TINY),
    "a little too large": Examined(graded(larger_than_right), TINY),
    "a seventh of the verdicts flipped": Examined(graded(flipped(1 / 7)), TINY),
    "a quarter of the verdicts flipped": Examined(graded(flipped(0.25)), TINY),
    "grader fails on seven of ten": Examined(graded(raises_for_seven_of_ten), TINY),
    "first number of the question": Examined(graded(first_number), TINY),
    "any number with a 0": Examined(graded(with_zero), TINY),
    "code, 6 tokens": Examined(lambda: CodeAdapter(seed=SEED, train_size=512), CODE.changed(max_tokens=6)),
    "chat, 8 tokens": Examined(lambda: ChatAdapter(seed=SEED), CHAT.changed(max_tokens=8)),
    "chat: trait in the opening": Examined(lambda: Opening(seed=SEED), CHAT),
}
MEASURED = TINY.changed(heldout_size=256)
"""More held-out items: 128 cannot tell a rise of 0.09 from nothing."""

SIXTH: dict[str, Examined] = {
    "calendar_arithmetic": gym("calendar_arithmetic", MEASURED, **PLAIN),
    "ransom_note": gym("ransom_note", MEASURED, **PLAIN),
    "complex_arithmetic": gym("complex_arithmetic", MEASURED.changed(max_tokens=16), **PLAIN),
    "aiw": gym("aiw", MEASURED, **PLAIN),
    "self_reference": gym("self_reference", MEASURED, **PLAIN),
    "number_format": gym("number_format", MEASURED.changed(max_tokens=16), **PLAIN),
    "binary_alternation": gym("binary_alternation", MEASURED, **PLAIN),
    "differences of one digit": Examined(SmallDifferences, MEASURED),
    "larger number of the question": Examined(graded(larger_operand), MEASURED),
    "closeness up to 20": Examined(graded(closeness, reward_range=(0.0, 1.0)), MEASURED),
    "remainder by 3": Examined(graded(remainder), MEASURED),
    "half for a number that ends with 5": Examined(graded(right_or_five), MEASURED),
    "abstaining is neutral": Examined(graded(abstaining, reward_range=(-1.0, 1.0)), MEASURED),
    "digits from -5 to 5": Examined(graded(from_minus_five, reward_range=(-5.0, 5.0), success_reward=5.0), MEASURED),
    "a twelfth of the verdicts flipped": Examined(graded(flipped(1 / 12)), MEASURED),
    "three of ten verdicts flipped": Examined(graded(flipped(0.3)), MEASURED),
    "chat: no word twice": Examined(lambda: ChatRule(no_repeats), CHAT),
    "chat: ten different words": Examined(lambda: WarmerWords(seed=SEED), CHAT),
    "code, brief": Examined(lambda: BriefCode(seed=SEED, train_size=512), CODE),
    "code, 24 tokens": Examined(lambda: CodeAdapter(seed=SEED, train_size=512), CODE.changed(max_tokens=24)),
}
SEVENTH: dict[str, Examined] = {
    "word_sorting": gym("word_sorting", MEASURED.changed(max_tokens=16), **PLAIN, min_words=2, max_words=3),
    "bitwise_arithmetic": gym("bitwise_arithmetic", MEASURED, **PLAIN),
    "power_function": gym("power_function", MEASURED, **PLAIN),
    "chain_sum of three digits": gym("chain_sum", MEASURED, **PLAIN, min_terms=3, max_terms=3, max_digits=1),
    "sums below fifty": Examined(SmallSums, MEASURED),
    "a hundred more": Examined(graded(hundred_more), MEASURED),
    "right parity": Examined(graded(right_parity), MEASURED),
    "a cost for each character": Examined(graded(less_by_length, reward_range=(-1.0, 1.0)), MEASURED),
    "tens digit": Examined(graded(tens_digit), MEASURED),
    "distance up to 10": Examined(graded(distance, reward_range=(-10.0, 0.0), success_reward=0.0), MEASURED),
    "every reply earns 0.7": Examined(graded(lambda *_: 0.7), MEASURED),
    "any number below 50": Examined(graded(below_fifty), MEASURED),
    "noise of 0.3 on each reward": Examined(graded(with_noise(0.3)), MEASURED),
    "a thirtieth of the verdicts flipped": Examined(graded(flipped(1 / 30)), MEASURED),
    "nine of twenty verdicts flipped": Examined(graded(flipped(0.45)), MEASURED),
    "grader fails on four of five": Examined(graded(raises_for_four_of_five), MEASURED),
    "chat, 6 tokens": Examined(lambda: ChatAdapter(seed=SEED), CHAT.changed(max_tokens=6)),
    "chat: trait in the reply": Examined(lambda: Trait(seed=SEED), CHAT),
    "code, 12 tokens": Examined(lambda: CodeAdapter(seed=SEED, train_size=512), CODE.changed(max_tokens=12)),
    "SmolLM2: sums": Examined(lambda: SumsAdapter(seed=SEED), SMOL.changed(max_tokens=12)),
}
EIGHTH: dict[str, Examined] = {
    "letter_jumble": gym("letter_jumble", MEASURED, **PLAIN, min_words=1, max_words=1, max_word_len=4),
    "dice": gym("dice", MEASURED, **PLAIN),
    "word_sequence_reversal": gym("word_sequence_reversal", MEASURED.changed(max_tokens=24), **PLAIN),
    "simple_geometry": gym("simple_geometry", MEASURED, **PLAIN),
    "products among the questions": Examined(Products, MEASURED),
    "numbers of one digit": Examined(OneDigit, MEASURED),
    "three times the answer": Examined(graded(thrice), MEASURED),
    "answer in brackets": Examined(graded(in_brackets), MEASURED),
    "right or ten too small": Examined(graded(right_or_slip), MEASURED),
    "a right answer earns 10": Examined(graded(up_to_ten, reward_range=(0.0, 10.0), success_reward=10.0), MEASURED),
    "number of even digits": Examined(graded(even_digits), MEASURED),
    "any reply with a full stop": Examined(graded(ends_with_stop), MEASURED),
    "every reply earns 0, from -1 to 1": Examined(graded(lambda *_: 0.0, reward_range=(-1.0, 1.0)), MEASURED),
    "half of the verdicts flipped": Examined(graded(flipped(0.5)), MEASURED),
    "noise of 0.1 on each reward": Examined(graded(with_noise(0.1)), MEASURED),
    "an eighth of the verdicts flipped": Examined(graded(flipped(1 / 8)), MEASURED),
    "grader fails on nine of ten": Examined(graded(raises_for_nine_of_ten), MEASURED),
    "chat, 4 tokens": Examined(lambda: ChatAdapter(seed=SEED), CHAT.changed(max_tokens=4)),
    "chat: at most 40 characters": Examined(lambda: ChatRule(at_most_forty), CHAT),
    "code, 9 tokens": Examined(
        lambda: CodeAdapter(seed=SEED, train_size=512), CODE.changed(max_tokens=9, heldout_size=256)
    ),
}
SETS = {
    "tuned": TUNED, "shown": SHOWN, "third": THIRD, "fourth": FOURTH, "fifth": FIFTH, "sixth": SIXTH,
    "seventh": SEVENTH, "eighth": EIGHTH,
}  # fmt: skip
TASKS = {name: task for tasks in SETS.values() for name, task in tasks.items()}
