"""A model of each family through the SDK: trained, saved, loaded, sampled and exported; and another one refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from small_models import FAMILIES, write_model, write_other_model
from transformers import AutoModelForCausalLM

import mint
from mint import types
from mint.compose.export import export_checkpoint
from mint.errors import InvalidRequestError

TOKENS = np.random.default_rng(1).integers(2, 97, 24).tolist()
DATUM = types.Datum(
    model_input=types.ModelInput.from_ints(TOKENS[:-1]),
    loss_fn_inputs={"target_tokens": TOKENS[1:], "weights": [1.0] * (len(TOKENS) - 1)},
)

OTHERS = ("gemma2", "gpt2", "qwen3_5_moe_text", "deepseek_v3", "falcon_h1")
"""Some that run on the modules of transformers."""


def _logprobs(client: mint.SamplingClient) -> np.ndarray:
    return np.array(client.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result()[1:], np.float64)


@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_a_model_of_every_family_goes_from_training_to_an_export(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if family in FAMILIES:
        write_model(tmp_path / "base", "untied", family=family, shards="40KB")
    else:
        write_other_model(tmp_path / "base", family)
    monkeypatch.setenv("MINT_MODELS", f"lab/{family}={tmp_path / 'base'}")
    monkeypatch.setenv("MINT_HOME", str(tmp_path / "home"))
    with mint.ServiceClient() as service:
        client = service.create_lora_training_client(f"lab/{family}", rank=4, seed=1)
        info = client.get_info()
        assert info.model_data.arch == family
        assert info.effective["implementation"] == ("mint" if family in FAMILIES else "transformers")
        losses = []
        for _ in range(3):
            losses.append(client.forward_backward([DATUM], loss_fn="cross_entropy").result().metrics["loss:sum"])
            client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        assert losses[2] < losses[0]
        path = client.save_state("s").result().path or ""
        ours = _logprobs(client.save_weights_and_get_sampling_client())
        again = service.create_training_client_from_state(path)
        assert np.array_equal(_logprobs(again.save_weights_and_get_sampling_client()), ours)
    export_checkpoint(path, output=tmp_path / "merged", format="hf")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        logits = merged(torch.tensor([TOKENS])).logits[0].log_softmax(-1).numpy()
    assert np.abs(logits[np.arange(23), TOKENS[1:]] - ours).max() <= 1e-4


def test_another_family_is_refused_to_the_user_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "base", "tied")
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    (tmp_path / "base" / "config.json").write_text(json.dumps({**config, "model_type": "nobody_knows"}))
    monkeypatch.setenv("MINT_MODELS", f"lab/other={tmp_path / 'base'}")
    monkeypatch.setenv("MINT_HOME", str(tmp_path / "home"))
    with (
        mint.ServiceClient() as service,
        pytest.raises(InvalidRequestError, match="nobody_knows"),
    ):
        service.create_lora_training_client("lab/other", rank=4)
