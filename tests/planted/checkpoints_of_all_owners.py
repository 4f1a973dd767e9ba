"""A bug: a checkpoint can be read by whoever knows its path."""

from typing import Any

from mint.server.store import checkpoints

_find_checkpoint = checkpoints.find_checkpoint


def _find_any(journal: Any, path: str, *, reader: str | None, now: float | None = None) -> Any:
    return _find_checkpoint(journal, path, reader=None, now=now)


checkpoints.find_checkpoint = _find_any
