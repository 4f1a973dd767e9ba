"""Runs code that a model wrote: `Sandbox.run` gives what a function returns, and nothing that the code claims."""

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
