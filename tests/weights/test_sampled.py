"""What PEFT and transformers compute from an export is what mint sampled, for a lora on every set of layers."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from policies import TOKENS, by_torch, load, step

import mint
from mint import types
from mint.compose.export import export_checkpoint

PARTS = [parts for parts in itertools.product([True, False], repeat=3) if any(parts)]


@pytest.mark.parametrize("parts", PARTS)
def test_the_logprobs_of_samples_are_those_of_the_exports(tmp_path: Path, parts: tuple[bool, bool, bool]) -> None:
    import peft  # deferred: loading it takes seconds, in every worker

    attn, mlp, unembed = parts
    with mint.ServiceClient() as service:
        client = service.create_lora_training_client(
            base_model="mint/tiny", rank=6, seed=2, train_attn=attn, train_mlp=mlp, train_unembed=unembed
        )
        for _ in range(2):
            step(client)
        path = client.save_state("trained").result().path
        sampler = service.create_sampling_client(model_path=path)
        params = types.SamplingParams(max_tokens=16, temperature=1.0, seed=5, stop=[])
        sampled = sampler.sample(types.ModelInput.from_ints(TOKENS[:8]), 1, params).result().sequences[0]
    for format in ("peft", "hf"):
        export_checkpoint(path, output=tmp_path / format, format=format)
    whole = TOKENS[:8] + sampled.tokens
    for model in (peft.PeftModel.from_pretrained(load(), tmp_path / "peft"), load(tmp_path / "hf")):
        np.testing.assert_allclose(by_torch(model, whole)[7:], sampled.logprobs, atol=1e-4)
