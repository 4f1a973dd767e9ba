"""Base models that were published in FP8 or MXFP4: mint computes with the numbers that the files stand for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_data import CROSS_ENTROPY, LORA, datum, job, random_data, take_gradient, train
from quantized_folders import Quantized, e4m3_values, quantize_folder, to_fp8, to_mxfp4
from small_models import write_model, write_other_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from mint.engine.memory.base_bytes import base_bytes
from mint.engine.model.config import read_decoder_config
from mint.engine.model.torch_operations import TorchOperations
from mint.engine.model.weight_loader import load_weights
from mint.engine.model.weights import MixtureWeights
from mint.engine.protocol import LORA_ALPHA, LoraSpec
from mint.engine.torch_engine import TorchEngine
from mint.errors import CheckpointError, InvalidRequestError
from mint.models.folder import ModelFolder
from mint.models.hf_format import write_merged

WIDE = {"hidden_size": 192, "intermediate_size": 288, "head_dim": 32, "num_attention_heads": 4}
"""Where the last blocks of 128 are smaller ones."""

BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def _compressed(strategy: str, block: list[int] | None = None) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "block_structure": block}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}},
        "ignore": ["lm_head"],
    }


FORMATS = {
    "blocks of 128": (BLOCKS, (128, 128), "weight_scale_inv"),
    "small blocks": ({**BLOCKS, "weight_block_size": [16, 32]}, (16, 32), "weight_scale_inv"),
    "one scale": ({**BLOCKS, "weight_block_size": None}, None, "weight_scale_inv"),
    "outputs": (_compressed("channel"), (1, None), "weight_scale"),
    "matrices": (_compressed("tensor"), None, "weight_scale"),
    "compressed blocks": (_compressed("block", [128, 128]), (128, 128), "weight_scale"),
}


def _write_fp8(folder: Path, format: str = "blocks of 128", **model: Any) -> PreTrainedModel:
    quantization, block, suffix = FORMATS[format]

    def convert(name: str, weight: np.ndarray) -> Quantized | None:
        if not name.endswith("_proj.weight"):
            return None
        rows, columns = block or weight.shape
        return to_fp8(weight, (rows, columns or weight.shape[1]), suffix)

    write_model(folder / "exact", "untied", **{**WIDE, **model})
    return quantize_folder(folder / "exact", folder, quantization, convert)


def _engine(folder: Path, **settings: Any) -> TorchEngine:
    engine = TorchEngine(**{"dtype": "float32", "threads": 1, "device": "cpu", **settings})
    engine.load_base("base", str(folder))
    return engine


def _logprobs(model: torch.nn.Module, tokens: np.ndarray) -> np.ndarray:
    """Of each token but the first."""
    with torch.no_grad():
        rows = model(torch.from_numpy(tokens)[None]).logits[0].float().log_softmax(-1).numpy()
    return rows[np.arange(len(tokens) - 1), tokens[1:]]


def _own_logprobs(engine: TorchEngine, tokens: np.ndarray) -> np.ndarray:
    found = engine.sample([job(tokens, max_tokens=0, prompt_logprobs=True)])[0].prompt_logprobs
    assert found is not None
    return found[1:]


def _write_mxfp4(folder: Path) -> PreTrainedModel:
    """A GPT-OSS model whose experts are in MXFP4, as OpenAI publishes it."""

    def convert(name: str, weight: np.ndarray) -> Quantized | None:
        return to_mxfp4(weight) if name.endswith(("gate_up_proj", "down_proj")) else None

    write_model(folder / "exact", "untied", family="gpt_oss", hidden_size=64, intermediate_size=96)
    return quantize_folder(folder / "exact", folder, {"quant_method": "mxfp4"}, convert)


TOKENS = np.random.default_rng(5).integers(2, 97, 60)


def test_the_value_of_each_fp8_byte_is_torchs() -> None:
    found = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(e4m3_values(), found)


@pytest.mark.parametrize("implementation", ["mint", "transformers"])
@pytest.mark.parametrize("format", FORMATS)
def test_logprobs_are_those_of_the_numbers_in_the_files(format: str, implementation: str, tmp_path: Path) -> None:
    reference = _write_fp8(tmp_path, format)
    engine = _engine(tmp_path, implementation=implementation)
    assert engine.load_base("base", "").settings["implementation"] == implementation
    theirs = _logprobs(reference, TOKENS)
    assert np.abs(_own_logprobs(engine, TOKENS) - theirs).max() <= 2e-5
    exact = AutoModelForCausalLM.from_pretrained(tmp_path / "exact", dtype=torch.float32)
    assert np.abs(_logprobs(exact, TOKENS) - theirs).max() > 1e-3  # the files are quantized indeed


@pytest.mark.parametrize("implementation", ["mint", "transformers"])
def test_an_fp8_base_trains_as_the_model_of_its_numbers(implementation: str, tmp_path: Path) -> None:
    _write_fp8(tmp_path)
    engines = [_engine(folder, implementation=implementation) for folder in (tmp_path, tmp_path / "plain")]
    found = []
    for engine in engines:
        engine.create_model("m", "base", LORA)
        train(engine, "m")
        logprobs = engine.forward_backward("m", random_data(3), CROSS_ENTROPY).logprobs
        found.append((np.concatenate(logprobs), take_gradient(engine, "m")))
    (ours, gradient), (theirs, expected) = found
    assert np.array_equal(ours, theirs)
    assert all(np.array_equal(gradient[name], expected[name]) for name in expected)


def test_experts_in_fp8_and_bfloat16_bases_have_the_numbers_of_the_files(tmp_path: Path) -> None:
    mixture = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    reference = _write_fp8(tmp_path, "small blocks", family="qwen3_moe", **mixture)
    theirs = _logprobs(reference, TOKENS)
    for implementation in ("mint", "transformers"):
        ours = _own_logprobs(_engine(tmp_path, implementation=implementation), TOKENS)
        assert np.abs(ours - theirs).max() <= 2e-5
    halves = [_own_logprobs(_engine(place, dtype="bfloat16"), TOKENS) for place in (tmp_path, tmp_path / "plain")]
    assert np.array_equal(*halves)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("format", ["small blocks", "outputs", "one scale"])
def test_a_base_that_is_kept_in_fp8_has_the_same_numbers(
    format: str, native: bool, native_folder: Path, tmp_path: Path
) -> None:
    """`MINT_QUANTIZE=fp8` holds the codes of the files, and does not quantize a second time."""
    reference = _write_fp8(tmp_path, format)
    engine = _engine(tmp_path, quantize="fp8", native=native_folder if native else None)
    assert engine.load_base("base", "").settings["quantization"] == "fp8"
    assert np.abs(_own_logprobs(engine, TOKENS) - _logprobs(reference, TOKENS)).max() <= 2e-5
    again = _engine(tmp_path / "plain", quantize="fp8", native=native_folder if native else None)
    quantized_twice = np.abs(_own_logprobs(again, TOKENS) - _logprobs(reference, TOKENS)).max()
    assert quantized_twice > 1e-3 or format == "outputs"  # the same blocks as mint's, at these widths
    engine.create_model("m", "base", LORA)
    train(engine, "m", steps=1)
    engine.publish("m", "w")
    for sample in engine.sample([job(TOKENS[:21], weights_id="w", num_samples=3, max_tokens=9)])[0].samples:
        trained = engine.forward("m", [datum(np.concatenate([TOKENS[:21], sample.tokens]))], CROSS_ENTROPY).logprobs[0]
        assert np.array_equal(trained[20:], sample.logprobs)


def test_other_families_in_fp8_run_on_transformers(tmp_path: Path) -> None:
    def convert(name: str, weight: np.ndarray) -> Quantized | None:
        return to_fp8(weight, (16, 32), "weight_scale_inv") if name.endswith("_proj.weight") else None

    write_other_model(tmp_path / "exact", "glm4")
    reference = quantize_folder(tmp_path / "exact", tmp_path, {**BLOCKS, "weight_block_size": [16, 32]}, convert)
    engine = _engine(tmp_path)
    assert engine.load_base("base", "").settings["implementation"] == "transformers"
    assert np.abs(_own_logprobs(engine, TOKENS) - _logprobs(reference, TOKENS)).max() <= 2e-5


def test_an_export_is_merged_into_the_numbers_and_is_no_longer_quantized(tmp_path: Path) -> None:
    _write_fp8(tmp_path / "base")
    engine = _engine(tmp_path / "base")
    engine.create_model("m", "base", LoraSpec(4, 0, True, True, True))
    train(engine, "m")
    write_merged(tmp_path / "merged", tmp_path / "base", engine.read_state("m").weights, scale=LORA_ALPHA / LORA.rank)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    ours = engine.forward("m", [datum(TOKENS)], CROSS_ENTROPY).logprobs[0]
    assert np.abs(ours - _logprobs(merged, TOKENS)).max() <= 1e-4


@pytest.mark.parametrize(
    ("quantization", "named"),
    [
        ({"quant_method": "awq", "bits": 4}, "'awq'"),
        ({"quant_method": "gptq", "bits": 4}, "'gptq'"),
        ({"bits": 4}, "None"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "'pack-quantized'"),
        (
            {**_compressed("channel"), "transform_config": {"config_groups": {"v": {"type": "hadamard"}}}},
            r"transform_config.*hadamard",
        ),
        ({**BLOCKS, "weight_block_size": [128]}, r"weight_block_size"),
        ({**BLOCKS, "weight_block_size": [64, 128]}, r"down_proj.weight is \[192, 288\] with scales \[2, 3\]"),
    ],
)
@pytest.mark.parametrize("implementation", ["mint", "transformers", None])
def test_other_quantizations_are_refused_by_name(
    quantization: dict[str, Any], named: str, implementation: str | None, tmp_path: Path
) -> None:
    _write_fp8(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    with pytest.raises(InvalidRequestError, match=named) as refusal:
        _engine(tmp_path, implementation=implementation)
    assert refusal.value.remedy


@pytest.mark.parametrize("implementation", ["mint", "transformers"])
def test_scales_that_round_keys_and_values_are_left_out(implementation: str, tmp_path: Path) -> None:
    """As llm-compressor writes them with a `kv_cache_scheme`."""
    from safetensors.torch import load_file, save_file

    reference = _write_fp8(tmp_path, "outputs")
    tensors = load_file(tmp_path / "model.safetensors")
    scales = {f"model.layers.{layer}.self_attn.{part}_scale": torch.ones(1) / 8 for layer in range(3) for part in "qkv"}
    save_file(tensors | scales, tmp_path / "model.safetensors", {"format": "pt"})
    found = _own_logprobs(_engine(tmp_path, implementation=implementation), TOKENS)
    assert np.abs(found - _logprobs(reference, TOKENS)).max() <= 2e-5


def test_a_matrix_without_its_scales_is_refused_by_name(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    _write_fp8(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight_scale_inv"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        InvalidRequestError, match=r"layers\.1\.mlp\.up_proj\.weight has no weight_scale_inv.*before quant"
    ):
        ModelFolder(tmp_path).tensors()


# --- MXFP4 -----------------------------------------------------------------------------------------------------------


def test_mxfp4_experts_are_read_as_transformers_and_numpy_read_them(tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    reference = _write_mxfp4(tmp_path)
    stored, tensors = load_file(tmp_path / "model.safetensors"), ModelFolder(tmp_path).tensors()
    assert tensors.keys() == reference.state_dict().keys()
    for name in (key.removesuffix("_blocks") for key in stored if key.endswith("_blocks")):
        found = tensors[name].read()
        assert found.shape == tensors[name].shape and found.dtype == torch.float32
        assert torch.equal(found, reference.state_dict()[name])
        parts = (stored[f"{name}_blocks"], stored[f"{name}_scales"])
        assert torch.equal(found, convert_moe_packed_tensors(*parts, dtype=torch.float32))
        assert torch.equal(tensors[name].read(2), found[2]) and torch.equal(tensors[name].read(slice(1, 3)), found[1:3])


def test_every_code_and_scale_of_mxfp4_has_its_value(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    folder = ModelFolder(_json_folder(tmp_path))
    blocks = torch.arange(256, dtype=torch.uint8).repeat(16, 1).view(1, 256, 1, 16)
    save_file({"x_blocks": blocks, "x_scales": torch.arange(256, dtype=torch.uint8).view(1, 256, 1)},
              tmp_path / "model.safetensors")  # fmt: skip
    found = folder.tensors()["x"].read()[0].T.double().numpy()
    magnitudes = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values = np.concatenate([magnitudes, -magnitudes])
    for scale in range(255):
        both = blocks.view(256, 16)[scale].numpy()
        expected = np.stack([values[both & 15], values[both >> 4]], -1).ravel() * 2.0 ** (scale - 127)
        np.testing.assert_array_equal(
            found[scale], np.where(np.abs(expected) < 2.0**128, expected, np.copysign(np.inf, expected))
        )
    assert np.isnan(found[255]).all()


def _json_folder(folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "mxfp4"}}))
    return folder


@pytest.mark.parametrize("implementation", ["mint", "transformers"])
def test_an_mxfp4_base_computes_with_the_numbers_of_its_files(implementation: str, tmp_path: Path) -> None:
    reference = _write_mxfp4(tmp_path)
    engine = _engine(tmp_path, implementation=implementation)
    assert engine.load_base("base", "").settings["implementation"] == implementation
    assert np.abs(_own_logprobs(engine, TOKENS) - _logprobs(reference, TOKENS)).max() <= 2e-5


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_that_are_kept_in_mxfp4_have_the_same_numbers(
    dtype: str, native: bool, native_folder: Path, tmp_path: Path
) -> None:
    _write_mxfp4(tmp_path)
    kernels = native_folder if native else None
    lora = LoraSpec(4, 7, train_attn=True, train_mlp=True, train_unembed=True)
    kept, plain = (_engine(tmp_path, dtype=dtype, native=kernels, quantize=kind) for kind in ("mxfp4", None))
    assert kept.load_base("base", "").settings["quantization"] == "mxfp4"
    for engine in (kept, plain):
        engine.create_model("m", "base", lora)
    train(plain, "m")
    kept.write_state("m", plain.read_state("m"))
    data = random_data(2)
    found, expected = (engine.forward_backward("m", data, CROSS_ENTROPY).logprobs for engine in (kept, plain))
    differences = np.abs(np.concatenate(found) - np.concatenate(expected))
    if dtype == "float32":
        assert differences.max() <= 2e-5
        own_gradient, gradient = take_gradient(kept, "m"), take_gradient(plain, "m")
        scale = max(float(np.abs(part).max()) for part in gradient.values())
        assert all(np.abs(own_gradient[name] - gradient[name]).max() <= 1e-4 * scale for name in gradient)
    else:  # products are rounded, so that a token may go to another of two near experts
        assert np.median(differences) <= 0.02
    kept.publish("m", "w")
    prompt = TOKENS[:21]
    for sample in kept.sample([job(prompt, weights_id="w", num_samples=3, max_tokens=9)])[0].samples:
        whole = np.concatenate([prompt, sample.tokens])
        trained = kept.forward("m", [datum(whole, prompt=len(prompt))], CROSS_ENTROPY).logprobs[0]
        assert np.array_equal(trained[len(prompt) - 1 :], sample.logprobs)


def test_kept_mxfp4_takes_five_bits_for_each_number_of_experts(tmp_path: Path) -> None:
    _write_mxfp4(tmp_path)
    folder, operations = ModelFolder(tmp_path), TorchOperations(torch.bfloat16, torch.device("cpu"))
    config = read_decoder_config(folder.config)
    loaded = load_weights(config, folder.tensors(), operations, "mxfp4")
    mixture = loaded.layers[1].mlp
    assert isinstance(mixture, MixtureWeights)
    for expert in mixture.experts:
        for matrix in (expert.gate_up, expert.down):
            assert 8 * matrix.size_bytes == 5 * matrix.outputs * matrix.inputs
    plain, kept = (base_bytes(config, folder.tensors(), operations, kind) for kind in (None, "mxfp4"))
    experts = 3 * config.num_hidden_layers * 6 * 64 * 96
    assert plain - kept == (16 - 5) * experts // 8


def test_mxfp4_is_refused_for_a_base_that_is_not_stored_in_it(tmp_path: Path) -> None:
    write_model(tmp_path, "untied", family="gpt_oss")
    with pytest.raises(InvalidRequestError, match=r"MINT_QUANTIZE = mxfp4.*GPT-OSS model has none.*nf4"):
        _engine(tmp_path, quantize="mxfp4")


@pytest.mark.parametrize("part", ["_scales", "_blocks"])
def test_mxfp4_experts_without_scales_or_of_another_shape_are_refused_by_name(part: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    _write_mxfp4(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = f"model.layers.1.mlp.experts.down_proj{part}"
    if part == "_scales":
        del tensors[name]
    else:
        tensors[name] = tensors[name][..., :8].contiguous()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(InvalidRequestError, match=r"layers\.1\.mlp\.experts\.down_proj_blocks"):
        ModelFolder(tmp_path).tensors()


@pytest.mark.parametrize("quantization", [None, "fp8"])
@pytest.mark.parametrize("damage", ["scale", "code"])
def test_an_fp8_base_with_a_number_that_is_not_finite_is_refused_by_name(
    damage: str, quantization: str | None, tmp_path: Path
) -> None:
    damaged = "model.layers.1.mlp.down_proj.weight"

    def convert(name: str, weight: np.ndarray) -> Quantized | None:
        if not name.endswith("_proj.weight"):
            return None
        stored, numbers = to_fp8(weight, (128, 128), "weight_scale_inv")
        if name == damaged and damage == "scale":
            stored["weight_scale_inv"][-1, -1] = float("inf")
        elif name == damaged:
            stored[""].view(torch.uint8)[-1, -1] = 0xFF  # a negative NaN
        return stored, numbers

    whole_blocks = {**WIDE, "hidden_size": 128, "intermediate_size": 256}  # so that FP8 keeps them as they are
    write_model(tmp_path / "exact", "untied", **whole_blocks)
    quantize_folder(tmp_path / "exact", tmp_path, BLOCKS, convert)
    with pytest.raises(CheckpointError, match=rf"the tensor {re.escape(damaged)} has numbers that are not finite"):
        _engine(tmp_path, quantize=quantization)


@pytest.mark.parametrize("quantization", [None, "mxfp4"])
def test_experts_with_a_scale_that_is_no_number_are_refused_by_name(quantization: str | None, tmp_path: Path) -> None:
    def convert(name: str, weight: np.ndarray) -> Quantized | None:
        if not name.endswith(("gate_up_proj", "down_proj")):
            return None
        stored, numbers = to_mxfp4(weight)
        if "layers.1" in name and name.endswith("down_proj"):
            stored["_scales"][-1, -1, -1] = 255
        return stored, numbers

    write_model(tmp_path / "exact", "untied", family="gpt_oss", hidden_size=64, intermediate_size=96)
    quantize_folder(tmp_path / "exact", tmp_path, {"quant_method": "mxfp4"}, convert)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.down_proj\S* has numbers that are not finite"):
        _engine(tmp_path, quantize=quantization)


@pytest.mark.parametrize("groups", [[{"weights": {}}], "none", {"group_0": ["weights"]}])
def test_groups_of_layers_that_are_no_objects_are_refused_by_name(groups: object, tmp_path: Path) -> None:
    _write_fp8(tmp_path, "outputs")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["config_groups"] = groups
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidRequestError, match="config_groups"):
        _engine(tmp_path)
