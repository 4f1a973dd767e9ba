"""What a training batch costs on its way from the user's lists to the engine's arrays, in CPU milliseconds.

    python -m benchmarks.serving.datum_cost [--datums 64] [--tokens 640] [--json]

The way of a request: lists become `Datum`s (build), these become protobuf (encode), the server reads them (decode) and
checks them against the model (validate). The way back: the engine's arrays become a result (answer), which is written
(write result) and read by the client (read result). Each row is the best of several repeats. No engine runs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from mint import wire
from mint.engine.protocol import BaseInfo
from mint.server.worker.validation import check_pass
from mint.types import Datum, ForwardBackwardOutput, ModelInput, TensorData
from mint.wire.requests import ForwardBackwardInput, ForwardBackwardRequest

REPEATS = 15
BASE = BaseInfo("base", "qwen3", vocab_size=151_936, context_length=32_768, eos_token_ids=(0,))


def user_lists(datums: int, tokens: int) -> list[dict[str, list[Any]]]:
    """What a training loop holds before it calls the SDK: plain Python lists."""
    random = np.random.default_rng(0)
    return [
        {
            "tokens": (full := random.integers(0, BASE.vocab_size, tokens + 1).tolist())[:-1],
            "target_tokens": full[1:],
            "weights": (random.random(tokens) < 0.8).astype(np.float32).tolist(),
            "logprobs": (-random.random(tokens)).tolist(),
            "advantages": random.normal(size=tokens).tolist(),
        }
        for _ in range(datums)
    ]


def build(rows: list[dict[str, list[Any]]]) -> list[Datum]:
    """As a user writes it."""
    return [
        Datum(
            model_input=ModelInput.from_ints(row["tokens"]),
            loss_fn_inputs={key: values for key, values in row.items() if key != "tokens"},
        )
        for row in rows
    ]


def best_ms(work: Callable[[], Any]) -> tuple[float, Any]:
    """CPU milliseconds of the fastest of `REPEATS` runs, and what the work returned."""
    times, result = [], None
    for _ in range(REPEATS):
        began = time.process_time()
        result = work()
        times.append(1e3 * (time.process_time() - began))
    return min(times), result


def measure(datums: int, tokens: int) -> dict[str, float]:
    """Milliseconds for each part of the way."""
    lists = user_lists(datums, tokens)
    cost: dict[str, float] = {}
    cost["build"], data = best_ms(lambda: build(lists))

    def encode() -> bytes:
        content = ForwardBackwardInput(data=data, loss_fn="ppo")
        request = ForwardBackwardRequest(model_id="session:train:0", seq_id=1, forward_backward_input=content)
        return wire.encode(request, wire.Encoding.PROTO)

    cost["encode"], body = best_ms(encode)
    cost["decode"], request = best_ms(lambda: wire.decode(ForwardBackwardRequest, body, wire.Encoding.PROTO))
    cost["validate"], checked = best_ms(lambda: check_pass(request.forward_backward_input, BASE))
    cost["request"] = sum(cost.values())

    def answer() -> ForwardBackwardOutput:
        rows = [{"logprobs": TensorData.from_numpy(datum.inputs["logprobs"])} for datum in checked.data]
        return ForwardBackwardOutput(loss_fn_outputs=rows, metrics={"loss:sum": 1.0})

    cost["answer"], output = best_ms(answer)
    cost["write result"], stored = best_ms(lambda: wire.encode_result(output))
    cost["read result"], _ = best_ms(lambda: wire.decode_result(ForwardBackwardOutput, stored))
    cost["result"] = cost["answer"] + cost["write result"] + cost["read result"]
    return cost


def main() -> None:
    """Prints one row for each part, or one JSON object."""
    options = argparse.ArgumentParser()
    options.add_argument("--datums", type=int, default=64)
    options.add_argument("--tokens", type=int, default=640)
    options.add_argument("--json", action="store_true")
    given = options.parse_args()
    cost = measure(given.datums, given.tokens)
    if given.json:
        print(json.dumps({"datums": given.datums, "tokens": given.tokens, "cpu_ms": cost}))
        return
    for name, milliseconds in cost.items():
        print(f"{name:<14}{milliseconds:8.2f} ms")


if __name__ == "__main__":
    main()
