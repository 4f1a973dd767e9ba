"""Decoders that fail at some of their calls."""

from __future__ import annotations

from collections.abc import Callable, Collection

import pytest
import torch

from mint.engine.model.decoder import Decoder


def fail_logits(monkeypatch: pytest.MonkeyPatch, calls: Collection[int], error: Callable[[], Exception]) -> None:
    """Calls of `Decoder.logits` with these numbers, counted from 1 over all decoders, raise `error()`."""
    plain, count = Decoder.logits, 0

    def fails(self: Decoder, *arguments: object) -> torch.Tensor:
        nonlocal count
        count += 1
        if count in calls:
            raise error()
        return plain(self, *arguments)  # ty: ignore[invalid-argument-type]

    monkeypatch.setattr(Decoder, "logits", fails)
