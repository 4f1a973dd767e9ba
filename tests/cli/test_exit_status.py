"""What a command says, and with which status it ends, where there is nothing to report or nothing worked."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from mint.cli.main import app
from mint.compose.installation import EXTRAS
from mint.config import read_settings

TASK = """
from mint.rl import RLAdapter

class Ungraded(RLAdapter):
    def build_dataset(self):
        return ["a", "b", "c", "d"]

    def build_heldout(self):
        return ["e", "f"]

    def make_prompt(self, item, tokenizer):
        return tokenizer.encode(item)

    def compute_reward(self, response, item):
        raise ValueError("no such table")

class Sometimes(Ungraded):
    def compute_reward(self, response, item):
        if item != "e" and len(response) % 2:
            raise ValueError("no such table")
        return 0.0
"""
SETTINGS = ("base_model=mint/tiny", "max_tokens=4", "heldout_samples=2")
STEPS = ("steps=1", "batch_size=4", "group_size=4")


def mint(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    (home / "own.py").write_text(TASK)
    return home


@pytest.fixture(autouse=True)
def _shared_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINT_HOME", str(home))
    monkeypatch.delenv("MINT_BASE_URL", raising=False)
    monkeypatch.chdir(home)


@pytest.fixture(scope="module")
def ungraded(home: Path) -> Result:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINT_HOME", str(home))
        patch.chdir(home)
        words = ("task=own.py:Ungraded", *SETTINGS, *STEPS, "--run-dir", str(home / "runs" / "ungraded"))
        return mint("train", "rl", *words, "--json")


def test_a_run_without_a_single_reward_ends_with_status_1_and_the_reason(ungraded: Result, home: Path) -> None:
    assert ungraded.exit_code == 1
    assert "none of the 16 rollouts could be graded (ValueError: no such table)" in ungraded.stderr
    assert "mint rollouts" in ungraded.stderr and "Traceback" not in ungraded.stderr
    assert json.loads(ungraded.stdout.splitlines()[-1])["steps"] == 1, "the report is printed all the same"


@pytest.mark.parametrize("more", [[], ["--plot", "readings.png"]], ids=["one reading", "a comparison"])
def test_an_evaluation_without_a_single_reward_ends_with_status_1(more: list[str]) -> None:
    answer = mint("eval", "mint/tiny", "own.py:Ungraded", *SETTINGS, *more)
    assert answer.exit_code == 1
    assert "none of the held-out completions could be graded" in answer.stderr
    assert "`mint doctor own.py:Ungraded` says why" in answer.stderr


def test_some_rewards_are_enough_for_status_0() -> None:
    assert mint("eval", "mint/tiny", "own.py:Sometimes", *SETTINGS).exit_code == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--flag", "tool_calls"], "No rollout of step 1 has the flag tool_calls. --step N looks at another step."),
        (["--text", "no such text"], "No rollout of the 1 step has the text 'no such text'."),
        (["--text", "zz", "--step", "1"], "No rollout of step 1 has the text 'zz'."),
    ],
)
def test_a_question_without_hits_is_answered_with_what_was_looked_for(
    ungraded: Result, words: list[str], said: str
) -> None:
    answer = mint("rollouts", "ungraded", *words)
    assert (answer.exit_code, answer.stdout, answer.stderr) == (0, "", f"{said}\n")
    answer = mint("rollouts", "ungraded", *words, "--json")
    assert (answer.exit_code, json.loads(answer.stdout)) == (0, {"rollouts": []})


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MINT_BASE_URL", "MINT_API_KEY", "MINT_THREADS", "MINT_HOME"):
        monkeypatch.setenv(name, "")
    settings = read_settings()
    assert (settings.base_url, settings.api_key, settings.home) == (None, None, Path("~/.mint"))
    monkeypatch.setenv("TINKER_BASE_URL", "http://127.0.0.1:1")
    assert read_settings().base_url == "http://127.0.0.1:1"


def test_runs_that_failed_to_start_are_counted_and_not_listed(
    ungraded: Result, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINT_HOME", str(tmp_path))
    failed = {"pid": 1, "host": "h", "began_at": 1.0, "ended_at": 2.0, "outcome": "failed", "error": "OSError: full"}
    for name in ("bad-1", "bad-2"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.json").write_text('{"steps": 3}')
        (tmp_path / "runs" / name / "process.json").write_text(json.dumps(failed))
    shutil.copytree(home / "runs" / "ungraded", tmp_path / "runs" / "good")
    shutil.copytree(home / "runs" / "ungraded", tmp_path / "runs" / "stopped")
    (tmp_path / "runs" / "stopped" / "process.json").write_text(json.dumps({**failed, "outcome": "failed"}))
    table, _, sentence = mint("runs", "list").stdout.partition("2 of them ended before the first step: ")
    assert "good" in table and "stopped" in table and "bad" not in table
    assert "bad-1" in sentence and "bad-2" in sentence and "--failed-starts" in sentence
    everything = mint("runs", "list", "--failed-starts").stdout
    assert "bad-1" in everything and "bad-2" in everything and "ended before" not in everything
    assert len(json.loads(mint("runs", "list", "--json").stdout)["rl_runs"]) == 4
    assert mint("runs", "show", "bad-1").exit_code == 0


@pytest.mark.parametrize("words", ["plot latest -o x.png", "plan --pass-rate 0.5", "doctor math", "diagnose latest"])
def test_a_bare_installation_names_each_extra_once(words: str, tmp_path: Path) -> None:
    hidden = f"import sys; sys.modules.update(dict.fromkeys({(*EXTRAS['local'], *EXTRAS['rl'])!r}))"
    command = [sys.executable, "-c", f"{hidden}; from mint.cli.main import app; app()", *words.split()]
    environment = {**os.environ, "MINT_HOME": str(tmp_path)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    name = words.split()[0]
    assert ended.returncode == 1
    assert f"mint {name} needs the package numpy, which is not installed" in ended.stderr
    assert ended.stderr.count("[local]'") == 1 and ended.stderr.count("[rl]'") == (name in ("doctor", "diagnose"))
