"""Keeps transformers silent while it loads or saves a model."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def quiet_transformers() -> Generator[None]:
    """Hides its progress bars and its warnings within the context; after it, they are as before.

    mint itself refuses what is missing, left over or of another shape, and says so in one sentence. The warnings say it
    in tables, also where it does not matter.
    """
    # Deferred: importing transformers takes seconds, and only those who load a model with it come here.
    from transformers.utils import logging as transformers_logging

    shows, level = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity(max(level, transformers_logging.ERROR))
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if shows:
            transformers_logging.enable_progress_bar()
