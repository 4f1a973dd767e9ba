"""Is `mint doctor` right? What it says of 21 tasks, beside what a short GRPO run of each task comes to.

    python -m benchmarks.detection.doctor [--set shown|tuned] [--only NAME …] [--output FILE] [--read FILE]

For each task: the doctor's verdict on the starting weights, then a run. `outcome` says what the run came to, from
numbers alone; it does not see the verdict. The doctor's limits were last set on the tasks of `TUNED`; those of `SHOWN`
set none. `--output` keeps one JSON line per task; a second call with the same file makes only the tasks that are not in
it, and `--verdicts` asks the doctor again about those that are.

| outcome | what the run showed |
|---|---|
| truncated | a quarter of the untrained completions is cut off, and four times the limit earns clearly more |
| saturated | the untrained model succeeds in 90 % of the held-out items |
| unlearnable | most completions got no grade; or nothing rose, and a quarter of the rewards changed when graded again |
| reward_constant | no reward differs; or after training one reply to every item earns as much as the policy |
| go | the held-out reward at temperature 1 rose by two standard errors, and by a twentieth of the range |
| sft_first | it did not rise |

The doctor is right if its verdict is the outcome. The tasks of SmolLM2-135M-Instruct need `mint models pull
SmolLM2-135M-Instruct` and the extras `tasks` and `ifeval`.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import math
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mint
from benchmarks.detection.faults import Curt, Solved, Sums, Wordy, coin, digits_right, graded
from benchmarks.detection.proof import Digits
from benchmarks.learning.algorithms import Rare
from benchmarks.learning.published_model import CHAIN_SUM, MODEL, SHORT_CONSTRAINTS
from mint.recipes.chat import ChatAdapter
from mint.recipes.code import CodeAdapter, CodeProblem
from mint.recipes.datasets.arithmetic import Problem
from mint.recipes.math import MathAdapter
from mint.recipes.question_task import Question, QuestionAdapter
from mint.recipes.sums import SumsAdapter
from mint.recipes.task_sources.ifeval import IFEvalAdapter
from mint.recipes.task_sources.reasoning_gym import ReasoningGymAdapter
from mint.rl import Reward, RLAdapter, RLConfig, run_grpo
from mint.rl.analysis.doctor import examine
from mint.rl.calls.own_thread import run_in_own_thread
from mint.rl.checkpoint_sampler import checkpoint_sampler
from mint.rl.estimate import Z95, Estimate, reward_interval, wilson
from mint.rl.heldout_evaluation import sample_heldout
from mint.rl.rollout import Rollout
from mint.rl.rollouts.grading import Grade, Grader
from mint.rl.rollouts.rollout_worker import RolloutWorker, open_calls
from mint.runs.log import RunLog

SEED = 7000
CUT_OFF = 0.25
NOISY = 0.25
SOLVED = 0.9
CLEARLY = 2.0
"""Standard errors."""

LEAST_GAIN = 0.05
"""Of the range. A run that gained less has learned where scraps of credit lie."""

LEAST_PAID = 0.1
"""A reply to every item that earns less than this share of the range is a lucky guess."""

REPLIES = 16
"""The most frequent replies of the trained policy, among which the best reply to every item is looked for."""

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


_THROWN = itertools.count()


@dataclass(frozen=True)
class Examined:
    """A task of the benchmark: how to make it, and how to train it."""

    make: Callable[[], RLAdapter]
    config: RLConfig


def gym(name: str, config: RLConfig, **options: Any) -> Examined:
    """A generator of reasoning-gym."""
    return Examined(lambda: ReasoningGymAdapter(name, seed=SEED, train_size=512, heldout_size=128, **options), config)


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
TASKS = {**TUNED, **SHOWN}


@dataclass(frozen=True)
class Facts:
    """What a run showed. `before` and `after` are held-out rewards at temperature 1 as (mean, standard error), `longer`
    is `before` with four times the limit; `fixed` is the reward of the best reply to every held-out item."""

    floor: float
    ceiling: float
    success: float
    before: tuple[float, float]
    after: tuple[float, float]
    longer: tuple[float, float]
    cut_off: float
    ungraded: float
    noisy: float
    informative: float
    fixed: float
    fixed_reply: str


def outcome(facts: Facts) -> str:
    """What the run came to; the table above says by which rules."""
    span = facts.ceiling - facts.floor
    rose = _clearly_above(facts.after, facts.before) and facts.after[0] - facts.before[0] >= LEAST_GAIN * span
    if facts.ungraded > 0.5 or (facts.noisy > NOISY and not rose):
        return "unlearnable"
    if facts.cut_off > CUT_OFF and _clearly_above(facts.longer, facts.before):
        return "truncated"
    if facts.success >= SOLVED:
        return "saturated"
    if facts.informative == 0 and facts.before[0] > facts.floor:
        return "reward_constant"
    as_good = facts.fixed >= facts.after[0] - CLEARLY * facts.after[1]
    if as_good and facts.fixed - facts.floor > LEAST_PAID * span:
        return "reward_constant"
    return "go" if rose else "sft_first"


def _clearly_above(later: tuple[float, float], earlier: tuple[float, float]) -> bool:
    return later[0] - earlier[0] >= CLEARLY * math.hypot(later[1], earlier[1]) > 0


def run(task: RLAdapter, config: RLConfig, service: mint.ServiceClient) -> Facts:
    """Trains, and measures before and after."""
    result = run_grpo(task, config, service_client=service)
    steps = list(RunLog(result.run_dir).read("metrics.jsonl"))
    base = checkpoint_sampler(service, config.base_model)
    trained = service.create_sampling_client(model_path=result.sampler_checkpoint)
    items = list(task.build_heldout())[: config.heldout_size]
    with closing(open_calls(config)) as calls:

        def sampled(client: Any, settings: RLConfig) -> list[Rollout]:
            worker = RolloutWorker(task, config=settings, tokenizer=client.get_tokenizer(), calls=calls)
            groups = sample_heldout(worker, client, items, temperature=1.0, completions=1)
            return [group.rollouts[0] for group in groups if group.rollouts]

        def grades(pairs: Sequence[tuple[str, Any]]) -> list[Grade]:
            return run_in_own_thread(Grader(task, calls).one_by_one(pairs))

        def earned(reply: str, of: Sequence[Any]) -> float:
            return sum(grade.reward or 0.0 for grade in grades([(reply, item) for item in of])) / len(of)

        untrained, replies = sampled(base, config), sampled(trained, config)
        again = grades([(one.text, item) for one, item in zip(untrained, items, strict=True)])
        longer = sampled(base, config.changed(max_tokens=4 * config.max_tokens))
        chosen, others = items[::2], items[1::2]
        candidates = [text for text, _ in Counter(one.text for one in replies).most_common(REPLIES)]
        fixed_reply = max(candidates, key=lambda text: earned(text, chosen))
        before, after = result.heldout_before[1.0], result.heldout_after[1.0]
        low, high = task.reward_range or (0.0, task.success_reward)
        return Facts(
            floor=low,
            ceiling=high,
            success=before.success,
            before=_reading(before),
            after=_reading(after),
            longer=_mean_of(task, longer),
            cut_off=sum(one.truncated for one in untrained) / len(untrained),
            ungraded=sum(one.reward is None for one in untrained) / len(untrained),
            noisy=sum(grade.reward != one.reward for grade, one in zip(again, untrained, strict=True)) / len(again),
            informative=sum(row["groups/used"] for row in steps) / sum(row["groups/total"] for row in steps),
            fixed=earned(fixed_reply, others),
            fixed_reply=fixed_reply,
        )


def _reading(estimate: Estimate) -> tuple[float, float]:
    return estimate.mean, (estimate.high - estimate.low) / (2 * Z95)


def _mean_of(task: RLAdapter, rollouts: Sequence[Rollout]) -> tuple[float, float]:
    mean, low, high = reward_interval(task, [one.reward or 0.0 for one in rollouts])
    return mean, (high - low) / (2 * Z95)


def row_of(name: str) -> dict[str, Any]:
    """The verdict, the facts and the outcome of a task."""
    began, cpu_began = time.monotonic(), time.process_time()
    chosen = TASKS[name]
    task = chosen.make()
    with tempfile.TemporaryDirectory() as folder, mint.ServiceClient(data_dir=Path(folder) / "service") as service:
        config = chosen.config.changed(run_dir=Path(folder) / "run")
        seen = examine(task, config, service_client=service, seed=SEED)
        facts = run(task, config, service)
        task.close()
    return {
        "task": name,
        "verdict": seen.verdict,
        "reason": seen.reason,
        "outcome": outcome(facts),
        "facts": asdict(facts),
        "doctor": {"success": seen.evidence.success, "informative": max(seen.evidence.informative.values())},
        "seconds": round(time.monotonic() - began, 1),
        "cpu_seconds": round(time.process_time() - cpu_began, 1),
    }


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """Verdict beside outcome, and how many agree."""
    print("| task | doctor | the run | held-out before → after | groups with a signal | cut off | best fixed reply | |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        facts = row["facts"]
        cells = [
            row["task"],
            row["verdict"],
            row["outcome"],
            f"{facts['before'][0]:.2f} → {facts['after'][0]:.2f}",
            f"{facts['informative']:.0%}",
            f"{facts['cut_off']:.0%}",
            f"{facts['fixed']:.2f}",
            "right" if row["verdict"] == row["outcome"] else "**wrong**",
        ]
        print("|", " | ".join(cells), "|")
    right = sum(row["verdict"] == row["outcome"] for row in rows)
    low, high = wilson(right, len(rows))
    print(f"\nright: {right} of {len(rows)} (95 %: {low:.2f} to {high:.2f})")


def verdict_of(name: str) -> dict[str, Any]:
    """What the doctor says of a task, without a run."""
    chosen = TASKS[name]
    with tempfile.TemporaryDirectory() as folder, mint.ServiceClient(data_dir=Path(folder)) as service:
        seen = examine(chosen.make(), chosen.config, service_client=service, seed=SEED)
    return {"verdict": seen.verdict, "reason": seen.reason}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=["shown", "tuned"], default="shown")
    parser.add_argument("--only", nargs="*", choices=list(TASKS), metavar="NAME")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--verdicts", action="store_true", help="ask the doctor again about the tasks of --output")
    options = parser.parse_args()
    lines = options.output.read_text().splitlines() if options.output is not None and options.output.exists() else []
    known = {row["task"]: row for row in map(json.loads, lines)}
    rows = []
    for name in options.only or (SHOWN if options.set == "shown" else TUNED):
        row = known.get(name) or row_of(name)
        if options.verdicts and name in known:
            row = {**row, **verdict_of(name)}
        rows.append({**row, "outcome": outcome(Facts(**row["facts"]))})
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        if options.output is not None and name not in known:
            with options.output.open("a") as file:
                file.write(json.dumps(row) + "\n")
    print_table(rows)


if __name__ == "__main__":
    main()
