"""The losses by name, and the settings of each with their defaults. The engine has the mathematics.

`temperature` divides the policy's logits before anything else, so that logprobs, entropy, ratio and gradient are those
of the tempered policy; sampler logprobs must be of the same temperature (`logprobs_mode="processed"`). `tis_cap` bounds
the weight of a token from above without stopping its gradient. With `trained_only` 1, logprobs and entropies are
computed where a weight is not 0, and are 0 elsewhere: less work for the same loss. `entropy_coef` subtracts that much
of the entropy of each trained token's distribution from the loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from mint.errors import InvalidRequestError

LossName = Literal["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo", "stable_reinforce", "sapo"]

_TRAINED_ONLY = {"trained_only": 0.0}
_TEMPERATURE = {**_TRAINED_ONLY, "temperature": 1.0, "entropy_coef": 0.0}
_CLIP = {**_TEMPERATURE, "clip_low_threshold": 0.8, "clip_high_threshold": 1.2}

LOSS_SETTINGS: Mapping[str, Mapping[str, float]] = {
    "cross_entropy": _TRAINED_ONLY,
    "importance_sampling": {**_TEMPERATURE, "tis_cap": math.inf},
    "ppo": {**_CLIP, "dual_clip": math.inf},
    "cispo": _CLIP,
    "dro": {**_TEMPERATURE, "beta": 0.05},
    "gspo": {**_TEMPERATURE, "clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4},
    "stable_reinforce": {**_TEMPERATURE, "kl_coeff": 0.01},
    "sapo": {**_TEMPERATURE, "tau_positive": 1.0, "tau_negative": 1.05},
}
"""Every loss with its settings and their defaults."""

_POSITIVE = frozenset({"temperature", "tis_cap", "dual_clip", "tau_positive", "tau_negative"})
"""Settings that must be above 0."""


def loss_settings(name: str, given: Mapping[str, float | str] | None = None) -> dict[str, float]:
    """All settings of a loss: those that are given, and the defaults of the others.

    Raises:
        InvalidRequestError: unknown loss, a key that the loss does not have, or a value that is not finite and >= 0
            (> 0 for those of `_POSITIVE`), or bounds in the wrong order.
    """
    if name not in LOSS_SETTINGS:
        raise InvalidRequestError(
            "is not a loss", field="loss_fn", value=name, remedy=f"Choose one of {', '.join(LOSS_SETTINGS)}"
        )
    defaults = LOSS_SETTINGS[name]
    full = dict(defaults)
    for key, value in (given or {}).items():
        if key not in defaults:
            has = ", ".join(defaults) or "none"
            raise InvalidRequestError(
                f"{name} has no such setting", field="loss_fn_config", value=key, remedy=f"Its settings are: {has}"
            )
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise InvalidRequestError(
                "is not a finite number >= 0", field=f"loss_fn_config.{key}", value=value, remedy="Pass a number"
            )
        if value == 0 and key in _POSITIVE:
            raise InvalidRequestError(
                "must be above 0",
                field=f"loss_fn_config.{key}",
                value=value,
                remedy=f"Leave it out for the default of {defaults[key]:g}",
            )
        full[key] = float(value)
    low, high = full.get("clip_low_threshold", 0.0), full.get("clip_high_threshold", math.inf)
    if low > high:
        raise InvalidRequestError(
            f"is above clip_high_threshold = {high}",
            field="loss_fn_config.clip_low_threshold",
            value=low,
            remedy=f"Both bound the probability ratio: {name}'s own are {defaults['clip_low_threshold']:g} and "
            f"{defaults['clip_high_threshold']:g}",
        )
    if full.get("dual_clip", math.inf) < high and "dual_clip" in full:
        raise InvalidRequestError(
            f"is below clip_high_threshold = {high}",
            field="loss_fn_config.dual_clip",
            value=full["dual_clip"],
            remedy="It bounds the ratio of tokens with a negative advantage from above: try 3",
        )
    return full
