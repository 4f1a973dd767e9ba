"""What all commands say in the same way: an error, as one red sentence."""

from __future__ import annotations

from typing import NoReturn

import typer
from rich.console import Console
from rich.text import Text

from mint.errors import MintError


def fail(error: MintError) -> NoReturn:
    """Prints the error as it is (no markup, no `:train:` that becomes a picture of one) and exits with 1."""
    Console(stderr=True).print(Text.assemble((type(error).__name__, "red"), f": {error}"), soft_wrap=True)
    raise typer.Exit(1) from error
