"""Exports give the same logits in PEFT and in transformers as in mint, unembedding and tied embeddings included."""

from __future__ import annotations

import errno
import itertools
import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from engine_data import CROSS_ENTROPY, train
from safetensors import SafetensorError
from small_models import FAMILIES, ODD_NAMES, QWENS_WITH_IMAGES, write_model, write_other_model, write_qwen_with_images
from transformers import AutoModelForCausalLM, PreTrainedModel

from mint.engine.bases.lora_layers import lora_layers
from mint.engine.protocol import LoraSpec, TrainDatum
from mint.engine.torch_engine import TorchEngine
from mint.engine.transformers import merged_model
from mint.errors import CheckpointError, InvalidRequestError
from mint.models import hf_format
from mint.models.folder import ModelFolder
from mint.models.hf_format import make_gguf_ready, write_merged
from mint.models.peft_format import PeftConfig, base_layers, config_json, read_config, read_weights, write_peft
from mint.models.tensor_files import open_tensors, read_tensors, write_tensors

PARTS = [parts for parts in itertools.product([True, False], repeat=3) if any(parts)]
TOKENS = np.random.default_rng(0).integers(0, 64, 30)


def _trained(folder: Path, shape: str, parts: tuple[bool, bool, bool], **model: object) -> tuple[TorchEngine, LoraSpec]:
    write_model(folder, shape, **model)
    return _train(folder, parts)


def _train(folder: Path, parts: tuple[bool, bool, bool]) -> tuple[TorchEngine, LoraSpec]:
    engine = TorchEngine(dtype="float32", threads=1, device="cpu")
    engine.load_base("base", str(folder))
    lora = LoraSpec(8, 0, *parts)
    engine.create_model("m", "base", lora)
    train(engine, "m", steps=3)
    return engine, lora


def _ours(engine: TorchEngine) -> np.ndarray:
    """Logprobs [N, V]: every token of the vocabulary as the target."""
    vocab = engine.load_base("base", "").vocab_size  # it is loaded, so this only answers
    data = [TrainDatum(TOKENS, np.full(30, target), np.ones(30, np.float32)) for target in range(vocab)]
    return np.stack(engine.forward("m", data, CROSS_ENTROPY).logprobs, axis=1)


def _theirs(model: torch.nn.Module) -> np.ndarray:
    with torch.no_grad():
        return model.float().eval()(torch.from_numpy(TOKENS)[None]).logits[0].log_softmax(-1).numpy()


def _read(folder: Path, base: Path) -> tuple[PeftConfig, dict[str, np.ndarray]]:
    config = read_config((folder / "adapter_config.json").read_bytes())
    with (folder / "adapter_model.safetensors").open("rb") as file:
        return config, read_weights(file, config, ModelFolder(base), base_layers(ModelFolder(base)))


@pytest.mark.parametrize("shape", ["tied", "untied"])
@pytest.mark.parametrize("parts", PARTS)
def test_peft_loads_the_adapter_with_the_same_logits(
    tmp_path: Path, shape: str, parts: tuple[bool, bool, bool]
) -> None:
    import peft  # deferred: loading it takes seconds, in every worker

    engine, lora = _trained(tmp_path / "base", shape, parts)
    weights = engine.read_state("m").weights
    write_peft(tmp_path / "adapter", weights, rank=lora.rank, alpha=32.0, base_model=str(tmp_path / "base"))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    plain = _theirs(base)
    theirs = _theirs(peft.PeftModel.from_pretrained(base, tmp_path / "adapter"))
    assert np.abs(_ours(engine) - theirs).max() <= 1e-4
    assert np.abs(plain - theirs).max() > 0.1  # the lora does something


@pytest.mark.parametrize("shape", ["tied", "untied"])
@pytest.mark.parametrize("parts", PARTS)
def test_transformers_loads_the_merged_model_with_the_same_logits(
    tmp_path: Path, shape: str, parts: tuple[bool, bool, bool]
) -> None:
    engine, _ = _trained(tmp_path / "base", shape, parts)
    write_merged(tmp_path / "merged", tmp_path / "base", engine.read_state("m").weights, scale=32 / 8)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert np.abs(_ours(engine) - _theirs(merged)).max() <= 1e-4
    assert merged.config.tie_word_embeddings == (shape == "tied" and not parts[2])
    assert (tmp_path / "merged" / "tokenizer.json").is_file()


