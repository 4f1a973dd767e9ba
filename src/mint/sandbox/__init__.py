"""Runs code that a model wrote. `Sandbox.run` returns the values that a function returned, `Shell.run` the output of a
command in a folder."""

from mint.sandbox.equality import same_value
from mint.sandbox.outcome import Engine, InputResult, Limits, Outcome, Status
from mint.sandbox.safe_text import value_text
from mint.sandbox.sandbox import Sandbox, SandboxLevel, sandbox_level
from mint.sandbox.shell import Shell
from mint.sandbox.shell_process import ShellLimits, ShellResult

__all__ = [
    "Engine",
    "InputResult",
    "Limits",
    "Outcome",
    "Sandbox",
    "SandboxLevel",
    "Shell",
    "ShellLimits",
    "ShellResult",
    "Status",
    "same_value",
    "sandbox_level",
    "value_text",
]
