"""Runs code that a model wrote. `Sandbox.run` returns the values that a function returned."""

from mint.sandbox.outcome import Engine, Limits, Outcome, Result, Status
from mint.sandbox.sandbox import Sandbox, SandboxLevel, sandbox_level
from mint.sandbox.values import same_value

__all__ = [
    "Engine",
    "Limits",
    "Outcome",
    "Result",
    "Sandbox",
    "SandboxLevel",
    "Status",
    "same_value",
    "sandbox_level",
]