def test_a_tied_model_whose_file_has_an_output_layer_keeps_that(tmp_path: Path) -> None:
    write_other_model(tmp_path / "base", "glm4", tie_word_embeddings=False)
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    (tmp_path / "base" / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    engine, _ = _train(tmp_path / "base", (True, True, True))
    write_merged(tmp_path / "merged", tmp_path / "base", engine.read_state("m").weights, scale=32 / 8)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert np.abs(_ours(engine) - _theirs(merged)).max() <= 1e-4


OTHER_NAMES: dict[str, dict[str, Any]] = {
    # the files call a layer, the embedding or the output layer otherwise than the model does
    "bloom": {},
    "ctrl": ODD_NAMES["ctrl"],
    "falcon": {"head_dim": None},
    "gpt2": {},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "gpt_neox": {},
    "mamba": {},
    "mpt": {},
    "opt": {},
    "zamba2": ODD_NAMES["zamba2"],
}
"""Families on transformers whose files a lora cannot be merged into by the names of its layers."""


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("family", OTHER_NAMES)
def test_transformers_merges_where_files_have_other_names(
    tmp_path: Path, family: str, dtype: Literal["float32", "float16"]
) -> None:
    base = tmp_path / "base"
    plain = _theirs(write_other_model(base, family, **OTHER_NAMES[family]))
    (base / "generation_config.json").write_text('{"temperature": 0.5, "do_sample": false}')  # saving refuses this one
    engine, _ = _train(base, (True, True, True))
    weights = engine.read_state("m").weights
    assert merged_model.needs_transformers(base, weights)
    merged_model.write_merged(tmp_path / "merged", base, weights, scale=32 / 8, dtype=dtype)
    merged, report = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert merged.dtype == getattr(torch, dtype) and not any(report.values())
    assert np.abs(_ours(engine) - _theirs(merged)).max() <= (1e-4 if dtype == "float32" else 0.05)
    assert np.abs(plain - _theirs(merged)).max() > 0.1  # the lora does something
    for name in ("tokenizer.json", "generation_config.json"):
        assert (tmp_path / "merged" / name).read_bytes() == (base / name).read_bytes()


@pytest.mark.parametrize("mask", [np.tril(np.ones((1, 1, 8, 8), np.uint8)), np.float32(-1e9)])
def test_the_masks_of_old_files_are_no_weights(tmp_path: Path, mask: np.ndarray) -> None:
    base = tmp_path / "base"
    write_other_model(base, "gptj", rotary_dim=4)
    tensors, _ = read_tensors(base / "model.safetensors")
    write_tensors(base / "model.safetensors", {**tensors, "transformer.h.0.attn.masked_bias": np.array(mask)}, {})
    engine, _ = _train(base, (True, True, True))
    weights = engine.read_state("m").weights
    assert merged_model.needs_transformers(base, weights)
    merged_model.write_merged(tmp_path / "merged", base, weights, scale=32 / 8, dtype="float16")
    merged, report = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(report.values())
    assert np.abs(_ours(engine) - _theirs(merged)).max() <= 0.05


def test_what_is_no_weight_keeps_its_dtype_in_a_merged_file(tmp_path: Path) -> None:
    engine, _ = _trained(tmp_path / "base", "tied", (True, True, True))
    tensors, _ = read_tensors(tmp_path / "base" / "model.safetensors")
    odd = {"flags": np.array([True, False]), "places": np.arange(3) * 2**40}
    write_tensors(tmp_path / "base" / "model.safetensors", {**tensors, **odd}, {})
    write_merged(tmp_path / "out", tmp_path / "base", engine.read_state("m").weights, scale=4.0, dtype="float16")
    written, _ = read_tensors(tmp_path / "out" / "model.safetensors")
    for name, array in odd.items():
        assert written[name].dtype == array.dtype and np.array_equal(written[name], array)
    assert {array.dtype.name for name, array in written.items() if name not in odd} == {"float16"}


def test_all_chat_templates_and_vocabularies_are_copied_and_no_adapter(tmp_path: Path) -> None:
    base = tmp_path / "base"
    engine, _ = _trained(base, "tied", (True, False, False))
    copied = ["chat_template.jinja", "additional_chat_templates/tools.jinja", "vocab.bpe", "qwen.tiktoken"]
    for name in [*copied, "adapter_config.json", "README.md"]:
        (base / name).parent.mkdir(exist_ok=True)
        (base / name).write_text(name)
    write_merged(tmp_path / "out", base, engine.read_state("m").weights, scale=4.0)
    names = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert names >= {*copied, "tokenizer.json"} and not names & {"adapter_config.json", "README.md"}


def test_files_take_a_lora_by_its_names_where_they_have_them(tmp_path: Path) -> None:
    write_other_model(tmp_path / "glm4", "glm4")
    write_other_model(tmp_path / "gpt2", "gpt2")
    engine, _ = _train(tmp_path / "glm4", (True, True, True))
    assert not merged_model.needs_transformers(tmp_path / "glm4", engine.read_state("m").weights)
    # a square matrix of GPT-2 has the shape of its transpose
    name = "transformer.h.0.attn.c_proj"
    weights = {f"{name}.lora_A.weight": np.ones((1, 48), np.float32), f"{name}.lora_B.weight": np.ones((48, 1), "f4")}
    assert hf_format.holds_layers(ModelFolder(tmp_path / "gpt2"), weights)
    assert merged_model.needs_transformers(tmp_path / "gpt2", weights)


def test_a_merge_refuses_layers_that_the_base_lacks_and_other_shapes(tmp_path: Path) -> None:
    write_other_model(tmp_path / "base", "gpt2")

    def merge(name: str, inputs: int, b: float = 1.0, dtype: Literal["float32", "float16"] = "float32") -> None:
        arrays = {"A": np.ones((1, inputs), np.float32), "B": np.full((144, 1), b, np.float32)}
        weights = {f"{name}.lora_{part}.weight": array for part, array in arrays.items()}
        merged_model.write_merged(tmp_path / "merged", tmp_path / "base", weights, scale=1.0, dtype=dtype)

    attention = "transformer.h.0.attn.c_attn"
    with pytest.raises(CheckpointError, match=r"has no layer transformer\.h\.9\.attn.*--format peft"):
        merge("transformer.h.9.attn.c_attn", 48)
    with pytest.raises(CheckpointError, match=r"shapes \(1, 47\) and \(144, 1\), the base \(144, 48\)"):
        merge(attention, 47)
    with pytest.raises(CheckpointError, match=r"c_attn.* reaches 1e\+09, too large for float16.*--format hf"):
        merge(attention, 48, 1e9, "float16")
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("parts", [(True, True, True), (False, True, False)])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "qwen3"])
def test_every_family_gives_the_same_logits_in_peft_and_in_transformers(
    tmp_path: Path, family: str, parts: tuple[bool, bool, bool]
) -> None:
    import peft  # deferred: loading it takes seconds, in every worker

    engine, lora = _trained(tmp_path / "base", "untied", parts, family=family, shards="40KB")
    weights = engine.read_state("m").weights
    write_peft(tmp_path / "adapter", weights, rank=lora.rank, alpha=32.0, base_model=str(tmp_path / "base"))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    plain = _theirs(base)
    theirs = _theirs(peft.PeftModel.from_pretrained(base, tmp_path / "adapter"))
    write_merged(tmp_path / "merged", tmp_path / "base", weights, scale=32 / 8)
    merged = _theirs(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    ours = _ours(engine)
    assert np.abs(ours - theirs).max() <= 1e-4
    assert np.abs(ours - merged).max() <= 1e-4
    assert np.abs(plain - theirs).max() > 0.1  # the lora does something
    _, back = _read(tmp_path / "adapter", tmp_path / "base")
    assert all(np.array_equal(back[name], array) for name, array in weights.items())


@pytest.mark.parametrize("family", ODD_NAMES)
def test_peft_finds_each_lora_where_last_names_of_layers_are_not_enough(tmp_path: Path, family: str) -> None:
    import peft  # deferred: loading it takes seconds, in every worker

    base = write_other_model(tmp_path / "base", family, **ODD_NAMES[family])
    engine, lora = _train(tmp_path / "base", (True, True, True))
    weights = engine.read_state("m").weights
    write_peft(tmp_path / "adapter", weights, rank=lora.rank, alpha=32.0, base_model=str(tmp_path / "base"))
    plain = _theirs(base)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert np.abs(_ours(engine) - _theirs(adapted)).max() <= 1e-4
    assert np.abs(plain - _theirs(adapted)).max() > 0.1  # the lora does something
    found = {name for name, _ in adapted.named_parameters() if ".lora_" in name}
    assert {name.removeprefix("base_model.model.").replace(".default", "") for name in found} == weights.keys()


def _targets(*modules: str) -> tuple[list[str], list[str]]:
    """`target_modules` and `target_parameters` of a lora on these layers."""
    config = json.loads(config_json(modules, rank=4, alpha=32.0, base_model=""))
    return config["target_modules"], config.get("target_parameters", [])


def test_a_name_that_ends_in_a_number_is_exported_with_the_name_before_it() -> None:
    assert _targets("h.0.ffn.0", "h.0.ffn.2", "h.1.q_proj") == (["ffn.0", "ffn.2", "q_proj"], [])
    assert _targets("layers.1.adapters.0.1") == (["adapters.0.1"], [])
    assert _targets("lm_head") == (["lm_head"], [])


def test_mlps_are_parameters_where_other_layers_may_have_experts() -> None:
    layers = ("model.layers.0", "model.layers.1")
    attention, gates = [f"{layer}.self_attn.q_proj" for layer in layers], [f"{layer}.mlp.gate_proj" for layer in layers]
    assert _targets(*attention, *gates) == (["gate_proj", "q_proj"], [])
    assert _targets(*attention, gates[0]) == (["q_proj"], [f"{gates[0]}.weight"])
    in_lists = [f"{layer}.mlps.{place}.gate_proj" for layer in layers for place in (0, 1)]
    assert _targets(*attention, *in_lists) == (["q_proj"], [f"{name}.weight" for name in in_lists])
    experts = [f"model.layers.{layer}.mlp.experts.{place}.gate_proj" for layer in (0, 1) for place in (0, 1)]
    assert _targets(*attention, *experts) == (["gate_proj", "q_proj"], [])


@pytest.mark.parametrize(("family", "shape"), list(itertools.product(QWENS_WITH_IMAGES, ["tied", "untied"])))
def test_the_text_model_of_one_with_images_is_trained_and_exported(tmp_path: Path, family: str, shape: str) -> None:
    import peft  # deferred: loading it takes seconds, in every worker

    base = tmp_path / "base"
    write_qwen_with_images(base, shape, family=family)
    engine, lora = _train(base, (True, True, True))
    assert engine.load_base("base", "").settings["implementation"] == "mint"
    weights = engine.read_state("m").weights
    write_peft(tmp_path / "adapter", weights, rank=lora.rank, alpha=32.0, base_model=str(base))
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    assert np.abs(_ours(engine) - _theirs(peft.PeftModel.from_pretrained(model, tmp_path / "adapter"))).max() <= 1e-4
    _, back = _read(tmp_path / "adapter", base)
    assert all(np.array_equal(back[name], array) for name, array in weights.items())
    write_merged(tmp_path / "merged", base, weights, scale=32 / 8)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.config.model_type == f"{family}_text"
    assert np.abs(_ours(engine) - _theirs(merged)).max() <= 1e-4


def test_experts_that_transformers_stored_one_by_one_come_back_as_they_went(tmp_path: Path) -> None:
    """They are more than ten, which their names do not sort by number."""
    parts = (False, True, False)
    engine, lora = _trained(tmp_path / "base", "untied", parts, family="qwen3_5_moe_text", experts_apart=True)
    weights = engine.read_state("m").weights
    unsorted = {name: weights[name] for name in sorted(weights)}
    write_peft(tmp_path / "adapter", unsorted, rank=lora.rank, alpha=32.0, base_model=str(tmp_path / "base"))
    _, back = _read(tmp_path / "adapter", tmp_path / "base")
    assert all(np.array_equal(back[name], array) for name, array in weights.items())
    write_merged(tmp_path / "merged", tmp_path / "base", weights, scale=32 / 8)
    assert np.abs(_ours(engine) - _theirs(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))).max() <= 1e-4


