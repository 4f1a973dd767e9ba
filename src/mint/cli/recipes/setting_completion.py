"""The completion of `key=value` arguments in a shell: names of settings, and values of those that have few."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import typer

from mint.cli.run_names import complete_run

if TYPE_CHECKING:
    from mint.cli.recipes.recipe_settings import Setting

DATA_WORDS = {
    "rl": {"task": "the task to learn"},
    "sft": {"task": "the task whose demonstrations to learn"},
    "dpo": {"data": "a .jsonl file of prompt, chosen and rejected"},
    "distill": {"task": "the task whose prompts to take", "teacher": "a checkpoint or the name of a base model"},
}
"""Recipe → the words of `mint train` that name its data, with their meanings. They are no settings."""


def complete_assignment(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """The words that begin with `incomplete`, each with its meaning. Commands without a recipe take settings of RL."""
    from mint.cli.recipes.recipe_settings import read_settings_of  # deferred: `mint --help` answers at once

    recipe = context.params.get("recipe")
    settings = {setting.name: setting for setting in read_settings_of(recipe or "rl")}
    before = context.params.get("assignments") or []
    name, separator, value = incomplete.partition("=")
    if separator:
        return [(f"{name}={each}", "") for each in _values(name, value, settings)]
    if before[-1:] == ["="]:  # bash takes `name=value` for three words
        return [(each, "") for each in _values(before[-2], incomplete, settings)]
    return _names(incomplete, DATA_WORDS.get(recipe or "", {}), settings.values())


def _names(begun: str, words: dict[str, str], settings: Iterable[Setting]) -> list[tuple[str, str]]:
    fitting = [(f"{name}=", meaning) for name, meaning in words.items() if name.startswith(begun)]
    chosen = [setting for setting in settings if setting.name.startswith(begun)]
    fitting += [(f"{setting.name}=", setting.meaning) for setting in chosen]
    if len(fitting) == len(chosen) == 1:
        # bash writes what two candidates share, and no space behind it: the value belongs there.
        value = chosen[0].default.replace("not set", "VALUE")
        fitting.append((f"{chosen[0].name}={value}", "the default"))
    return fitting


def _values(name: str, begun: str, settings: dict[str, Setting]) -> Iterable[str]:
    if name == "init_from":
        return complete_run(begun)
    if name == "task":
        from mint.recipes.task_registry import RECIPES  # deferred: `mint --help` answers at once

        return RECIPES
    return settings[name].choices if name in settings else ()
