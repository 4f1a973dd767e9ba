"""Answers that are equal though written differently; hostile ones cost at most the time-out."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from waiting import HANG_S, wait_until

from mint.rl.tasks.math_grader import MathGrader, exact_match

TIMEOUT_S = 1.0

EQUAL = [
    ("92", "92"),
    (" 92\n", "92"),
    ("1/2", "0.5"),
    ("3/6", "1/2"),
    ("\\frac{3}{6}", "\\frac12"),
    ("\\dfrac{1}{2}", "1/2"),
    ("-\\frac{1}{2}", "\\frac{-1}{2}"),
    ("1 1/2", "3/2"),
    ("1\\frac12", "\\frac32"),
    ("50\\%", "0.5"),
    ("50%", "1/2"),
    ("50%", "50"),
    ("12.5%", "12.5\\%"),
    ("1,000", "1000"),
    ("1{,}234{,}567", "1234567"),
    ("12.50", "12.5"),
    (".5", "0.5"),
    ("+7", "7"),
    ("-0", "0"),
    ("−5", "-5"),
    ("7.", "7"),
    ("2e3", "2000"),
    ("10^6", "1000000"),
    ("10^{-3}", "0.001"),
    ("x=3", "3"),
    ("x = 3", "x=3"),
    ("2 + 2 = 4", "4"),
    ("f(x) = 2x", "2x"),
    ("|-7|", "7"),
    ("$5", "5"),
    ("\\$5.00", "5"),
    ("5 dollars", "5"),
    ("2 km", "2"),
    ("2\\text{ km}", "2"),
    ("2 km", "2000 m"),
    ("2000 m", "2\\,\\mathrm{km}"),
    ("5 apples", "5"),
    ("10 cm^2", "10\\text{ cm}^2"),
    ("90^\\circ", "90"),
    ("36 km/h", "10 m/s"),
    ("2\\sqrt{2}", "\\sqrt{8}"),
    ("2\\sqrt{2} km", "\\sqrt{8} km"),
    ("2\\sqrt{2} km", "2000\\sqrt{2} m"),
    ("sqrt(2)/2", "\\frac{1}{\\sqrt{2}}"),
    ("pi/2", "\\frac{\\pi}{2}"),
    ("x^2+2x+1", "(x+1)^2"),
    ("\\{2, 1\\}", "\\{1,2\\}"),
    ("( 1 , 2 )", "(1,2)"),
    ("\\left[0, 1\\right)", "[0,1)"),
    ("x>3", "3<x"),
    ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}"),
    ("\\text{yes}", "Yes"),
    ("The answer is 3/4.", "0.75"),
    ("2 + 2 = 4, so the answer is \\boxed{\\frac{3}{4}}. I hope so.", "0.75"),
    ("**Answer:** 1,250 km", "1250"),
    ("48 + 24 = 72\n#### 72", "72"),
    ("We add them and get $\\frac{10}{4}$", "5/2"),
    ("So there are 12 in total", "12"),
]

NOT_EQUAL = [
    ("", "92"),
    ("12", "21"),
    ("-5", "5"),
    ("50", "0.5"),
    ("0.05", "50%"),
    ("0.333", "1/3"),
    ("3.14", "\\pi"),
    ("1.000", "1000"),
    ("1,00", "100"),
    ("1,5", "1.5"),
    ("y=3", "x=3"),
    ("5 km", "5 m"),
    ("5 kg", "5 m"),
    ("2 m", "2 m^2"),
    ("5 apples", "5 oranges"),
    ("2m", "2"),
    ("2x", "2"),
    ("42 or 43", "42"),
    ("42, 43", "42"),
    ("\\boxed{42 \\text{ or } 43}", "42"),
    ("\\boxed{42} no, \\boxed{43}", "42"),
    ("The answer is 42. The answer is 43.", "42"),
    ("The answer is 5 km.", "5 m"),
    ("(1,2)", "(2,1)"),
    ("[0,1)", "[0,1]"),
    ("\\{1,2\\}", "\\{1,3\\}"),
    ("x>3", "x\\ge 3"),
    ("x^2+1", "(x-1)(x+1)"),
    ("act", "cat"),
    ("on", "no"),
    ("No", "Yes"),
    ("1/0", "1"),
    ("\\frac{1}{0}", "0"),
    ("2^{10}", "1023"),
    ("True", "1"),
    ("8 = 7", "7"),
    ("7 = 8", "7"),
    ("x = 8 = 7", "7"),
    ("x = x", "7"),
    ("7..8", "7"),
    ("7 | 8", "7"),
    ("7 \\\\ 8", "7"),
    ("7 is not the answer, 8 is", "7"),
]

HOSTILE = [
    "9^{9^{9^9}}",
    "$" + "(" * 200 + "1" + ")" * 200 + "$",
    "(" * 3000 + "1" + ")" * 3000,
    "\\boxed{" * 2000,
    "9" * 100_000,
    "1e99999999",
    "\\frac{" * 60 + "1" + "}{2}" * 60,
    "((x+1)^{99}(y+2)^{99}(z+3)^{99})^{99}",
    "99999999!",
    "\\sum_{n=1}^{999999999} \\sin(n)",
    "1" + " " * 5000 + "!",
    "\\text{" + " " * 5000,
    "a " * 2500 + "1",
    "\\(" * 2500,
    "7=" * 2000 + "8",
    "\\int_0^1 e^{e^{e^{x^2}}} dx",
    "\x00\x1b[2J $\\write18{touch here}$",
    "__import__('os').system('touch here')",
]


@pytest.fixture(scope="module")
def grader() -> Iterator[MathGrader]:
    grader = MathGrader(workers=1, timeout_s=HANG_S)
    yield grader
    grader.close()


@pytest.fixture(scope="module")
def impatient() -> Iterator[MathGrader]:
    grader = MathGrader(workers=1, timeout_s=TIMEOUT_S)
    yield grader
    grader.close()


@pytest.mark.parametrize(("response", "answer"), EQUAL)
def test_equal_though_written_differently(grader: MathGrader, response: str, answer: str) -> None:
    comparison = grader.compare(response, answer)
    assert comparison.equal, comparison


@pytest.mark.parametrize(("response", "answer"), NOT_EQUAL)
def test_not_equal_though_it_looks_alike(grader: MathGrader, response: str, answer: str) -> None:
    comparison = grader.compare(response, answer)
    assert not comparison.equal, comparison


@pytest.mark.parametrize("response", HOSTILE, ids=lambda text: repr(text[:24]))
def test_a_hostile_answer_costs_at_most_the_time_out_and_is_not_equal(impatient: MathGrader, response: str) -> None:
    """What this process does itself, before and after its worker, is next to nothing."""
    began = time.thread_time()
    comparison = impatient.compare(response, "7")
    assert not comparison.equal
    assert time.thread_time() - began < 0.5, comparison


def test_after_a_time_out_the_next_answer_is_graded(impatient: MathGrader) -> None:
    assert impatient.compare("9^{9^{9^9}}", "7").decided_by in ("timeout", "error")
    wait_until(lambda: impatient.equal_answers("\\sqrt{8}", "2\\sqrt2"))  # a busy machine may need more than one try


def test_a_grader_that_was_closed_at_the_end_of_a_run_serves_the_next() -> None:
    grader = MathGrader(workers=1)
    for _ in range(2):
        assert grader.compare("\\sqrt{8}", "2\\sqrt2").equal
        grader.close()


def test_plain_numbers_need_no_process() -> None:
    grader = MathGrader(workers=0)  # asking math-verify would wait for ever
    assert [grader.compare(text, "1000").decided_by for text in ("1000", "1,000", "999", "1 km")] == [
        "exact", "number", "number", "number",
    ]  # fmt: skip


def test_it_works_from_many_threads_at_once() -> None:
    grader = MathGrader(workers=2, timeout_s=HANG_S)
    verdicts: dict[int, bool] = {}

    def grade(number: int) -> None:
        verdicts[number] = grader.equal_answers(
            f"\\sqrt{{{number * number}}}", f"{number if number % 2 else number + 1}"
        )

    threads = [threading.Thread(target=grade, args=(number,)) for number in range(1, 13)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    grader.close()
    assert verdicts == {number: number % 2 == 1 for number in range(1, 13)}


def test_exact_match_is_strict() -> None:
    assert exact_match(" 92 \n", "92")
    assert not exact_match("92.0", "92")
    assert not exact_match("", "")
