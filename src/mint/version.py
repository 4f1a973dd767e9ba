"""The version of this package, for whoever must not import the whole of it."""

from __future__ import annotations

VERSION = "0.1.0"
