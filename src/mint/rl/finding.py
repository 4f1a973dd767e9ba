"""A finding: one thing that looks wrong in a run, with its evidence and a remedy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Severity = Literal["info", "warning", "error"]
SEVERITIES: tuple[Severity, ...] = ("info", "warning", "error")
"""`info`: worth knowing · `warning`: look at it · `error`: the run cannot reach its goal like this."""


@dataclass(frozen=True)
class Finding:
    """`code` names the fault, `step` is where it was first seen, `numbers` are the numbers in `evidence`."""

    code: str
    severity: Severity
    step: int
    evidence: str
    remedy: str
    numbers: Mapping[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)
