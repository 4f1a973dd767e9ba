"""The settings that every training run has, whatever it trains on: weights, optimizer, checkpoints, folder, trackers.

Knows nothing of rewards, demonstrations or preferences: `RLConfig` and the configs of the supervised recipes add those.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from mint.errors import InvalidRequestError
from mint.types import AdamParams, invalid_request
from mint.types.allowed_values import allowed_values

ScheduleName = Literal["constant", "linear", "cosine"]
TrackerName = Literal["tensorboard", "wandb", "trackio"]


class RunConfig(BaseModel):
    """One training run. Frozen; every field is checked when it is constructed or copied with `changed`.

    Nothing is converted: `epochs="3"` is refused. An integer may stand for a float, a list for a tuple, a text for a
    path, and a numpy number for Python's. `from_texts` takes texts.

    A subclass adds its own fields and may declare a field again to give it another default.

    Raises:
        InvalidRequestError: a field is unknown, of the wrong type or out of range.
    """

    not_in_the_result: ClassVar[frozenset[str]] = frozenset({"run_dir", "trackers", "print_progress"})
    """The settings that change no bit of a run: they are not in `config.json`, and may differ when it is resumed."""

    names_elsewhere: ClassVar[Mapping[str, str]] = {
        "lr": "learning_rate",
        "max_grad_norm": "grad_clip_norm",
        "clip_grad": "grad_clip_norm",
        "warmup_steps": "lr_warmup_steps",
        "lr_scheduler_type": "lr_schedule",
        "lora_rank": "rank",
        "model": "base_model",
        "model_name": "base_model",
        "output_dir": "run_dir",
        "save_steps": "save_every",
        "save_freq": "save_every",
        "report_to": "trackers",
        "warmup_ratio": "lr_warmup_steps",
        **dict.fromkeys(
            ("per_device_train_batch_size", "gradient_accumulation_steps", "train_batch_size"), "batch_size"
        ),
    }
    """What TRL, verl and prime-rl call a setting, and what to give here, so that a refusal can say so."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, strict=True)

    # The weights.
    base_model: str = "Qwen/Qwen3-0.6B"
    """A name of `mint models list`, the Hugging Face name of a model in the local cache, or a folder."""
    rank: int = Field(16, ge=1, le=256)
    """The rank of the LoRA matrices; their product is scaled by 32 / rank."""
    train_mlp: bool = True
    """Whether the MLP matrices have a LoRA."""
    train_attn: bool = True
    """Whether the attention matrices have a LoRA."""
    train_unembed: bool = True
    """Whether the unembedding has a LoRA."""
    init_from: str | None = None
    """A checkpoint (`mint://…`) to start from, for example that of an SFT run. The command line also takes a run: its
    name or the beginning of it, its number, or latest."""
    init_optimizer: bool = False
    """Whether to restore the optimizer state from `init_from`, too."""

    # The optimizer.
    batch_size: int = Field(8, ge=1)
    """Examples per training step."""
    learning_rate: float = Field(2e-5, ge=0, allow_inf_nan=False)
    """Adam's step size. A LoRA wants about ten times that of full fine-tuning, and a small model more."""
    lr_schedule: ScheduleName = "constant"
    """`linear` and `cosine` fall from `learning_rate` towards 0 after the last step."""
    lr_warmup_steps: int = Field(0, ge=0)
    """Steps in which the learning rate grows linearly from 0 to `learning_rate`."""
    betas: tuple[float, float] = Field((0.9, 0.999), strict=False)
    """Adam's decay rates of its means of gradients and of squared gradients."""
    eps: float = Field(1e-8, gt=0, allow_inf_nan=False)
    """Added to the denominator of Adam's update."""
    weight_decay: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Adam's decoupled weight decay (AdamW); 0 is off."""
    grad_clip_norm: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Global norm; 0 is off."""

    # The run.
    seed: int = Field(0, ge=0)
    """Of the new LoRA's weights, the order of the data, and sampling: the same seed gives the same run."""
    run_dir: Path | None = Field(None, strict=False)
    """None makes a new folder under `MINT_HOME/runs`."""
    save_every: int = Field(10, ge=1)
    """Steps between resumable checkpoints; the last step is always saved."""
    trackers: tuple[TrackerName, ...] = ()
    """Mirrors of the run besides its folder: `tensorboard`, `wandb`, `trackio`; one name, or several with commas."""

    print_progress: bool = True
    """Prints a line per step, evaluation and finding on standard error, unless the run has an `on_progress`."""

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**{name: _plain(value) for name, value in fields.items()})
        except ValidationError as error:
            raise self._refusal(error) from error

    @classmethod
    def from_texts(cls, fields: Mapping[str, Any]) -> Self:
        """The settings on a command line or in a JSON file, where `"3"` is 3, `"no"` is False and a list is a tuple.

        Raises:
            InvalidRequestError: as the constructor.
        """
        return cls(**{name: cls._converted(name, value) for name, value in fields.items()})

    def changed(self, **fields: Any) -> Self:
        """The same settings with some replaced: `config.changed(learning_rate=1e-4)`.

        Raises:
            InvalidRequestError: as the constructor.
        """
        given = {name: getattr(self, name) for name in self.model_fields_set if self._names(name).isdisjoint(fields)}
        return type(self)(**given, **fields)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """`changed` by the name that pydantic has for it; the values that are kept are copied too, if `deep`."""
        return super().model_copy(deep=deep).changed(**(update or {}))

    @classmethod
    def _names(cls, field: str) -> set[str]:
        """The names under which a value of the field may be given."""
        alias = cls.model_fields[field].validation_alias
        return {field, *map(str, alias.choices)} if isinstance(alias, AliasChoices) else {field}

    @classmethod
    def _converted(cls, name: str, value: Any) -> Any:
        """A text as the type of its field; the constructor refuses what cannot be converted."""
        try:
            kind: Any = cls.model_fields[name].annotation
            return TypeAdapter(kind).validate_python(value)
        except (KeyError, ValidationError):
            return value

    @classmethod
    def _refusal(cls, error: ValidationError) -> InvalidRequestError:
        """The first complaint of pydantic as our error, with a remedy."""
        refusal = invalid_request(error, cls.__name__)
        complaints = error.errors()
        first = complaints[0]
        given = str(first["loc"][0]) if first["loc"] else ""
        wrong_type = first["type"].endswith("_type")
        if (
            wrong_type
            and len(first["loc"]) > 1
            and len({each["loc"][:-1] for each in complaints}) == 1 < len(complaints)
        ):
            refusal.message = "is not of a kind that is allowed here"  # one complaint for each kind, and its name last
            refusal.field = ".".join(map(str, (cls.__name__, *first["loc"][:-1])))
        elif wrong_type:
            refusal.message += f", not {type(first['input']).__name__}"
        similar = get_close_matches(given, [each for name in cls.model_fields for each in cls._names(name)], n=1)
        twice = [name for name in cls.model_fields if name != given and given in cls._names(name)]
        if first["type"] == "extra_forbidden" and twice:
            refusal.message = f"is another name of {twice[0]}, which is given, too"
            refusal.remedy = "Give one of the two"
        elif first["type"] == "extra_forbidden":
            known = cls.names_elsewhere.get(given)
            refusal.remedy = (
                f"Give {known}" if known is not None else f"Did you mean {similar[0]}?" if similar else refusal.remedy
            )
        elif first["type"] == "literal_error":
            refusal.field = f"{cls.__name__}.{given}"  # without the name of the branch where a function is allowed, too
            takes_function = any(other["type"] == "callable_type" for other in error.errors())
            refusal.remedy = "Choose one of these" + (", or give a function" if takes_function else "")
        elif wrong_type or refusal.remedy is None:
            fields = [field for name, field in cls.model_fields.items() if given in cls._names(name)]
            refusal.remedy = f"Give {allowed_values(fields[0])}" if fields else None
        others = {str(each["loc"][0]): None for each in complaints if each["loc"] and str(each["loc"][0]) != given}
        if others:
            names, remedy = ", ".join(others), refusal.remedy
            refusal.remedy = f"Also wrong: {names}" if remedy is None else f"{remedy.rstrip('.')}; also wrong: {names}"
        return refusal

    @field_validator("trackers", mode="before")
    @classmethod
    def _split_tracker_names(cls, given: Any) -> Any:
        if isinstance(given, str):
            return tuple(name.strip() for name in given.split(",") if name.strip())
        return tuple(given) if isinstance(given, list) else given or ()

    @model_validator(mode="after")
    def _optimizer_has_a_source(self) -> Self:
        if self.init_optimizer and self.init_from is None:
            raise InvalidRequestError(
                "needs init_from",
                field=f"{type(self).__name__}.init_optimizer",
                value=True,
                remedy="Name the checkpoint, or leave it out",
            )
        return self

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

    def unused_settings(self) -> list[str]:
        """A sentence for each setting that has no effect beside the others: its value, and what it needs."""
        return []

    def without_effect(self, needed: str, *names: str) -> list[str]:
        """A sentence about those of the settings `names` that differ from their default, which all need `needed`."""
        return [
            f"{name} = {value} has no effect without {needed}"
            for name in names
            if (value := getattr(self, name)) != type(self).model_fields[name].default
        ]

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


def _plain(value: Any) -> Any:
    """A number of numpy as Python's, for example of a sweep over `np.geomspace`; any other value as it is."""
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value
