"""Runs code that a model wrote. `Sandbox.run` returns the values that a function returned."""

from mint.sandbox.equality import same_value
from mint.sandbox.outcome import Engine, InputResult, Limits, Outcome, Status
from mint.sandbox.safe_text import value_text
from mint.sandbox.sandbox import Sandbox, SandboxLevel, sandbox_level

__all__ = [
    "Engine",
    "InputResult",
    "Limits",
    "Outcome",
    "Sandbox",
    "SandboxLevel",
    "Status",
    "same_value",
    "sandbox_level",
    "value_text",
]