def test_a_mixture_with_dense_layers_gives_the_same_logits_in_peft_and_in_transformers(tmp_path: Path) -> None:
    import peft  # deferred: loading it takes seconds, in every worker

    parts = (False, True, False)
    engine, lora = _trained(tmp_path / "base", "untied", parts, family="qwen3_moe", mlp_only_layers=[1])
    weights = engine.read_state("m").weights
    assert {f"model.layers.{place}.up_proj.lora_A.weight" for place in ("1.mlp", "0.mlp.experts.5")} <= weights.keys()
    write_merged(tmp_path / "merged", tmp_path / "base", weights, scale=32 / 8)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert np.abs(_ours(engine) - _theirs(merged)).max() <= 1e-4
    write_peft(tmp_path / "adapter", weights, rank=lora.rank, alpha=32.0, base_model=str(tmp_path / "base"))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert np.abs(_ours(engine) - _theirs(adapted)).max() <= 1e-4
    _, back = _read(tmp_path / "adapter", tmp_path / "base")
    assert all(np.array_equal(back[name], array) for name, array in weights.items())


def test_a_bfloat16_base_is_merged_in_float32(tmp_path: Path) -> None:
    import peft  # deferred: loading it takes seconds, in every worker

    engine, _ = _trained(tmp_path / "base", "tied", (True, True, True))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "half")
    weights = engine.read_state("m").weights
    write_merged(tmp_path / "merged", tmp_path / "half", weights, scale=4.0)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.dtype == torch.float32
    adapted = AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype=torch.float32)
    write_peft(tmp_path / "adapter", weights, rank=8, alpha=32.0, base_model="")
    expected = _theirs(peft.PeftModel.from_pretrained(adapted, tmp_path / "adapter"))
    assert np.abs(_theirs(merged) - expected).max() <= 1e-4


