"""A pairwise judge: compares the responses of a group two by two and turns the verdicts into rewards.

Judges are biased towards the first or the last place. So each pair is judged twice, with the places swapped. Only a
preference that is the same both times counts; anything else is a tie. The reward of a response is its mean score
against the others of its group (round robin), in [0, 1]. A function, a policy (`SamplingComparison`) or an endpoint
(`openai_judge`) does the comparing.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import math
import threading
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal
from weakref import WeakKeyDictionary

from mint.client.sampling_client import SamplingClient
from mint.errors import InvalidRequestError, MintError
from mint.rl.calls.paused_timeout import paused_timeout
from mint.rl.reward import Reward
from mint.types import ModelInput

ComparisonVerdict = Literal["a", "b", "tie"]


@dataclass(frozen=True)
class CostedVerdict:
    """A verdict and what it cost, in a currency of your own."""

    verdict: ComparisonVerdict
    cost: float


Compare = Callable[
    [str, str, str], "ComparisonVerdict | CostedVerdict | Awaitable[ComparisonVerdict] | Awaitable[CostedVerdict]"
]
"""`(prompt, a, b)` → which is better; sync or async."""

FLIP_ALARM = 0.2
"""A judge should not be trusted if the verdict depends on the order in more than this share of pairs."""
FLIP_ALARM_PAIRS = 20
"""The fewest pairs for an alarm."""


class JudgeError(MintError):
    """A judge gave no readable verdict."""


@dataclass(frozen=True)
class JudgeStatistics:
    """Counts of a judge. `pairs` were judged in both orders; the verdict of `flips` of them depends on the order.

    `length_correlation` is that of the difference in characters with the outcome, from -1 (shorter wins) to 1.
    """

    pairs: int = 0
    flips: int = 0
    ties: int = 0
    comparisons: int = 0
    from_cache: int = 0
    errors: int = 0
    last_error: str | None = None
    cost: float = 0.0
    length_outcome: float = 0.0
    length_squares: float = 0.0
    outcome_squares: float = 0.0

    @property
    def flip_rate(self) -> float:
        """Share of the pairs whose verdict depends on the order."""
        return self.flips / self.pairs if self.pairs else 0.0

    @property
    def length_correlation(self) -> float:
        """Uncentred, because the order within a pair is arbitrary; 0 without any difference."""
        scale = math.sqrt(self.length_squares * self.outcome_squares)
        return self.length_outcome / scale if scale else 0.0

    @property
    def alarm(self) -> str | None:
        """Why the judge should not be trusted, if so."""
        return position_bias(self.pairs, self.flips)


def position_bias(pairs: int, flips: int) -> str | None:
    """Why a judge should not be trusted that flipped on `flips` of `pairs`, if so."""
    if pairs >= FLIP_ALARM_PAIRS and flips / pairs > FLIP_ALARM:
        return f"{flips / pairs:.0%} of {pairs} pairs change their verdict with the order (position bias)"
    return None


@dataclass(frozen=True)
class _Answer:
    """The verdict on one order of a pair, or the error in words."""

    verdict: ComparisonVerdict | None = None
    cost: float = 0.0
    error: str | None = None


@dataclass(frozen=True)
class _Pair:
    """Two distinct responses, the answers for both orders, and the outcome for `a`: 1, 0.5, 0, or None on failure."""

    a: str
    b: str
    answer: _Answer
    swapped_answer: _Answer

    @property
    def forward(self) -> ComparisonVerdict | None:
        return self.answer.verdict

    @property
    def backward(self) -> ComparisonVerdict | None:
        verdict = self.swapped_answer.verdict
        return None if verdict is None else _SWAPPED[verdict]

    @property
    def outcome(self) -> float | None:
        if self.forward is None or self.backward is None:
            return None
        return _POINTS[self.forward] if self.forward == self.backward else 0.5

    @property
    def flipped(self) -> bool:
        return self.outcome is not None and self.forward != self.backward

    @property
    def cost(self) -> float:
        return self.answer.cost + self.swapped_answer.cost

    @property
    def error(self) -> str | None:
        return self.answer.error or self.swapped_answer.error

    def counted(self, before: JudgeStatistics) -> JudgeStatistics:
        """The statistics with this pair."""
        statistics = replace(before, cost=before.cost + self.cost)
        if self.outcome is None:
            return statistics
        longer = len(self.a) - len(self.b)
        better = self.outcome - 0.5
        return replace(
            statistics,
            pairs=before.pairs + 1,
            flips=before.flips + self.flipped,
            ties=before.ties + (self.forward == self.backward == "tie"),
            length_outcome=before.length_outcome + longer * better,
            length_squares=before.length_squares + longer**2,
            outcome_squares=before.outcome_squares + better**2,
        )


_POINTS: dict[ComparisonVerdict, float] = {"a": 1.0, "tie": 0.5, "b": 0.0}
_SWAPPED: dict[ComparisonVerdict, ComparisonVerdict] = {"a": "b", "tie": "tie", "b": "a"}


class _GroupQueue:
    """Admits groups to the judge while it has places for their comparisons; the others wait, without their time-out."""

    def __init__(self, concurrency: int) -> None:
        self.slots = asyncio.Semaphore(concurrency)
        self._concurrency = concurrency
        self._admitted = 0
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def admitted(self, comparisons: int) -> AsyncGenerator[None]:
        """Waits until the comparisons fit beside those of the admitted groups, or there are none."""
        with paused_timeout():
            async with self._changed:
                await self._changed.wait_for(
                    lambda: not self._admitted or self._admitted + comparisons <= self._concurrency
                )
                self._admitted += comparisons
        try:
            yield
        finally:
            async with self._changed:
                self._admitted -= comparisons
                self._changed.notify_all()


class PairwiseJudge:
    """Turns comparisons into rewards; usable from several threads at once.

    A comparison that fails is left out of the round robin and counted. A response whose comparisons all failed gets
    None. Equal responses are a tie and are not judged.
    """

    def __init__(self, compare: Compare | SamplingClient, *, concurrency: int = 64, cache_size: int = 10_000) -> None:
        """`compare` is a function, a callable object, or a `SamplingClient`, whose weights then judge.

        `concurrency` bounds the comparisons in flight, of all groups together; `cache_size` bounds the cached verdicts.
        """
        self._compare: Compare = SamplingComparison(compare) if isinstance(compare, SamplingClient) else compare
        self._concurrency = concurrency
        self._threads: ThreadPoolExecutor | None = None
        # What asyncio waits for belongs to an event loop, and a judge may serve several.
        self._queues: WeakKeyDictionary[asyncio.AbstractEventLoop, _GroupQueue] = WeakKeyDictionary()
        self._is_async = inspect.iscoroutinefunction(self._compare) or inspect.iscoroutinefunction(
            type(self._compare).__call__
        )
        self._cache: OrderedDict[tuple[str, str, str], ComparisonVerdict] = OrderedDict()
        self._cache_size = cache_size
        self._lock = threading.Lock()
        self._statistics = JudgeStatistics()

    @property
    def statistics(self) -> JudgeStatistics:
        """The counts over all groups so far."""
        with self._lock:
            return self._statistics

    async def judge(self, prompt: str, responses: Sequence[str]) -> list[Reward | None]:
        """One reward per response, in order: its mean score against the others (0.5 against its equals).

        `Reward.info` counts the comparisons of this response that failed or flipped, and holds the `judge_flip_rate`
        and `judge_length_correlation` of this group, and the response's share of its `cost`, if the judge says what it
        costs. A lone response scores 0.5.
        """
        distinct = list(dict.fromkeys(responses))
        with self._lock:
            queue = self._queues.setdefault(asyncio.get_running_loop(), _GroupQueue(self._concurrency))
        couples = list(itertools.combinations(distinct, 2))
        async with queue.admitted(2 * len(couples)):
            pairs = await asyncio.gather(*(self._ask_both_ways(queue.slots, prompt, a, b) for a, b in couples))
        group = JudgeStatistics()
        for pair in pairs:
            group = pair.counted(group)
            with self._lock:
                self._statistics = pair.counted(self._statistics)
        return [_reward(response, responses, pairs, group) for response in responses]

    def close(self) -> None:
        """Ends the judge's threads and closes `compare`; the next question opens them again."""
        with self._lock:
            threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=False, cancel_futures=True)  # a comparison may hang in the user's code
        close = getattr(self._compare, "close", None)
        if close is not None:
            close()

    async def _ask_both_ways(self, slots: asyncio.Semaphore, prompt: str, a: str, b: str) -> _Pair:
        forward, backward = await asyncio.gather(self._ask(slots, prompt, a, b), self._ask(slots, prompt, b, a))
        return _Pair(a, b, forward, backward)

    async def _ask(self, slots: asyncio.Semaphore, prompt: str, a: str, b: str) -> _Answer:
        key = (prompt, a, b)
        with self._lock:
            known = self._cache.get(key)
            self._statistics = replace(
                self._statistics,
                comparisons=self._statistics.comparisons + 1,
                from_cache=self._statistics.from_cache + (known is not None),
            )
        if known is not None:
            return _Answer(known)
        try:
            async with slots:
                said = await self._call(prompt, a, b)
            verdict = said.verdict if isinstance(said, CostedVerdict) else said
            if verdict not in _POINTS:
                raise JudgeError(f"answered {verdict!r}", remedy='Answer "a", "b" or "tie"')
        except Exception as error:  # noqa: BLE001 - the boundary to the user's judge: its failure costs this comparison
            with self._lock:
                errors = self._statistics.errors + 1
                message = f"{type(error).__name__}: {error}"
                self._statistics = replace(self._statistics, errors=errors, last_error=message)
            return _Answer(error=message)
        with self._lock:
            self._cache[key] = verdict
            if len(self._cache) > self._cache_size:
                self._cache.popitem(last=False)
        return _Answer(verdict, said.cost if isinstance(said, CostedVerdict) else 0.0)

    async def _call(self, prompt: str, a: str, b: str) -> Any:
        if self._is_async:
            answer: Any = self._compare(prompt, a, b)
        else:
            loop = asyncio.get_running_loop()
            answer = await loop.run_in_executor(self._open_threads(), self._compare, prompt, a, b)
        return await answer if inspect.isawaitable(answer) else answer

    def _open_threads(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(self._concurrency, thread_name_prefix="mint-judge")
            return self._threads


def _reward(
    response: str, responses: Sequence[str], pairs: Sequence[_Pair], statistics: JudgeStatistics
) -> Reward | None:
    """Round robin: the mean of the outcomes against every other response of the group."""
    mine = {pair.b if pair.a == response else pair.a: pair for pair in pairs if response in (pair.a, pair.b)}
    failed = sum(pair.outcome is None for pair in mine.values())
    if mine and failed == len(mine):
        return None
    scores = [0.5] * (responses.count(response) - 1)
    for other, pair in mine.items():
        if pair.outcome is not None:
            outcome = pair.outcome if pair.a == response else 1 - pair.outcome
            scores += [outcome] * responses.count(other)
    score = math.fsum(scores) / len(scores) if scores else 0.5
    info: dict[str, Any] = {
        "judge_pairs": len(mine),
        "judge_failed_pairs": failed,
        "judge_flipped_pairs": sum(
            pair.outcome is not None and pair.forward != pair.backward for pair in mine.values()
        ),
        "judge_flip_rate": statistics.flip_rate,
        "judge_length_correlation": statistics.length_correlation,
    }
    if failed:
        info["judge_last_error"] = next(pair.error for pair in mine.values() if pair.outcome is None)
    if statistics.cost:
        info["cost"] = statistics.cost / len(responses)
    return Reward(score, {"judge": score}, info)


QUESTION = """\
Which of two replies answers the message better? Judge what they say, not their length or their order.

Message:
{prompt}

Reply A:
{a}

Reply B:
{b}

Answer with one letter, A or B."""
"""The question to a policy or an endpoint; your own template must have the same three fields."""


class SamplingComparison:
    """Asks a policy or base model behind a `SamplingClient`.

    The verdict comes from the logprobs of the answers "A" and "B" after the question (`compute_logprobs`). Nothing is
    sampled, so the same weights always give the same verdict.
    """

    def __init__(
        self,
        sampler: SamplingClient,
        *,
        template: str = QUESTION,
        answers: tuple[str, str] = ("A", "B"),
        tie_margin: float = 0.0,
    ) -> None:
        """`tie_margin` is the difference of logprobs (nats) up to which the two are a tie.

        Raises:
            InvalidRequestError: the template lacks one of its fields.
        """
        check_template(template)
        self._sampler = sampler
        self._template = template
        self._answers = answers
        self._tie_margin = tie_margin
        self._tokenizer = sampler.get_tokenizer()

    async def __call__(self, prompt: str, a: str, b: str) -> ComparisonVerdict:
        """Which of the two answers the policy finds more likely."""
        question = self._render(self._template.format(prompt=prompt, a=a, b=b))
        first, second = await asyncio.gather(*(self._logprob(question, answer) for answer in self._answers))
        if not (math.isfinite(first) and math.isfinite(second)):
            raise JudgeError(f"the judge's logprobs are {first:g} and {second:g}")
        if abs(first - second) <= self._tie_margin:
            return "tie"
        return "a" if first > second else "b"

    def _render(self, question: str) -> list[int]:
        if not getattr(self._tokenizer, "chat_template", None):
            return self._tokenizer.encode(f"{question}\nAnswer: ")
        messages = [{"role": "user", "content": question}]
        return self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)

    async def _logprob(self, question: list[int], answer: str) -> float:
        """The logprob of all tokens of `answer` after the question."""
        tokens = self._tokenizer.encode(answer, add_special_tokens=False)
        logprobs = await self._sampler.compute_logprobs_async(ModelInput.from_ints([*question, *tokens]))
        return math.fsum(logprob for logprob in logprobs[len(question) :] if logprob is not None)


def check_template(template: str) -> None:
    """Checks that a judge's question has its three fields.

    Raises:
        InvalidRequestError: one is missing.
    """
    missing = [field for field in ("{prompt}", "{a}", "{b}") if field not in template]
    if missing:
        raise InvalidRequestError(
            f"lacks {', '.join(missing)}",
            field="template",
            value=template,
            remedy="Write the question with {prompt}, {a} and {b}; double the braces that are text",
        )
