"""What code in the sandbox returns costs the host time and memory in proportion to its size, and never raises there."""

from __future__ import annotations

import math
import resource
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mint.recipes.code import run_tests
from mint.sandbox import Limits, Outcome, Sandbox, same_value, value_text
from mint.sandbox.safe_text import MAX_ERROR_CHARACTERS
from mint.sandbox.value_encoding import ValueLimitError, decode, encode
from mint.sandbox.zygote_pool import read_header, read_outcome

SOURCE = Path(__file__).resolve().parents[2] / "src"
DEPTH, ITEMS = 500, 1_000_000


def nested(depth: int, leaf: object = "'") -> Any:
    """Lists, tuples and dicts around a leaf; a quote is what doubles when texts are nested in texts."""
    value = leaf
    for level in range(depth):
        value = ([value], (value,), {"k": value})[level % 3]
    return value


def cost(work: Callable[[], object]) -> tuple[int, int]:
    """The lines of Python that run, and the peak of memory in bytes."""
    lines = 0

    def count(frame: object, event: str, argument: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return count

    tracemalloc.start()
    before = sys.gettrace()
    try:
        sys.settrace(count)
        work()
    finally:
        sys.settrace(before)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return lines, peak


def assert_linear(work: Callable[[Any], object], small: Any, large: Any, *, factor: int) -> None:
    """`large` is `factor` times `small`. Hash tables grow in steps, so their margin is wide."""
    work(small)  # what is only done once
    lines, peak = cost(lambda: work(small))
    more_lines, higher_peak = cost(lambda: work(large))
    assert more_lines <= 1.2 * factor * lines
    assert higher_peak <= 2.5 * factor * peak + 4096


def test_28_nested_lists_are_compared_at_once_in_little_memory() -> None:
    program = """
import resource, time
from mint.sandbox import same_value
value, other = "'", "'"
for _ in range(28):
    value, other = [value], [other]
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), used + (64 << 20)))
began = time.process_time()
assert same_value(value, other)
assert time.process_time() - began < 1
"""
    limit_cpu = lambda: resource.setrlimit(resource.RLIMIT_CPU, (60, 60))  # noqa: E731
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        preexec_fn=limit_cpu,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "work",
    [
        lambda value: same_value(value, value),
        lambda value: encode(value, DEPTH, ITEMS),
        lambda value: decode(encode(value, DEPTH, ITEMS), DEPTH, ITEMS),
        lambda value: value_text(value, 10_000),
    ],
    ids=["same_value", "encode", "decode", "value_text"],
)
@pytest.mark.parametrize("shape", ["deep", "wide", "deep and wide"])
def test_the_cost_grows_with_the_size(work: Callable[[Any], object], shape: str) -> None:
    sizes = {
        "deep": (nested(10), nested(20)),
        "wide": (["'"] * 500, ["'"] * 1000),
        "deep and wide": ([nested(200)], [nested(200), nested(200)]),
    }
    assert_linear(work, *sizes[shape], factor=2)
    if shape == "deep":
        assert_linear(work, nested(200), nested(400), factor=2)


def test_a_value_that_occurs_many_times_is_compared_once() -> None:
    value, other = [1], [1]
    for _ in range(60):
        value, other = [value, value], [other, other]
    assert same_value(value, other)
    assert not same_value(value, [*other, 1])


def test_depth_needs_no_stack_and_a_value_that_contains_itself_equals_nothing() -> None:
    assert same_value(nested(50_000), nested(50_000))
    assert not same_value(nested(50_000), nested(50_000, leaf='"'))
    endless: list[Any] = []
    endless.append(endless)
    assert not same_value(endless, endless)
    assert not same_value([endless], [[]])


def same_slowly(one: Any, other: Any) -> bool:
    """The definition of `same_value`, written plainly."""
    if type(one) is not type(other):
        return False
    if type(one) is float:
        return one == other or (math.isnan(one) and math.isnan(other))
    if type(one) in (list, tuple):
        return len(one) == len(other) and all(map(same_slowly, one, other))
    if type(one) is dict:
        return same_unordered(list(one.items()), list(other.items()))
    if type(one) in (set, frozenset):
        return same_unordered(list(one), list(other))
    return one == other


def same_unordered(some: list[Any], others: list[Any]) -> bool:
    for part in some:
        match = next((place for place, other in enumerate(others) if same_slowly(part, other)), None)
        if match is None:
            return False
        del others[match]
    return not others


