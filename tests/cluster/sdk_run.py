"""A small run through the SDK: what it samples, its losses and its digests."""

from __future__ import annotations

from collections.abc import Callable

import mint
from mint import types


def undisturbed(_step: int) -> None:
    """Does nothing between two requests."""


def run(
    service: mint.ServiceClient,
    base_model: str,
    steps: int,
    disturb: Callable[[int], None] = undisturbed,
    *,
    copies: int = 16,
) -> list[object]:
    """Trains on `copies` of what it samples; `disturb(step)` is called while the pass of a step runs."""
    seen: list[object] = []
    client = service.create_lora_training_client(base_model, rank=4, seed=3)
    for step in range(steps):
        sampler = client.save_weights_and_get_sampling_client()
        params = types.SamplingParams(max_tokens=6, seed=step)
        samples = sampler.sample(types.ModelInput.from_ints([20 + step, 30]), 4, params).result()
        seen += [[list(own.tokens), list(own.logprobs)] for own in samples.sequences]
        data = [
            types.Datum(
                model_input=types.ModelInput.from_ints([20 + step, 30, *own.tokens[:-1]]),
                loss_fn_inputs={"target_tokens": [30, *own.tokens], "weights": [0.0] + [1.0] * len(own.tokens)},
            )
            for own in samples.sequences * copies
        ]
        passed = client.forward_backward(data, "cross_entropy")
        disturb(step)
        stepped = client.optim_step(types.AdamParams(learning_rate=1e-3))
        seen += [passed.result().metrics["loss:sum"], stepped.result().state_digest]
    return seen
