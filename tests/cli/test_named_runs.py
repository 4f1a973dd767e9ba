"""`mint train` takes the name of a run for its folder (`--run-dir … --resume`) and for its last checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from mint.cli.main import app
from mint.cli.train import resume_command

SETTINGS = ("base_model=mint/tiny", "steps=1", "batch_size=2", "group_size=2", "max_tokens=4", "heldout_size=0")


def mint(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def train(*arguments: str) -> dict[str, Any]:
    answer = mint("train", "rl", "task=math", *SETTINGS, *arguments, "--json")
    assert answer.exit_code == 0, answer.output
    return json.loads(answer.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def _shared_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINT_HOME", str(home))


@pytest.fixture(scope="module")
def first(home: Path) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINT_HOME", str(home))
        return train("--run-dir", str(home / "runs" / "first"))


def recorded(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())["init_from"]


@pytest.mark.parametrize("name", ["latest", "first", "fir", "1"])
def test_a_run_starts_from_the_last_checkpoint_of_a_run_that_is_named(
    first: dict[str, Any], tmp_path: Path, name: str
) -> None:
    answer = mint("train", "rl", "task=math", *SETTINGS, f"init_from={name}", "--run-dir", str(tmp_path / "next"))
    assert answer.exit_code == 0, answer.output
    assert recorded(tmp_path / "next") == first["checkpoint"]
    assert f"init_from={name} is {first['checkpoint']}" in answer.stderr


def test_a_resume_keeps_the_checkpoint_that_a_name_meant(first: dict[str, Any], home: Path) -> None:
    folder = home / "runs" / "second"
    words = ("init_from=latest", "--run-dir", str(folder))
    begun = train(*words)
    assert recorded(folder) == first["checkpoint"]
    assert train(*words, "--resume")["checkpoint"] == begun["checkpoint"]  # `latest` is the run itself by now
    refused = mint("train", "rl", "task=math", *SETTINGS, "init_from=second", *words[1:], "--resume")
    assert refused.exit_code == 1 and "init_from" in refused.stderr, refused.output


@pytest.mark.parametrize("name", ["first", "firs"])
def test_a_resume_takes_any_name_of_a_run(first: dict[str, Any], home: Path, name: str) -> None:
    answer = mint("train", "rl", "task=math", *SETTINGS, "--run-dir", name, "--resume", "--json")
    assert answer.exit_code == 0, answer.output
    assert json.loads(answer.stdout.splitlines()[-1])["checkpoint"] == first["checkpoint"]
    assert f"--run-dir {name} is {home / 'runs' / 'first'}" in answer.stderr
    assert not Path(name).exists()


def test_a_resume_takes_the_latest_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINT_HOME", str(tmp_path))
    begun = train()
    for words in (["--run-dir", "latest"], ["run_dir=latest"], ["--run-dir", "1"]):
        assert train(*words, "--resume")["run_dir"] == begun["run_dir"]
    assert len(list((tmp_path / "runs").iterdir())) == 1


@pytest.mark.parametrize("recipe", [("train", "rl", "task=math", *SETTINGS), ("demo", "math")])
def test_a_resume_of_no_run_is_refused(
    recipe: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refused = mint(*recipe, "--run-dir", "nosuch", "--resume")
    said = " ".join(refused.stderr.split())
    assert refused.exit_code == 1 and "--run-dir = nosuch: is not a run" in said, refused.output
    assert "`mint runs list`" in said and "Leave out --resume" in said
    assert not Path("nosuch").exists()


def test_a_resume_without_a_task_goes_on_with_the_task_and_settings_of_the_run(
    first: dict[str, Any], home: Path
) -> None:
    folder = home / "runs" / "first"
    answer = mint("train", "rl", "--run-dir", "first", "--resume", "--json")
    assert answer.exit_code == 0, answer.output
    assert json.loads(answer.stdout.splitlines()[-1])["state_digest"] == first["state_digest"]
    assert f"task=math, with the settings in {folder / 'config.json'}" in answer.stderr


def test_a_resume_of_supervised_fine_tuning_reads_its_data_and_settings_from_the_folder(tmp_path: Path) -> None:
    rows = [json.dumps({"prompt": f"{number} + 1 = ", "answer": str(number + 1)}) for number in range(8)]
    (tmp_path / "sums.jsonl").write_text("\n".join(rows))
    words = (f"task=file:{tmp_path}/sums.jsonl", "base_model=mint/tiny", "batch_size=4", "epochs=1")
    begun = mint("train", "sft", *words, "--run-dir", str(tmp_path / "run"), "--json")
    assert begun.exit_code == 0, begun.output
    again = mint("train", "sft", "--run-dir", str(tmp_path / "run"), "--resume", "--json")
    assert again.exit_code == 0, again.output
    first, second = (json.loads(one.stdout.splitlines()[-1]) for one in (begun, again))
    assert first["checkpoint"] == second["checkpoint"]


@pytest.mark.parametrize("recipe", ["rl", "sft"])
def test_a_resume_from_another_directory_finds_the_file_where_the_run_began(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    began_in, elsewhere = tmp_path / "began", tmp_path / "elsewhere"
    began_in.mkdir()
    elsewhere.mkdir()
    rows = [json.dumps({"prompt": f"{number} + 1 = ", "answer": str(number + 1)}) for number in range(8)]
    (began_in / "sums.jsonl").write_text("\n".join(rows))
    own = SETTINGS if recipe == "rl" else ("base_model=mint/tiny", "batch_size=4", "epochs=1")
    monkeypatch.chdir(began_in)
    begun = mint("train", recipe, "task=file:sums.jsonl", *own, "--run-dir", "run", "--json")
    assert begun.exit_code == 0, begun.output
    monkeypatch.chdir(elsewhere)
    again = mint("train", recipe, "--run-dir", "../began/run", "--resume", "--json")
    assert again.exit_code == 0, again.output
    first, second = (json.loads(one.stdout.splitlines()[-1]) for one in (begun, again))
    assert first["checkpoint"] == second["checkpoint"]
    assert f"task=file:sums.jsonl in {began_in}" in again.stderr
    assert f"{began_in / 'run'} is complete, all " in caplog.text


def test_a_resume_from_another_directory_keeps_a_relative_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began_in, elsewhere = tmp_path / "began", tmp_path / "else" / "where"
    began_in.mkdir()
    elsewhere.mkdir(parents=True)
    rows = [json.dumps({"prompt": f"{number} + 1 = ", "answer": str(number + 1)}) for number in range(8)]
    (began_in / "sums.jsonl").write_text("\n".join(rows))
    monkeypatch.chdir(began_in)
    monkeypatch.setenv("MINT_HOME", "../home")
    begun = mint("train", "rl", "task=file:sums.jsonl", *SETTINGS, "--run-dir", "run", "--json")
    assert begun.exit_code == 0, begun.output
    monkeypatch.chdir(elsewhere)
    monkeypatch.setenv("MINT_HOME", "../../home")
    again = mint("train", "rl", "--run-dir", str(began_in / "run"), "--resume", "--json")
    assert again.exit_code == 0, again.output


def test_a_resume_with_a_long_text_among_its_settings_or_from_a_removed_directory_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began_in, removed = tmp_path / "began", tmp_path / "removed"
    began_in.mkdir()
    removed.mkdir()
    rows = [json.dumps({"hint " * 80: f"{number} + 1 = ", "answer": str(number + 1)}) for number in range(8)]
    (tmp_path / "sums.jsonl").write_text("\n".join(rows))
    monkeypatch.chdir(began_in)
    words = (f"task=file:{tmp_path / 'sums.jsonl'}", f"prompt_key={'hint ' * 80}", *SETTINGS)
    begun = mint("train", "rl", *words, "--run-dir", "run", "--json")
    assert begun.exit_code == 0, begun.output
    monkeypatch.chdir(removed)
    removed.rmdir()
    again = mint("train", "rl", "--run-dir", str(began_in / "run"), "--resume", "--json")
    assert again.exit_code == 0, again.output


@pytest.mark.parametrize("words", [["steps=4"], ["task=math"]])
def test_a_resume_with_other_settings_names_the_command_that_has_those_of_the_run(
    first: dict[str, Any], home: Path, words: list[str]
) -> None:
    refused = mint("train", "rl", *words, "--run-dir", "first", "--resume")
    assert refused.exit_code == 1 and "belongs to a run with another value of" in refused.stderr, refused.output
    assert (
        f"`mint train rl --run-dir {home / 'runs' / 'first'} --resume` resumes with those of the run" in refused.stderr
    )


@pytest.mark.parametrize(
    ("recipe", "changes", "value", "remedy"),
    [
        ("sft", {}, "is a run of rl", "Write mint train rl --run-dir"),
        ("rl", {"task_spec": None}, "started from Python", "add its task and its settings"),
        ("rl", {"advantage": "function own.mean"}, "advantage = function own.mean", "with resume=True"),
        ("rl", {"task_spec": {"task": "code", "seed": 0, "options": {"unsafe_sandbox": True}}}, "is how", "--unsafe-"),
    ],
)
def test_a_run_that_cannot_be_resumed_by_its_folder_alone_says_why(
    first: dict[str, Any], home: Path, tmp_path: Path, recipe: str, changes: dict[str, Any], value: str, remedy: str
) -> None:
    config = json.loads((home / "runs" / "first" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    refused = mint("train", recipe, "--run-dir", str(tmp_path), "--resume")
    assert refused.exit_code == 1 and value in refused.stderr and remedy in refused.stderr, refused.output


def test_a_resume_in_a_folder_without_a_run_starts_one(tmp_path: Path) -> None:
    assert train("--run-dir", str(tmp_path), "--resume")["steps"] == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rl", "task=math", "init_from=frist"], "init_from = frist: is not a run. Did you mean first?"),
        (["rl", "task=math", "kl_reference=frist"], "kl_reference = frist: is not a run. Did you mean first?"),
        (["sft", "task=math", "init_from=frist"], "init_from = frist: is not a run. Did you mean first?"),
        (["distill", "task=math", "teacher=frist"], "teacher = frist"),
    ],
)
def test_a_name_that_no_run_has_is_told_with_its_setting(first: dict[str, Any], words: list[str], said: str) -> None:
    refused = mint("train", *words)
    assert refused.exit_code == 1 and said in " ".join(refused.stderr.split()), refused.output


def test_a_misspelt_latest_is_told(first: dict[str, Any]) -> None:
    refused = mint("runs", "show", "latst")
    assert refused.exit_code == 1 and "Did you mean latest?" in refused.stderr, refused.output


def test_a_bisection_that_is_refused_says_which_run_latest_is(first: dict[str, Any], home: Path) -> None:
    (home / "runs" / "first" / "metrics.jsonl").touch()  # the newest
    refused = mint("bisect", "latest")
    assert refused.exit_code == 1 and "run = latest (first): has fewer than two checkpoints" in refused.stderr


def test_the_command_that_goes_on_names_the_folder_and_not_the_latest_run(tmp_path: Path) -> None:
    words = ["train", "rl", "task=math"]
    for given in (["--run-dir", "latest", "--resume"], ["--run-dir=latest"], ["run_dir=latest"]):
        assert resume_command([*words, *given], tmp_path) == f"mint train rl task=math --run-dir {tmp_path} --resume"


def test_the_reference_of_a_kl_penalty_may_be_a_run(first: dict[str, Any], tmp_path: Path) -> None:
    train("kl_reference=first", "kl_penalty_coef=0.1", "--run-dir", str(tmp_path / "next"))
    written = json.loads((tmp_path / "next" / "config.json").read_text())
    assert written["kl_reference"] == first["checkpoint"]
