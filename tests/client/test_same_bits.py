"""Both transports, the real engine and the bundled model: the same bits out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from http_server import http_server

import mint
from mint.types import AdamParams, Datum, ModelInput, SamplingParams


@contextmanager
def open_client(transport: str, folder: Path) -> Iterator[mint.ServiceClient]:
    if transport == "embedded":
        with mint.ServiceClient(data_dir=folder) as client:
            yield client
    else:
        with http_server(folder) as url, mint.ServiceClient(base_url=url + "/") as client:
            yield client


def every_bit(client: mint.ServiceClient) -> list[Any]:
    """Two supervised steps, two steps of GRPO's kind, a custom loss, saving and resuming: all that comes out."""
    training = client.create_lora_training_client("mint/tiny", rank=8, seed=3)
    tokenizer = training.get_tokenizer()
    seen: list[Any] = []
    for text in ("Q: 1 + 2\nA: 3", "Q: 2 + 2\nA: 4"):
        tokens = tokenizer.encode(text)
        weights = [0.0] * (len(tokens) - 3) + [1.0, 0.5]
        inputs = {"target_tokens": tokens[1:], "weights": weights}
        data = [Datum(model_input=ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)]
        passed, stepped = training.forward_backward(data, "cross_entropy"), training.optim_step(AdamParams())
        seen += [passed.result().model_dump(), stepped.result().model_dump()]
    for loss in ("importance_sampling", "ppo"):
        sampler = training.save_weights_and_get_sampling_client()
        prompt = tokenizer.encode("Q: 3 + 4\nA:")
        group = sampler.sample(ModelInput.from_ints(prompt), 4, SamplingParams(max_tokens=6)).result()
        seen += [
            [(one.tokens, one.logprobs, one.stop_reason) for one in group.sequences],
            sampler.compute_logprobs(ModelInput.from_ints(prompt)).result(),
        ]
        datums = []
        for place, sequence in enumerate(group.sequences):
            full = [*prompt, *sequence.tokens]
            before = [0.0] * (len(prompt) - 1)
            inputs = {
                "target_tokens": full[1:],
                "weights": [*before, *[1.0] * len(sequence.tokens)],
                "logprobs": [*before, *sequence.logprobs],
                "advantages": [*before, *[float(place) - 1.5] * len(sequence.tokens)],
            }
            datums.append(Datum(model_input=ModelInput.from_ints(full[:-1]), loss_fn_inputs=inputs))
        passed, stepped = training.forward_backward(datums, loss), training.optim_step(AdamParams())
        seen += [passed.result().model_dump(), stepped.result().model_dump()]
    training.forward_backward_custom(datums, lambda _data, rows: (sum(row.square().sum() for row in rows), {}))
    seen.append(training.optim_step().result().model_dump())
    path = training.save_state("here").result().path
    resumed = client.create_training_client_from_state_with_optimizer(path)
    seen += [resumed.optim_step().result().model_dump(), training.optim_step().result().model_dump()]
    return seen


def test_every_bit_is_the_same_embedded_and_over_http(tmp_path: Path) -> None:
    bits = {}
    for transport in ("embedded", "http"):
        with open_client(transport, tmp_path / transport) as client:
            bits[transport] = every_bit(client)
    digests = [
        result["state_digest"] for result in bits["http"] if isinstance(result, dict) and "state_digest" in result
    ]
    assert len(digests) == 7 and digests[-1] == digests[-2] and len(set(digests)) == 6 and all(digests)
    assert bits["embedded"] == bits["http"]
