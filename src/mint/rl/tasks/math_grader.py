"""Compares answers in different notations: exact match, then our own rules, then math-verify.

Plain numbers, quantities with units and words are compared here, exactly and without delay. math-verify compares
everything else (LaTeX, algebra, sets, intervals) in worker processes, which are killed and replaced after a time-out:
sympy may compute for ever.

Equal: `1/2`, `0.5`, `3/6`, `\\frac12`, `50%` · `1,000` and `1000` · `2 km` and `2000 m` · `2 km` if the answer is `2`
(the question names the unit) · `50%` if the answer is `50` · `x = 3` if it is `3`. Not equal: `5 km` and `5 m` ·
`0.333` and `1/3` · `(1, 2)` and `[1, 2]` · `act` and `cat`.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import queue
import select
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import IO, Literal

from mint.errors import MissingExtraError
from mint.rl.reward import UnsupportedError
from mint.rl.tasks.math_answers import (
    EQUALS,
    HEDGE,
    MAX_ANSWER_CHARACTERS,
    MAX_TAIL_CHARACTERS,
    NAME,
    WORDS,
    PlainNumber,
    as_math,
    final_answer,
    measure,
    plain_number,
    tidy,
)

Decision = Literal["exact", "number", "word", "math-verify", "too long", "timeout", "error"]
"""How it was decided: equal text, exact arithmetic, a word, math-verify, or why it could not be compared."""

MAX_SIDES = 4
"""The most sides of a chain of equals signs; each side is compared."""
START_TIMEOUT_S = 60.0
WORKER = Path(__file__).with_name("math_worker.py")


@dataclass(frozen=True)
class Comparison:
    """`equal` is False if the two could not be compared; then `decided_by` says why."""

    equal: bool
    decided_by: Decision


def exact_match(response: str, answer: str) -> bool:
    """Whether `response` is `answer`, character for character, without white space at the ends."""
    return response.strip() == answer.strip() != ""


class MathGrader:
    """Compares answers; safe to use from several threads at once. `close()` ends its processes."""

    def __init__(self, *, workers: int = 2, timeout_s: float = 3.0) -> None:
        """No process starts before it is needed.

        Raises:
            MissingExtraError: math-verify is not installed.
        """
        if importlib.util.find_spec("math_verify") is None:
            raise MissingExtraError("grading by math-verify needs math-verify", remedy="pip install math-verify")
        self._timeout_s = timeout_s
        self._idle: queue.LifoQueue[_GraderProcess | None] = queue.LifoQueue()
        for _ in range(workers):
            self._idle.put(None)
        self._started: set[_GraderProcess] = set()
        self._lock = threading.Lock()

    def equal_answers(self, response: str, answer: str) -> bool:
        """Whether the final answer of `response` equals `answer`."""
        return self.compare(response, answer).equal

    def compare(self, response: str, answer: str) -> Comparison:
        """Compares the final answer of `response` with `answer`.

        Takes at most the time-out, and about a second more if a worker has to start.

        Raises:
            UnsupportedError: the workers do not start.
        """
        if exact_match(response, answer):
            return Comparison(True, "exact")
        candidate, in_prose = final_answer(response)
        if max(len(candidate), len(answer)) > (MAX_TAIL_CHARACTERS if in_prose else MAX_ANSWER_CHARACTERS):
            return Comparison(False, "too long")
        target = tidy(candidate)
        gold = tidy(answer)
        if gold == "":
            return Comparison(False, "error")
        if WORDS.fullmatch(gold):
            return Comparison(target.casefold() == gold.casefold(), "word")
        if in_prose:
            return self._ask(as_math(gold), target)
        if HEDGE.search(target):
            return Comparison(False, "math-verify")
        if "=" in gold or "=" not in target:
            return self._compare_expressions(target, gold)
        # math-verify reads the last side alone, so `8 = 7` would be 7.
        sides = [side.strip() for side in EQUALS.split(target) if not NAME.fullmatch(side.strip())]
        if not 1 <= len(sides) <= MAX_SIDES:
            return Comparison(False, "error")
        comparison = self._compare_expressions(sides[0], gold)
        for side in sides[1:]:
            if comparison.equal:
                comparison = self._compare_expressions(side, gold)
        return comparison

    def _compare_expressions(self, target: str, gold: str) -> Comparison:
        measured = measure(target)
        expected = measure(gold)
        if measured.unit and expected.unit and measured.unit.dimension != expected.unit.dimension:
            return Comparison(False, "number")
        ratio = measured.unit.factor / expected.unit.factor if measured.unit and expected.unit else Fraction(1)
        numbers = plain_number(measured.text), plain_number(expected.text)
        if numbers[0] is not None and numbers[1] is not None:
            return Comparison(_same_number(numbers[0], numbers[1], ratio), "number")
        scaled = f"\\frac{{{ratio.numerator}}}{{{ratio.denominator}}}\\cdot({measured.text})"
        return self._ask(as_math(expected.text), as_math(measured.text if ratio == 1 else scaled))

    def close(self) -> None:
        """Ends the workers."""
        with self._lock:
            workers, self._started = self._started, set()
        for worker in workers:
            worker.end()

    def _ask(self, gold: str, target: str) -> Comparison:
        worker = self._idle.get()
        try:
            if worker is None or not worker.alive:
                worker = self._start()
            answer = worker.ask(gold, target, self._timeout_s)
            if answer is None or answer.decided_by == "timeout":
                self._drop(worker)
                worker = self._start()  # now, so that the next question does not wait for the start
        finally:
            self._idle.put(worker)
        return answer or Comparison(False, "error")

    def _start(self) -> _GraderProcess:
        worker = _GraderProcess()
        with self._lock:
            self._started.add(worker)
        return worker

    def _drop(self, worker: _GraderProcess) -> None:
        with self._lock:
            self._started.discard(worker)
        worker.end()


@cache
def shared_grader() -> MathGrader:
    """The grader of this process, with default settings."""
    grader = MathGrader()
    atexit.register(grader.close)
    return grader


def equal_answers(response: str, answer: str) -> bool:
    """Whether the final answer of `response` equals `answer`, by the grader of this process.

    Raises:
        MissingExtraError: math-verify is not installed.
        UnsupportedError: its processes do not start.
    """
    return shared_grader().equal_answers(response, answer)


class _GraderProcess:
    """One process of `math_worker.py`; its first line says that it is ready."""

    def __init__(self) -> None:
        # Its own interpreter with nothing of ours in it: no fork of torch's threads, no keys in the environment. The
        # fixed hash seed makes sympy's order of terms, and with it the verdict, the same every time.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONHASHSEED": "0"},
        )
        self._ready = False

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, gold: str, target: str, timeout_s: float) -> Comparison | None:
        """None if the process died or did not answer in time.

        Raises:
            UnsupportedError: it does not start.
        """
        if not self._ready and self._line(START_TIMEOUT_S) != b"ready\n":
            raise UnsupportedError("the process for math-verify does not start", remedy="Run it: python " + str(WORKER))
        self._ready = True
        question = {"timeout_s": timeout_s, "gold": gold, "target": target}
        began = time.monotonic()
        try:
            _pipe(self._process.stdin).write(json.dumps(question).encode() + b"\n")
            _pipe(self._process.stdin).flush()
        except OSError:
            return None
        # The process ends itself after `timeout_s` by a timer of the kernel. The extra time lets that end arrive here.
        line = self._line(timeout_s + 0.2)
        if line in (b"1\n", b"0\n"):
            return Comparison(line == b"1\n", "math-verify")
        if line == b"!\n":
            return Comparison(False, "error")
        # No answer: the timer ended the process, or it died of something else, which takes less than the time-out.
        return Comparison(False, "timeout") if time.monotonic() - began >= 0.9 * timeout_s else None

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            try:
                _pipe(pipe).close()
            except OSError:
                continue  # a question that it never read

    def _line(self, timeout_s: float) -> bytes:
        """The next line; b"" if the process ended or was too late."""
        output = _pipe(self._process.stdout)
        return output.readline() if select.select([output], [], [], timeout_s)[0] else b""


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    if pipe is None:
        raise UnsupportedError("the process for math-verify has no pipes")
    return pipe


def _same_number(measured: PlainNumber, expected: PlainNumber, ratio: Fraction) -> bool:
    value = measured.value * ratio
    if measured.percent == expected.percent:
        return value == expected.value
    # With the sign on one side only, `50%` answers both `0.5` and `50`: questions ask for either.
    return value == expected.value or (
        value * 100 == expected.value if measured.percent else value == expected.value * 100
    )
