"""`mint rollouts`, `mint plot` and `mint runs show` on a real run: what they print is what the run folder says."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from mint.cli.main import app
from mint.cli.run_names import find_checkpoint, find_run
from mint.cli.runs import newest_runs, run_row
from mint.errors import InvalidRequestError, NotFoundError
from mint.models.registry import resolve
from mint.recipes.task_registry import load_task
from mint.rl import run_grpo
from mint.runs.log import RunLog

STEPS = 3


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A data folder with one run, `looked-at`."""
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINT_HOME", str(folder))
        choice = load_task("math", seed=0)
        size = {"steps": STEPS, "batch_size": 4, "group_size": 4, "heldout_size": 8, "save_every": 2}
        run_grpo(choice.adapter, choice.config.changed(**size, run_dir=folder / "runs" / "looked-at"))
        yield folder


@pytest.fixture(autouse=True)
def _at_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINT_HOME", str(home))


@pytest.fixture
def log(home: Path) -> RunLog:
    return RunLog(home / "runs" / "looked-at")


def mint(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})


def rollouts_of(*arguments: str) -> list[dict[str, Any]]:
    answer = mint("rollouts", "looked-at", *arguments, "--json")
    assert answer.exit_code == 0, answer.output
    return json.loads(answer.stdout.splitlines()[-1])["rollouts"]


def test_the_worst_rollouts_of_a_step_are_those_with_the_lowest_rewards(home: Path, log: RunLog) -> None:
    logged = sorted(row["reward"] for row in log.read("rollouts.jsonl") if row["step"] == 2)
    found = rollouts_of("--step", "2", "--worst", "3")
    assert [row["reward"] for row in found] == logged[:3] and {row["step"] for row in found} == {2}
    assert [row["reward"] for row in rollouts_of("--step", "2", "--best", "2")] == logged[::-1][:2]


def test_without_a_step_the_last_one_is_shown(home: Path) -> None:
    assert {row["step"] for row in rollouts_of()} == {STEPS}


def test_one_item_is_followed_over_all_steps(home: Path, log: RunLog) -> None:
    item = log.read("rollouts.jsonl")[0]["item"]
    expected = [row for row in log.read("rollouts.jsonl") if row["item"] == item]
    assert len(rollouts_of("--item", str(item), "--best", "100")) == len(expected)


def test_an_item_without_rollouts_is_told_with_those_that_have_some(home: Path, log: RunLog) -> None:
    items = sorted({row["item"] for row in log.read("rollouts.jsonl")})
    for form in ([], ["--json"]):
        answer = mint("rollouts", "latest", "--item", "9999", *form)
        assert answer.exit_code == 1
        assert f"--item = 9999: has no rollouts. The run has rollouts of {len(items)} items" in answer.stderr
        assert f"from {items[0]} to {items[-1]}" in answer.stderr


def test_people_see_prompt_text_reward_and_how_it_ended(home: Path, log: RunLog) -> None:
    answer = mint("rollouts", "looked-at", "--step", "1", "--best", "1")
    assert answer.exit_code == 0, answer.output
    (row,) = rollouts_of("--step", "1", "--best", "1")
    for text in ("step 1 ", f"reward {row['reward']:.3f}", row["text"].strip().split("\n")[0], row["stop_reason"]):
        assert text in answer.stdout


def test_people_see_each_text_of_a_step_once(home: Path, log: RunLog) -> None:
    texts = [row["text"] for row in log.read("rollouts.jsonl") if row["step"] == STEPS]
    assert len(set(texts)) < len(texts)
    shown = mint("rollouts", "looked-at", "--best", "100").stdout.splitlines()
    assert len([line for line in shown if line.startswith("step ")]) == len(set(texts))
    assert len(rollouts_of("--best", "100")) == len(texts)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--step", "99"], "those from 1 to 3"),
        (["--flag", "sleepy"], "is not a flag"),
    ],
)
def test_a_wrong_question_is_answered_with_what_there_is(home: Path, arguments: list[str], said: str) -> None:
    answer = mint("rollouts", "looked-at", *arguments)
    assert answer.exit_code == 1 and said in answer.stderr


def test_a_misspelled_run_is_guessed(home: Path) -> None:
    answer = mint("rollouts", "loked-at")
    assert answer.exit_code == 1 and "Did you mean looked-at?" in answer.stderr


