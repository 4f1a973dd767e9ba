"""MinT's name for the training recipes of the package tinker_cookbook, if that is installed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from mint.errors import MissingExtraError


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return import_module(f"tinker_cookbook.{name}")
    except ImportError as error:
        raise MissingExtraError(
            f"mint.recipe.{name} comes from tinker_cookbook, which cannot be imported ({error})",
            remedy="pip install tinker-cookbook",
        ) from error
