"""Errors on the terminal, the same for all commands."""

from __future__ import annotations

import json
from typing import NoReturn

import typer
from rich.console import Console
from rich.text import Text

from mint.errors import MintError


def fail(error: MintError, *, as_json: bool = False) -> NoReturn:
    """Prints the error without interpreting markup or `:emoji:` in it, and exits with status 1.

    With `as_json`, standard output gets the error as a JSON document, too.
    """
    if as_json:
        typer.echo(json.dumps(error.to_wire()))
    Console(stderr=True).print(Text.assemble((type(error).__name__, "red"), f": {error}"), soft_wrap=True)
    raise typer.Exit(1) from error
