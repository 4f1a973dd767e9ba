"""Examples, jobs and steps for engine tests: short ways to say the usual, every field open to change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mint.engine.protocol import AdamSpec, Engine, LoraSpec, SampleJob, StopRule, TrainDatum, resolve_loss

LORA = LoraSpec(rank=4, seed=7, train_attn=True, train_mlp=True, train_unembed=True)
ADAM = AdamSpec(learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, grad_clip_norm=0.0)
CROSS_ENTROPY = resolve_loss("cross_entropy")


def datum(tokens: Sequence[int] | np.ndarray, *, prompt: int = 1, **inputs: Any) -> TrainDatum:
    """A whole sequence as an example: weight 0 up to the end of its prompt, 1 after it."""
    whole = np.asarray(tokens, np.int64)
    weights = np.ones(len(whole) - 1, np.float32)
    weights[: prompt - 1] = 0
    arrays = {name: np.asarray(array, np.float32) for name, array in inputs.items()}
    return TrainDatum(whole[:-1], whole[1:], weights, arrays)


def random_data(
    seed: int, *, count: int = 6, vocab: int = 64, shared: int = 0, policy: bool = False
) -> list[TrainDatum]:
    """Examples of 5 to 30 tokens; the first `shared` of them are common to pairs of neighbours.

    Tokens are 20 and more: below lies the fake engine's poison.
    """
    rng = np.random.default_rng(seed)
    data = []
    prefix = rng.integers(20, vocab, 0)
    for index in range(count):
        if index % 2 == 0:
            prefix = rng.integers(20, vocab, shared)
        whole = np.concatenate([prefix, rng.integers(20, vocab, int(rng.integers(5, 30)))])
        size = len(whole) - 1
        inputs = {"logprobs": rng.normal(-4, 0.3, size), "advantages": rng.normal(0, 1, size)} if policy else {}
        data.append(datum(whole, prompt=max(3, shared), **inputs))
    return data


def job(prompt: Sequence[int], **changes: Any) -> SampleJob:
    """One sample of at most 8 tokens at temperature 1 from the base `base`."""
    fields: dict[str, Any] = {
        "base": "base", "weights_id": None, "num_samples": 1, "max_tokens": 8, "temperature": 1.0, "top_k": -1,
        "top_p": 1.0, "seed": 0, "stop": StopRule(), **changes,
    }  # fmt: skip
    return SampleJob(prompt=np.asarray(prompt, np.int64), **fields)


def train(engine: Engine, model_id: str, steps: int = 2, seed: int = 0) -> None:
    """A few steps, so that the lora is no longer zero."""
    for step in range(steps):
        engine.forward_backward(model_id, random_data(seed + step), CROSS_ENTROPY)
        engine.optim_step(model_id, ADAM)


def take_gradient(engine: Engine, model_id: str) -> dict[str, np.ndarray]:
    """The accumulated gradient by PEFT name, bit for bit; it is cleared, and nothing else changes.

    It is the first moment after a step that forgets the moments before it and moves no weight.
    """
    state = engine.read_state(model_id)
    metrics = engine.optim_step(model_id, AdamSpec(0.0, 0.0, 0.9, 1e-8, 0.0, 0.0))
    assert not metrics["skipped_nonfinite"]
    gradient = engine.read_state(model_id).exp_avg
    assert gradient is not None
    engine.write_state(model_id, state)
    return dict(gradient)


def flat(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """All entries in one vector."""
    return np.concatenate([array.reshape(-1) for array in arrays.values()])
