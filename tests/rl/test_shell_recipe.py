"""The shell recipe: an agent edits one of several files, and only the right edit of nothing else is rewarded."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path

import pytest
from scripted_policy import roll_out, says

import mint
from mint.errors import MissingExtraError
from mint.recipes.shell import Edit, ShellAdapter, draw_edits
from mint.recipes.task_registry import load_task
from mint.rl import run_grpo
from mint.rl.rollout import Rollout


@pytest.fixture(scope="module")
def adapter() -> ShellAdapter:
    try:
        return ShellAdapter(heldout_size=4)
    except MissingExtraError as error:
        pytest.skip(str(error))


@pytest.fixture
def edit(adapter: ShellAdapter) -> Edit:
    return adapter.build_heldout()[0]


def play(adapter: ShellAdapter, edit: Edit, *commands: str) -> Rollout:
    calls = [json.dumps({"name": "bash", "arguments": {"command": command}}) for command in commands]
    replies = [*(f"<tool_call>{call}</tool_call>" for call in calls), "done"]
    ((rollout,),) = [group.rollouts for group in roll_out(says(*replies), adapter, items=[edit])]
    return rollout


def solution(edit: Edit) -> str:
    """The command that does what is asked, from the request alone."""
    asked = re.search(r"Set (\w+) of the service (\w+) to (\d+)", edit.text)
    assert asked is not None
    name, service, value = asked.groups()
    return f"sed -i 's/^{name} = .*/{name} = {value}/' $(grep -l 'service = {service}$' conf.d/*)"


def test_the_edit_that_was_asked_for_is_rewarded(adapter: ShellAdapter, edit: Edit) -> None:
    rollout = play(adapter, edit, "grep -r . conf.d", solution(edit))
    assert (rollout.reward, rollout.error, rollout.tool_calls) == (1.0, None, 2)
    assert "conf.d/1.conf:service = " in rollout.trace[2]["content"]


@pytest.mark.parametrize(
    "more",
    [
        "true",
        "{} && touch more",
        "{} && echo >> conf.d/1.conf",
        "{} && rm conf.d/4.conf",
        "rm -rf *",
        "{} && mv conf.d c && ln -s c conf.d",
        "{} && mkfifo pipe",
    ],
)
def test_any_other_change_is_not(adapter: ShellAdapter, edit: Edit, more: str) -> None:
    assert play(adapter, edit, more.replace("{}", solution(edit))).reward == 0.0


def test_no_held_out_request_is_ever_trained_on_whatever_the_seed() -> None:
    heldout = {edit.text for edit in draw_edits(0, 40, heldout=True)}
    for seed in range(3):
        assert not heldout & {edit.text for edit in draw_edits(seed, 200, heldout=False)}


def test_it_trains_by_its_name_and_its_working_folders_are_removed(
    adapter: ShellAdapter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        errors, samples = train(tmp_path)
        assert (errors, samples) == ({None}, 4)
        assert list(Path(folder).glob("mint-shell-*")) == []


def train(tmp_path: Path) -> tuple[set[str | None], int]:
    """The errors and the number of samples of one step on the bundled model."""
    choice = load_task("shell", heldout_size=2, train_size=8)
    config = choice.config.changed(
        base_model="mint/tiny",
        steps=1,
        batch_size=2,
        group_size=2,
        max_tokens=16,
        max_turns=2,
        run_dir=tmp_path / "run",
    )
    with mint.ServiceClient(data_dir=tmp_path / "service") as service:
        result = run_grpo(choice.adapter, config, service_client=service)
    rows = [json.loads(line) for line in (result.run_dir / "rollouts.jsonl").read_text().splitlines()]
    return {row["error"] for row in rows}, result.samples
