"""A program that trains in a Ray cluster: `attached_program.py ADDRESS TRAINERS SAMPLERS MODEL_FOLDER DATA_DIR`.

It prints one JSON document: what it has sampled, its losses and digests, and the state of the cluster at the end. With
ADDRESS `none` it computes all in its own process. Processes of the variable END are killed in its second step.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from clusters import cluster, torch_engine
from ray_nodes import end

import mint
from mint import types
from mint.cluster.ray_runtime import Place
from mint.compose.embedded import open_embedded

STEPS = 3


def main(address: str, trainers: str, samplers: str, model: str, data_dir: str) -> None:
    if address == "none":
        engine = torch_engine()
    else:
        engine = cluster(int(trainers), samplers=int(samplers), place=Place(address))
    seen: list[object] = []
    with mint.ServiceClient(open_embedded=lambda: open_embedded(data_dir=Path(data_dir), engine=engine)) as service:
        client = service.create_lora_training_client(model, rank=4, seed=3)
        for step in range(STEPS):
            sampler = client.save_weights_and_get_sampling_client()
            params = types.SamplingParams(max_tokens=6, seed=step)
            samples = sampler.sample(types.ModelInput.from_ints([20 + step, 30]), 4, params).result()
            seen.append([(list(own.tokens), list(own.logprobs)) for own in samples.sequences])
            data = [
                types.Datum(
                    model_input=types.ModelInput.from_ints([20 + step, 30, *own.tokens[:-1]]),
                    loss_fn_inputs={"target_tokens": [30, *own.tokens], "weights": [0.0] + [1.0] * len(own.tokens)},
                )
                for own in samples.sequences * 16
            ]
            passed = client.forward_backward(data, "cross_entropy")
            if step == 1:
                for pid in os.environ.get("END", "").split():
                    end(int(pid))
            stepped = client.optim_step(types.AdamParams(learning_rate=1e-3))
            seen.append([passed.result().metrics["loss:sum"], stepped.result().state_digest])
        state = getattr(engine, "cluster_state", {})
    print(json.dumps({"seen": seen, "state": state}))


if __name__ == "__main__":
    main(*sys.argv[1:])
