"""A lora that mint trained, its exports, and what mint's own sampler continues without chance."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from policies import step

import mint
from mint import types
from mint.compose.export import export_checkpoint

PROMPTS = [
    np.random.default_rng(seed).integers(3, 1000, length).tolist() for seed, length in enumerate((3, 12, 24, 70))
]
NEW_TOKENS = 24
RANK = 8
STEPS = 3


@dataclass(frozen=True)
class Continuation:
    """The most probable tokens after a prompt, one after the other, and their logprobs."""

    tokens: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class Exported:
    """The exports of one checkpoint, each in a folder of `folder` that has the format's name; the continuations of
    `PROMPTS` by mint, with the lora and without. `name` says what was trained."""

    name: str
    folder: Path
    with_lora: list[Continuation]
    without: list[Continuation]


def train_and_export(folder: Path, *, name: str, train_unembed: bool) -> Exported:
    """Trains `mint/tiny` for some steps and writes every format."""
    with mint.ServiceClient() as service:
        client = service.create_lora_training_client(
            base_model="mint/tiny", rank=RANK, seed=1, train_unembed=train_unembed
        )
        for _ in range(STEPS):
            step(client)
        path = client.save_state("trained").result().path
        with_lora = _continuations(service.create_sampling_client(model_path=path))
        without = _continuations(service.create_sampling_client(base_model="mint/tiny"))
    for format in ("peft", "hf", "gguf-ready"):
        export_checkpoint(path, output=folder / format, format=format)
    return Exported(name, folder, with_lora, without)


def _continuations(sampler: mint.SamplingClient) -> list[Continuation]:
    params = types.SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, stop=[], ignore_eos=True)
    found = [sampler.sample(types.ModelInput.from_ints(prompt), 1, params) for prompt in PROMPTS]
    sequences = [one.result().sequences[0] for one in found]
    return [Continuation(each.tokens, each.logprobs) for each in sequences]
