"""One word for one thing over the options of all commands, and the old names that still work."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.core import TyperGroup
from typer.testing import CliRunner

from mint.cli.main import app
from mint.recipes.recipe_configs import CONFIGS

OLD = {"seeds", "samples", "group", "tokens", "prompts", "new", "repeat"}
"""Names of options that the settings call otherwise, or that meant different things in different commands."""

PROMPTS_OF = {"doctor"}
"""Commands whose `--prompts` is no batch of a step."""


def commands(command: Any = None, name: str = "mint") -> Iterator[tuple[str, Any]]:
    command = command or typer.main.get_command(app)
    if isinstance(command, TyperGroup):
        for word, one in command.commands.items():
            yield from commands(one, f"{name} {word}")
    else:
        yield name, command


def options() -> Iterator[tuple[str, Any]]:
    for name, command in commands():
        yield from ((name, one) for one in command.params if one.param_type_name == "option" and not one.hidden)


def test_no_option_has_a_word_of_its_own_for_a_setting() -> None:
    named = [(name, word) for name, one in options() for word in one.opts if word.strip("-") in OLD]
    assert {(name, word) for name, word in named} == {(f"mint {name}", "--prompts") for name in PROMPTS_OF}


def test_an_option_that_means_a_setting_has_its_name() -> None:
    found = {(name.split()[1], one.name) for name, one in options()}
    settings = {name for config in CONFIGS.values() for name in config.model_fields}
    for command, expected in {
        "plan": {"batch_size", "group_size", "rank"},
        "bench": {"batch_size", "group_size", "max_tokens"},
        "doctor": {"group_size"},
        "demo": {"seed", "steps", "run_dir", "trackers"},
    }.items():
        assert expected <= settings
        assert {(command, one) for one in expected} <= found


def test_an_option_has_the_same_short_form_everywhere() -> None:
    forms = defaultdict(set)
    for _, one in options():
        forms[one.opts[0]].add(tuple(one.opts))
    assert {word: each for word, each in forms.items() if len(each) > 1} == {}
    assert forms["--yes"] == {("--yes", "-y")} and forms["--output"] == {("--output", "-o")}
    assert "--base-model" not in forms and "--model" in forms


@pytest.mark.parametrize(
    ("line", "old", "new"),
    [
        ("plan --pass-rate 0.5 --json", "--tokens 64", "--mean-tokens 64"),
        ("plan --model mint/tiny --context 64 --device-memory 8 --json", "--group 3", "--group-size 3"),
    ],
)
def test_the_old_name_of_an_option_still_works(line: str, old: str, new: str) -> None:
    documents = [CliRunner().invoke(app, f"{line} {words}".split()) for words in (old, new)]
    assert [one.exit_code for one in documents] == [0, 0], [one.output for one in documents]
    first, second = (json.loads(one.stdout) for one in documents)
    assert {**first, "available": 0, "free": 0} == {**second, "available": 0, "free": 0}
    assert old.split()[0] not in CliRunner().invoke(app, [line.split()[0], "--help"]).stdout.replace(new.split()[0], "")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("doctor math --samples 1", "--group-size"),
        ("bench --new 1", "--max-tokens"),
        ("bench --prompts 0", "--batch-size"),
        ("bench --group 0", "--group-size"),
        ("eval mint/tiny math --seeds 0", "--heldout-samples"),
        ("checkpoints upload /nope.tar.gz --base-model", "--model"),
    ],
)
def test_a_refusal_of_an_old_name_says_the_new_one(
    line: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINT_HOME", str(tmp_path))
    answer = CliRunner().invoke(app, line.split())
    assert answer.exit_code == 2 and said in answer.stderr, answer.output
