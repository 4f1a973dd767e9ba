"""Whether an answer is right though written differently: exact match, then own rules, then math-verify.

Plain numbers, quantities with units and words are decided here, exactly and at once; everything else (LaTeX, algebra,
sets, intervals) by math-verify in worker processes that are killed and replaced when they take too long, since sympy
can be made to compute for ever. Knows nothing of prompts or policies.

What counts as equal: `1/2`, `0.5`, `3/6`, `\\frac12`, `50%` · `1,000` and `1000` · `2 km` and `2000 m` · `2 km` where
the answer is `2` (the question names the unit) · `50%` where the answer is `50` · `x = 3` where it is `3`. What does
not: `5 km` and `5 m` · `0.333` and `1/3` · `(1, 2)` and `[1, 2]` · `act` and `cat`.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import queue
import re
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

Decision = Literal["exact", "number", "word", "math-verify", "too long", "timeout", "error"]
"""Who decided: text that is the same, exact arithmetic, a word, math-verify, or why it could not be compared."""

MAX_ANSWER_CHARACTERS = 500
"""A final answer longer than this is not compared."""
MAX_TAIL_CHARACTERS = 2000
"""Where a response names no final answer, the last expression in so many characters at its end counts."""
MAX_QUANTITY_CHARACTERS = 200
"""A unit is looked for behind at most so many characters."""
MAX_SIDES = 4
"""Of a chain of equals signs; each is compared."""
START_TIMEOUT_S = 60.0
WORKER = Path(__file__).with_name("math_worker.py")


@dataclass(frozen=True)
class Comparison:
    """`equal` is False wherever the two could not be compared; `decided_by` says so."""

    equal: bool
    decided_by: Decision


def exact_match(response: str, answer: str) -> bool:
    """Whether `response`, white space at its ends aside, is `answer`, character for character."""
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
        self._idle: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(workers):
            self._idle.put(None)
        self._started: set[_Worker] = set()
        self._lock = threading.Lock()

    def equal_answers(self, response: str, answer: str) -> bool:
        """Whether the final answer of `response` equals `answer`."""
        return self.compare(response, answer).equal

    def compare(self, response: str, answer: str) -> Comparison:
        """The same, with who decided. Takes at most the time-out, and a second more where a worker has to start.

        Raises:
            UnsupportedError: the workers do not start.
        """
        if exact_match(response, answer):
            return Comparison(True, "exact")
        candidate, in_prose = final_answer(response)
        if max(len(candidate), len(answer)) > (MAX_TAIL_CHARACTERS if in_prose else MAX_ANSWER_CHARACTERS):
            return Comparison(False, "too long")
        target, gold = tidy(candidate), tidy(answer)
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
        # math-verify would look at the last side alone, and `8 = 7` would be 7.
        sides = [side.strip() for side in EQUALS.split(target) if not NAME.fullmatch(side.strip())]
        if not 1 <= len(sides) <= MAX_SIDES:
            return Comparison(False, "error")
        comparison = self._compare_expressions(sides[0], gold)
        for side in sides[1:]:
            if comparison.equal:
                comparison = self._compare_expressions(side, gold)
        return comparison

    def _compare_expressions(self, target: str, gold: str) -> Comparison:
        measured, expected = measure(target), measure(gold)
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
                worker = self._start()  # at once, so that the next question need not wait for it
        finally:
            self._idle.put(worker)
        return answer or Comparison(False, "error")

    def _start(self) -> _Worker:
        worker = _Worker()
        with self._lock:
            self._started.add(worker)
        return worker

    def _drop(self, worker: _Worker) -> None:
        with self._lock:
            self._started.discard(worker)
        worker.end()


@cache
def shared_grader() -> MathGrader:
    """The grader of this process, for those that need no settings of their own."""
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


class _Worker:
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
        """None: it died, or was too late to answer.

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
        line = self._line(timeout_s + 0.2)
        if line in (b"1\n", b"0\n"):
            return Comparison(line == b"1\n", "math-verify")
        if line == b"!\n":
            return Comparison(False, "error")
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
        """Its next line, b"" if it ended or none came in time."""
        output = _pipe(self._process.stdout)
        return output.readline() if select.select([output], [], [], timeout_s)[0] else b""


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    if pipe is None:
        raise UnsupportedError("the process for math-verify has no pipes")
    return pipe


# --- Reading an answer ----------------------------------------------------------------------------------------------

