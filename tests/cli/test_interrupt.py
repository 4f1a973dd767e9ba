"""Ctrl-C: a run ends after its step, which is saved, and the command that is printed goes on with the same bits."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mint.cli.train import resume_command

RUN = "from mint.cli.main import app; app()"
ARGUMENTS = (
    "train",
    "rl",
    "task=math",
    "base_model=mint/tiny",
    "steps=7",
    "batch_size=2",
    "group_size=4",
    "max_tokens=16",
    "heldout_size=0",
    "save_every=100",
)


def mint(*arguments: str, home: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", RUN, *arguments],
        env={**os.environ, "MINT_HOME": str(home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(process: subprocess.Popen[str], text: str) -> None:
    assert process.stderr is not None
    read = []
    for line in process.stderr:
        read.append(line)
        if text in line:
            return
    raise AssertionError("".join(read))


def rewards(folder: Path) -> list[float]:
    return [json.loads(line)["reward/mean"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_the_printed_command_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = mint(*ARGUMENTS, "--run-dir", str(run), home=tmp_path / "home")
    wait_for(process, "step 2/7")
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "ends the run after this step" in told and "Traceback" not in told
    saved = json.loads((run / "state.json").read_text())["step"]
    assert 2 <= saved < 7 and len(rewards(run)) == saved and f"saved up to step {saved}" in told
    assert json.loads((run / "process.json").read_text())["outcome"] == "stopped"

    program, *command = shlex.split(told.splitlines()[-1])
    assert program == "mint" and command == [*ARGUMENTS, "--run-dir", str(run), "--resume"]
    resumed = mint(*command, home=tmp_path / "home")
    assert resumed.communicate(timeout=120) and resumed.returncode == 0
    undisturbed = mint(*ARGUMENTS, "--run-dir", str(tmp_path / "other"), home=tmp_path / "home")
    assert undisturbed.communicate(timeout=120) and undisturbed.returncode == 0
    assert rewards(run) == rewards(tmp_path / "other")


@pytest.mark.parametrize("task", ["task=file:sums.jsonl", "task=own.py:Sums", "data=sums.jsonl"])
def test_a_command_with_a_relative_path_can_be_run_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sums.jsonl").touch()
    Path("own.py").touch()
    run = tmp_path / "run"
    words = ["train", "rl", task, "steps=7"]
    line = resume_command(words, run)
    assert line == f"cd {tmp_path} && " + shlex.join(["mint", *words, "--run-dir", str(run), "--resume"])


def test_a_command_without_a_relative_path_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["train", "rl", f"task=file:{tmp_path}/sums.jsonl", "--run-dir", str(tmp_path), "--resume"]
    assert resume_command(words, tmp_path) == shlex.join(["mint", *words])


@pytest.mark.restarts
def test_the_second_one_ends_it_at_once_and_the_command_says_what_is_saved(tmp_path: Path) -> None:
    process = mint(*ARGUMENTS, "temperature=1.5", home=tmp_path)
    wait_for(process, "step 1/7")
    process.send_signal(signal.SIGINT)
    wait_for(process, "Press Ctrl-C again")
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=120)
    assert process.returncode == 130 and "Traceback" not in told
    (run,) = (tmp_path / "runs").iterdir()
    assert told.splitlines()[-1] == shlex.join(
        ["mint", *ARGUMENTS, "temperature=1.5", "--run-dir", str(run), "--resume"]
    )
