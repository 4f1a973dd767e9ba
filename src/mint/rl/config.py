"""The settings of an RL run. The first block is the parameter table of the RL overview, by its names and defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, model_validator

from mint.errors import InvalidRequestError
from mint.types import AdamParams, LossName, SamplingParams, invalid_request

AdvantageName = Literal["center", "rloo", "std"]
ScheduleName = Literal["constant", "linear"]


class RLConfig(BaseModel):
    """One RL run. Frozen; a changed copy is `config.model_copy(update={...})`.

    Raises:
        InvalidRequestError: a field is unknown, of the wrong type or out of range.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    # The parameter table.
    loss_fn: LossName = "importance_sampling"
    group_size: int = Field(4, ge=2, le=1024)
    """Samples per prompt."""
    batch_size: int = Field(8, ge=1, validation_alias=AliasChoices("batch_size", "groups_per_batch"))
    """Prompts per training step; `groups_per_batch` is the same."""
    max_tokens: int = Field(16, ge=1)
    learning_rate: float = Field(2e-5, ge=0, allow_inf_nan=False)
    temperature: float = Field(0.8, gt=0, allow_inf_nan=False)
    kl_penalty_coef: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Weight of KL(policy ‖ base), taken as k1 inside the advantage (its exact gradient; see `advantages`)."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0, allow_inf_nan=False)
    weight_decay: float = Field(0.0, ge=0, allow_inf_nan=False)
    base_model: str = "Qwen/Qwen3-0.6B"
    rank: int = Field(16, ge=1, le=256)
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True

    # The run.
    steps: int = Field(10, ge=0)
    seed: int = Field(0, ge=0)
    loss_fn_config: dict[str, float] | None = None
    """Passed on as it is, for example `{"clip_high_threshold": 1.28}` for ppo."""
    advantage: AdvantageName = "center"
    """`center`: r − mean. `rloo`: r − mean of the others. `std`: (r − mean) / (std + 1e-4)."""
    lr_schedule: ScheduleName = "constant"
    """`linear` falls from `learning_rate` at step 1 towards 0 after the last."""
    grad_clip_norm: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Global norm; 0 is off."""
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    """Besides the model's own end token."""
    grader_timeout_s: float = Field(30.0, gt=0)
    heldout_size: int = Field(512, ge=0)
    """How many held-out samples to read before and after; 0 reads none."""
    save_every: int = Field(10, ge=1)
    """Steps between resumable checkpoints; the last step is always saved."""
    run_dir: Path | None = None
    """None makes a new folder under `MINT_HOME/runs`."""

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise invalid_request(error, type(self).__name__) from error

    @model_validator(mode="after")
    def _betas_are_fractions(self) -> Self:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise InvalidRequestError(
                "must both lie in [0, 1)", field="RLConfig.betas", value=self.betas, remedy="Try (0.9, 0.999)"
            )
        return self

    @property
    def groups_per_batch(self) -> int:
        """The other name of `batch_size`."""
        return self.batch_size

    def learning_rate_at(self, step: int) -> float:
        """The learning rate of `step` (counted from 1)."""
        if self.lr_schedule == "constant":
            return self.learning_rate
        return self.learning_rate * (1 - (step - 1) / self.steps)

    def adam_params(self, step: int) -> AdamParams:
        """The optimizer settings of `step`."""
        return AdamParams(
            learning_rate=self.learning_rate_at(step),
            beta1=self.betas[0],
            beta2=self.betas[1],
            eps=self.eps,
            weight_decay=self.weight_decay,
            grad_clip_norm=self.grad_clip_norm,
        )

    def sampling_params(self, seed: int, temperature: float | None = None) -> SamplingParams:
        """How this run samples; `temperature` overrides the run's own (evaluation)."""
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature if temperature is None else temperature,
            seed=seed,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
        )


def mix_seed(*parts: int) -> int:
    """One 63-bit seed from several whole numbers; a change in any part changes all bits (splitmix64 finaliser)."""
    state = 0
    for part in parts:
        state = (state ^ (part & _MASK)) * 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
        state = (state ^ (state >> 31)) + 0x9E3779B97F4A7C15 & _MASK
    return state >> 1


_MASK = (1 << 64) - 1
