"""The tasks of `benchmarks.learning.algorithms`: each makes one difficulty large for which an algorithm is meant."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Sequence
from typing import Any

from mint.recipes.chat import ChatAdapter
from mint.recipes.code import CodeAdapter
from mint.recipes.datasets.chat_questions import ChatQuestion, fitting, words_of
from mint.recipes.math import MathAdapter
from mint.rl import MessageEnvAdapter, Reward, RLAdapter
from mint.rl.message_env import Message, MessageEnv, MessageStepResult


class Sums(RLAdapter):
    """The items and prompts of the math task."""

    def __init__(self, seed: int) -> None:
        self.math = MathAdapter(seed=seed)

    def build_dataset(self) -> Sequence[Any]:
        """The items of the math task."""
        return self.math.build_dataset()

    def build_heldout(self) -> Sequence[Any]:
        """Those of the math task."""
        return self.math.build_heldout()

    def make_prompt(self, item: Any, tokenizer: Any) -> list[int]:
        """The prompt of the math task."""
        return self.math.make_prompt(item, tokenizer)

    def close(self) -> None:
        """Ends the processes of the math task."""
        self.math.close()


class SlowMath(Sums):
    """The math task; a reward takes 2 s more."""

    async def compute_reward(self, response: str, item: Any) -> Reward | float:
        """The math reward after the wait."""
        await asyncio.sleep(2.0)
        return await asyncio.to_thread(self.math.compute_reward, response, item)


class Counting(Sums):
    """Pays for each digit, up to 24; the policy learns long answers, up to the limit."""

    def compute_reward(self, response: str, item: Any) -> float:
        """The share of 24 digits."""
        return min(24, len(re.findall(r"\d", response))) / 24


class Rare(Sums):
    """Pays for an answer that is ten too large, which the model gives in about one of 100; 32 items."""

    def build_dataset(self) -> Sequence[Any]:
        """The first 32 sums without a carry. They come back every second step."""
        return [item for item in self.math.build_dataset() if self._is_without_carry(item)][:32]

    def build_heldout(self) -> Sequence[Any]:
        """Others of that kind."""
        return [item for item in self.math.build_heldout() if self._is_without_carry(item)]

    def compute_reward(self, response: str, item: Any) -> float:
        """1 for the value and ten."""
        return float(response.strip() == str(item.value + 10))

    def _is_without_carry(self, item: Any) -> bool:
        return item.op == "+" and item.a % 10 + item.b % 10 < 10


class Seldom(Sums):
    """Seven of eight training items are never solved: the grader wants a number that the model cannot give."""

    def build_dataset(self) -> Sequence[Any]:
        """All items; `compute_reward` says which can be solved."""
        return [(place % 8 == 0, item) for place, item in enumerate(self.math.build_dataset())]

    def build_heldout(self) -> Sequence[Any]:
        """Items that can be solved."""
        return [(True, item) for item in self.math.build_heldout()]

    def make_prompt(self, item: Any, tokenizer: Any) -> list[int]:
        """The prompt of the math task."""
        return self.math.make_prompt(item[1], tokenizer)

    def item_key(self, item: Any) -> str:
        """The question."""
        return self.math.item_key(item[1])

    def compute_reward(self, response: str, item: Any) -> float:
        """1 for the right number, of an item that can be solved."""
        possible, problem = item
        return float(possible and response.strip() == problem.answer)


class Ragged(Sums):
    """The math task with a grader that fails on two of three completions; held-out items are always graded."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._drawn = random.Random(f"ragged {seed}")
        self._graded_always = {self.math.item_key(item) for item in self.build_heldout()}

    def compute_reward(self, response: str, item: Any) -> Reward | float:
        """The math reward, or an error."""
        if self.math.item_key(item) not in self._graded_always and self._drawn.random() < 2 / 3:
            raise TimeoutError("the judge is away")
        return self.math.compute_reward(response, item)


class Opening(ChatAdapter):
    """Pays for a reply that has the thing's trait among its first six words, whatever follows them."""

    def compute_reward(self, response: str, item: ChatQuestion) -> Reward:
        """0 or 1."""
        return Reward(float(item.thing.trait in words_of(response)[:6]))


