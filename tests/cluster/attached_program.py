"""A program that trains in a Ray cluster: `attached_program.py ADDRESS TRAINERS SAMPLERS MODEL_FOLDER DATA_DIR`.

It prints one JSON document: what it has sampled, its losses and digests, and the state of the cluster at the end. With
ADDRESS `none` it computes all in its own process. The process of the variable END, and all that come from it, are
killed in its second step.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from clusters import cluster, torch_engine
from ray_nodes import descendants, end
from sdk_run import run

import mint
from mint.cluster.ray_runtime import Place
from mint.compose.embedded import open_embedded

STEPS = 3


def main(address: str, trainers: str, samplers: str, model: str, data_dir: str) -> None:
    if address == "none":
        engine = torch_engine()
    else:
        engine = cluster(int(trainers), samplers=int(samplers), place=Place(address))

    def disturb(step: int) -> None:
        if step == 1:
            node = [int(pid) for pid in os.environ.get("END", "").split()]
            for pid in [*node, *descendants(node)]:
                end(pid)

    with mint.ServiceClient(open_embedded=lambda: open_embedded(data_dir=Path(data_dir), engine=engine)) as service:
        seen = run(service, model, STEPS, disturb)
        state = getattr(engine, "cluster_state", {})
    print(json.dumps({"seen": seen, "state": state}))


if __name__ == "__main__":
    main(*sys.argv[1:])
