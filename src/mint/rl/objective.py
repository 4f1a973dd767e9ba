"""The functions of a user's own objective, and the names under which a run's record keeps them.

A setting of `RLConfig` that names a known advantage, baseline or loss may hold such a function instead. A run with
functions is resumed with functions of the same names.

Letters: G rollouts of one prompt · T trained tokens of one datum.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mint.errors import InvalidRequestError, MintError
from mint.rl.rollout import Group, Rollout

AdvantageFunction = Callable[[np.ndarray], np.ndarray]
"""Rewards of a group, float64 [G] → advantages [G]. The rewards are less the baseline, if the settings name one."""

BaselineFunction = Callable[[Group], float | Sequence[float] | np.ndarray]
"""A group of the rollouts that count → what is subtracted from each reward: one number, or [G]."""

WeightFunction = Callable[[Rollout, float], float]
"""A rollout and its advantage → a factor of the weight of its tokens in the loss."""

FilterFunction = Callable[[Group], bool]
"""A group of the rollouts that count → whether it is trained on."""

LossFunction = Callable[[Any, Any, Any, Any], Any]
"""Torch tensors of the trained tokens of one datum, each [T]: logprobs (with a gradient), logprobs of the sampler,
advantages, weights → the loss of each token [T], or their sum."""

MetricsFunction = Callable[[Sequence[Group]], Mapping[str, float]]
"""All groups of a step → numbers for `metrics.jsonl`."""

RECORDED = "function "
"""Begins the recorded value of a setting that holds a function."""


def function_name(function: Callable[..., Any]) -> str:
    """The name of a function in messages and in a run's record; a `partial` has its arguments in it."""
    if isinstance(function, partial):
        given = [*map(repr, function.args), *(f"{name}={value!r}" for name, value in function.keywords.items())]
        return f"{function_name(function.func)}({', '.join(given)})"
    return getattr(function, "__qualname__", type(function).__name__).rpartition("<locals>.")[2]


def recorded(value: Any) -> Any:
    """The value of a setting as a run's record has it."""
    return RECORDED + function_name(value) if callable(value) else value


def is_recorded_function(value: Any) -> bool:
    """Whether a recorded setting held a function, which the record cannot give back."""
    return isinstance(value, str) and value.startswith(RECORDED)


def check_function(field: str, function: Callable[..., Any], arguments: Sequence[str]) -> None:
    """Refuses a function that a run could not name, or that does not take `arguments`.

    Raises:
        InvalidRequestError: a lambda, a coroutine function, or another number of arguments.
    """
    name = function_name(function)
    if name.startswith("<lambda>"):
        raise InvalidRequestError(
            "has no name for the record of the run", field=field, value=name, remedy="Define it with def"
        )
    if inspect.iscoroutinefunction(function):
        raise InvalidRequestError("is async", field=field, value=name, remedy="Define it with def alone")
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise InvalidRequestError(
            f"cannot be called with its arguments ({error})",
            field=field,
            value=name,
            remedy=f"Let it take ({', '.join(arguments)})",
        ) from error
    except ValueError:  # a builtin without a signature
        return


def called(field: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function of the user returns.

    Raises:
        InvalidRequestError: it raised; names the setting and the function. The exception itself is its cause.
    """
    try:
        return function(*arguments)
    except MintError:
        raise
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        raise InvalidRequestError(
            f"raised {type(error).__name__}: {error} ({Path(at.filename).name}, line {at.lineno})",
            field=field,
            value=function_name(function),
            remedy="Correct the function",
        ) from error


def real_numbers(given: Any) -> np.ndarray | None:
    """A number, a sequence, an array or a torch tensor as float64 of the same shape, the gradient left out. None if it
    holds something else than real numbers."""
    if hasattr(given, "detach"):  # a torch tensor, which need not be on the CPU or of a type that numpy has
        given = given.detach().tolist()
    elif isinstance(given, list | tuple):
        given = [one.detach().tolist() if hasattr(one, "detach") else one for one in given]
    try:
        values = np.asarray(given)
    except (TypeError, ValueError):  # rows of several lengths
        return None
    return values.astype(np.float64) if values.dtype.kind in "biuf" else None


def finite_numbers(field: str, function: Callable[..., Any], given: Any, count: int | None) -> np.ndarray:
    """Checks the numbers that a function returned: float64 [count], or one number [] if `count` is None.

    Raises:
        InvalidRequestError: it is of another shape, not real, not finite, or too large for float32, in which they are
            trained on.
    """
    values = real_numbers(given)
    shape = () if count is None else (count,)
    if values is None or values.shape != shape or not (np.abs(values) <= np.finfo(np.float32).max).all():
        wanted = "one finite number" if count is None else f"{count} finite numbers, one for each rollout"
        raise InvalidRequestError(
            f"returned {' '.join(str(given).split())[:80]}",
            field=field,
            value=function_name(function),
            remedy=f"Return {wanted}, that float32 can hold",
        )
    return values
