"""The answer of a process of the cluster: a value, or an error in a form that every process can read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mint.engine.protocol import is_out_of_memory
from mint.engine.reductions.division import PeerFailedError
from mint.errors import MintError


@dataclass(frozen=True)
class Answer:
    """The result of work on a process: the returned value, or the raised error."""

    value: Any = None
    error: Exception | None = None


def portable(error: Exception) -> Exception:
    """The error as one that any process can read, and that `is_out_of_memory` knows."""
    if isinstance(error, (MintError, PeerFailedError)):
        return error
    text = f"{type(error).__name__}: {error}"
    return MemoryError(text) if is_out_of_memory(error) else RuntimeError(text)
