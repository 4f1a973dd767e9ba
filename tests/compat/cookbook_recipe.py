"""A recipe of tinker-cookbook at its own settings: `python cookbook_recipe.py MODULE [key=value …]`.

Run in the cookbook's own environment, as `python -m MODULE` would run it. Data sets of the Hugging Face hub, which a
machine without a network cannot load, are replaced by made-up rows of the same form. The reward of `rl_loop`, which no
tiny model earns, is the share of digits, so that its groups have a signal. Nothing else of a recipe is changed.
"""

from __future__ import annotations

import importlib
import runpy
import sys

import chz
from cookbook_data import stand_in

RL_LOOP = "tinker_cookbook.recipes.rl_loop"


def share_of_digits(response: str, _answer: str) -> float:
    """The reward of `rl_loop`."""
    return sum(map(str.isdigit, response)) / max(1, len(response))


def main(module: str) -> None:
    """Runs the recipe with the options in `sys.argv`."""
    stand_in()
    if module == RL_LOOP:
        recipe = importlib.import_module(module)
        recipe.get_reward = share_of_digits
        chz.nested_entrypoint(recipe.main)
    else:
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    del sys.argv[0]
    main(sys.argv[0])
