"""A GGUF file of GPT-OSS, as llama.cpp's converter writes it, is the model from which it was made."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from engine_data import CROSS_ENTROPY, LORA, job, random_data, train
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import load_file
from small_models import write_model
from transformers import AutoTokenizer, PreTrainedModel

from mint.engine.torch_engine import TorchEngine
from mint.errors import InvalidRequestError
from mint.models import registry
from mint.models.folder import ModelFolder
from mint.models.gguf import conversion

ARCHITECTURE = "gpt-oss"
TOKENS = np.random.default_rng(5).integers(3, 97, 60)

VECTORS = {"input_layernorm.weight": "attn_norm.weight", "self_attn.sinks": "attn_sinks.weight",
           "post_attention_layernorm.weight": "post_attention_norm.weight",
           "mlp.router.weight": "ffn_gate_inp.weight", "mlp.router.bias": "ffn_gate_inp.bias",
           "mlp.experts.down_proj_bias": "ffn_down_exps.bias",
           **{f"self_attn.{own}_proj.bias": f"attn_{theirs}.bias"
              for own, theirs in (("q", "q"), ("k", "k"), ("v", "v"), ("o", "output"))}}  # fmt: skip
"""Small tensors of a layer, which the converter leaves in float32."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def _write_gguf(
    folder: Path,
    file: Path,
    experts: Kind,
    *,
    down: Kind | None = None,
    model: PreTrainedModel | None = None,
    edit: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    without: str = "nothing",
) -> None:
    """Writes the model in `folder`, its matrices in Q8_0 and its experts in the format `experts`, or `down` for the
    last matrices of each. `model` gets the numbers that are in the file; `edit` adds fields; no tensor that has
    `without` in its name is written."""
    config = ModelFolder(folder).config
    weights = load_file(folder / "model.safetensors")
    writer = gguf.GGUFWriter(file, ARCHITECTURE)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_expert_count(config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    letters = [chr(33 + n) for n in range(92)]
    others = [chr(300 + n) for n in range(config["vocab_size"] - len(letters) - 4)]
    words = ["<unk>", "<s>", "</s>", *letters, *others, "ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-4o")
    writer.add_token_list(words)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(words) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages[0].content }}")
    edit(writer)
    state = {} if model is None else model.state_dict()

    def add(name: str, values: np.ndarray, kind: Kind) -> np.ndarray:
        """Writes a tensor, and returns the numbers that are in it."""
        stored = gguf.quants.quantize(np.ascontiguousarray(values, np.float32), kind)
        if without not in name:
            writer.add_tensor(name, stored, raw_dtype=kind)
        return gguf.quants.dequantize(stored, kind).reshape(values.shape)

    def keep(name: str, values: np.ndarray) -> None:
        if name in state:
            state[name].copy_(torch.from_numpy(np.ascontiguousarray(values)))

    for own, theirs in {"model.embed_tokens": "token_embd", "lm_head": "output"}.items():
        keep(f"{own}.weight", add(f"{theirs}.weight", weights[f"{own}.weight"], Kind.Q8_0))
    add("output_norm.weight", weights["model.norm.weight"], Kind.F32)
    for layer in range(config["num_hidden_layers"]):
        own, theirs = f"model.layers.{layer}.", f"blk.{layer}."
        for name, stored in VECTORS.items():
            add(theirs + stored, weights[own + name], Kind.F32)
        for name, stored in (("q", "q"), ("k", "k"), ("v", "v"), ("o", "output")):
            full = f"{own}self_attn.{name}_proj.weight"
            keep(full, add(f"{theirs}attn_{stored}.weight", weights[full], Kind.Q8_0))
        # [N, E, 2 I] with gate and up in turns → [N, I, E] of each
        both = weights[f"{own}mlp.experts.gate_up_proj"].swapaxes(1, 2)
        found = [
            add(f"{theirs}ffn_{part}_exps.weight", both[:, start::2], experts)
            for start, part in enumerate(("gate", "up"))
        ]
        keep(f"{own}mlp.experts.gate_up_proj", np.stack(found, axis=2).reshape(both.shape).swapaxes(1, 2))
        last = weights[f"{own}mlp.experts.down_proj"].swapaxes(1, 2)
        keep(f"{own}mlp.experts.down_proj", add(f"{theirs}ffn_down_exps.weight", last, down or experts).swapaxes(1, 2))
        biases = weights[f"{own}mlp.experts.gate_up_proj_bias"]
        for start, part in enumerate(("gate", "up")):
            add(f"{theirs}ffn_{part}_exps.bias", biases[:, start::2], Kind.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _small_model(folder: Path) -> PreTrainedModel:
    return write_model(folder, "untied", family="gpt_oss", hidden_size=64, intermediate_size=96, head_dim=32)


def _engine(folder: Path, quantize: str | None = None) -> TorchEngine:
    engine = TorchEngine(dtype="float32", threads=1, device="cpu", quantize=quantize)  # ty: ignore[invalid-argument-type]
    engine.load_base("base", str(folder))
    return engine


@pytest.mark.parametrize("experts", [Kind.MXFP4, Kind.Q8_0, Kind.F16])
def test_a_file_has_the_logprobs_of_its_numbers_and_trains(experts: Kind, tmp_path: Path) -> None:
    model = _small_model(tmp_path / "exact")
    _write_gguf(tmp_path / "exact", tmp_path / "oss.gguf", experts, model=model)
    folder = registry.resolve(str(tmp_path / "oss.gguf"), {})
    with torch.no_grad():
        logits = model(torch.from_numpy(TOKENS)[None]).logits[0].log_softmax(-1).numpy()
    theirs = logits[np.arange(len(TOKENS) - 1), TOKENS[1:]]
    for quantize in (None, "mxfp4") if experts is Kind.MXFP4 else (None,):
        engine = _engine(folder, quantize)
        assert engine.load_base("base", "").settings["implementation"] == "mint"
        found = engine.sample([job(TOKENS, max_tokens=0, prompt_logprobs=True)])[0].prompt_logprobs
        assert found is not None
        assert np.abs(found[1:] - theirs).max() <= 2e-5
        engine.create_model("m", "base", LORA)
        before = engine.forward("m", random_data(3), CROSS_ENTROPY).metrics["loss:sum"]
        train(engine, "m")
        assert engine.forward("m", random_data(3), CROSS_ENTROPY).metrics["loss:sum"] < before


def test_experts_in_mxfp4_stay_as_they_are(tmp_path: Path) -> None:
    _small_model(tmp_path / "exact")
    _write_gguf(tmp_path / "exact", tmp_path / "oss.gguf", Kind.MXFP4)
    folder = registry.resolve(str(tmp_path / "oss.gguf"), {})
    weights = load_file(folder / "model.safetensors")
    config = ModelFolder(tmp_path / "exact").config
    experts, inner = config["num_local_experts"], config["intermediate_size"]
    assert weights["model.layers.0.mlp.experts.gate_up_proj_blocks"].shape == (experts, 2 * inner, 2, 16)
    assert weights["model.layers.0.mlp.experts.down_proj_scales"].shape == (experts, 64, 3)
    assert not [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]


def test_the_tokenizer_and_the_chat_template_are_those_of_the_file(tmp_path: Path) -> None:
    _small_model(tmp_path / "exact")
    _write_gguf(tmp_path / "exact", tmp_path / "oss.gguf", Kind.MXFP4)
    folder = registry.resolve(str(tmp_path / "oss.gguf"), {})
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.eos_token == "</s>"
    assert tokenizer.convert_ids_to_tokens([0, 2, 130]) == ["<unk>", "</s>", "ab"]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "x"


@pytest.mark.parametrize(
    ("without", "edit", "said"),
    [
        ("blk.1.ffn_up_exps.bias", lambda _: None, r"blk\.1\.ffn_up_exps\.bias: is not among the tensors of the file"),
        ("nothing", lambda w: w.add_tensor("blk.0.odd.weight", np.ones(2, np.float32)), r"blk\.0\.odd\.weight: is no"),
        ("nothing", lambda w: w.add_uint32(f"{ARCHITECTURE}.rope.scaling.odd", 1), r"rope\.scaling\.odd = 1"),
    ],
)
def test_a_file_that_is_no_whole_gpt_oss_is_refused_by_name(
    without: str, edit: Callable[[gguf.GGUFWriter], None], said: str, tmp_path: Path
) -> None:
    _small_model(tmp_path / "exact")
    _write_gguf(tmp_path / "exact", tmp_path / "oss.gguf", Kind.MXFP4, edit=edit, without=without)
    with pytest.raises(InvalidRequestError, match=said):
        registry.resolve(str(tmp_path / "oss.gguf"), {})


def test_an_exponent_that_is_no_number_is_refused_by_the_name_of_its_tensor(tmp_path: Path) -> None:
    _small_model(tmp_path / "exact")
    _write_gguf(tmp_path / "exact", tmp_path / "oss.gguf", Kind.MXFP4)
    reader = gguf.GGUFReader(tmp_path / "oss.gguf", "r+")
    next(own for own in reader.tensors if own.name == "blk.1.ffn_up_exps.weight").data[2, 3, 17] = 255
    reader.data.flush()
    with pytest.raises(InvalidRequestError, match=r"blk\.1\.ffn_up_exps\.weight: has numbers that are not finite"):
        registry.resolve(str(tmp_path / "oss.gguf"), {})


def test_a_disk_that_is_full_while_the_folder_is_written_is_no_fault_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    _small_model(tmp_path / "exact")
    _write_gguf(tmp_path / "exact", tmp_path / "oss.gguf", Kind.MXFP4)
    monkeypatch.setattr(conversion, "write_later_tensors", full)
    with pytest.raises(InvalidRequestError, match=r"cannot be written to .*No space left.*Free disk space"):
        registry.resolve(str(tmp_path / "oss.gguf"), {})


def test_the_disk_has_room_for_experts_in_float32_if_some_are_not_in_mxfp4(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _small_model(tmp_path / "exact")
    _write_gguf(tmp_path / "exact", tmp_path / "oss.gguf", Kind.MXFP4)
    _write_gguf(tmp_path / "exact", tmp_path / "mixed.gguf", Kind.MXFP4, down=Kind.Q8_0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _place: SimpleNamespace(free=1_200_000))
    folder = registry.resolve(str(tmp_path / "oss.gguf"), {})
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 1_200_000
    with pytest.raises(InvalidRequestError, match=r"becomes a folder of 1\.7 MB in float32, and .* has 1\.2 MB left"):
        registry.resolve(str(tmp_path / "mixed.gguf"), {})