class SmallOpening(Opening):
    """The same, and a right reply earns 0.1."""

    SUCCESS = 0.1
    reward_range = (0.0, SUCCESS)
    success_reward = SUCCESS

    def compute_reward(self, response: str, item: ChatQuestion) -> Reward:
        """0 or 0.1."""
        return Reward(self.SUCCESS * super().compute_reward(response, item).value)


class Belonging(ChatAdapter):
    """Pays for a reply that says where the thing belongs, as one in 23 replies does."""

    def compute_reward(self, response: str, item: ChatQuestion) -> Reward:
        """0 or 1."""
        words = words_of(response)
        return Reward(float("belongs" in words and item.thing.name in words))


class Lottery(MessageEnv):
    """Asks about a thing twice. The first reply earns `prize`, the second 1 if it has a word that fits the thing."""

    def __init__(self, asked: ChatQuestion, prize: float) -> None:
        self.asked = asked
        self.prize = prize
        self.turn = 0

    def initial_observation(self) -> Sequence[Message]:
        """The question."""
        return self.asked.messages

    def step(self, message: Message) -> MessageStepResult:
        """The prize and the question again, then what the second reply earns."""
        self.turn += 1
        if self.turn == 1:
            return MessageStepResult(self.prize, False, [self.asked.messages[-1]])
        return MessageStepResult(float(fitting(str(message["content"]), self.asked)))


class OneTurnMatters(MessageEnvAdapter):
    """Episodes of `Lottery`; without a prize where they are held out."""

    PRIZE = 4.0
    reward_range = (0.0, 1.0 + PRIZE)

    def __init__(self, seed: int) -> None:
        self.chat = ChatAdapter(seed=seed)
        self._drawn = random.Random(f"lottery {seed}")
        self._without = {self.chat.item_key(item) for item in self.build_heldout()}

    def build_dataset(self) -> Sequence[ChatQuestion]:
        """The questions of the chat task."""
        return self.chat.build_dataset()

    def build_heldout(self) -> Sequence[ChatQuestion]:
        """Its held-out questions."""
        return self.chat.build_heldout()

    def item_key(self, item: ChatQuestion) -> str:
        """The message."""
        return self.chat.item_key(item)

    def make_env(self, item: ChatQuestion) -> MessageEnv:
        """One episode."""
        wins = self.chat.item_key(item) not in self._without and self._drawn.random() < 0.5
        return Lottery(item, self.PRIZE if wins else 0.0)


class Rounds(MessageEnv):
    """Asks about one thing after the other. The first reply earns `prize`, each of the others its share of 1 if it has
    a word that fits the thing."""

    def __init__(self, asked: Sequence[ChatQuestion], prize: float) -> None:
        self.asked = asked
        self.prize = prize
        self.turn = 0

    def initial_observation(self) -> Sequence[Message]:
        """The first question."""
        return self.asked[0].messages

    def step(self, message: Message) -> MessageStepResult:
        """What the reply earns, and the next question."""
        first, done = self.turn == 0, self.turn + 1 == len(self.asked)
        fits = fitting(str(message["content"]), self.asked[self.turn])
        reward = self.prize if first else float(fits) / (len(self.asked) - 1)
        self.turn += 1
        return MessageStepResult(reward, done, [] if done else [self.asked[self.turn].messages[-1]])


