"""The version of this package, for modules that must not import all of it."""

from __future__ import annotations

VERSION = "0.1.0"
