"""A program of tinker-cookbook at its own settings: `python cookbook_program.py MODULE-or-FILE [key=value …]`.

Run in the cookbook's own environment, as `python -m MODULE` or `python FILE` would run it. Data sets of the Hugging
Face hub, which a machine without a network cannot load, are replaced by made-up rows of the same form. The reward of
`rl_loop`, which no tiny model earns, is the share of digits, so that its groups have a signal. Nothing else is changed.
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


def main(program: str) -> None:
    """Runs the module or the file with the options in `sys.argv`."""
    stand_in()
    if program == RL_LOOP:
        recipe = importlib.import_module(program)
        recipe.get_reward = share_of_digits
        chz.nested_entrypoint(recipe.main)
    elif program.endswith(".py"):
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    del sys.argv[0]
    main(sys.argv[0])
