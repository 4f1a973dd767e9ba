"""A recipe of tinker-cookbook at its own settings: `python cookbook_recipe.py MODULE [key=value …]`.

Run in the cookbook's own environment. GSM8K, which a machine without the hub cannot load, is replaced by questions of
the same form; and the reward of `rl_loop`, which no tiny model earns, by the share of digits, so that its groups have a
signal. Nothing else of a recipe is changed.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
from typing import Any

import chz
import datasets

QUESTIONS = 256


def sums(name: str, *_: Any, **__: Any) -> datasets.DatasetDict:
    """Questions and answers in the form of GSM8K."""
    assert name == "openai/gsm8k", name
    rows = {"question": [], "answer": []}
    for number in range(1, QUESTIONS + 1):
        rows["question"].append(f"What is {number} + {number}?")
        rows["answer"].append(f"It is {2 * number}.\n#### {2 * number}")
    part = datasets.Dataset.from_dict(rows)
    return datasets.DatasetDict(train=part, test=part)


def share_of_digits(response: str, _answer: str) -> float:
    """The reward of `rl_loop`."""
    return sum(map(str.isdigit, response)) / max(1, len(response))


def main(module: str) -> None:
    """Runs the recipe with the options in `sys.argv`."""
    datasets.load_dataset = sums
    recipe = importlib.import_module(module)
    if hasattr(recipe, "get_reward"):
        recipe.get_reward = share_of_digits
        chz.nested_entrypoint(recipe.main)
    else:
        asyncio.run(recipe.cli_main(chz.entrypoint(recipe.CLIConfig)))


if __name__ == "__main__":
    del sys.argv[0]
    main(sys.argv[0])