@pytest.mark.parametrize("name", ["looked-at", "look", "1", "latest"])
def test_a_run_is_named_in_one_way_everywhere(home: Path, name: str, tmp_path: Path) -> None:
    for arguments in (
        ["runs", "show", name, "--json"],
        ["rollouts", name, "--json"],
        ["plot", name, "-o", str(tmp_path / "curve.png")],
        ["diagnose", name, "--json"],
    ):
        answer = mint(*arguments)
        assert answer.exit_code == 0, answer.output
    assert json.loads(mint("runs", "show", name, "--json").stdout)["name"] == "looked-at"


def test_a_run_stands_for_its_last_checkpoint(home: Path, log: RunLog, tmp_path: Path) -> None:
    saved = log.read("checkpoints.jsonl")[-1]["checkpoint"]
    assert [find_checkpoint(name) for name in ("latest", "look", saved)] == [saved] * 3
    assert mint("export", "latest", "--output", str(tmp_path / "adapter")).exit_code == 0
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    named = [mint("eval", name, "math", "heldout_size=4", "--json").stdout for name in ("latest", saved)]
    assert named[0] == named[1] and json.loads(named[0])


def test_a_model_names_its_run_and_a_run_its_model(home: Path, log: RunLog) -> None:
    saved = log.read("checkpoints.jsonl")[-1]["checkpoint"]
    model = saved.removeprefix("mint://").split("/")[0]
    listed = json.loads(mint("runs", "list", "--json").stdout)
    assert {row["training_run_id"]: row["run"] for row in listed["training_runs"]}[model] == "looked-at"
    assert listed["rl_runs"][0]["models"] == [model]
    assert json.loads(mint("runs", "show", model, "--json").stdout)["run"] == "looked-at"
    row = next(line for line in mint("runs", "list").stdout.splitlines() if line.startswith(model))
    assert "looked-at" in row
    assert model in mint("runs", "show", "looked-at").stdout


def test_a_run_that_has_saved_nothing_has_no_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "begun"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    with pytest.raises(NotFoundError, match="run = begun: has saved no checkpoint"):
        find_checkpoint("begun", tmp_path)


@pytest.mark.parametrize("config", ["{}", '{"steps": 3}', '{"a":', "[3]"])
def test_a_folder_with_the_config_of_a_run_is_a_run_even_if_it_is_damaged(tmp_path: Path, config: str) -> None:
    (tmp_path / "config.json").write_text(config)
    assert find_run(str(tmp_path)) == tmp_path


def test_the_folder_of_a_base_model_is_no_run_and_can_be_evaluated() -> None:
    model = resolve("mint/tiny", {})
    with pytest.raises(NotFoundError, match="is the folder of a base model"):
        find_run(str(model))
    by_folder, by_name = (
        mint("eval", name, "math", "heldout_size=4", "max_tokens=2", "--json") for name in (str(model), "mint/tiny")
    )
    assert by_folder.exit_code == 0, by_folder.output
    assert by_folder.stdout == by_name.stdout


def test_the_folder_of_a_base_model_is_not_taken_for_the_beginning_of_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    RunLog(tmp_path / "runs" / "tiny-sums").start({"steps": 3}, resume=False)
    assert find_run("tiny", tmp_path).name == "tiny-sums"
    monkeypatch.chdir(resolve("mint/tiny", {}).parent)
    with pytest.raises(NotFoundError, match="run = tiny: is the folder of a base model"):
        find_run("tiny", tmp_path)
    assert find_run("tiny-", tmp_path).name == "tiny-sums"


def test_numbers_and_latest_count_from_the_run_that_was_written_last(tmp_path: Path) -> None:
    for place, run in enumerate(("first", "second", "3")):
        folder = tmp_path / "runs" / run
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        os.utime(folder / "config.json", (place, place))
    assert [find_run(name, tmp_path).name for name in ("latest", "2", "sec")] == ["3", "second", "second"]
    assert find_run("3", tmp_path).name == "3"  # a whole name counts before a number


def test_the_beginning_of_several_names_is_refused_with_the_names(tmp_path: Path) -> None:
    for run in ("sums-1", "sums-2"):
        folder = tmp_path / "runs" / run
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    with pytest.raises(InvalidRequestError, match=r"run = sums: is the beginning of several runs.*sums-1") as refusal:
        find_run("sums", tmp_path)
    assert "sums-2" in str(refusal.value)


@pytest.mark.parametrize("name", ["", "0", "2", "loked-at", "latest-"])
@pytest.mark.parametrize("command", [["runs", "show"], ["diagnose"], ["bisect"], ["rollouts"]])
def test_a_name_that_is_no_run_is_told_as_such(home: Path, command: list[str], name: str) -> None:
    answer = mint(*command, name)
    assert answer.exit_code == 1 and f"run = {name or '(empty)'}: is not a run" in answer.stderr


