"""What pages start: valid settings and tasks of mint, as processes; and nothing that a run folder brings along."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from waiting import wait_until

from mint.compose.page_commands import RunCommands
from mint.config import Settings
from mint.errors import InvalidRequestError
from mint.recipes.distill import DistillConfig
from mint.recipes.dpo import DPOConfig
from mint.recipes.math import DEMO
from mint.recipes.sft import SFTConfig
from mint.recipes.task_registry import load_task
from mint.rl import RLConfig, run_grpo
from mint.rl.run_config import RunConfig
from tests.dashboard.dashboard_harness import API, showing

SMALL = {"base_model": "mint/tiny", "steps": 2, "batch_size": 2, "group_size": 2, "heldout_size": 4, "save_every": 1}

HARMLESS = {
    **{name: value for name, value in DEMO.model_dump(mode="json").items() if name not in DEMO.not_in_the_result},
    **SMALL,
    "task": "MathAdapter",
    "task_spec": {"task": "math", "seed": 0, "options": {}},
}

HOSTILE: dict[str, dict[str, Any]] = {
    "a task file": {"task_spec": {"task": "evil.py:Evil", "seed": 0, "options": {}}},
    "a task of another module": {"task_spec": {"task": "os:system", "seed": 0, "options": {}}},
    "a file": {"task_spec": {"task": "file:/etc/passwd", "seed": 0, "options": {}}},
    "a server": {"task_spec": {"task": "openenv:http://127.0.0.1:1", "seed": 0, "options": {}}},
    "a module of another package": {"task_spec": {"task": "verifiers:evil", "seed": 0, "options": {}}},
    "a path as the name of a generator": {"task_spec": {"task": "textarena:../evil", "seed": 0, "options": {}}},
    "an option instead of a task": {"task_spec": {"task": "--help", "seed": 0, "options": {}}},
    "no sandbox": {"task_spec": {"task": "code", "seed": 0, "options": {"unsafe_sandbox": True}}},
    "an option with a path": {"task_spec": {"task": "math", "seed": 0, "options": {"problems": "/etc/passwd"}}},
    "an option that is none": {"task_spec": {"task": "math", "seed": 0, "options": {"--unsafe-sandbox": 1}}},
    "an option that sets a setting": {"task_spec": {"task": "math", "seed": 0, "options": {"heldout_size": 1}}},
    "another seed of the task": {"task_spec": {"task": "math", "seed": 7, "options": {}}},
    "no task": {"task_spec": None},
    "a task that is a list": {"task_spec": ["math"]},
    "weights of a folder": {"base_model": "/tmp/evil"},
    "weights of a folder above": {"base_model": "../evil"},
    "weights that are no text": {"base_model": ["mint/tiny"]},
    "a checkpoint of a folder": {"init_from": "/tmp/evil"},
    "a reference of a folder": {"kl_reference": "./evil"},
    "a function of a program": {"advantage": "function evil.advantage"},
    "a setting out of range": {"steps": -1},
    "a setting of another type": {"group_size": "rm -rf /"},
    "a loss that is none": {"loss_fn": "evil"},
}


def write_config(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**HARMLESS, **changes}))
    return folder


def commands(home: Path, *tasks: str) -> RunCommands:
    return RunCommands(Settings(), home, tasks=tasks)


# --- command lines ----------------------------------------------------------------------------------------------------


def test_a_run_is_started_with_the_settings_that_were_asked_for(tmp_path: Path) -> None:
    folder, words = commands(tmp_path).start(
        "rl", "math", {"steps": 3, "betas": [0.9, 0.99], "base_model": "mint/tiny"}
    )
    assert folder.parent == tmp_path / "runs" and folder.name.startswith("math-")
    assert words[:3] == ["train", "rl", 'task="math"']
    assert words[3:] == ["steps=3", "betas=[0.9, 0.99]", 'base_model="mint/tiny"', "--run-dir", str(folder)]


@pytest.mark.parametrize(
    ("recipe", "task", "settings", "said"),
    [
        ("dpo", "math", {}, "recipe = dpo"),
        ("rl", "", {}, "task = (missing)"),
        ("rl", "evil.py:Evil", {}, "task = evil.py:Evil"),
        ("rl", "file:/etc/passwd", {}, "task = file:/etc/passwd"),
        ("rl", "math", {"steps": -1}, "RLConfig.steps = -1"),
        ("rl", "math", {"run_dir": "/tmp/elsewhere"}, "run_dir = /tmp/elsewhere"),
        ("rl", "math", {"trackers": "wandb"}, "trackers = wandb"),
        ("rl", "math", {"unsafe_sandbox": True}, "unsafe_sandbox = True"),
        ("rl", "math", {"--yes": 1}, "--yes = 1"),
        ("rl", "math", {"base_model": "/tmp/evil"}, "base_model = /tmp/evil"),
        ("sft", "math", {"group_size": 4}, "group_size = 4"),
    ],
)
def test_a_page_starts_nothing_else(
    recipe: str, task: str, settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequestError, match=said.replace("(", r"\(").replace(")", r"\)")) as refused:
        commands(tmp_path).start(recipe, task, settings)
    assert refused.value.remedy
    assert not (tmp_path / "runs").exists()


def test_a_run_goes_on_with_the_settings_of_its_folder(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "a run", trackers=["wandb"])
    words = commands(tmp_path).resume(folder)
    assert words[:3] == ["train", "rl", 'task="math"'] and words[-3:] == ["--run-dir", str(folder), "--resume"]
    assert {"steps=2", "group_size=2", "seed=0"} <= set(words)
    assert not any("wandb" in word for word in words)


@pytest.mark.parametrize("changes", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_run_folder_is_not_resumed(changes: dict[str, Any], tmp_path: Path) -> None:
    folder = write_config(tmp_path / "run", **changes)
    with pytest.raises(InvalidRequestError) as refused:
        commands(tmp_path).resume(folder)
    assert refused.value.remedy


@pytest.mark.parametrize("what", [name for name in HOSTILE if name != "a function of a program"])
def test_a_hostile_run_folder_is_not_evaluated(what: str, tmp_path: Path) -> None:
    folder = write_config(tmp_path / "run", **HOSTILE[what])
    with pytest.raises(InvalidRequestError):
        commands(tmp_path).evaluate(folder, "mint://m/weights/1")


@pytest.mark.parametrize("checkpoint", ["", "--help", "/etc", "mint/tiny", "mint://m/other/1", "mint://m/weights/1\n"])
def test_what_is_no_checkpoint_is_not_evaluated(checkpoint: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="checkpoint = "):
        commands(tmp_path).evaluate(write_config(tmp_path / "run"), checkpoint)


def test_an_evaluation_needs_no_function_of_the_objective(tmp_path: Path) -> None:
    words = commands(tmp_path).evaluate(write_config(tmp_path / "run", advantage="function own"), "mint://m/weights/1")
    assert words[:3] == ["eval", "mint://m/weights/1", "math"] and words[-1] == "--json"
    assert not any("advantage" in word for word in words)


SUPERVISED: dict[str, tuple[type[RunConfig], dict[str, Any]]] = {
    "sft": (SFTConfig, {"task": "math", "problems": 64}),
    "dpo": (DPOConfig, {"data": "/data/pairs.jsonl", "prompt_style": "chat"}),
    "distill": (DistillConfig, {"teacher": "mint/tiny", "task": "math"}),
}


def write_supervised(folder: Path, recipe: str, **arguments: Any) -> Path:
    config, usual = SUPERVISED[recipe]
    source = {"recipe": recipe, "arguments": {**usual, **arguments}}
    folder.mkdir(parents=True)
    described = {**config(seed=5).model_dump(mode="json"), "task": recipe, "data": "…", "data_source": source}
    (folder / "config.json").write_text(json.dumps(described))
    return folder


@pytest.mark.parametrize("recipe", SUPERVISED)
def test_a_supervised_run_goes_on_with_its_settings_and_its_data(recipe: str, tmp_path: Path) -> None:
    folder = write_supervised(tmp_path / "run", recipe)
    words = commands(tmp_path, "file:/data/pairs.jsonl").resume(folder)
    assert words[:2] == ["train", recipe] and words[-3:] == ["--run-dir", str(folder), "--resume"]
    given = {name: json.loads(value) for name, value in (word.split("=", 1) for word in words[2:-3])}
    config, usual = SUPERVISED[recipe]
    assert {name: given.pop(name) for name in usual} == usual
    assert config.from_texts(given).model_dump(mode="json", exclude={"run_dir"}) == config(seed=5).model_dump(
        mode="json", exclude={"run_dir"}
    )


@pytest.mark.parametrize(
    ("recipe", "arguments"),
    [
        ("sft", {"task": "evil.py:Evil"}),
        ("sft", {"task": "file:/etc/passwd"}),
        ("sft", {"task": ["math"]}),
        ("sft", {"problems": "/etc/passwd"}),
        ("sft", {"data": "/etc/passwd"}),
        ("sft", {"--yes": 1}),
        ("sft", {"run_dir": "/tmp/elsewhere"}),
        ("dpo", {"data": "/etc/passwd"}),
        ("dpo", {"data": None}),
        ("dpo", {"prompt_style": "../evil"}),
        ("distill", {"teacher": "/tmp/evil"}),
        ("distill", {"teacher": ["mint/tiny"]}),
        ("distill", {"teacher": None}),
    ],
)
def test_a_hostile_supervised_run_is_not_resumed(recipe: str, arguments: dict[str, Any], tmp_path: Path) -> None:
    folder = write_supervised(tmp_path / "run", recipe, **arguments)
    with pytest.raises(InvalidRequestError) as refused:
        commands(tmp_path, "file:/data/pairs.jsonl").resume(folder)
    assert refused.value.remedy


@pytest.mark.parametrize("source", [{"recipe": "serve", "arguments": {}}, {"recipe": "sft"}, {"arguments": {}}, {}])
def test_a_source_that_names_no_recipe_is_not_resumed(source: dict[str, Any], tmp_path: Path) -> None:
    folder = write_supervised(tmp_path / "run", "sft")
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**described, "data_source": source}))
    with pytest.raises(InvalidRequestError, match="does not say how"):
        commands(tmp_path).resume(folder)


def test_a_refusal_has_the_command_to_run_by_hand_and_the_operator_may_name_the_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text("")
    spec = {"task": "own.py:Own", "seed": 0, "options": {}}
    folder = write_config(tmp_path / "run", task_spec=spec)
    with pytest.raises(InvalidRequestError) as refused:
        commands(tmp_path).resume(folder)
    remedy = str(refused.value.remedy)
    assert f"--run-dir {folder} --resume" in remedy and "--task own.py:Own" in remedy
    assert 'task="own.py:Own"' in commands(tmp_path, "own.py:Own").resume(folder)


# --- the pages --------------------------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINT_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    return tmp_path / "home"


@pytest.fixture
def client(home: Path) -> Iterator[httpx.Client]:
    with showing(home, commands=commands(home)) as (_, found):
        yield found


def ended(client: httpx.Client, launch: str) -> dict[str, Any]:
    """The launch when its process has ended."""

    def entry() -> dict[str, Any]:
        return next(one for one in client.get(f"{API}/launches").json()["launches"] if one["launch"] == launch)

    wait_until(lambda: entry()["state"] != "running")
    return entry()


@pytest.mark.restarts
def test_a_run_is_started_stopped_resumed_and_evaluated_by_requests(home: Path, client: httpx.Client) -> None:
    started = client.post(f"{API}/launches", json={"recipe": "rl", "task": "math", "settings": {**SMALL, "steps": 40}})
    assert started.status_code == 200, started.text
    launch = started.json()["launch"]
    name = launch["run"]
    wait_until(lambda: (home / "runs" / name / "metrics.jsonl").exists())
    assert client.post(f"{API}/runs/{name}/resume").status_code == 400, "it is running"
    assert client.post(f"{API}/runs/{name}/stop").status_code == 200
    assert ended(client, launch["launch"])["state"] == "stopped"
    assert client.get(f"{API}/runs/{name}").json()["summary"]["state"] == "stopped"
    saved = json.loads((home / "runs" / name / "state.json").read_text())["step"]

    resumed = client.post(f"{API}/runs/{name}/resume").json()["launch"]
    wait_until(lambda: len((home / "runs" / name / "metrics.jsonl").read_text().splitlines()) > saved)
    assert client.post(f"{API}/runs/{name}/stop").status_code in (200, 400)
    ended(client, resumed["launch"])
    assert len((home / "runs" / name / "metrics.jsonl").read_text().splitlines()) > saved

    checkpoint = client.get(f"{API}/runs/{name}/checkpoints").json()["checkpoints"][0]["checkpoint"]
    asked = client.post(f"{API}/runs/{name}/evaluate", json={"checkpoint": checkpoint}).json()["launch"]
    reading = ended(client, asked["launch"])
    assert reading["state"] == "done", reading["told"]
    assert 0 <= reading["result"]["0"]["mean"] <= 1 and reading["result"]["0"]["n"] == SMALL["heldout_size"]


@pytest.mark.slow
def test_a_supervised_run_is_started_stopped_and_resumed_by_requests(home: Path, client: httpx.Client) -> None:
    settings = {"base_model": "mint/tiny", "epochs": 1, "batch_size": 16, "save_every": 1}
    begun = client.post(f"{API}/launches", json={"recipe": "sft", "task": "math", "settings": settings}).json()[
        "launch"
    ]
    run = begun["run"]
    wait_until(lambda: (home / "runs" / run / "state.json").exists())
    client.post(f"{API}/runs/{run}/stop").raise_for_status()
    assert ended(client, begun["launch"])["state"] == "stopped"
    stopped_at = json.loads((home / "runs" / run / "state.json").read_text())["step"]
    resumed = client.post(f"{API}/runs/{run}/resume").json()["launch"]
    wait_until(lambda: json.loads((home / "runs" / run / "state.json").read_text())["step"] > stopped_at)
    client.post(f"{API}/runs/{run}/stop").raise_for_status()
    assert ended(client, resumed["launch"])["state"] == "stopped"
    steps = [json.loads(line)["step"] for line in (home / "runs" / run / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) > stopped_at


class _Waiting(RunCommands):
    """Runs commands that take a moment and write nothing."""

    def start(self, recipe: str, task: str, settings: Any) -> tuple[Path, list[str]]:
        return Path("stopped"), ["--version"]

    def resume(self, folder: Path) -> list[str]:
        return ["--version"]


def test_a_run_that_is_over_is_resumed_though_its_process_has_not_ended_yet(home: Path) -> None:
    folder = write_config(home / "runs" / "stopped")
    process = {"pid": 1, "host": "elsewhere", "began_at": 1.0, "ended_at": 2.0, "outcome": "stopped", "error": None}
    (folder / "process.json").write_text(json.dumps(process))
    with showing(home, commands=_Waiting(Settings(), home)) as (_, client):
        first = client.post(f"{API}/launches", json={"task": "math"}).json()["launch"]
        assert first["state"] == "running"
        resumed = client.post(f"{API}/runs/stopped/resume")
        assert resumed.status_code == 200, resumed.text
        assert ended(client, first["launch"])["state"] == ended(client, resumed.json()["launch"]["launch"])["state"]


def test_pages_that_start_nothing_name_the_command_of_pages_that_do(tmp_path: Path) -> None:
    with showing(tmp_path) as (_, client):
        assert f"mint dashboard --start-runs --data-dir {tmp_path}" in client.get("/").text


def test_a_command_that_fails_says_why(home: Path, client: httpx.Client) -> None:
    answer = client.post(f"{API}/launches", json={"task": "math", "settings": {"base_model": "nobody/knows"}})
    found = ended(client, answer.json()["launch"]["launch"])
    assert found["state"] == "failed" and "UnknownBaseModelError: base_model = nobody/knows" in found["told"]
    assert not (home / "runs").exists()


@pytest.mark.parametrize(
    ("body", "remedy"),
    [
        ({"task": "math", "settings": {"stps": 3}}, "Did you mean steps?"),
        ({"task": "maths", "settings": {}}, "Did you mean math?"),
        ({"task": "", "settings": {}}, "Choose "),
    ],
)
def test_a_mistyped_word_is_told_with_the_right_one(body: dict[str, Any], remedy: str, client: httpx.Client) -> None:
    answer = client.post(f"{API}/launches", json=body)
    assert answer.status_code == 400 and answer.json()["remedy"].startswith(remedy), answer.text


@pytest.mark.parametrize("what", ["a task file", "no sandbox", "weights of a folder"])
def test_a_click_on_a_hostile_run_starts_no_process(what: str, home: Path, client: httpx.Client) -> None:
    write_config(home / "runs" / "evil", **HOSTILE[what])
    for path, body in (("resume", {}), ("evaluate", {"checkpoint": "mint://m/weights/1"})):
        answer = client.post(f"{API}/runs/evil/{path}", json=body)
        assert answer.status_code == 400 and "Run it yourself" in answer.json()["remedy"], answer.text
    assert client.get(f"{API}/launches").json() == {"launches": []}


@pytest.mark.parametrize("path", ["launches", "runs/run/resume", "runs/run/evaluate"])
def test_pages_start_nothing_unless_the_operator_lets_them(path: str, tmp_path: Path) -> None:
    write_config(tmp_path / "runs" / "run")
    with showing(tmp_path) as (_, client):
        answer = client.post(f"{API}/{path}", json={"task": "math", "checkpoint": "mint://m/weights/1"})
        assert answer.status_code == 500 and "--start-runs" in answer.json()["remedy"]
        assert 'id="start"' not in client.get("/").text and "resume-run" not in client.get("/runs/run").text


@pytest.mark.parametrize("path", ["launches", "runs/run/resume", "runs/run/evaluate"])
def test_a_foreign_page_starts_no_process(path: str, home: Path, client: httpx.Client) -> None:
    write_config(home / "runs" / "run")
    for headers in ({"sec-fetch-site": "cross-site"}, {"origin": "http://evil.org"}, {"host": "evil.org"}):
        answer = client.post(f"{API}/{path}", json={"task": "math"}, headers=headers)
        assert answer.status_code == 403
    assert client.get(f"{API}/launches").json() == {"launches": []}


def test_a_demo_of_the_command_line_can_be_resumed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings of its folder, given one by one, are those that the run was started with."""
    monkeypatch.setenv("MINT_HOME", str(home))
    choice = load_task("math", seed=0)
    run_grpo(choice.adapter, choice.config.changed(**{**SMALL, "steps": 1}, run_dir=home / "runs" / "demo"))
    words = commands(home).resume(home / "runs" / "demo")
    given = dict(word.split("=", 1) for word in words if "=" in word)
    settings = {name: json.loads(value) for name, value in given.items() if name != "task"}
    described = json.loads((home / "runs" / "demo" / "config.json").read_text())
    again = RLConfig.from_texts(settings).model_dump(mode="json")
    assert all(again[name] == value for name, value in described.items() if name in RLConfig.model_fields)
