"""What a caller of the sandbox may rely on: values in exact types, limits, refusals, threads, and never in silence."""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mint.errors import InvalidRequestError
from mint.sandbox import Limits, Outcome, Sandbox, same_value, zygote_pool
from mint.sandbox.syscalls import ALLOWED, ALLOWED_UNLESS_EXECUTABLE, SLEEPS, seccomp_filter
from mint.sandbox.value_encoding import decode, encode
from mint.sandbox.zygote_pool import ZygoteError, read_outcome

SOURCE = Path(__file__).resolve().parents[2] / "src"

LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
KEYS = st.booleans() | st.integers() | st.text() | st.binary() | st.tuples(st.integers(), st.text())
VALUES = st.recursive(
    LEAVES | st.frozensets(KEYS) | st.sets(KEYS),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None)
@given(VALUES)
def test_a_plain_value_crosses_the_channel_unchanged(value: object) -> None:
    crossed = decode(encode(value, 20, 1000), 20, 1000)
    assert same_value(crossed, value)
    assert repr(crossed) == repr(value) or "{" in repr(value)


@pytest.mark.parametrize(
    "value",
    [0, True, "a\ud800", b"\x00", 10**5000, -0.0, (1, [2, {3: {4}}]), {"k": frozenset([1])}],
    ids=lambda value: type(value).__name__,
)
def test_values_go_in_and_come_out_of_each_engine(either: Sandbox, value: object) -> None:
    if value == "a\ud800" and either.level.engines == ("monty",):
        pytest.skip("Monty has no lone surrogates")
    result = either.run("def same(x):\n    return x", "same", [(value,)]).results[0]
    assert result.error is None
    assert same_value(result.value, value)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (True, 1),
        (1, 1.0),
        ([1], (1,)),
        ({1}, frozenset([1])),
        ("a", b"a"),
        ({1: 2}, {True: 2}),
        ([0], [False]),
        (None, 0),
        ({1}, {1.0}),
        (1, 2),
        ([1, 2], [2, 1]),
        (math.inf, -math.inf),
    ],
)
def test_values_of_another_type_or_worth_differ(one: object, other: object) -> None:
    assert not same_value(one, other)
    assert same_value(one, one)


def test_nan_zero_and_the_order_of_sets_and_dicts_are_settled() -> None:
    assert same_value([math.nan], [math.nan])
    assert same_value(0.0, -0.0)
    assert same_value({"a": 1, "b": 2}, {"b": 2, "a": 1})


