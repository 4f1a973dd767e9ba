"""How stored runs, checkpoints and sessions are printed: as tables for people, as JSON for scripts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from mint.cli.terminal import print_pairs
from mint.runs.terminal_text import counted, paragraph

if TYPE_CHECKING:
    from pydantic import BaseModel

    from mint.types.records import Checkpoint, TrainingRun

PIPE_WIDTH = 240
"""Columns of a table that is not printed to a terminal."""


def print_json(document: dict[str, Any]) -> None:
    typer.echo(json.dumps(document))


def record_json(record: BaseModel) -> dict[str, Any]:
    return record.model_dump(mode="json")


def checkpoint_json(one: Checkpoint) -> dict[str, Any]:
    return {"path": one.tinker_path, **record_json(one)}


def run_json(run: TrainingRun) -> dict[str, Any]:
    last = {"last_checkpoint": run.last_checkpoint, "last_sampler_checkpoint": run.last_sampler_checkpoint}
    return {**record_json(run), **{key: None if one is None else checkpoint_json(one) for key, one in last.items()}}


def print_checkpoint(one: Checkpoint, as_json: bool) -> None:
    if as_json:
        print_json(checkpoint_json(one))
        return
    print_facts(
        {
            "path": one.tinker_path,
            "id": one.alias,
            "type": one.checkpoint_type,
            "size": decimal(one.size_bytes or 0),
            "created": time_text(one.time),
            "expires": "never" if one.expires_at is None else time_text(one.expires_at),
            "published": "yes" if one.public else "no",
            "metadata": metadata_text(one.user_metadata),
        }
    )


def print_checkpoints(saved: Sequence[Checkpoint], total: int) -> None:
    rows = [
        (
            one.tinker_path,
            one.checkpoint_type,
            decimal(one.size_bytes or 0),
            time_text(one.time),
            "" if one.expires_at is None else time_text(one.expires_at),
            "yes" if one.public else "",
        )
        for one in saved
    ]
    columns = ("checkpoint", "type", "size", "created (UTC)", "expires (UTC)", "published")
    print_table(columns, rows, f"{len(rows)} of {counted(total, 'checkpoint')}")


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False, caption=caption, caption_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(_text(cell) for cell in row))
    _console().print(table)


def print_facts(facts: dict[str, Any]) -> None:
    print_pairs([(name, _text(str(value))) for name, value in facts.items() if value is not None])


def print_sentence(sentence: str) -> None:
    typer.echo(paragraph(sentence))


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PIPE_WIDTH)


def _text(text: str) -> Text:
    """Text without markup: rich would print `:train:`, which is in run ids, as an emoji."""
    return Text(paragraph(text))


def metadata_text(metadata: dict[str, Any] | None) -> str | None:
    return None if metadata is None else json.dumps(metadata)


def time_text(moment: datetime) -> str:
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M}"
