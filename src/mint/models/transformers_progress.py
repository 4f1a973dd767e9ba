"""Switches off the progress bars that transformers shows while it loads a model."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def without_progress() -> Generator[None]:
    """Hides them within the context; after it, they are shown if they were shown before."""
    # Deferred: importing transformers takes seconds, and only those who load a model with it come here.
    from transformers.utils import logging as transformers_logging

    shows = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shows:
            transformers_logging.enable_progress_bar()