class ManyRounds(MessageEnvAdapter):
    """Episodes of `Rounds` about five things. Half of the training episodes have a prize, held-out ones have none."""

    TURNS = 5
    PRIZE = 2.0
    reward_range = (0.0, 1.0 + PRIZE)

    def __init__(self, seed: int) -> None:
        self.chat = ChatAdapter(seed=seed)
        self._drawn = random.Random(f"rounds {seed}")

    def build_dataset(self) -> Sequence[tuple[bool, tuple[ChatQuestion, ...]]]:
        """512 episodes: whether they may have a prize, and their questions."""
        return self._draw(self.chat.build_dataset(), 512, with_prizes=True)

    def build_heldout(self) -> Sequence[tuple[bool, tuple[ChatQuestion, ...]]]:
        """96 episodes of held-out questions."""
        return self._draw(self.chat.build_heldout(), 96, with_prizes=False)

    def item_key(self, item: tuple[bool, tuple[ChatQuestion, ...]]) -> str:
        """The messages."""
        return " | ".join(map(self.chat.item_key, item[1]))

    def make_env(self, item: tuple[bool, tuple[ChatQuestion, ...]]) -> MessageEnv:
        """One episode."""
        may_win, asked = item
        return Rounds(asked, self.PRIZE if may_win and self._drawn.random() < 0.5 else 0.0)

    def _draw(
        self, questions: Sequence[ChatQuestion], count: int, *, with_prizes: bool
    ) -> list[tuple[bool, tuple[ChatQuestion, ...]]]:
        drawn = random.Random(f"{with_prizes}")
        return [(with_prizes, tuple(drawn.sample(list(questions), self.TURNS))) for _ in range(count)]


class Rarer(Sums):
    """Pays for the difference and 20, which the model gives in about one of 500 completions at temperature 1.3."""

    def build_dataset(self) -> Sequence[Any]:
        """16 subtractions. Each comes back every second step of 8 items."""
        return [item for item in self.math.build_dataset() if is_subtraction(item)][:16]

    def build_heldout(self) -> Sequence[Any]:
        """Others of that kind."""
        return [item for item in self.math.build_heldout() if is_subtraction(item)]

    def compute_reward(self, response: str, item: Any) -> float:
        """1 for the value and 20."""
        return float(response.strip() == str(item.value + 20))


class Tempting(Rarer):
    """The same, and half the reward for the right difference, which half of the completions give."""

    def build_dataset(self) -> Sequence[Any]:
        """All subtractions."""
        return [item for item in self.math.build_dataset() if is_subtraction(item)]

    def compute_reward(self, response: str, item: Any) -> float:
        """0, a half, or 1."""
        return max(super().compute_reward(response, item), 0.5 * (response.strip() == item.answer))


class LeadingZero(RLAdapter):
    """Asks for the next digit of a question. The untrained model gives 1 to 9 about equally often, and 0 once in some
    500 completions. 0 earns 1, the others a twentieth of their value, so that the policy is drawn to 9."""

    reward_range = (0.0, 1.0)

    def __init__(self, seed: int) -> None:
        """The task is the same for all seeds."""

    def build_dataset(self) -> Sequence[int]:
        """The first numbers of the questions: those that do not end with 7."""
        return [number for number in range(10, 100) if number % 10 != 7]

    def build_heldout(self) -> Sequence[int]:
        """Those that do."""
        return range(17, 100, 10)

    def item_key(self, item: int) -> str:
        """The number."""
        return str(item)

    def make_prompt(self, item: int, tokenizer: Any) -> list[int]:
        """A question that is not complete."""
        return tokenizer.encode(f"Q: What is {item} + ")

    def compute_reward(self, response: str, item: int) -> float:
        """From 0 to 1."""
        reply = response.strip()
        if not reply.isdecimal():
            return 0.0
        return 1.0 if reply == "0" else int(reply) / 20


def is_subtraction(item: Any) -> bool:
    """Whether the item is a subtraction whose result is at least 10."""
    return item.op == "-" and item.value >= 10


def math(seed: int) -> RLAdapter:
    """The math task."""
    return MathAdapter(seed=seed)


def opening(seed: int) -> RLAdapter:
    """The chat task that reads the opening alone."""
    return Opening(seed=seed)


def small_opening(seed: int) -> RLAdapter:
    """The same with small rewards."""
    return SmallOpening(seed=seed)


def belonging(seed: int) -> RLAdapter:
    """The chat task that pays for a rare word."""
    return Belonging(seed=seed)


def functions(seed: int) -> RLAdapter:
    """The code task."""
    return CodeAdapter(seed=seed, train_size=512)