def test_an_adapter_comes_back_as_it_went(tmp_path: Path) -> None:
    engine, lora = _trained(tmp_path / "base", "tied", (True, True, True))
    weights = engine.read_state("m").weights
    write_peft(tmp_path / "adapter", weights, rank=lora.rank, alpha=32.0, base_model="mint/tiny")
    config, back = _read(tmp_path / "adapter", tmp_path / "base")
    assert (config.rank, config.alpha, config.base_model) == (8, 32.0, "mint/tiny")
    engine.load_weights("back", "base", lora, back)
    assert all(np.array_equal(back[name], array) for name, array in weights.items())


def test_an_adapter_with_other_tensors_is_refused(tmp_path: Path) -> None:
    engine, lora = _trained(tmp_path / "base", "tied", (True, False, False))
    write_peft(tmp_path, engine.read_state("m").weights, rank=lora.rank, alpha=32, base_model="")
    arrays, _ = read_tensors(tmp_path / "adapter_model.safetensors")
    write_tensors(tmp_path / "adapter_model.safetensors", {**arrays, "odd": np.ones(1, np.float32)}, {})
    with pytest.raises(InvalidRequestError, match="odd"):
        _read(tmp_path, tmp_path / "base")


@pytest.mark.parametrize("shape", ["tied", "untied"])
@pytest.mark.parametrize("parts", PARTS)
def test_a_folder_for_llama_cpp_meets_its_converters_conditions(
    tmp_path: Path, shape: str, parts: tuple[bool, bool, bool]
) -> None:
    engine, _ = _trained(tmp_path / "base", shape, parts)
    (tmp_path / "base" / "generation_config.json").unlink(missing_ok=True)
    weights = engine.read_state("m").weights
    write_merged(tmp_path / "out", tmp_path / "base", weights, scale=4.0, dtype="float16")
    make_gguf_ready(tmp_path / "out", tmp_path / "base")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["dtype"] == config["torch_dtype"] == "float16"
    tensors = open_tensors(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {"F16"}
    # the converter takes a missing lm_head as tied, whatever the configuration says
    assert ("lm_head.weight" in tensors) == (not config["tie_word_embeddings"]) == (shape == "untied" or parts[2])
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names >= {"tokenizer.json", "generation_config.json"} and not any("adapter" in name for name in names)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert np.abs(_ours(engine) - _theirs(merged)).max() <= 0.02  # half a float16 step of every weight


def test_weights_too_large_for_float16_are_refused(tmp_path: Path) -> None:
    engine, _ = _trained(tmp_path / "base", "tied", (True, True, True))
    with pytest.raises(CheckpointError, match="too large for float16"):
        write_merged(tmp_path / "out", tmp_path / "base", engine.read_state("m").weights, scale=1e9, dtype="float16")


def test_a_lora_of_another_model_cannot_be_merged(tmp_path: Path) -> None:
    engine, _ = _trained(tmp_path / "base", "tied", (True, True, True))
    write_model(tmp_path / "other", "one_kv_head")
    with pytest.raises(CheckpointError):
        write_merged(tmp_path / "merged", tmp_path / "other", engine.read_state("m").weights, scale=4.0)


@pytest.mark.parametrize("parts", [(True, True, True), (True, True, False)])
def test_a_tied_model_is_merged_whose_config_leaves_the_default_of_its_family_out(
    tmp_path: Path, parts: tuple[bool, bool, bool]
) -> None:
    """As the published config.json of Gemma 3 does."""
    base = tmp_path / "base"
    write_model(base, "tied", family="gemma3_text")
    config = json.loads((base / "config.json").read_text())
    assert config.pop("tie_word_embeddings")
    (base / "config.json").write_text(json.dumps(config))
    engine, _ = _train(base, parts)
    write_merged(tmp_path / "merged", base, engine.read_state("m").weights, scale=32 / 8)
    merged, report = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(report.values())
    assert np.abs(_ours(engine) - _theirs(merged)).max() <= 1e-4


def test_an_adapter_of_a_text_model_names_its_layers_apart_from_those_for_images() -> None:
    layers = [f"model.language_model.layers.0.self_attn.{name}" for name in ("k_proj", "q_proj")]
    assert _targets(*layers, "lm_head") == (["lm_head", *layers], [])


def test_peft_loads_the_adapter_of_a_model_with_images(tmp_path: Path) -> None:
    """PEFT has no LoRA on Gemma 4's layers for images, whose last names are those of the text model."""
    import peft  # deferred: loading it takes seconds, in every worker
    from transformers import AutoConfig

    torch.manual_seed(0)
    text = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 97, "max_position_embeddings": 256,
            "sliding_window": 16, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97,
            "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}  # fmt: skip
    images = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = {"image_token_id": 90, "boi_token_id": 91, "eoi_token_id": 92}
    config = AutoConfig.for_model("gemma4", text_config=text, vision_config=images, **ids)
    base = AutoModelForCausalLM.from_config(config)
    base.save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "tokenizer.json").write_text("{}")
    engine, lora = _train(tmp_path / "base", (True, True, True))
    weights = engine.read_state("m").weights
    write_peft(tmp_path / "adapter", weights, rank=lora.rank, alpha=32.0, base_model=str(tmp_path / "base"))
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert np.abs(_ours(engine) - _theirs(adapted)).max() <= 1e-4
    found = {name for name, _ in adapted.named_parameters() if ".lora_" in name}
    assert {name.removeprefix("base_model.model.").replace(".default", "") for name in found} == weights.keys()


