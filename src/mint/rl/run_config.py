"""The settings that every training run has, whatever it trains on: weights, optimizer, checkpoints, folder, trackers.

Knows nothing of rewards, demonstrations or preferences: `RLConfig` and the configs of the supervised recipes add those.
"""

from __future__ import annotations

import math
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from mint.errors import InvalidRequestError
from mint.types import AdamParams, invalid_request

ScheduleName = Literal["constant", "linear", "cosine"]
TrackerName = Literal["tensorboard", "wandb", "trackio"]


class RunConfig(BaseModel):
    """One training run. Frozen; every field is checked when it is constructed.

    A subclass adds its own fields and may declare a field again to give it another default.

    Raises:
        InvalidRequestError: a field is unknown, of the wrong type or out of range.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    # The weights.
    base_model: str = "Qwen/Qwen3-0.6B"
    rank: int = Field(16, ge=1, le=256)
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True
    init_from: str | None = None
    """A checkpoint (`mint://…`) to start from, for example that of an SFT run."""
    init_optimizer: bool = False
    """Whether to restore the optimizer state from `init_from`, too."""

    # The optimizer.
    batch_size: int = Field(8, ge=1)
    learning_rate: float = Field(2e-5, ge=0, allow_inf_nan=False)
    lr_schedule: ScheduleName = "constant"
    """`linear` and `cosine` fall from `learning_rate` towards 0 after the last step."""
    lr_warmup_steps: int = Field(0, ge=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0, allow_inf_nan=False)
    weight_decay: float = Field(0.0, ge=0, allow_inf_nan=False)
    grad_clip_norm: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Global norm; 0 is off."""

    # The run.
    seed: int = Field(0, ge=0)
    run_dir: Path | None = None
    """None makes a new folder under `MINT_HOME/runs`."""
    save_every: int = Field(10, ge=1)
    """Steps between resumable checkpoints; the last step is always saved."""
    trackers: tuple[TrackerName, ...] = ()
    """Mirrors of the run besides its folder: `tensorboard`, `wandb`, `trackio`; one name, or several with commas."""

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            refusal = invalid_request(error, type(self).__name__)
            first = error.errors()[0]
            if first["type"] == "extra_forbidden":
                similar = get_close_matches(str(first["loc"][-1]), type(self).model_fields, n=1)
                refusal.remedy = f"Did you mean {similar[0]}?" if similar else refusal.remedy
            raise refusal from error

    @field_validator("trackers", mode="before")
    @classmethod
    def _split_tracker_names(cls, given: Any) -> Any:
        if isinstance(given, str):
            return tuple(name.strip() for name in given.split(",") if name.strip())
        return given or ()

    @model_validator(mode="after")
    def _check_betas(self) -> Self:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise InvalidRequestError(
                "must both lie in [0, 1)",
                field=f"{type(self).__name__}.betas",
                value=self.betas,
                remedy="Try (0.9, 0.999)",
            )
        return self

    def learning_rate_at(self, step: int, steps: int) -> float:
        """The learning rate of `step`, counted from 1, of a run of `steps`."""
        if step <= self.lr_warmup_steps:
            return self.learning_rate * step / self.lr_warmup_steps
        if self.lr_schedule == "constant":
            return self.learning_rate
        done = (step - 1 - self.lr_warmup_steps) / max(1, steps - self.lr_warmup_steps)
        return self.learning_rate * (1 - done if self.lr_schedule == "linear" else (1 + math.cos(math.pi * done)) / 2)

    def adam_params(self, step: int, steps: int) -> AdamParams:
        """The optimizer settings of `step`, counted from 1, of a run of `steps`."""
        return AdamParams(
            learning_rate=self.learning_rate_at(step, steps),
            beta1=self.betas[0],
            beta2=self.betas[1],
            eps=self.eps,
            weight_decay=self.weight_decay,
            grad_clip_norm=self.grad_clip_norm,
        )
