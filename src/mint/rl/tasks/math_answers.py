"""Reads the answer in a response: where it stands, its unit, and its exact value if it is a plain number. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_ANSWER_CHARACTERS = 500
"""A final answer longer than this is not compared."""
MAX_TAIL_CHARACTERS = 2000
"""If a response names no final answer, its last expression within so many characters of the end counts."""
MAX_QUANTITY_CHARACTERS = 200
"""No unit is looked for in an expression longer than this."""
ANNOUNCED = re.compile(r"(?:####|\banswer(?:\s+is)?\s*[:=]?(?:\*\*)?)[ \t]*(?P<answer>\S[^\n]*)", re.IGNORECASE)
FORMULA = re.compile(r"\$\$?([^$]+)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
PROSE = re.compile(r"(?<![\\A-Za-z])(?!(?:sin|cos|tan|log|exp|sqrt|infty)\b)[A-Za-z]{3,}|\n")
WORDS = re.compile(r"(?!pi\b)[A-Za-z]{2,}(?: [A-Za-z]+)*", re.IGNORECASE)
TEXT_COMMAND = r"\\(?:text|textrm|mathrm|textbf|mbox)\{([^{}]*)\}"
HEDGE = re.compile(r"\.\.|[\w})]\s*\|\s*[\w\\(]|\\\\(?!.*\\end\{)", re.DOTALL)
"""Two answers side by side; math-verify would read only one of them."""
EQUALS = re.compile(r"(?<![<>!:])=")
NAME = re.compile(r"\\?[A-Za-z]+(?:_\{?\w+\}?)?(?:\([A-Za-z]\))?|")
"""A name left of an equals sign, which is not compared: `x`, `a_1`, `\\theta`, `f(x)`."""
COMMANDS = re.compile(rf"\\(?:begin|end)\{{\w+\*?\}}|{TEXT_COMMAND}")


def final_answer(response: str) -> tuple[str, bool]:
    """The answer in `response`, and whether it is prose, of which the last expression counts.

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
    """Removes dollar signs, bold marks, the final full stop, and LaTeX that only changes the appearance."""
    text = text.strip().removesuffix(".").strip().strip("*").strip()
    text = re.sub(r"\\left(?![a-z])|\\right(?![a-z])|\\!|\\displaystyle", "", text.replace("{,}", ","))
    text = re.sub(r"\\[dt]frac", r"\\frac", re.sub(r"(?<!\\)\\[,;: ]|~", " ", text))
    text = re.sub(r"\\[()\[\]]|\\?\$", "", text)
    text = re.sub(r"(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi", text.replace("π", r"\pi").replace("−", "-"))
    whole = re.fullmatch(TEXT_COMMAND, text.strip())
    return (whole[1] if whole else text).strip()


def as_math(text: str) -> str:
    """Marks text as a formula for math-verify."""
    return text if "\\boxed" in text else f"${text}$"


@dataclass(frozen=True)
class Unit:
    """A dimension, and the size of the unit in base units of it."""

    dimension: str
    factor: Fraction


@dataclass(frozen=True)
class Measured:
    """An expression and its unit."""

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
    """Splits a unit off the end of an expression. An unknown word (`5 apples`) is a dimension of its own; an
    unknown letter (`3 x`) or a letter without a space (`2m`) is a variable."""
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
        top = _decimal(above.removeprefix("-"))
        bottom = _decimal(below)
        if top is None or bottom is None or bottom == 0:
            return None
        value = int(match["whole"] or 0) + (-top if above.startswith("-") else top) / bottom
    else:
        return None
    return PlainNumber(sign * value / (100 if percent else 1), bool(percent))


def _decimal(text: str) -> Fraction | None:
    digits = text.replace(",", "")
    return Fraction(digits if not digits.startswith(".") else f"0{digits}") if re.search(r"\d", digits) else None
