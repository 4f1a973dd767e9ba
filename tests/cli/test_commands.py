"""The commands around a run, as a script uses them: the last line of stdout is JSON, errors are one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from mint.cli.main import app
from mint.cli.recipes.recipe_data import read_pairs
from mint.cli.recipes.recipe_settings import read_settings_of
from mint.cli.train import Recipe
from mint.compose.installation import EXTRAS
from mint.errors import InvalidRequestError
from mint.extras import install_command
from mint.recipes.recipe_configs import CONFIGS
from mint.version import VERSION

ROWS = [{"prompt": f"Q: What is {a} + {b}?\nA:", "answer": str(a + b)} for a in range(12, 24) for b in range(30, 38)]
PAIRS = [{"prompt": row["prompt"], "chosen": f" {row['answer']}", "rejected": " 7"} for row in ROWS]
SETTINGS = ("prompt_style=plain", "batch_size=4", "group_size=4", "max_tokens=6", "heldout_size=7")


def mint(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def last_line(*arguments: str) -> Any:
    result = mint(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def _shared_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MINT_HOME", str(home))
    yield


@pytest.fixture(scope="module")
def prompts(home: Path) -> str:
    path = home / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return f"file:{path}"


@pytest.fixture(scope="module")
def trained(home: Path, prompts: str) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINT_HOME", str(home))
        patch.setenv("MINT_THREADS", "1")
        return last_line("train", "rl", f"task={prompts}", "steps=4", "save_every=1", "lr=2e-3", *SETTINGS)


def test_a_file_of_prompts_is_trained_on_and_reported(trained: dict[str, Any]) -> None:
    assert (trained["steps"], trained["samples"]) == (4, 4 * 16)
    assert trained["heldout_after"]["n"] == 7  # what the hash holds out
    assert trained["checkpoint"].startswith("mint://")


def test_a_run_can_be_stepped_into_again(trained: dict[str, Any], prompts: str) -> None:
    again = last_line(
        "train",
        "rl",
        f"task={prompts}",
        "steps=4",
        "save_every=1",
        "lr=2e-3",
        *SETTINGS,
        "--run-dir",
        trained["run_dir"],
        "--resume",
    )
    assert again["checkpoint"] == trained["checkpoint"]
    assert again["heldout_after"] == trained["heldout_after"]


def test_a_checkpoint_and_a_base_model_are_read_on_a_task(trained: dict[str, Any], prompts: str) -> None:
    after = last_line("eval", trained["checkpoint"], prompts, *SETTINGS, "heldout_samples=4")
    assert after["0"]["mean"] == trained["heldout_after"]["mean"]
    assert after["1"]["pass_at"].keys() == {"1", "2", "4"}
    base = last_line("eval", "mint/tiny", prompts, *SETTINGS)
    assert base["0"]["mean"] == trained["heldout_before"]["mean"]


def test_checkpoints_are_compared_on_several_tasks(trained: dict[str, Any], prompts: str, home: Path) -> None:
    picture = home / "readings.png"
    path = home / "more.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS[:40]))
    more = f"file:{path}"
    words = ("--against", "mint/tiny", "--also", more, "heldout_samples=2", "--plot", str(picture))
    rows = last_line("eval", trained["checkpoint"], prompts, *SETTINGS, *words)
    assert [(row["task"], row["checkpoint"], row["temperature"]) for row in rows] == [
        (task, checkpoint, temperature)
        for task in (prompts, more)
        for temperature in (0.0, 1.0)
        for checkpoint in (trained["checkpoint"], "mint/tiny")
    ]
    assert rows[0]["mean"] == trained["heldout_after"]["mean"]
    assert rows[1]["mean"] == trained["heldout_before"]["mean"]
    assert rows[1]["difference"]["mean"] == pytest.approx(rows[0]["mean"] - rows[1]["mean"])
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_run_is_diagnosed_with_its_ledger(trained: dict[str, Any]) -> None:
    found = last_line("diagnose", trained["run_dir"])
    assert all(finding["severity"] != "error" for finding in found["findings"])
    ledger = found["ledger"]
    assert ledger["generated"] >= ledger["graded"] >= ledger["informative"] >= ledger["trained"] > 0


def test_bisect_reads_only_what_it_needs(trained: dict[str, Any]) -> None:
    found = last_line("bisect", trained["run_dir"], "--metric", "success")
    assert found["verdict"] in ("none", "uncertain", "found")
    assert found["evaluations"] <= 4
    wrong = mint("bisect", trained["run_dir"], "--metric", "vibes")
    assert wrong.exit_code == 1
    assert "heldout_sampled" in wrong.output


def test_a_plan_of_memory_and_one_of_groups_are_one_command() -> None:
    planned = last_line("plan", "--model", "mint/tiny", "--context", "256", "--group-size", "4", "--device-memory", "8")
    assert planned["free"] == 8 << 30 and planned["sequences"] > 4
    assert planned["fits"] == {"kept": True, "recomputed": True, "offloaded": True}
    expected = last_line("plan", "--model", "mint/tiny", "--context", "256", "--throughput")
    assert expected["sampled_per_second"] > 100 and expected["trained_per_second"] > 100
    shown = mint("plan", "--model", "mint/tiny", "--device", "cuda", "--device-memory", "24")
    assert shown.exit_code == 0 and "A prediction" in shown.output
    several = last_line(
        "plan", "--model", "mint/tiny", "--context", "1k", "--gpus", "8xH100", "--tenants", "3", "--rank", "4"
    )
    assert several["fits"] and several["resident"] == 3 and several["plan"]["context"] == 1024
    assert 1 <= several["trainers"] <= 7
    refused = mint("plan")
    assert refused.exit_code == 1 and "--pass-rate" in refused.output


def test_doctor_and_plan_agree_on_what_to_expect(prompts: str) -> None:
    examined = last_line("doctor", prompts, "prompt_style=plain", "--prompts", "16", "--group-size", "4")
    assert examined["verdict"] == "go"
    planned = last_line("plan", "--pass-rate", "0.5")
    assert {one["group_size"]: round(one["informative"], 4) for one in planned["options"]}[4] == 0.875


@pytest.mark.learns
def test_sft_dpo_and_distillation_run_from_the_command_line(home: Path, prompts: str) -> None:
    pairs = home / "pairs.jsonl"
    pairs.write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    words = ("train", "sft", f"task={prompts}", "prompt_style=plain", "epochs=1", "--run-dir", str(home / "sft"))
    sft = last_line(*words)
    assert sft["after"]["loss"][0] < sft["before"]["loss"][0]
    again = last_line(*words, "--resume")
    assert (again["checkpoint"], again["after"]) == (sft["checkpoint"], sft["after"])
    shown = mint("runs", "show", str(home / "sft"))
    assert "accuracy" in shown.output
    dpo = last_line("train", "dpo", f"data={pairs}", "prompt_style=plain")
    assert dpo["after"]["loss"][0] < dpo["before"]["loss"][0]
    words = (f"task={prompts}", "prompt_style=plain", f"teacher={sft['sampler_checkpoint']}", "steps=3")
    assert last_line("train", "distill", *words)["checkpoint"].startswith("mint://")


def test_a_line_of_pairs_ends_at_a_newline_alone(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    pair = {"prompt": "a\u2028b", "chosen": "c\u0085d", "rejected": "e"}
    path.write_text("\ufeff" + f"{json.dumps(pair, ensure_ascii=False)}\n\n" * 2, encoding="utf-8")
    assert read_pairs(path) == [pair, pair]


def test_a_link_to_itself_is_no_file_of_pairs(tmp_path: Path) -> None:
    (tmp_path / "loop.jsonl").symlink_to(tmp_path / "loop.jsonl")
    refused = mint("train", "dpo", f"data={tmp_path / 'loop.jsonl'}", "base_model=mint/tiny")
    assert refused.exit_code == 1 and "loop.jsonl: is not a file" in refused.output


@pytest.mark.parametrize("prompt", ["messages", "text", "nothing"])
def test_the_conversational_pairs_of_trl_are_read(prompt: str, tmp_path: Path) -> None:
    question, good, bad = [
        {"role": role, "content": text} for role, text in (("user", "2 + 2 ="), ("assistant", "4"), ("assistant", "5"))
    ]
    row = {"prompt": [question], "chosen": [good], "rejected": [bad]}
    if prompt != "messages":
        row = {"chosen": [question, good], "rejected": [question, bad]}
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({**row, "prompt": question["content"]} if prompt == "text" else row))
    assert read_pairs(path) == [{"prompt": (question,), "chosen": "4", "rejected": "5"}]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"prompt": "a", "chosen": "\xe9", "rejected": "b"}', "is not JSON in UTF-8"),
        (b'{"prompt": "a", "chosen": "\\ud83d", "rejected": "b"}', r"has half of a character, \\ud83d"),
        (b'{"prompt": [{"role": "user"}], "chosen": "a", "rejected": "b"}', "is neither a text nor a list of messages"),
        (b'{"prompt": "a", "chosen": ["a"], "rejected": "b"}', "is not a pair"),
        (b'{"chosen": [{"role": "user", "content": "a"}], "rejected": "b"}', "is not a pair"),
        (
            b'{"prompt": "b", "chosen": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "c"}], '
            b'"rejected": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "d"}]}',
            "is not a pair",
        ),
        (b"[1]", "is not a pair"),
    ],
)
def test_a_bad_pair_is_named_by_its_line(line: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_bytes(b'{"prompt": "a", "chosen": "b", "rejected": "c"}\n' + line + b"\n")
    with pytest.raises(InvalidRequestError, match=rf"pairs\.jsonl:2.* {said}"):
        read_pairs(path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("train", "rl"), "task"),
        (("train", "rl", "task=nope"), "reasoning_gym:NAME"),
        (("train", "rl", "task=math", "steps=abc"), "RLConfig.steps"),
        (("train", "rl", "task=math", "setps=3"), "did you mean steps"),
        (("train", "rl", "steps"), "key=value"),
        (("train", "rl", "task=math", "chain_sum.max_terms=2"), "chain_sum.max_terms"),
        (("train", "rl", "task.py:Mine"), "Write for example task=task.py:Mine"),
        (("train", "rl", "task=math", "learnig_rate=1"), "did you mean learning_rate"),
        (("train", "rl", "task=math", "weird=1"), "The settings of a run are base_model, "),
        (("train", "sft", "task=tools"), "several turns"),
        (("train", "sft", "task=math", "batch_size=-3"), "SFTConfig.batch_size"),
        (("train", "sft", "task=math", "epoch=1"), "did you mean epochs"),
        (("train", "dpo", "data=pairs.jsonl", "betta=1"), "Did you mean beta"),
        (("train", "distill", "task=math", "teacher=mint/tiny", "steps=few"), "DistillConfig.steps"),
        (("train", "dpo"), "data"),
        (("diagnose", "nowhere"), "is not a run"),
        (("eval", "mint://nobody:train:0/weights/none", "math"), "nobody"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(words: tuple[str, ...], said: str) -> None:
    result = mint(*words)
    assert result.exit_code == 1
    assert said in result.output
    assert "Traceback" not in result.output


def test_a_misspelt_variable_ends_a_command_and_an_unknown_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINT_RESUME_PATH", "x")
    shown = CliRunner().invoke(app, ["plan", "--pass-rate", "0.1"])
    assert shown.exit_code == 0
    assert "MINT_RESUME_PATH in the environment" in shown.stderr
    monkeypatch.setenv("MINT_KV_CACHE_BYTES", "1")
    refused = CliRunner().invoke(app, ["plan", "--pass-rate", "0.1"])
    assert refused.exit_code == 1
    assert "Did you mean MINT_KV_CACHE_MIB?" in refused.stderr


def test_the_version_is_printed() -> None:
    answer = mint("--version")
    assert (answer.exit_code, answer.stdout) == (0, f"mint {VERSION}\n")


def test_the_package_runs_as_the_command_line() -> None:
    command = [sys.executable, "-m", "mint", "train", "--help"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "python -m mint train" in ended.stdout and "steps=50" in ended.stdout


@pytest.mark.parametrize("words", ["", "--help", "serve", "runs list", "doctor"])
def test_the_base_install_has_no_command_line_and_says_what_has_one(words: str, tmp_path: Path) -> None:
    hidden = "import sys; sys.modules.update(rich=None, typer=None)"
    code = f"{hidden}; from mint.__main__ import main; main()"
    ended = subprocess.run([sys.executable, "-c", code, *words.split()], capture_output=True, text=True, timeout=120)
    first, *lines = ended.stderr.splitlines()
    assert ended.returncode == 1 and ended.stdout == ""
    assert first.startswith("MissingExtraError: the command line needs the package ")
    for extra in ("local", "rl", "cli"):
        assert any(install_command(extra) in line for line in lines), "a line for each purpose"
    told = subprocess.run([sys.executable, "-c", code, "--version"], capture_output=True, text=True, check=True)
    assert told.stdout == f"mint {VERSION}\n"


LOCAL_COMMANDS = (
    *("serve", "dashboard", "demo math --yes", "export a -o b"),
    *(
        pytest.param(words, marks=pytest.mark.slow)
        for words in ("serve --check", "chaos --kills 1", "doctor math", "keys list", "models list", "bench", "recover")
    ),
)


@pytest.mark.parametrize("words", LOCAL_COMMANDS)
def test_a_package_that_is_not_installed_is_one_sentence_with_what_to_install(words: str, tmp_path: Path) -> None:
    hidden = f"import sys; sys.modules.update(dict.fromkeys({EXTRAS['local']!r}))"
    command = [sys.executable, "-c", f"{hidden}; from mint.cli.main import app; app()", *words.split()]
    ended = subprocess.run(
        command, env={**os.environ, "MINT_HOME": str(tmp_path)}, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 1 and "Traceback" not in ended.stderr
    (line,) = ended.stderr.splitlines()
    assert "MissingExtraError" in line and install_command("local") in line


def test_the_run_folders_are_listed_without_the_service(trained: dict[str, Any], home: Path) -> None:
    """With `mint[rl]`, which has numpy alone."""
    hidden = f"import sys; sys.modules.update(dict.fromkeys(set({EXTRAS['local']!r}) - {{'numpy'}}))"
    command = [sys.executable, "-c", f"{hidden}; from mint.cli.main import app; app()", "runs", "list", "--json"]
    environment = {**os.environ, "MINT_HOME": str(home)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert Path(trained["run_dir"]).name in [run["name"] for run in json.loads(ended.stdout)["rl_runs"]]


def test_the_folder_of_a_run_may_be_named_like_a_setting(prompts: str, tmp_path: Path) -> None:
    for number, words in enumerate((["rl", "steps=1"], ["sft", "epochs=1"])):
        folder = tmp_path / str(number)
        mint("train", *words, f"task={prompts}", f"run_dir={folder}", "batch_size=64", "prompt_style=plain")
        assert (folder / "metrics.jsonl").exists(), words


def test_commands_that_read_a_run_take_one_of_any_recipe(prompts: str, tmp_path: Path) -> None:
    mint(
        "train", "sft", f"task={prompts}", "epochs=1", "batch_size=64", "prompt_style=plain", "--run-dir", str(tmp_path)
    )
    shown = mint("runs", "show", str(tmp_path)).output
    assert "loss" in shown and "first" in shown and "reward" not in shown
    assert mint("plot", str(tmp_path), "-o", str(tmp_path / "curve.png")).exit_code == 0
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    diagnosed = mint("diagnose", str(tmp_path))
    assert diagnosed.exit_code == 0 and "about rewards; this run has none" in " ".join(diagnosed.output.split())
    refused = mint("rollouts", str(tmp_path))
    assert refused.exit_code == 1 and "has no rollouts. Only RL runs have them" in " ".join(refused.output.split())


def test_what_cannot_work_is_one_sentence_that_helps(prompts: str) -> None:
    for words, part in (
        (
            (f"task={prompts}", "base_model=mint/tinny"),
            "Did you mean mint/tiny?",
        ),
        ((f"task={prompts}", "steps=0", "--run-dir", "/proc/none"), "run_dir = /proc/none: cannot be made"),
    ):
        told = mint("train", "rl", *words)
        assert isinstance(told.exception, SystemExit) and part in " ".join(told.output.split()), told.output


def test_the_recipes_of_the_command_are_those_that_have_settings() -> None:
    assert [recipe.value for recipe in Recipe] == list(CONFIGS)


@pytest.mark.parametrize("recipe", CONFIGS)
def test_every_setting_of_a_recipe_has_a_type_a_default_and_a_meaning(recipe: str) -> None:
    settings = read_settings_of(recipe)
    assert {"rank", "learning_rate", "betas", "seed"} <= {setting.name for setting in settings}
    assert [setting.name for setting in settings if not (setting.kind and setting.default and setting.meaning)] == []


@pytest.mark.parametrize("recipe", CONFIGS)
def test_the_help_of_a_recipe_lists_its_settings(recipe: str) -> None:
    answer = CliRunner().invoke(app, ["train", recipe, "--help"])
    assert answer.exit_code == 0, answer.output
    assert "  save_every (int, default " in answer.stdout and "Steps between resumable checkpoints" in answer.stdout
    assert ("group_size" in answer.stdout) == (recipe in ("rl", "distill"))
