"""How a checkpoint's path is written."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, PlainSerializer


def _shown(path: str) -> str:
    return "mint://" + path.removeprefix("tinker://") if path.startswith("tinker://") else path


def _sent(path: str) -> str:
    return "tinker://" + path.removeprefix("mint://") if path.startswith("mint://") else path


CheckpointUri = Annotated[str, AfterValidator(_shown), PlainSerializer(_sent)]
"""A checkpoint's path: `mint://…` in Python, `tinker://…` on the wire, as every client of this protocol reads it."""
