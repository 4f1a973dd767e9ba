"""Data and arithmetic of the cases: token sequences, datums of each loss, and the losses in closed form.

Run inside a tinker SDK's own environment: imports nothing of mint.
"""

from __future__ import annotations

from typing import Any

import numpy as np

TOKENS = [40, 73, 61, 82, 55, 90, 44, 67, 71, 52, 63, 88]
"""A sequence that the bundled model has never seen in this order."""


def sft_datum(types: Any, tokens: list[int] = TOKENS, *, prompt: int = 3) -> Any:
    """Next-token prediction of `tokens`, without loss on the first `prompt` ones."""
    weights = [0.0] * (prompt - 1) + [1.0] * (len(tokens) - prompt)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights},
    )


def plain_datum(types: Any, tokens: list[int] = TOKENS) -> Any:
    """Next-token prediction of every token."""
    return sft_datum(types, tokens, prompt=1)


def policy_datum(types: Any, tokens: list[int], logprobs: Any, advantages: Any, **inputs: Any) -> Any:
    """What policy-gradient losses need; `logprobs` are the sampler's."""
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": np.asarray(logprobs, dtype=np.float32),
            "advantages": np.asarray(advantages, dtype=np.float32),
            **inputs,
        },
    )


def logprobs_of(output: Any, index: int = 0) -> np.ndarray:
    """The trainer's logprobs of one datum, in float64."""
    value = output.loss_fn_outputs[index]["logprobs"]
    return np.asarray(value.tolist(), dtype=np.float64)


def loss_of(output: Any) -> float:
    """The summed loss that the server reports."""
    return float(output.metrics["loss:sum"])


def importance_sampling(new: np.ndarray, old: np.ndarray, advantages: np.ndarray) -> float:
    return float(-(np.exp(new - old) * advantages).sum())


def ppo(new: np.ndarray, old: np.ndarray, advantages: np.ndarray, low: float = 0.8, high: float = 1.2) -> float:
    ratio = np.exp(new - old)
    return float(-np.minimum(ratio * advantages, ratio.clip(low, high) * advantages).sum())


def cispo(new: np.ndarray, old: np.ndarray, advantages: np.ndarray, low: float = 0.8, high: float = 1.2) -> float:
    return float(-(np.exp(new - old).clip(low, high) * new * advantages).sum())


def dro(new: np.ndarray, old: np.ndarray, advantages: np.ndarray, beta: float = 0.05) -> float:
    return float(-(new * advantages - 0.5 * beta * (new - old) ** 2).sum())


def stable_reinforce(new: np.ndarray, old: np.ndarray, advantages: np.ndarray, kl_coeff: float = 0.01) -> float:
    taper = np.where(advantages < 0, np.exp(min(float((new - old).sum()), 0.0)), 1.0)
    return float((-taper * advantages * new + 0.5 * kl_coeff * (new - old) ** 2).sum())


def gspo(
    new: np.ndarray, old: np.ndarray, advantages: np.ndarray, mask: np.ndarray, low: float = 0.8, high: float = 1.2
) -> float:
    ratio = np.exp((new - old)[mask != 0].mean())
    return float(-np.minimum(ratio * advantages, np.clip(ratio, low, high) * advantages).sum())


def close(measured: float, expected: float, *, tolerance: float = 1e-4) -> None:
    """Fails unless both agree to `tolerance`, relative to the larger of 1 and the value."""
    assert abs(measured - expected) <= tolerance * max(1.0, abs(expected)), f"{measured} instead of {expected}"
