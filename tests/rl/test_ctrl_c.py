"""Ctrl-C in a script, or a request to stop: the run ends after its step, which is saved, and says how to go on."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from digits_task import ManyDigits

from mint.rl import RLConfig, run_grpo
from mint.runs.interrupt import RunInterrupted, request_stop
from mint.runs.reader import RunReader

pytestmark = pytest.mark.learns

SMALL = RLConfig(
    base_model="mint/tiny",
    steps=4,
    batch_size=2,
    group_size=4,
    max_tokens=6,
    temperature=1.0,
    heldout_size=0,
    save_every=100,
)


def press_at(event: str, count: int = 1) -> Any:
    """A progress hook that presses Ctrl-C at the first `event`."""
    left = [count]

    def hook(what: str, fields: dict[str, Any]) -> None:
        while what == event and left[0]:
            left[0] -= 1
            os.kill(os.getpid(), signal.SIGINT)

    return hook


def test_the_step_is_saved_and_a_resumed_run_has_the_bits_of_an_undisturbed_one(tmp_path: Path) -> None:
    config = SMALL.changed(run_dir=tmp_path / "run")
    with pytest.raises(
        RunInterrupted, match=r"saved up to step 1 of 4 in .*/run\. .*resume=True and run_dir='"
    ) as ended:
        run_grpo(ManyDigits(), config, on_progress=press_at("step"))
    assert (ended.value.folder, ended.value.saved_step) == (tmp_path / "run", 1)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    resumed = run_grpo(ManyDigits(), config, resume=True)
    undisturbed = run_grpo(ManyDigits(), SMALL.changed(run_dir=tmp_path / "other"))
    assert (resumed.steps, resumed.state_digest) == (4, undisturbed.state_digest)


def test_a_request_to_stop_ends_a_run_as_ctrl_c_does_and_is_forgotten_by_the_next_process(tmp_path: Path) -> None:
    config = SMALL.changed(run_dir=tmp_path / "run")

    def stop(what: str, fields: dict[str, Any]) -> None:
        if what == "step" and fields["step"] == 2:
            request_stop(tmp_path / "run")

    with pytest.raises(RunInterrupted, match=r"ended by a request to stop; it is saved up to step 2 of 4"):
        run_grpo(ManyDigits(), config, on_progress=stop)
    assert RunReader(tmp_path / "run").summary().state == "stopped"
    resumed = run_grpo(ManyDigits(), config, resume=True)
    undisturbed = run_grpo(ManyDigits(), SMALL.changed(run_dir=tmp_path / "other"))
    assert (resumed.steps, resumed.state_digest) == (4, undisturbed.state_digest)


def test_the_second_one_ends_the_run_at_once_and_a_resumed_run_says_that_it_starts_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = SMALL.changed(run_dir=tmp_path)
    with pytest.raises(RunInterrupted, match="before a step was saved; it goes on at step 1"):
        run_grpo(ManyDigits(), config, on_progress=press_at("step", 2))
    with caplog.at_level(logging.WARNING):
        assert run_grpo(ManyDigits(), config, resume=True).steps == 4
    assert [
        str(tmp_path) in line and "has no checkpoint: the run starts at step 1" in line for line in caplog.messages
    ] == [True]


def test_a_program_that_handles_ctrl_c_itself_keeps_its_handler(tmp_path: Path) -> None:
    pressed = []
    before = signal.signal(signal.SIGINT, lambda *_: pressed.append(True))
    try:
        assert run_grpo(ManyDigits(), SMALL.changed(run_dir=tmp_path), on_progress=press_at("step")).steps == 4
    finally:
        signal.signal(signal.SIGINT, before)
    assert pressed == [True]
