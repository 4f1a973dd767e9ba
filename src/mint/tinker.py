"""The names of `mint` once more, because MinT's package has them here."""

from __future__ import annotations

from typing import Any

import mint


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return mint.__all__
    return getattr(mint, name)


def __dir__() -> list[str]:
    return dir(mint)
