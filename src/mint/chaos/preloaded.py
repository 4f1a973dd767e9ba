"""Imports what servers and programs need, so that a forked process has it at once. Starts no thread."""

from __future__ import annotations

import mint.chaos.process
import mint.engine.torch_engine  # noqa: F401 - the import is the purpose
from mint.models.registry import resolve
from mint.tokenizer import load_tokenizer

load_tokenizer(str(resolve("mint/tiny", {})), "mint/tiny")