ANNOUNCED = re.compile(r"(?:####|\banswer(?:\s+is)?\s*[:=]?(?:\*\*)?)[ \t]*(?P<answer>\S[^\n]*)", re.IGNORECASE)
FORMULA = re.compile(r"\$\$?([^$]+)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
PROSE = re.compile(r"(?<![\\A-Za-z])(?!(?:sin|cos|tan|log|exp|sqrt|infty)\b)[A-Za-z]{3,}|\n")
WORDS = re.compile(r"(?!pi\b)[A-Za-z]{2,}(?: [A-Za-z]+)*", re.IGNORECASE)
TEXT_COMMAND = r"\\(?:text|textrm|mathrm|textbf|mbox)\{([^{}]*)\}"
HEDGE = re.compile(r"\.\.|[\w})]\s*\|\s*[\w\\(]|\\\\(?!.*\\end\{)", re.DOTALL)
"""Two answers side by side, of which math-verify would read one."""
EQUALS = re.compile(r"(?<![<>!:])=")
NAME = re.compile(r"\\?[A-Za-z]+(?:_\{?\w+\}?)?(?:\([A-Za-z]\))?|")
"""What may stand left of an equals sign without being compared: `x`, `a_1`, `\\theta`, `f(x)`."""
COMMANDS = re.compile(rf"\\(?:begin|end)\{{\w+\*?\}}|{TEXT_COMMAND}")


def final_answer(response: str) -> tuple[str, bool]:
    """What `response` gives as its answer, and whether that is prose in which the last expression counts.

    In this order: the last `\\boxed{…}`; what follows the last "answer is", "Answer:" or `####`; the last formula
    between dollars; the whole response.
    """
    boxed = _last_boxed(response)
    if boxed is not None:
        return boxed, False
    tail = response[-MAX_TAIL_CHARACTERS:]
    found = [match["answer"] for match in ANNOUNCED.finditer(tail)]
    text = found[-1] if found else tail if len(response) > MAX_ANSWER_CHARACTERS else response.strip()
    if not PROSE.search(COMMANDS.sub("", measure(tidy(text)).text)):
        return text, False
    formulas = [next(filter(None, groups), "") for groups in FORMULA.findall(text)]
    return (formulas[-1], False) if formulas else (text, not WORDS.fullmatch(tidy(text)))


def _last_boxed(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    begin = start + len("\\boxed{")
    depth = 1
    for place, letter in enumerate(text[begin:], start=begin):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return text[begin:place]
    return None


def tidy(text: str) -> str:
    """Without dollars, bold marks, the full stop at the end, and LaTeX that only changes the looks."""
    text = text.strip().removesuffix(".").strip().strip("*").strip()
    text = re.sub(r"\\left(?![a-z])|\\right(?![a-z])|\\!|\\displaystyle", "", text.replace("{,}", ","))
    text = re.sub(r"\\[dt]frac", r"\\frac", re.sub(r"(?<!\\)\\[,;: ]|~", " ", text))
    text = re.sub(r"\\[()\[\]]|\\?\$", "", text)
    text = re.sub(r"(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi", text.replace("π", r"\pi").replace("−", "-"))
    whole = re.fullmatch(TEXT_COMMAND, text.strip())
    return (whole[1] if whole else text).strip()


def as_math(text: str) -> str:
    """A formula for math-verify."""
    return text if "\\boxed" in text else f"${text}$"


@dataclass(frozen=True)
class Unit:
    """What is measured, and how many of the base unit one is."""

    dimension: str
    factor: Fraction


@dataclass(frozen=True)
class Measured:
    """An expression and the unit behind it."""

    text: str
    unit: Unit | None


_SCALES: dict[str, dict[str, Fraction | int]] = {
    "length": {"mm": Fraction(1, 1000), "cm": Fraction(1, 100), "m": 1, "km": 1000, "meter": 1, "metre": 1,
               "centimeter": Fraction(1, 100), "kilometer": 1000, "inch": Fraction("0.0254"),
               "inches": Fraction("0.0254"), "ft": Fraction("0.3048"), "feet": Fraction("0.3048"),
               "foot": Fraction("0.3048"), "yard": Fraction("0.9144"), "mile": Fraction("1609.344"),
               "mi": Fraction("1609.344")},
    "mass": {"mg": Fraction(1, 1000), "g": 1, "kg": 1000, "gram": 1, "kilogram": 1000},
    "time": {"ms": Fraction(1, 1000), "s": 1, "sec": 1, "second": 1, "min": 60, "minute": 60, "h": 3600, "hr": 3600,
             "hour": 3600, "day": 86400, "week": 604800},
    "volume": {"ml": Fraction(1, 1000), "mL": Fraction(1, 1000), "l": 1, "L": 1, "liter": 1, "litre": 1},
    "speed": {"m/s": 1, "km/h": Fraction(5, 18), "mph": Fraction("0.44704")},
    "money": {"cent": Fraction(1, 100), "dollar": 1, "USD": 1},
    "angle": {"degree": 1, "°": 1, "^\\circ": 1, "^{\\circ}": 1},
}  # fmt: skip
UNITS = {
    name: Unit(dimension, Fraction(scale)) for dimension, table in _SCALES.items() for name, scale in table.items()
}
ATTACHED = "|".join(re.escape(name) for name in sorted(UNITS, key=len, reverse=True) if len(name) > 1 or name == "°")
UNIT_AT_END = re.compile(
    rf"(?P<body>.*[\d)}}A-Za-z])\s*(?:{TEXT_COMMAND}|(?<=\d)\s*({ATTACHED})"
    r"|(?<=[\d)}])\s+([A-Za-z]+(?:/[A-Za-z]+)?(?: [A-Za-z]+)*))\s*(?:\^\{?(?P<power>[23])\}?)?"
)


def measure(text: str) -> Measured:
    """Splits a unit off the end of an expression. A word that is no known unit (`5 apples`) is a dimension of its own;
    one unknown letter (`3 x`) is a variable, and so is a letter without a space (`2m`)."""
    match = UNIT_AT_END.fullmatch(text) if len(text) <= MAX_QUANTITY_CHARACTERS else None
    name = next(filter(None, match.groups()[1:4]), "").strip() if match else ""
    if match is None or not name:
        return Measured(text, None)
    unit = UNITS.get(name) or UNITS.get(name.removesuffix("s"))
    if unit is None and len(name) < 3:
        return Measured(text, None)
    unit = unit or Unit(name.casefold().removesuffix("s"), Fraction(1))
    power = int(match["power"] or 1)
    return Measured(match["body"].strip(), Unit(f"{unit.dimension}^{power}", unit.factor**power))


DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d{1,60})?(?:\.\d{0,60})?"
NUMBER = re.compile(rf"(?P<number>{DIGITS})(?:[eE](?P<exponent>[+-]?\d{{1,2}}))?", re.ASCII)
FRACTION = re.compile(
    rf"(?:(?P<whole>\d{{1,60}})\s+)?(?:(?P<above>{DIGITS})\s*/\s*(?P<below>{DIGITS})"
    rf"|\\frac\{{(?P<above2>-?{DIGITS})\}}\{{(?P<below2>{DIGITS})\}}|\\frac(?P<above3>\d)(?P<below3>\d))",
    re.ASCII,
)


@dataclass(frozen=True)
class PlainNumber:
    """An exact value; `percent` where it was written with a percent sign (and `value` is already a hundredth)."""

    value: Fraction
    percent: bool = False


def plain_number(text: str) -> PlainNumber | None:
    """The exact value of `-1,234.5`, `3/4`, `1 1/2`, `\\frac{3}{4}`, `2e3`, `50%`; None if it is anything else."""
    text, percent = re.subn(r"\s*(?:\\?%|\s[Pp]er\s?cent)$", "", text.strip())
    sign = -1 if text.startswith("-") else 1
    text = text[1:].strip() if text[:1] in ("+", "-") else text
    if (match := NUMBER.fullmatch(text)) and (value := _decimal(match["number"])) is not None:
        value *= Fraction(10) ** int(match["exponent"] or 0)
    elif match := FRACTION.fullmatch(text):
        above, below = (match[f"{part}"] or match[f"{part}2"] or match[f"{part}3"] or "" for part in ("above", "below"))
        top, bottom = _decimal(above.removeprefix("-")), _decimal(below)
        if top is None or bottom is None or bottom == 0:
            return None
        value = int(match["whole"] or 0) + (-top if above.startswith("-") else top) / bottom
    else:
        return None
    return PlainNumber(sign * value / (100 if percent else 1), bool(percent))


def _decimal(text: str) -> Fraction | None:
    digits = text.replace(",", "")
    return Fraction(digits if not digits.startswith(".") else f"0{digits}") if re.search(r"\d", digits) else None


def _same_number(measured: PlainNumber, expected: PlainNumber, ratio: Fraction) -> bool:
    value = measured.value * ratio
    if measured.percent == expected.percent:
        return value == expected.value
    # With the sign on one side only, `50%` answers both `0.5` and `50`: questions ask for either.
    return value == expected.value or (
        value * 100 == expected.value if measured.percent else value == expected.value * 100
    )