def test_the_diagnosis_of_a_failed_run_says_that_it_failed(home: Path, tmp_path: Path) -> None:
    failed = tmp_path / "failed"
    shutil.copytree(home / "runs" / "looked-at", failed)
    process = json.loads((failed / "process.json").read_text())
    (failed / "process.json").write_text(json.dumps({**process, "outcome": "failed", "error": "OSError: disk is full"}))
    people = mint("diagnose", str(failed)).stdout
    assert f"failed: It failed after step {STEPS}: OSError: disk is full" in people and "no findings" not in people
    document = json.loads(mint("diagnose", str(failed), "--json").stdout)
    assert (document["state"], document["error"]) == ("failed", "OSError: disk is full")
    assert json.loads(mint("diagnose", "looked-at", "--json").stdout)["state"] == "finished"


def test_a_run_is_named_by_the_model_that_it_trained(home: Path, log: RunLog) -> None:
    model = log.read("checkpoints.jsonl")[-1]["checkpoint"].split("/")[2]
    assert find_run(model, home) == home / "runs" / "looked-at"
    answer = mint("diagnose", model)
    assert answer.exit_code == 0, answer.output


@pytest.mark.parametrize("name", ["latest", "looked", "1"])
def test_commands_on_checkpoints_take_the_name_of_a_run(home: Path, log: RunLog, name: str) -> None:
    last = log.read("checkpoints.jsonl")[-1]["checkpoint"]
    model = last.split("/")[2]
    assert mint("checkpoints", "list", name, "--json").stdout == mint("checkpoints", "list", model, "--json").stdout
    for command in ("show", "publish", "unpublish"):
        shown = mint("checkpoints", command, name, "--json")
        assert shown.exit_code == 0, shown.output
        assert json.loads(shown.stdout)["path"] == last
    refused = mint("checkpoints", "delete", "loked-at", "--yes")
    assert refused.exit_code == 1 and "run = loked-at: is not a run. Did you mean looked-at?" in refused.stderr


