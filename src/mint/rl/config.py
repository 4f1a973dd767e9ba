"""The settings of an RL run. The first block is the parameter table of the RL overview, by its names and defaults."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from mint.config import rl_variables
from mint.errors import InvalidRequestError
from mint.rl.tracking.trackers import TrackerName
from mint.types import AdamParams, LossName, SamplingParams, invalid_request

AdvantageName = Literal["center", "rloo", "std", "std_batch"]
ScheduleName = Literal["constant", "linear", "cosine"]
NormalizationName = Literal["sum", "constant", "token", "sequence"]
TruncationName = Literal["keep", "mask", "penalize"]
CollapseName = Literal["warn", "stop", "rollback"]


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
    init_from: str | None = None
    """A checkpoint (`mint://…`) to start from, for example that of an SFT run."""
    init_optimizer: bool = False
    """Whether the optimizer of `init_from` goes on, too: for a run that continues with other settings."""
    save_every: int = Field(10, ge=1)
    """Steps between resumable checkpoints; the last step is always saved."""
    run_dir: Path | None = None
    """None makes a new folder under `MINT_HOME/runs`."""

    # The objective.
    loss_fn_config: dict[str, float] | None = None
    """Passed on as it is, for example `{"clip_high_threshold": 1.28}` for ppo (clip-higher, arXiv 2503.14476)."""
    advantage: AdvantageName = "center"
    """`center`: r − mean. `rloo`: r − mean of the others. `std`: (r − mean) / (std of the group + 1e-4). `std_batch`:
    the same with the deviation over the whole batch."""
    loss_normalization: NormalizationName = "sum"
    """What a token's loss is divided by. `sum`: nothing. `constant`: prompts · group_size · max_tokens (Dr. GRPO).
    `token`: the trained tokens of the batch (DAPO). `sequence`: first the tokens of its own rollout (GRPO; favours
    short answers when right and long ones when wrong)."""
    kl_reference: str | None = None
    """A checkpoint (`mint://…/sampler_weights/…`) as the reference of the KL penalty; None is the base model."""
    optim_steps_per_batch: int = Field(1, ge=1)
    """Optimizer steps per batch of rollouts, each on its share of the prompts; from the second on, off-policy."""
    max_staleness: int = Field(0, ge=0)
    """Steps by which the sampling weights may lag behind; 0 is strictly on-policy, more samples ahead of training."""
    lr_schedule: ScheduleName = "constant"
    """`linear` and `cosine` fall from `learning_rate` towards 0 after the last step."""
    lr_warmup_steps: int = Field(0, ge=0)
    grad_clip_norm: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Global norm; 0 is off."""
    on_collapse: CollapseName = "warn"
    """What an `error` finding of a collapse does: only say so, stop the run, or stop at the best checkpoint."""

    # Sampling.
    temperature_end: float | None = Field(None, gt=0, allow_inf_nan=False)
    """The temperature moves linearly from `temperature` to this; None keeps it."""
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    """Besides the model's own end token."""
    dynamic_sampling: bool = False
    """Replaces groups without a signal by groups of other prompts (DAPO, arXiv 2503.14476)."""
    max_refill: float = Field(3.0, ge=0, allow_inf_nan=False)
    """At most this many extra groups per wanted group, with `dynamic_sampling`."""
    truncation: TruncationName = "keep"
    """What a rollout that a limit cut off does. `keep`: its reward counts. `mask`: it is left out of its group.
    `penalize`: its reward loses `truncation_penalty`."""
    truncation_penalty: float = Field(0.5, ge=0, allow_inf_nan=False)
    max_turns: int = Field(8, ge=1)
    """Of an episode with tools."""
    max_episode_tokens: int | None = Field(None, ge=1)
    """Sampled tokens of an episode; None is no limit besides the model's context."""
    max_episode_s: float = Field(60.0, gt=0)
    """Seconds of an episode's own environment and tools; sampling does not count."""

    # Data.
    curriculum: bool = False
    """Prefers items with a success rate from `curriculum_low` to `curriculum_high`; retires and re-tests others."""
    curriculum_low: float = Field(0.2, ge=0, le=1)
    curriculum_high: float = Field(0.8, ge=0, le=1)
    curriculum_retire_at: float = Field(0.95, gt=0, le=1)
    curriculum_retest_share: float = Field(0.05, ge=0, lt=1)

    # Reading.
    grader_timeout_s: float = Field(30.0, gt=0)
    heldout_size: int = Field(512, ge=0)
    """How many held-out samples to read; 0 reads none."""
    heldout_samples: int = Field(1, ge=1)
    """Completions per held-out sample at temperature 1, for pass@k."""
    eval_every: int = Field(0, ge=0)
    """Steps between readings of the held-out set; 0 reads it before and after only. The best reading is kept."""
    print_samples: int = Field(0, ge=0)
    """Rollouts printed per step."""
    trackers: tuple[TrackerName, ...] = ()
    """Mirrors of the run besides its folder: `tensorboard`, `wandb`, `trackio`; one name, or several with commas."""

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise invalid_request(error, type(self).__name__) from error

    @field_validator("trackers", mode="before")
    @classmethod
    def _names_of_trackers(cls, given: Any) -> Any:
        if isinstance(given, str):
            return tuple(name.strip() for name in given.split(",") if name.strip())
        return given or ()

    @model_validator(mode="after")
    def _betas_are_fractions(self) -> Self:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise InvalidRequestError(
                "must both lie in [0, 1)", field="RLConfig.betas", value=self.betas, remedy="Try (0.9, 0.999)"
            )
        return self

    @model_validator(mode="after")
    def _band_is_ordered(self) -> Self:
        if self.curriculum_low > self.curriculum_high:
            raise InvalidRequestError(
                f"is above curriculum_high = {self.curriculum_high:g}",
                field="RLConfig.curriculum_low",
                value=self.curriculum_low,
                remedy="Try 0.2 and 0.8",
            )
        return self

    @classmethod
    def from_env(cls, **fields: Any) -> Self:
        """The settings named by `MINT_BASE_MODEL, MINT_LORA_RANK, MINT_RL_STEPS, MINT_RL_BATCH, MINT_RL_GROUP,
        MINT_RL_LR, MINT_RL_MAX_TOKENS, MINT_RL_TEMPERATURE`; `fields` stand for variables that are not set."""
        return cls(**{**fields, **rl_variables()})

    @property
    def groups_per_batch(self) -> int:
        """The other name of `batch_size`."""
        return self.batch_size

    def learning_rate_at(self, step: int) -> float:
        """The learning rate of `step` (counted from 1)."""
        if step <= self.lr_warmup_steps:
            return self.learning_rate * step / self.lr_warmup_steps
        if self.lr_schedule == "constant":
            return self.learning_rate
        done = (step - 1 - self.lr_warmup_steps) / max(1, self.steps - self.lr_warmup_steps)
        return self.learning_rate * (1 - done if self.lr_schedule == "linear" else (1 + math.cos(math.pi * done)) / 2)

    def temperature_at(self, step: int) -> float:
        """The sampling temperature of `step` (counted from 1)."""
        if self.temperature_end is None or self.steps < 2:
            return self.temperature
        return self.temperature + (self.temperature_end - self.temperature) * (step - 1) / (self.steps - 1)

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
