"""The `key=value` arguments of a command line."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from mint.cli.recipes.setting_completion import complete_assignment
from mint.errors import InvalidRequestError

Assignments = Annotated[
    list[str] | None,
    typer.Argument(help="key=value: settings of the run, options of the task", autocompletion=complete_assignment),
]

SHORT_NAMES = {"lr": "learning_rate", "groups_per_batch": "batch_size", "model": "base_model"}
"""Second spellings of settings, which `mint train RECIPE --help` lists."""

PLAIN_SIGNS = {ord(sign): None for sign in "“”„‘’"} | {ord(sign): "--" for sign in "–—"}
"""What some programs make of quotation marks and of two hyphens."""


def parse_assignments(arguments: Sequence[str]) -> dict[str, Any]:
    """`["steps=5", "task=math"]` as a dict. A value is JSON if it parses as JSON, and text otherwise; short names are
    written out.

    Raises:
        InvalidRequestError: an argument is not of the form key=value, or names a setting that another one names.
    """
    found: dict[str, Any] = {}
    given: dict[str, str] = {}
    for place, argument in enumerate(arguments):
        key, separator, text = argument.partition("=")
        if not separator or not all(part.isidentifier() for part in key.split(".")):
            raise InvalidRequestError(
                "is not of the form key=value",
                field="argument",
                value=argument,
                remedy=f"Write for example {_guess(argument, arguments[place + 1 :])}",
            )
        name = SHORT_NAMES.get(key, key)
        if name in given:
            raise InvalidRequestError(
                "is given twice", field=name, value=text, remedy=f"Leave out {given[name]} or {argument}"
            )
        given[name] = argument
        try:
            found[name] = json.loads(text)
        except ValueError:
            found[name] = {"True": True, "False": False, "None": None}.get(text, text)
    return found


def _guess(argument: str, following: Sequence[str]) -> str:
    """The remedy for a word that is not key=value: the same in plain signs if a program for texts has changed them,
    `task=WORD` if it looks like the name of a task, and `WORD=NEXT` where the next word has no `=` either."""
    plain = unicodedata.normalize("NFKC", argument).translate(PLAIN_SIGNS)
    if plain != argument and (plain.startswith("--") or plain.partition("=")[0].isidentifier()):
        return plain
    if ":" in argument:
        return f"task={argument}"
    if argument.isidentifier() and following and "=" not in following[0]:
        return f"{argument}={following[0]}"
    return "steps=20"
