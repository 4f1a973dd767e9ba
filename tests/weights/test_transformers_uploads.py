"""Adapters of base models that run on the modules of transformers go out to PEFT and come back."""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from policies import by_mint, by_torch, load, step
from small_models import OTHER_FAMILIES, UNSUPPORTED_BY_PEFT, write_other_model

import mint
from mint.compose.export import export_checkpoint
from mint.engine.bases.lora_layers import lora_layers
from mint.engine.protocol import LoraSpec
from mint.engine.torch_engine import TorchEngine
from mint.errors import InvalidRequestError
from mint.models.folder import ModelFolder

CHANGES = {"bert": {"is_decoder": True}, "roberta": {"is_decoder": True}}
"""Families whose output layer is not called `lm_head`, or is within a module of this name, and what makes decoders of
them."""

TOKENS = np.random.default_rng(1).integers(3, 97, 24).tolist()


@pytest.fixture(autouse=True)
def aliases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of base models by the names that uploads may use."""
    names = ("base", "wider", "other")
    monkeypatch.setenv("MINT_MODELS", ",".join(f"small/{name}={tmp_path / name}" for name in names))


def _upload(service: mint.ServiceClient, folder: Path, base: str) -> str:
    archive = folder.with_suffix(".tar.gz")
    with tarfile.open(archive, "w:gz") as writer:
        writer.add(folder, "adapter")
    path = service.create_rest_client().upload_checkpoint(archive, base_model=base).result().path
    assert path is not None
    return path


@pytest.mark.parametrize(
    "family",
    ["gpt2", "gemma2", "glm4", "deepseek_v3", "llama4_text", "lfm2", "falcon_h1", *CHANGES],
)
def test_a_trained_adapter_goes_out_and_comes_back_as_the_same_function(tmp_path: Path, family: str) -> None:
    import peft  # deferred: loading it takes seconds, in every worker

    base = tmp_path / "base"
    write_other_model(base, family, **CHANGES.get(family, {}))
    with mint.ServiceClient() as service:
        client = service.create_lora_training_client(base_model="small/base", rank=4, seed=1)
        step(client, TOKENS)
        saved = client.save_state("trained").result().path
        ours = by_mint(service, client.save_weights_for_sampler("s").result().path or "", TOKENS)
    export_checkpoint(saved, output=tmp_path / "adapter", format="peft")
    if family not in UNSUPPORTED_BY_PEFT:
        model = peft.PeftModel.from_pretrained(load(base), tmp_path / "adapter")
        np.testing.assert_allclose(by_torch(model, TOKENS), ours, atol=1e-4)
    with mint.ServiceClient() as service:
        path = _upload(service, tmp_path / "adapter", "small/base")
        assert np.array_equal(by_mint(service, path, TOKENS), ours)
        again = service.create_training_client_from_state(path)
        step(again, TOKENS)
        after = by_mint(service, again.save_weights_for_sampler("after").result().path or "", TOKENS)
    assert after.sum() > ours.sum()


def test_an_adapter_that_peft_trained_comes_in_as_the_same_function(tmp_path: Path) -> None:
    """On GPT-2, whose layers store their weights transposed, which PEFT notes in the adapter's configuration."""
    import peft  # deferred: loading it takes seconds, in every worker

    write_other_model(tmp_path / "base", "gpt2")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=3, lora_alpha=6, target_modules=["c_attn"], fan_in_fan_out=True)
    model = peft.get_peft_model(load(tmp_path / "base"), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    theirs = by_torch(model, TOKENS)
    model.save_pretrained(tmp_path / "adapter")
    with mint.ServiceClient() as service:
        path = _upload(service, tmp_path / "adapter", "small/base")
        np.testing.assert_allclose(by_mint(service, path, TOKENS), theirs, atol=1e-4)


def test_an_adapter_of_another_model_is_refused_with_the_layers_of_this_one(tmp_path: Path) -> None:
    for name, family, changes in (
        ("base", "gpt2", {}),
        ("wider", "gpt2", {"n_embd": 64, "hidden_size": 64}),
        ("other", "glm4", {}),
    ):
        write_other_model(tmp_path / name, family, **changes)
    with mint.ServiceClient() as service:
        client = service.create_lora_training_client(base_model="small/base", rank=4)
        saved = client.save_state("fresh").result().path
    export_checkpoint(saved, output=tmp_path / "adapter", format="peft")
    with mint.ServiceClient() as service:
        with pytest.raises(InvalidRequestError, match=r"shape \[4, 48\].*it is \[4, 64\]"):
            _upload(service, tmp_path / "adapter", "small/wider")
        with pytest.raises(InvalidRequestError, match="can have loras on down_proj, gate_up_proj, k_proj"):
            _upload(service, tmp_path / "adapter", "small/other")


@pytest.mark.parametrize("family", OTHER_FAMILIES)
def test_the_layers_of_a_folder_are_those_that_its_model_trains(tmp_path: Path, family: str) -> None:
    write_other_model(tmp_path, family)
    engine = TorchEngine(dtype="float32", threads=1, device="cpu")
    engine.load_base("base", str(tmp_path))
    found = lora_layers(ModelFolder(tmp_path))
    for parts in ((True, False, False), (False, True, False), (False, False, True)):
        part = ("attn", "mlp", "unembed")[parts.index(True)]
        layers = {name: layer for name, layer in found.items() if layer.part == part}
        if not layers:
            continue
        engine.create_model("m", "base", LoraSpec(2, 0, *parts))
        weights = engine.read_state("m").weights
        shapes = {f"{name}.lora_A.weight": (2, layer.inputs) for name, layer in layers.items()}
        shapes |= {f"{name}.lora_B.weight": (layer.outputs, 2) for name, layer in layers.items()}
        assert {name: array.shape for name, array in weights.items()} == shapes