def test_a_value_that_claims_to_be_equal_agrees_with_nothing() -> None:
    class Any(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    assert not same_value(Any(3), 3)


NOT_VALUES = """nan
[
true
[]
[nan]
[3]
[3.0]
[true, true]
["odd", []]
[["int"]]
[["int", 5]]
[["int", " 0x5"]]
[["int", "0x_5"]]
[["int", "5"]]
[["float", "1_0"]]
[["float", "1e5e5"]]
[["bytes", "6"]]
[["bytes", "61 62"]]
[["odd", "0x1"]]
[["odd", 0]]
[["list", 1]]
[["list", -1]]
[["list", true]]
[["list", 0], null]
[["dict", 1], true]
[["set", 1], ["list", 0]]
[["set", 2], true, true]
[["dict", 2], ["int", "0x1"], null, true, null]
[{"int": "0x1"}]
{"a": 1}
3"""


@pytest.mark.parametrize(
    "text", ["", "[" * 100_000, "[" + "9" * 100_000 + "]", *NOT_VALUES.split("\n")], ids=lambda text: text[:20]
)
def test_what_is_not_an_encoded_value_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not an encoded value"):
        decode(text, 200, 1000)


@pytest.mark.parametrize("function", ["f()", "f; import os", "class", "", "a.b"])
def test_a_function_is_asked_for_by_its_bare_name(either: Sandbox, function: str) -> None:
    with pytest.raises(InvalidRequestError):
        either.run("def f(): return 1", function, [()])


def test_an_input_that_is_not_plain_is_refused(either: Sandbox) -> None:
    with pytest.raises(InvalidRequestError):
        either.run("def f(x): return 1", "f", [(object(),)])


@pytest.mark.parametrize("limits", [{"cpu_s": 0}, {"wall_s": 0.0}, {"memory_bytes": 5}, {"wall_s": math.nan}])
def test_limits_that_cannot_be_are_refused(limits: dict[str, float]) -> None:
    with pytest.raises(InvalidRequestError):
        Limits(**limits)


def test_many_threads_may_run_at_once(both: Sandbox) -> None:
    code = ["def f(x):\n    return x * 2", "import heapq\ndef f(x):\n    return x * 2"]
    with ThreadPoolExecutor(8) as threads:
        outcomes = list(threads.map(lambda i: both.run(code[i % 2], "f", [(i,)]), range(60)))
    assert [outcome.results[0].value for outcome in outcomes] == [2 * i for i in range(60)]


def test_one_run_knows_nothing_of_another(zygote: Sandbox) -> None:
    poison = "import builtins, json\nbuiltins.len = lambda x: 99\njson.dumps = None\ndef f(x):\n    return 1"
    zygote.run(poison, "f", [(1,)])
    assert zygote.run("def f(x):\n    return len(x)", "f", [([1],)]).results[0].value == 1


def test_the_same_run_gives_the_same_values(either: Sandbox) -> None:
    code = "import random\ndef f(x):\n    return [random.random(), list({'a', 'b', 'c', 'd'})]"
    values = [repr(either.run(code, "f", [(1,)]).results) for _ in range(3)]
    assert len(set(values)) == 1


def test_a_timeout_keeps_the_answers_given_before_it(either: Sandbox) -> None:
    code = "def f(x):\n    while x:\n        pass\n    return 'done'"
    outcome = either.run(code, "f", [(0,), (1,), (0,)])
    assert outcome.status == "timeout"
    assert [result.value for result in outcome.results] == ["done", None, None]


def test_printed_text_is_kept_apart_and_capped(either: Sandbox) -> None:
    outcome = either.run("def f(x):\n    print('hello', x)\n    return x", "f", [(1,)])
    assert (outcome.stdout, outcome.results[0].value) == ("hello 1\n", 1)
    flood = either.run("def f(x):\n    for _ in range(10 ** 6):\n        print('x' * 999)", "f", [(1,)])
    assert flood.status == "output"
    assert len(flood.stdout) <= 64 << 10


def test_memory_is_limited_to_what_is_asked() -> None:
    code = "def f(n):\n    return len('a' * n)"
    with Sandbox(Limits(memory_bytes=32 << 20), workers=1) as small:
        if not small.level.engines:
            pytest.skip("no engine here")
        assert small.run(code, "f", [(8 << 20,)]).status == "ok"
        assert small.run(code, "f", [(64 << 20,)]).status == "memory"


def test_without_any_engine_code_is_unsupported_and_never_run(tmp_path: Path) -> None:
    with Sandbox(engines=()) as sandbox:
        outcome = sandbox.run(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef f(x):\n    return x", "f", [(1,), (2,)])
    assert (outcome.status, outcome.engine, len(outcome.results)) == ("unsupported", None, 2)
    assert not (tmp_path / "ran").exists()


def test_with_monty_alone_a_gap_in_the_language_is_unsupported_and_a_wrong_answer_is_not(monty: Sandbox) -> None:
    assert monty.run("import heapq\ndef f(x):\n    return 1", "f", [(1,)]).status == "unsupported"
    assert monty.run("class A(int): pass\ndef f(x):\n    return 1", "f", [(1,)]).status == "unsupported"
    assert monty.run("def f(x):\n    return 1 / x", "f", [(0,)]).status == "ok"
    assert monty.run("def f(x) return", "f", [(0,)]).status == "syntax_error"


def test_a_kernel_without_landlock_has_no_zygote(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*, locked: bool) -> None:
        raise ZygoteError("Landlock: Function not implemented")

    monkeypatch.setattr(zygote_pool, "_Zygote", refuse)
    with Sandbox() as sandbox:
        assert "zygote" not in sandbox.level.engines
        assert "Landlock" in sandbox.level.missing["zygote"]
        assert sandbox.run("import heapq\ndef f(x):\n    return 1", "f", [(1,)]).status == "unsupported"


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")
def test_unsafe_runs_with_all_rights_and_says_so(tmp_path: Path) -> None:
    with Sandbox(unsafe=True, workers=1) as sandbox:
        outcome = sandbox.run(f"def f(x):\n    return open({str(tmp_path / 'new')!r}, 'w').write(x)", "f", [("abc",)])
        assert (outcome.engine, outcome.results[0].value) == ("unsafe", 3)
        assert sandbox.level.engines == ("unsafe",)
        assert sandbox.run("def f():\n    while True: pass", "f", [()]).status == "timeout"


def child_processes() -> set[int]:
    return {
        int(child) for task in Path("/proc/self/task").iterdir() for child in (task / "children").read_text().split()
    }


@pytest.mark.usefixtures("zygote")
def test_a_lost_zygote_is_replaced() -> None:
    others = child_processes()
    with Sandbox(engines=("zygote",), workers=1) as sandbox:
        (process,) = child_processes() - others
        os.kill(process, signal.SIGKILL)
        os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
        outcomes = [sandbox.run("def f(x): return x", "f", [(1,)]) for _ in range(3)]
    assert outcomes[0].status == "crashed"
    assert {outcome.status for outcome in outcomes[1:]} == {"ok"}


def outcome_of(results: bytes, count: int = 1) -> Outcome:
    """The outcome of a child that has written `results` and ended by itself."""
    return read_outcome({"ended": "exit", "exit": 0}, results, b"", "n", count, Limits(), "zygote", 0.0)


def test_a_line_without_the_nonce_voids_the_run() -> None:
    honest = b"n R \nn L \nn V [true]\n"
    assert outcome_of(honest).results[0].value is True
    for forged in (b"x V [true]\n" + honest, honest + b"x V [true]\n", honest + b"n V [true]\n", b"\n" + honest):
        assert outcome_of(forged).status == "crashed"


REACHING_OUT = """
open openat socket connect clone fork vfork execve kill tgkill ptrace prctl mount unlink rename chmod setuid bpf ioctl
io_uring_setup
"""


@pytest.mark.parametrize("machine", ALLOWED)
def test_the_filter_names_no_call_that_reaches_out(machine: str) -> None:
    reaching_out = set(REACHING_OUT.split())
    named = ALLOWED[machine].keys() | ALLOWED_UNLESS_EXECUTABLE[machine].keys() | SLEEPS[machine].keys()
    assert not named & reaching_out
    assert len(seccomp_filter(machine)) % 8 == 0


def test_both_machines_allow_the_same_calls_but_for_one_that_is_old() -> None:
    assert ALLOWED["x86_64"].keys() - ALLOWED["aarch64"].keys() == {"time"}
    assert ALLOWED["aarch64"].keys() <= ALLOWED["x86_64"].keys()


WALL_ALONE = """
import socket
from mint.sandbox.lockdown import Lockdown

Lockdown().{wall}()
for reach_out in (lambda: open("/etc/passwd"), lambda: socket.socket().connect(("127.0.0.1", {port}))):
    try:
        reach_out()
    except PermissionError:
        continue
    raise SystemExit("it got through")
"""


@pytest.mark.parametrize("wall", ["apply_landlock", "apply_seccomp"])
def test_each_wall_alone_keeps_files_and_the_network_out(zygote: Sandbox, wall: str) -> None:
    if "landlock" in wall and zygote.level.landlock_abi < 4:
        pytest.skip("Landlock before ABI 4 leaves TCP to seccomp")
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = WALL_ALONE.format(wall=wall, port=server.getsockname()[1])
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONPATH": str(SOURCE)},
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert (done.returncode, done.stderr) == (0, "")
