"""Engines on ranks of this machine, and a small RL run on any engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from engine_data import ADAM, LORA, datum

from mint.cluster.collectives.parallelism import ALIKE, Parallelism
from mint.cluster.engine import ClusterEngine
from mint.cluster.ray_runtime import HERE, Place
from mint.engine.protocol import Engine, SampleJob, StopRule, resolve_loss
from mint.engine.reductions.division import Peers
from mint.engine.torch_engine import TorchEngine

ROWS = 64
PROMPTS, SAMPLES, NEW_TOKENS = 4, 4, 8


def torch_engine(*, dtype: Any = "float32", **given: Any) -> TorchEngine:
    """An engine of one process."""
    return TorchEngine(dtype=dtype, threads=1, device="cpu", micro_batch_rows=ROWS, **given)


def cluster(
    trainers: int,
    *,
    samplers: int = 0,
    dtype: Any = "float32",
    rank_dtype: Any = None,
    place: Place = HERE,
    parallelism: Parallelism = ALIKE,
) -> ClusterEngine:
    """`trainers` ranks and `samplers` replicas, beside this process. `rank_dtype` is another one for all of them."""
    given = parallelism.engine_settings

    def open_rank(peers: Peers) -> TorchEngine:  # sent by value: ranks cannot import this module
        own = {"dtype": rank_dtype or dtype, "micro_batch_rows": ROWS, **given}
        return TorchEngine(threads=1, device="cpu", peers=peers, **own)

    own = torch_engine(dtype=dtype, **given)
    return ClusterEngine(own, open_rank, trainers, samplers=samplers, place=place, parallelism=parallelism)


def open_model(engine: Engine, folder: Path) -> None:
    """Makes model `m` on the base in a folder."""
    engine.load_base(folder.name, str(folder))
    engine.create_model("m", folder.name, LORA)


def grpo_step(engine: Engine, folder: Path, step: int) -> str:
    """Samples groups from the model `m`, rewards low tokens, and takes a step; returns the digest after it."""
    rng = np.random.default_rng(step)
    engine.publish("m", "policy")
    prompts = [rng.integers(20, 90, int(rng.integers(4, 12))) for _ in range(PROMPTS)]
    jobs = [
        SampleJob(folder.name, "policy", prompt, SAMPLES, NEW_TOKENS, 1.0, -1, 1.0, 1000 * step + place, StopRule())
        for place, prompt in enumerate(prompts)
    ]
    data = []
    for prompt, result in zip(prompts, engine.sample(jobs), strict=True):
        rewards = np.array([(sample.tokens < 48).mean() for sample in result.samples])
        for sample, advantage in zip(result.samples, rewards - rewards.mean(), strict=True):
            whole = np.concatenate([prompt, sample.tokens])
            logprobs = np.concatenate([np.zeros(len(prompt) - 1), sample.logprobs])
            advantages = np.full(len(whole) - 1, advantage)
            data.append(datum(whole, prompt=len(prompt), logprobs=logprobs, advantages=advantages))
    engine.forward_backward("m", data, resolve_loss("importance_sampling"))
    engine.optim_step("m", ADAM)
    return engine.state_digest("m")