def test_the_copy_of_an_embedding_that_has_another_name_is_known(tmp_path: Path) -> None:
    import peft  # deferred: loading it takes seconds, in every worker

    base = write_other_model(tmp_path / "base", "gpt2")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["lm_head"])
    peft.get_peft_model(base, config).save_pretrained(tmp_path / "adapter")
    own = ModelFolder(tmp_path / "base")
    path = tmp_path / "adapter" / "adapter_model.safetensors"

    def read() -> set[str]:
        with path.open("rb") as file:
            settings = read_config((tmp_path / "adapter" / "adapter_config.json").read_bytes())
            return set(read_weights(file, settings, own, lora_layers(own)))

    assert read() == {"lm_head.lora_A.weight", "lm_head.lora_B.weight"}
    arrays, _ = read_tensors(path)
    copy = "base_model.model.lm_head.base_layer.weight"
    write_tensors(path, {**arrays, copy: arrays[copy] + np.float32(1)}, {})
    with pytest.raises(InvalidRequestError, match="not the base model's own lm_head"):
        read()


def test_a_full_disk_is_told_where_transformers_writes_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_args: object, **_options: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    write_other_model(tmp_path / "base", "gpt2")
    engine, _ = _train(tmp_path / "base", (True, False, False))
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", refuse)
    with pytest.raises(OSError, match="No space left") as caught:
        merged_model.write_merged(tmp_path / "out", tmp_path / "base", engine.read_state("m").weights, scale=1.0)
    assert caught.value.errno == errno.ENOSPC  # of which the export makes an error of its output