LEAVES = st.sampled_from(
    [
        None,
        True,
        False,
        0,
        1,
        -1,
        2**61 - 1,
        10**400,
        0.0,
        -0.0,
        1.0,
        math.nan,
        math.inf,
        -math.inf,
        5e-324,
        "",
        "a",
        "1",
        "'",
        "\\",
        "[",
        "\ud800",
        "é",
        "e\u0301",
        b"",
        b"a",
        b"1",
    ]
)
KEYS = st.recursive(LEAVES, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=4)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.sets(KEYS, max_size=3)
        | st.frozensets(KEYS, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=400, deadline=None)
@given(VALUES, VALUES)
def test_values_are_the_same_exactly_by_the_plain_definition(one: Any, other: Any) -> None:
    assert same_value(one, other) == same_slowly(one, other)
    assert same_value(one, decode(encode(one, DEPTH, ITEMS), DEPTH, ITEMS))


@settings(max_examples=200, deadline=None)
@given(VALUES, st.randoms())
def test_a_value_that_differs_in_one_leaf_differs(value: Any, rng: Any) -> None:
    changed = with_another_leaf(value, rng)
    assert same_value(value, changed) == same_slowly(value, changed)


def with_another_leaf(value: Any, rng: Any) -> Any:
    """The value with a part replaced by a near one of another type or sign, if it has such a part."""
    if type(value) in (list, tuple) and value:
        place = rng.randrange(len(value))
        return type(value)([*value[:place], with_another_leaf(value[place], rng), *value[place + 1 :]])
    if type(value) is dict and value:
        key = rng.choice(list(value))
        return {**value, key: with_another_leaf(value[key], rng)}
    if type(value) in (list, tuple, dict):
        return [] if type(value) is tuple else ()
    if type(value) is int:
        return bool(value) if value in (0, 1) else value + 1
    if type(value) is float:
        return -value
    return {None: 0, True: 1, False: 0.0, "a": b"a", b"1": "1"}.get(value, value) if value.__hash__ else value


def test_values_beyond_depth_or_items_are_named(either: Sandbox) -> None:
    code = """
def f(kind):
    value = 1
    for _ in range(199 if kind == 'deep enough' else 201):
        value = [value]
    if kind == 'wide':
        return [0] * 50000
    return value
"""
    outcome = either.run(code, "f", [("deep enough",), ("too deep",), ("wide",), ("deep enough",)])
    assert outcome.status == "output"
    assert [result.returned for result in outcome.results] == [True, False, False, True]
    assert outcome.results[1].error == "ValueLimitError: the value is nested deeper than 200 levels"
    assert (outcome.results[2].error or "").startswith("ValueLimitError: the value has more than")


def test_a_caller_chooses_depth_and_items(either: Sandbox) -> None:
    engines = either.level.engines
    with Sandbox(Limits(wall_s=60.0, value_depth=2, value_items=4), engines=engines, workers=1) as small:
        outcome = small.run("def f(x):\n    return x", "f", [([[1]],), ([1, 2, 3],), ([1, 2, 3, 4],)])
        assert [result.returned for result in outcome.results] == [True, True, False]


def test_too_many_keys_with_one_hash_are_refused() -> None:
    """Python hashes an integer modulo 2**61 - 1; a set of integers that share a hash takes quadratic time."""
    sharing = [place * (2**61 - 1) for place in range(1, 1000)]
    for value in (set(sharing), dict.fromkeys(sharing), frozenset((number,) for number in sharing)):
        with pytest.raises(ValueLimitError, match="share a hash"):
            decode(encode(value, DEPTH, ITEMS), DEPTH, ITEMS)
    assert decode(encode(set(sharing[:9]), DEPTH, ITEMS), DEPTH, ITEMS) == set(sharing[:9])


@pytest.mark.parametrize(
    "text",
    [
        "[" * 60_000,
        "[[]," * 1 + "[]," * 20_000 + "[]]",
        "[" + "[]," * 20_000,
        "[" + '["list",1],' * 5_000 + "0]",
        '["' + "\\ud800" * 10_000 + '"]',
        '[["int","0x' + "f" * 60_000 + '"]]',
        "[" + "9" * 60_000 + "]",
        '[["int","' + "9" * 60_000 + '"]]',
        '[["float","' + "9" * 60_000 + '"]]',
        '{"' + "k" * 60_000 + '":1}',
    ],
    ids=lambda text: text[:16],
)
def test_a_forged_value_costs_memory_in_proportion_and_gives_a_value_or_a_refusal(text: str) -> None:
    def attempt() -> None:
        try:
            value_text(decode(text, 200, 16_000), 300)
        except ValueError:
            return

    attempt()
    assert cost(attempt)[1] <= 40 * len(text) + 100_000


def outcome_of(results: bytes, count: int = 1, exit_status: int = 0, stdout: bytes = b"") -> Outcome:
    """The outcome of a child that has written `results` and ended by itself."""
    header = {"ended": "exit", "exit": exit_status}
    return read_outcome(header, results, stdout, "n", count, Limits(), "zygote", 0.0)


