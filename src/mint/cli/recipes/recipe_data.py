"""Arguments and data of the recipes: `key=value` arguments as settings and options, items, and files of preferences."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from mint.errors import InvalidRequestError
from mint.recipes.question_task import checked_prompt, split_last_reply, text_of_reply
from mint.recipes.supervised import SupervisedConfig
from mint.recipes.task_registry import load_task, suggestion_of_settings
from mint.recipes.task_sources.files import read_json_lines
from mint.rl.adapter import RLAdapter
from mint.rl.heldout_evaluation import without_heldout

HELDOUT_LIMIT = 256

Config = TypeVar("Config", bound=SupervisedConfig)


def take(arguments: dict[str, Any], key: str, remedy: str) -> Any:
    """Removes a word that must be there.

    Raises:
        InvalidRequestError: it is missing.
    """
    if key not in arguments:
        raise InvalidRequestError("is missing", field=key, value="(missing)", remedy=remedy)
    return arguments.pop(key)


def split_arguments(config: type[Config], arguments: Mapping[str, Any]) -> tuple[Config, dict[str, Any]]:
    """The settings among the arguments, and the options of the task."""
    settings = {key: value for key, value in arguments.items() if key in config.model_fields}
    options = {key: value for key, value in arguments.items() if key not in config.model_fields}
    return config.from_texts(settings), options


@contextmanager
def single_turn_task(recipe: str, options: dict[str, Any], config: SupervisedConfig) -> Generator[RLAdapter]:
    """The task that the options name, closed at the end.

    Raises:
        InvalidRequestError: there is no such task, it does not take the options, or it has several turns.
    """
    example = f", for example task=file:{options['data']}" if "data" in options else ""
    name = str(take(options, "task", f"Add task=…{example}: `mint train {recipe}` needs it"))
    with suggestion_of_settings(options, type(config).model_fields):
        adapter = load_task(name, seed=config.seed, **options).adapter
    try:
        if not isinstance(adapter, RLAdapter):
            raise InvalidRequestError(
                "is a task of several turns",
                field="task",
                value=name,
                remedy=f"`mint train {recipe}` takes single turns",
            )
        yield adapter
    finally:
        adapter.close()


def split_items(adapter: RLAdapter) -> tuple[list[Any], list[Any]]:
    """Training and held-out items, disjoint by content."""
    heldout = list(adapter.build_heldout())[:HELDOUT_LIMIT]
    return without_heldout(adapter, adapter.build_dataset(), heldout)[0], heldout


def read_pairs(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of preferences.

    Raises:
        InvalidRequestError: there is no such file, or a line is not a pair; names the line.
    """
    if not path.is_file():
        raise InvalidRequestError("is not a file", field="data", value=str(path), remedy="Give a .jsonl file")
    rows = []
    for where, row in read_json_lines(path):
        pair = _pair(row)
        if pair is None:
            raise InvalidRequestError(
                "is not a pair",
                field=where,
                value=json.dumps(row, ensure_ascii=False)[:80],
                remedy='Write {"prompt": …, "chosen": "…", "rejected": "…"}',
            )
        rows.append({**pair, "prompt": checked_prompt(pair["prompt"], where)})
    return rows


def _pair(row: Any) -> dict[str, Any] | None:
    """The prompt, the chosen and the rejected reply of a row: texts, messages, or two conversations that differ in
    their last reply, as TRL's rows without a prompt, or with one that is the text of a message in both (UltraFeedback).
    """
    if not isinstance(row, dict):
        return None
    ends = [split_last_reply(row.get(side)) for side in ("chosen", "rejected")]
    if ends[0] is not None and ends[1] is not None and ends[0][0] == ends[1][0]:
        before = ends[0][0]
        if row.get("prompt") in (None, *(message["content"] for message in before)):
            row = {"prompt": before, "chosen": ends[0][1], "rejected": ends[1][1]}
    replies = {side: text_of_reply(row.get(side)) for side in ("chosen", "rejected")}
    is_complete = bool(row.get("prompt")) and all(isinstance(text, str) and text for text in replies.values())
    return {**row, **replies} if is_complete else None
