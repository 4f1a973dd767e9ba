"""An exported adapter keeps the rules by which vLLM's own loader takes one (`vllm/lora/peft_helper.py`,
`lora_model.py`, `utils.py`), as read there. The slow suite loads it with vLLM itself: `test_other_programs.py`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from policies import step

import mint
from mint.compose.export import export_checkpoint
from mint.models.tensor_files import open_tensors

LINEAR = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
"""What vLLM's Qwen3 lets loras replace in its layers."""

MAX_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values of `--max-lora-rank`; an adapter's rank may be any up to it."""


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    with mint.ServiceClient() as service:
        client = service.create_lora_training_client(base_model="mint/tiny", rank=12, train_unembed=False, seed=1)
        step(client)
        path = client.save_weights_for_sampler("s").result().path or ""
    export_checkpoint(path, output=tmp_path / "adapter", format="peft")
    return tmp_path / "adapter"


def test_the_configuration_passes_its_checks(adapter: Path) -> None:
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert type(config["r"]) is int and type(config["lora_alpha"]) is int and config["r"] <= max(MAX_RANKS)
    assert isinstance(config["target_modules"], list)
    assert config["bias"] == "none" and not config["use_dora"] and not config["modules_to_save"]
    assert config["lora_alpha"] / config["r"] == 32 / 12  # its scaling factor, unless use_rslora
    assert not config["use_rslora"]


def test_every_tensor_has_a_name_that_it_parses_and_a_module_that_it_expects(adapter: Path) -> None:
    tensors = open_tensors(adapter / "adapter_model.safetensors")
    modules: dict[str, set[str]] = {}
    for name, tensor in tensors.items():
        assert name.startswith("base_model.model.")
        *module, half, weight = name.removeprefix("base_model.model.").split(".")
        assert weight == "weight" and half in ("lora_A", "lora_B")
        assert module[-1] in LINEAR
        assert tensor.shape[0 if half == "lora_A" else 1] == 12
        modules.setdefault(".".join(module), set()).add(half)
    assert set(map(frozenset, modules.values())) == {frozenset({"lora_A", "lora_B"})}
    packed = ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"})  # fused there: all of them, or none
    for parts in packed:
        counts = {sum(module.endswith(part) for module in modules) for part in parts}
        assert counts == {4}
