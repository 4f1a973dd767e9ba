"""How the engine's time is shared between training and sampling, and among those who train.

Owners, and the models of an owner, take turns by start-time fair queuing (Goyal, Vin and Cheng, 1996): the one that has
used the least time goes next, and one that was idle starts level with the others, so unused time is not saved up.
Values only: every change gives a new one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class FairQueue:
    """The time that each of some names has used, in seconds; `virtual_time_s` is where a newcomer starts."""

    used_s: Mapping[str, float] = field(default_factory=dict)
    virtual_time_s: float = 0.0

    def start_tag(self, name: str) -> float:
        """The name with the lowest tag goes next."""
        return max(self.used_s.get(name, 0.0), self.virtual_time_s)

    def charge(self, name: str, seconds: float) -> FairQueue:
        """The queue after `name`, whose turn it was, has used `seconds` more."""
        virtual_time_s = self.start_tag(name)
        # A name that is not ahead of the virtual time would start there anyway: its entry can go.
        ahead = {other: used_s for other, used_s in self.used_s.items() if used_s > virtual_time_s}
        return FairQueue({**ahead, name: virtual_time_s + seconds}, virtual_time_s)


@dataclass(frozen=True)
class Fairness:
    """Who has used how much of the engine's time.

    `training_lead_s` is the time that training has had while samples waited or ran, less the time of the samples.
    """

    training_lead_s: float = 0.0
    owners: FairQueue = FairQueue()
    models: Mapping[str, FairQueue] = field(default_factory=dict)  # by owner

    def models_of(self, owner: str) -> FairQueue:
        return self.models.get(owner, FairQueue())

    def after_training(self, owner: str, model_id: str, seconds: float, *, beside_samples: bool) -> Fairness:
        """After a training request; `beside_samples` says whether samples could have used the time."""
        owners = self.owners.charge(owner, seconds)
        models = {name: queue for name, queue in self.models.items() if name in owners.used_s}
        models[owner] = self.models_of(owner).charge(model_id, seconds)
        return Fairness(self.training_lead_s + seconds if beside_samples else 0.0, owners, models)

    def after_sampling(self, seconds: float) -> Fairness:
        """After a step of the sampling batch."""
        return replace(self, training_lead_s=max(0.0, self.training_lead_s - seconds))
