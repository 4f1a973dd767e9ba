"""What transformers would load in silence, or fail on in its own words, is refused by name with what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_data import CROSS_ENTROPY, LORA, datum
from safetensors.torch import load_file, save_file
from small_models import write_other_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from mint.engine.torch_engine import TorchEngine
from mint.engine.transformers.loading import load_model
from mint.errors import CheckpointError, InvalidRequestError, MintError
from mint.models.folder import ModelFolder

Tensors = dict[str, Tensor]
QUERIES = "model.layers.0.self_attn.q_proj.weight"


def _load(folder: Path) -> None:
    load_model(ModelFolder(folder), torch.float32)


def _rewrite(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})


def _set(folder: Path, **settings: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda found: {name: (each * 50).to(torch.int8) for name, each in found.items()}, r"as I8.*bfloat16"),
        (lambda found: {**found, QUERIES: found[QUERIES].to(torch.int32)}, r"q_proj\.weight as I32.*bfloat16"),
        (lambda found: {**found, QUERIES: found[QUERIES].to(torch.float8_e4m3fn)}, r"as F8_E4M3.*quantization_config"),
        (lambda found: {**found, "model.layers.9.extra.weight": torch.ones(2, 2)}, r"layers\.9\.extra.*leave the"),
        (
            lambda found: found | {name.replace(".0.", ".2."): each.clone() for name, each in found.items()},
            r"layers\.2\..*Give the config\.json that belongs",
        ),
        (
            lambda found: {**found, QUERIES: torch.ones(300, 300)},
            r"q_proj\.weight of shape \[300, 300\]; config\.json says \[64, 48\]",
        ),
        (lambda found: {**found, QUERIES: torch.ones(3, 3)}, r"q_proj\.weight of shape \[3, 3\]; config\.json says"),
    ],
)
def test_tensors_that_do_not_belong_are_refused_by_name(
    change: Callable[[Tensors], Tensors], named: str, tmp_path: Path
) -> None:
    write_other_model(tmp_path, "gemma2")
    _rewrite(tmp_path, change)
    with pytest.raises(InvalidRequestError, match=named):
        _load(tmp_path)


def test_what_published_files_hold_beside_the_model_is_left_out(tmp_path: Path) -> None:
    write_other_model(tmp_path / "gpt2", "gpt2")
    mask = torch.ones(1, 1, 4, 4, dtype=torch.uint8)
    _rewrite(
        tmp_path / "gpt2",
        lambda found: (
            {name.removeprefix("transformer."): each for name, each in found.items()}
            | {"h.0.attn.bias": mask, "h.0.attn.masked_bias": torch.tensor(-1e4)}
        ),
    )
    write_other_model(tmp_path / "glm4_moe", "glm4_moe", num_nextn_predict_layers=1)
    _rewrite(
        tmp_path / "glm4_moe",
        lambda found: {
            **found,
            "model.layers.2.eh_proj.weight": torch.ones(2, 2),
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2),
        },
    )
    for family in ("gpt2", "glm4_moe"):
        _load(tmp_path / family)
    _set(tmp_path / "glm4_moe", num_nextn_predict_layers=0)
    with pytest.raises(InvalidRequestError, match="eh_proj"):
        _load(tmp_path / "glm4_moe")


def test_the_text_part_of_a_model_of_images_loads_alone_and_is_checked(tmp_path: Path) -> None:
    text = {"hidden_size": 48, "intermediate_size": 80, "intermediate_size_mlp": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 97,
            "num_local_experts": 2, "pad_token_id": 0}  # fmt: skip
    config = AutoConfig.for_model("llama4", text_config=text)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    _set(tmp_path, **{**config.to_dict(), "architectures": ["Llama4ForConditionalGeneration"]})
    images = {"vision_model.class_embedding": torch.ones(2), "vision_model.ids": torch.ones(2, dtype=torch.int64)}

    def published(found: Tensors) -> Tensors:
        return {f"language_model.{name}": each for name, each in found.items()} | images

    _rewrite(tmp_path, published)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "llama4"
    _load(tmp_path)
    _rewrite(tmp_path, lambda found: {**found, "language_model.model.layers.9.x.weight": torch.ones(2)})
    with pytest.raises(InvalidRequestError, match=r"layers\.9"):
        _load(tmp_path)


@pytest.mark.parametrize("damage", [lambda whole: whole[:-100], lambda _: b"", lambda _: b"garbage" * 100])
def test_a_damaged_weight_file_is_refused_by_name(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    write_other_model(tmp_path, "gemma2")
    file = tmp_path / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read.*download the model again"):
        _load(tmp_path)


def test_tensors_that_are_missing_are_counted(tmp_path: Path) -> None:
    write_other_model(tmp_path, "gemma2")
    _rewrite(tmp_path, lambda found: {name: each for name, each in found.items() if "layers.0.mlp" not in name})
    with pytest.raises(InvalidRequestError, match=r"the tensor model\.layers\.0\.mlp\.\w+\.weight, and 2 more\. Give"):
        _load(tmp_path)


def test_an_encoder_without_an_output_layer_is_called_an_encoder(tmp_path: Path) -> None:
    write_other_model(tmp_path, "bert").base_model.save_pretrained(tmp_path)
    with pytest.raises(InvalidRequestError, match=r"lacks the tensor cls\..*: it is an encoder without .*Choose a"):
        _load(tmp_path)


def test_a_loaded_model_stays_as_it_is_when_its_file_is_written_over(tmp_path: Path) -> None:
    write_other_model(tmp_path, "glm4")
    engine = TorchEngine(dtype="float32", threads=1, device="cpu")
    engine.load_base("base", str(tmp_path))
    engine.create_model("m", "base", LORA)
    before = engine.forward("m", [datum([3, 4, 5, 6])], CROSS_ENTROPY).logprobs[0]
    with (tmp_path / "model.safetensors").open("r+b") as file:  # as `cp` does, which keeps the file
        size_bytes = file.seek(0, 2)
        file.seek(size_bytes // 2)
        file.write(bytes(size_bytes - size_bytes // 2))
    after = engine.forward("m", [datum([3, 4, 5, 6])], CROSS_ENTROPY).logprobs[0]
    assert after.tobytes() == before.tobytes()


@pytest.mark.parametrize("number", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite_are_refused_by_name(number: float, tmp_path: Path) -> None:
    write_other_model(tmp_path, "gemma2")

    def damage(found: Tensors) -> Tensors:
        found["model.embed_tokens.weight"][5, 3] = number  # the tokens that are measured need not have the sixth
        return found

    _rewrite(tmp_path, damage)
    with pytest.raises(CheckpointError, match=rf"{tmp_path}: the tensor model\.embed_tokens\.weight has numbers that"):
        _load(tmp_path)


@pytest.mark.parametrize(
    "settings",
    [
        {"head_dim": "abc"},
        {"num_attention_heads": 0},
        {"num_key_value_heads": 0},
        {"hidden_activation": "nonsense"},
        {"hidden_activation": []},
        {"layer_types": ["full_attention"]},
        {"layer_types": {}},
        {"rope_parameters": 5},
        {"hidden_size": -1},
        {"vocab_size": 10**12},
        {"num_hidden_layers": None},
        {"pad_token_id": 10**6},
        {"sliding_window": None},
        {"sliding_window": 0},
        {"sliding_window": -5},
        {"quantization_config": "fp8"},
        {"quantization_config": [1]},
    ],
)
def test_a_configuration_that_transformers_cannot_take_is_refused_with_the_folder(
    settings: dict[str, object], tmp_path: Path
) -> None:
    write_other_model(tmp_path, "gemma2")
    _set(tmp_path, **settings)
    with pytest.raises(MintError) as refusal:
        _engine(tmp_path)
    assert isinstance(refusal.value, InvalidRequestError)
    assert refusal.value.remedy and str(tmp_path) in str(refusal.value)


def test_a_size_of_zero_is_named(tmp_path: Path) -> None:
    write_other_model(tmp_path, "gemma2")
    _set(tmp_path, num_key_value_heads=0)
    with pytest.raises(InvalidRequestError, match=r"it divides by zero, and config\.json has num_key_value_heads = 0"):
        _engine(tmp_path)


def _engine(folder: Path) -> TorchEngine:
    engine = TorchEngine(dtype="float32", threads=1, device="cpu")
    engine.load_base("base", str(folder))
    return engine
