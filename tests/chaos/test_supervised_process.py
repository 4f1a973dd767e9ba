"""What a supervisor hears of its processes is true, whichever of its threads asks."""

from __future__ import annotations

import operator
import signal
import sys
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor

import pytest

from mint.chaos import supervised_process
from mint.chaos.supervised_process import SupervisedProcess


@pytest.fixture
def restless_threads() -> Generator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("restless_threads")
def test_threads_that_ask_at_once_hear_the_exit_code_that_the_process_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervised_process, "PRELOADED", [])
    supervised_process.forks.cache_clear()

    def wait_for_code(process: SupervisedProcess) -> int:
        while (code := process.exit_code) is None:
            pass
        return code

    with ThreadPoolExecutor(4) as threads:
        for _ in range(5):
            process = SupervisedProcess(operator.is_not, None)  # a call that does nothing
            codes = list(threads.map(wait_for_code, [process] * 4))
            assert process.end(60)
            assert {*codes, process.exit_code} == {0}


@pytest.mark.timeout(120)
def test_a_process_that_ends_just_before_a_signal_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervised_process, "PRELOADED", [])
    supervised_process.forks.cache_clear()
    process = SupervisedProcess(operator.is_not, None)
    assert process.end(60)
    monkeypatch.setattr(SupervisedProcess, "exit_code", None)  # what was known when it was last asked
    process.signal(signal.SIGKILL)
