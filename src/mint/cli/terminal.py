"""What all commands share on the terminal: errors, sentences, names with values, and options."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from mint.errors import MintError

Json = Annotated[bool, typer.Option("--json", help="for scripts: print the answer as JSON, in the last line")]
"""The option of every command that has an answer for scripts."""


def renamed(**options: str) -> dict[str, Any]:
    """The settings of a command whose options also have old names, which `--help` does not list: old → new."""
    new_names = {old.replace("_", "-"): new for old, new in options.items()}
    return {"token_normalize_func": lambda name: new_names.get(name, name)}


def fail(error: MintError, *, as_json: bool = False) -> NoReturn:
    """Prints the error without interpreting markup or `:emoji:` in it, and exits with status 1.

    With `as_json`, standard output gets the error as a JSON document, too.
    """
    if as_json:
        typer.echo(json.dumps(error.to_wire()))
    Console(stderr=True).print(Text.assemble((type(error).__name__, "red"), f": {error}"), soft_wrap=True)
    raise typer.Exit(1) from error


def say(text: str) -> None:
    """Prints a sentence on standard error, for people. No line is broken."""
    Console(stderr=True, highlight=False).print(text, markup=False, soft_wrap=True)


def print_pairs(pairs: Sequence[tuple[str, Text]]) -> None:
    """Prints a name and a value per line. No line is broken, so that a path can be copied from it."""
    width = max((len(name) for name, _ in pairs), default=0) + 2
    console = Console(highlight=False)
    for name, value in pairs:
        console.print(Text.assemble((name.ljust(width), "bold"), value), soft_wrap=True)
