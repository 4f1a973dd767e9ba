"""Runs code that a model wrote. `Sandbox.run` returns the values that a function returned."""

from mint.sandbox.outcome import Engine, InputResult, Limits, Outcome, Status
from mint.sandbox.sandbox import Sandbox, SandboxLevel, sandbox_level
from mint.sandbox.value_encoding import same_value

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
]