READY = b"n R \nn L \n"


@pytest.mark.parametrize(
    "answer",
    [
        b"E " + b"[" * 60_000,
        b"E " + b"[" * 500 + b"]" * 500,
        b"E " + b"9" * 60_000,
        b"E null",
        b"E {}",
        b"E",
        b"V " + b"[" * 60_000,
        b"V \xff\xff",
        b"Q true",
        b"V",
        b"",
        b"X no lock-down",
        b"R ",
        b"L ",
    ],
    ids=lambda answer: repr(answer[:12]),
)
def test_a_forged_answer_voids_the_run(answer: bytes) -> None:
    outcome = outcome_of(READY + b"n " + answer + b"\n")
    assert outcome.status == "crashed"
    assert not outcome.results[0].returned


def test_code_cannot_claim_that_the_lock_down_failed() -> None:
    """Such a run would be left out of its group instead of earning nothing."""
    assert outcome_of(b"n X no Landlock\n").status == "unsupported"
    assert outcome_of(b"n R \nn X no Landlock\n").status == "crashed"
    assert outcome_of(b"n L \nn V [true]\n").status == "crashed"


CLAIMS = """
import os, sys
nonce = sys._getframe(1).f_locals['nonce']
os.write(3, nonce + b' X the lock-down failed\\n')
os._exit(1)
"""


def test_a_program_that_forges_the_frame_of_a_failed_lock_down_earns_nothing(zygote: Sandbox) -> None:
    assert run_tests(zygote, CLAIMS, "f", [((1,), 2)]).value == 0.0


@pytest.mark.parametrize("exit_status", [-1, -11, -34, -40, -64, -1000, 255])
def test_any_end_of_a_child_has_a_name(exit_status: int) -> None:
    assert outcome_of(b"n R \n", exit_status=exit_status).status == "crashed"


def test_frames_cut_off_and_floods_of_small_frames_end_as_crashed() -> None:
    assert outcome_of(READY + b"n V [tr").status == "crashed"
    assert outcome_of(b"n").status == "crashed"
    assert outcome_of(b"\n" * 60_000).status == "crashed"
    assert outcome_of(READY + b"n V [true]\n" * 5_000).status == "crashed"


def test_texts_of_exceptions_are_short_and_printable() -> None:
    error = outcome_of(READY + b'n E "A\\ud800\\u001b[31m\\u0000' + b"x" * 60_000 + b'"\n').results[0].error
    assert error is not None
    assert len(error) == MAX_ERROR_CHARACTERS
    assert error.startswith("A\\ud800\\x1b[31m\\x00xx")
    outcome = outcome_of(READY, stdout=b"\xff" * 10)
    assert outcome.stdout.encode()


HEADER = b'{"ended": "exit", "exit": 0, "results": 5, "stdout": 0}'


@pytest.mark.parametrize(
    "line",
    [b"", b"{}", b"[]", b"[" * 4000, b"nan", b"\xff", HEADER[:-1], HEADER.replace(b"5", b"-5")]
    + [HEADER.replace(b"5", wrong) for wrong in (b"65537", b"true", b"1e3", b"null", b'"5"', b"9" * 4000)]
    + [HEADER.replace(b'"exit",', b'"won",'), HEADER.replace(b"}", b', "extra": 1}')],
    ids=lambda line: repr(line[:50]),
)
def test_a_header_with_lengths_that_lie_is_refused(line: bytes) -> None:
    assert read_header(HEADER, 65_536)["results"] == 5
    with pytest.raises(ValueError):
        read_header(line, 65_536)


def test_the_text_of_a_value_is_its_repr_or_the_start_of_it() -> None:
    for value in (None, True, 1, -0.0, "a'\n", b"\x00", [1, (2,), ()], {"k": {1}}, set(), frozenset([1]), frozenset()):
        assert value_text(value, 100) == repr(value)
    assert value_text(["abc"] * 10**6, 10) == "['abc', 'a…"
    assert value_text(10**10**5, 20) == "an int of 332193 bit…"
    assert value_text(nested(100_000), 50).endswith("…")
    assert value_text(object(), 50) == "<object>"
    assert "an int of" in repr(outcome_of(READY + b'n V [["int", "0x' + b"f" * 9000 + b'"]]\n'))


def test_a_value_that_doubles_when_it_is_shown_is_graded(either: Sandbox) -> None:
    code = 'def f(x):\n    value = "\'"\n    for _ in range(150):\n        value = [value]\n    return value'
    reward = run_tests(either, code, "f", [((1,), 1)])
    assert reward.value == 0.0
    assert len(reward.info["failed"]) <= 300