@pytest.mark.parametrize("name", ["latest", "looked", "1"])
def test_the_dashboard_takes_the_name_of_a_run(home: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    shown: list[Path] = []
    monkeypatch.setattr("mint.compose.dashboard_server.serve_dashboard", lambda _, extra, **_rest: shown.extend(extra))
    assert mint("dashboard", name).exit_code == 0
    assert shown == [home / "runs" / "looked-at"]


def test_paths_are_not_broken_so_that_they_can_be_copied(home: Path) -> None:
    answer = CliRunner().invoke(app, ["runs", "show", "latest"], env={"COLUMNS": "40"})
    assert str(home / "runs" / "looked-at") in answer.stdout


def test_a_run_is_shown_with_state_evaluations_and_checkpoints(home: Path, log: RunLog) -> None:
    answer = mint("runs", "show", "looked-at", "--json")
    assert answer.exit_code == 0, answer.output
    document = json.loads(answer.stdout)
    metrics = log.read("metrics.jsonl")
    assert (document["state"], document["step"], document["steps"]) == ("finished", STEPS, STEPS)
    assert document["reward"] == metrics[-1]["reward/mean"]
    assert [row["mean"] for row in document["evaluations"]] == [row["mean"] for row in log.read("evaluations.jsonl")]
    assert document["checkpoints"] == log.read("checkpoints.jsonl")
    people = mint("runs", "show", str(home / "runs" / "looked-at")).stdout
    for text in ("finished", "3 of 3", f"{metrics[-1]['reward/mean']:.3f}", "after (step 3), greedy", "checkpoint"):
        assert text in people


def test_a_held_out_reward_of_before_training_says_so_in_the_list(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "runs" / "new")
    log.start({"task": "math", "base_model": "mint/tiny", "steps": 3}, resume=False)
    row = {
        "step": 0,
        "when": "before",
        "set": "held out",
        "temperature": 1.0,
        "mean": 0.2,
        "low": 0.1,
        "high": 0.3,
        "n": 64,
    }
    log.append("evaluations.jsonl", row)
    assert run_row(1, newest_runs(tmp_path, 1)[0])[6].endswith(" at step 0")
    log.append("evaluations.jsonl", {**row, "step": 3, "when": "after"})
    assert "step" not in run_row(1, newest_runs(tmp_path, 1)[0])[6]


def test_the_last_checkpoint_of_a_run_that_has_none_is_not_mistaken_for_a_base_model(tmp_path: Path) -> None:
    RunLog(tmp_path / "empty").start({"task": "math", "base_model": "mint/tiny", "steps": 3}, resume=False)
    answer = mint("eval", str(tmp_path / "empty"), "math")
    assert answer.exit_code == 1
    assert "has saved no checkpoint" in answer.stderr and "save_every" in answer.stderr


@pytest.mark.parametrize("picture", ["missing/x.png", "x.unknown", "."])
def test_a_picture_that_cannot_be_written_is_refused_before_the_evaluation(
    tmp_path: Path, picture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINT_BASE_URL", "http://127.0.0.1:9")  # nobody answers: it must not be asked
    answer = mint("eval", "mint/tiny", "math", "--plot", str(tmp_path / picture))
    assert answer.exit_code == 1 and "InvalidRequestError: output = " in answer.stderr


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("config.json", '{"a":'),
        ("config.json", "[3]"),
        ("metrics.jsonl", '{"reward/mean": 1}\n'),
        ("metrics.jsonl", '{"step": 1, "reward/mean": "many"}\n'),
        ("evaluations.jsonl", '{"step": "two", "when": "after"}\n'),
        ("evaluations.jsonl", '{"step": 1, "when": "after", "mean": 1, "low": 1, "high": 1, "n": 1}\n'),
    ],
)
def test_a_damaged_run_is_listed_as_unreadable_beside_the_others(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, text: str
) -> None:
    monkeypatch.setenv("MINT_HOME", str(tmp_path))
    shutil.copytree(home / "runs" / "looked-at", tmp_path / "runs" / "good")
    damaged = tmp_path / "runs" / "bad"
    shutil.copytree(home / "runs" / "looked-at", damaged)
    (damaged / file).write_text(text)
    answer = mint("runs", "list", "--json")
    assert answer.exit_code == 0, answer.output
    listed = {run["name"]: run for run in json.loads(answer.stdout)["rl_runs"]}
    assert (listed["good"]["state"], listed["bad"]["state"]) == ("finished", "unreadable")
    assert str(damaged / file) in listed["bad"]["error"]
    people = mint("runs", "list").stdout
    assert "unreadable" in people and f"bad cannot be read. file = {damaged / file}: " in people
    commands = [["runs", "show"], ["diagnose"], ["plot", "-o", str(tmp_path / "x.png")]]
    for command in commands if file == "metrics.jsonl" else [*commands, ["bisect"]]:
        refused = mint(*command, "bad")
        assert refused.exit_code == 1 and isinstance(refused.exception, SystemExit)
        assert f"file = {damaged / file}: " in refused.stderr, command


def test_run_folders_are_listed_beside_training_runs(home: Path, log: RunLog) -> None:
    answer = mint("runs", "list", "--json")
    assert answer.exit_code == 0, answer.output
    (run,) = json.loads(answer.stdout)["rl_runs"]
    assert (run["name"], run["state"], run["task"]) == ("looked-at", "finished", "math")
    people = mint("runs", "list").stdout
    assert "looked-at" in people and "3 of 3" in people and "runs on this machine: 1" in people


@pytest.mark.parametrize("metrics", [[], ["--metric", "train/entropy", "--metric", "optim/grad_norm"]])
def test_a_plot_is_a_picture_of_the_run(home: Path, tmp_path: Path, metrics: list[str]) -> None:
    picture = tmp_path / "curve.png"
    answer = mint("plot", "looked-at", "-o", str(picture), *metrics)
    assert answer.exit_code == 0, answer.output
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 5_000


@pytest.mark.parametrize("output", ["missing/x.png", "x.unknown"])
def test_a_picture_that_cannot_be_written_is_one_sentence(home: Path, tmp_path: Path, output: str) -> None:
    answer = mint("plot", "latest", "-o", str(tmp_path / output))
    assert answer.exit_code == 1
    assert "InvalidRequestError: output = " in answer.stderr and "Name a .png" in answer.stderr


@pytest.mark.parametrize("output", [".", ""])
def test_a_picture_needs_the_name_of_a_file(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = mint("plot", "latest", "-o", output)
    assert answer.exit_code == 1 and "output = .: is a folder" in answer.stderr
    assert not list(tmp_path.iterdir())


def test_an_unknown_metric_is_answered_with_those_that_are_like_it(home: Path, tmp_path: Path) -> None:
    answer = mint("plot", "looked-at", "-o", str(tmp_path / "x.png"), "--metric", "reward/men")
    assert answer.exit_code == 1 and "reward/mean" in answer.stderr and not (tmp_path / "x.png").exists()
