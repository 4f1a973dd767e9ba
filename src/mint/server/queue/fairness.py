"""How the engine's time was shared lately: between training and sampling, and among those who train.

Only time that somebody else wanted counts. Whoever has had less goes first, and whoever comes (back) begins level with
those who are there: time that nobody used is not saved up. Values only: each change gives a new one, and the scheduler
decides by them. Knows no queue, no clock and no engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Turns:
    """Whose turn it is among some names, by the seconds each has had; `level_s` is where a newcomer begins."""

    had_s: Mapping[str, float] = field(default_factory=dict)
    level_s: float = 0.0

    def place(self, name: str) -> float:
        """The lowest goes first."""
        return max(self.had_s.get(name, 0.0), self.level_s)

    def after(self, name: str, seconds: float) -> Turns:
        """`name`, whose turn it was, has had so much more."""
        level_s = self.place(name)
        ahead = {other: had_s for other, had_s in self.had_s.items() if had_s > level_s}
        return Turns({**ahead, name: level_s + seconds}, level_s)


@dataclass(frozen=True)
class Shares:
    """Seconds of the engine's time. `lead_s` is by how much training is ahead of samples that wait or run beside it."""

    lead_s: float = 0.0
    owners: Turns = Turns()
    models: Mapping[str, Turns] = field(default_factory=dict)

    def of_models(self, owner: str) -> Turns:
        """The turns of an owner's models."""
        return self.models.get(owner, Turns())

    def after_training(self, owner: str, model_id: str, seconds: float, *, beside_samples: bool) -> Shares:
        """A training request has run; `beside_samples` says whether samples could have used the time."""
        owners = self.owners.after(owner, seconds)
        models = {name: turns for name, turns in self.models.items() if name in owners.had_s}
        models[owner] = self.of_models(owner).after(model_id, seconds)
        return Shares(self.lead_s + seconds if beside_samples else 0.0, owners, models)

    def after_sampling(self, seconds: float) -> Shares:
        """Samples have got a step further."""
        return replace(self, lead_s=max(0.0, self.lead_s - seconds))
