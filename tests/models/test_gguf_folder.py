"""A GGUF file is a base model like any other: the same numbers, tokens and chat as transformers reads from it."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from subprocess import PIPE
from types import MappingProxyType, SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

import mint
from mint import types
from mint.cli.storage.folder_storage import FolderStorage
from mint.config import Settings
from mint.engine.fake_engine import FakeEngine
from mint.errors import InvalidRequestError
from mint.models import registry
from mint.models.gguf.header import GgufHeader
from mint.server.worker.base_models import BaseModels

WORDS = ["<unk>", "<s>", "</s>", *(chr(33 + n) for n in range(92)), "ab"]
HIDDEN, INNER, HEADS, LAYERS = 64, 96, 4, 2


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("MINT_NATIVE", "0")  # the compiled kernels are in that cache, too
    monkeypatch.setenv("MINT_HOME", str(tmp_path / "home"))


def _write_gguf(
    path: Path,
    *,
    layers: int = LAYERS,
    without: str | None = None,
    architecture: str = "llama",
    head_dim: int = HIDDEN // HEADS,
    infinite: str | None = None,
    tensors: Mapping[str, np.ndarray] = MappingProxyType({}),
    edit: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> None:
    """A random model with quantised matrices, as llama.cpp's converter would write it; it says that it has so many
    `layers`. Further `tensors`, and none of a name that has `without` in it; the vector `infinite` begins with
    infinity; `edit` adds fields."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(layers)
    edit(writer)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_key_length(head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(WORDS) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    shapes = {"token_embd": (len(WORDS), HIDDEN), "output_norm": (HIDDEN,), "output": (len(WORDS), HIDDEN)}
    for layer in range(LAYERS):
        for name in ("attn_q", "attn_k", "attn_v"):
            shapes[f"blk.{layer}.{name}"] = (HEADS * head_dim, HIDDEN)
        shapes[f"blk.{layer}.attn_output"] = (HIDDEN, HEADS * head_dim)
        if architecture in ("qwen3", "qwen3moe", "gemma3"):
            shapes |= {f"blk.{layer}.attn_{name}_norm": (head_dim,) for name in ("q", "k")}
        if architecture == "gemma3":
            shapes |= {f"blk.{layer}.post_{name}_norm": (HIDDEN,) for name in ("attention", "ffw")}
        for name in ("attn_norm", "ffn_norm"):
            shapes[f"blk.{layer}.{name}"] = (HIDDEN,)
        shapes |= {f"blk.{layer}.ffn_{name}": (INNER, HIDDEN) for name in ("gate", "up")}
        shapes[f"blk.{layer}.ffn_down"] = (HIDDEN, INNER)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    for name, shape in shapes.items():
        values = rng.normal(1.0 if "norm" in name else 0.0, 0.15, shape).astype(np.float32)
        if without is not None and without in name:
            continue
        if name == infinite:
            values[0] = np.inf
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", values)
        else:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "small.gguf"
    _write_gguf(path)
    return path


def _logprobs(model: torch.nn.Module, tokens: list[int]) -> np.ndarray:
    with torch.no_grad():
        rows = model(torch.tensor([tokens])).logits[0].log_softmax(-1).numpy()
    return rows[np.arange(len(tokens) - 1), tokens[1:]]


def test_a_gguf_file_trains_and_samples_with_the_numbers_of_transformers(file: Path) -> None:
    reference = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    tokens = np.random.default_rng(1).integers(3, 96, 20).tolist()
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * 19},
    )
    with mint.ServiceClient() as service:
        client = service.create_lora_training_client(str(file), rank=4, seed=1)
        assert client.get_info().effective["implementation"] == "mint"
        sampler = service.create_sampling_client(base_model=str(file))
        found = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()[1:]
        assert np.abs(np.array(found, np.float64) - _logprobs(reference, tokens)).max() <= 1e-4
        losses = []
        for _ in range(2):
            losses.append(client.forward_backward([datum], loss_fn="cross_entropy").result().metrics["loss:sum"])
            client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        assert losses[1] < losses[0]


def test_experts_of_qwen3_moe_are_written_as_they_are_published(tmp_path: Path) -> None:
    """One by one, as mint's own decoder and exports know them; a GGUF file has those of a layer in one tensor."""
    path, rng = tmp_path / "experts.gguf", np.random.default_rng(3)
    shapes = {"gate_inp": (4, HIDDEN), "gate_exps": (4, 32, HIDDEN), "up_exps": (4, 32, HIDDEN),
              "down_exps": (4, HIDDEN, 32), "norm": (HIDDEN,)}  # fmt: skip
    tensors = {
        f"blk.{layer}.ffn_{name}.weight": rng.normal(0, 0.15, shape).astype(np.float32)
        for layer in range(LAYERS)
        for name, shape in shapes.items()
    }

    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_expert_count(4)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(32)

    _write_gguf(path, architecture="qwen3moe", without="ffn_", tensors=tensors, edit=edit)
    config = AutoConfig.from_pretrained(tmp_path, gguf_file=path.name)
    config.moe_intermediate_size = 32  # which transformers does not read
    config.head_dim = HIDDEN // HEADS
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, config=config)
    tokens = rng.integers(3, 96, 20).tolist()
    with mint.ServiceClient() as service:
        sampler = service.create_sampling_client(base_model=str(path))
        found = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()[1:]
    assert np.abs(np.array(found, np.float64) - _logprobs(reference, tokens)).max() <= 1e-4
    names = load_file(registry.resolve(str(path), {}) / "model.safetensors").keys()
    assert "model.layers.1.mlp.experts.3.gate_proj.weight" in names


def test_a_file_is_converted_once_and_again_when_its_content_changes(file: Path) -> None:
    first = registry.resolve(str(file), {})
    stamp = (first / "config.json").stat().st_mtime_ns
    assert registry.resolve("mine", {"mine": str(file)}) == first
    assert (first / "config.json").stat().st_mtime_ns == stamp
    _write_gguf(file, edit=lambda writer: writer.add_string("general.name", "another one"))
    assert registry.resolve(str(file), {}) != first
    assert not list(first.parent.glob(".*"))


def test_copies_of_a_file_share_one_conversion_whatever_their_names(file: Path, tmp_path: Path) -> None:
    first = registry.resolve(str(file), {})
    (tmp_path / "elsewhere").mkdir()
    copy = shutil.copy(file, tmp_path / "elsewhere" / "copy.gguf")
    os.utime(copy, (0, 0))
    assert registry.resolve(str(copy), {}) == first
    assert list(first.parent.iterdir()) == [first]


def test_two_processes_at_once_read_a_new_file_once(file: Path, tmp_path: Path) -> None:
    program = "import sys; from mint.models import registry; print(registry.resolve(sys.argv[1], {}))"
    command = [sys.executable, "-c", f"import logging; logging.basicConfig(level='INFO'); {program}", str(file)]
    processes = [subprocess.Popen(command, stdout=PIPE, stderr=PIPE, text=True) for _ in range(2)]
    told = [process.communicate(timeout=120) for process in processes]
    assert len({out for out, _ in told}) == 1 and Path(told[0][0].strip()).is_dir()
    assert sum(log.count(f"reading {file}, once") for _, log in told) == 1
    assert len(list((tmp_path / "cache" / "mint" / "gguf").iterdir())) == 1


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-8])


def _change_a_byte(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b"llama", b"lIama", 1))


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("model.safetensors", _cut),
        ("model.safetensors", Path.unlink),
        ("config.json", _change_a_byte),
        ("tokenizer.json", _cut),
        ("conversion.json", _cut),
    ],
)
def test_a_damaged_conversion_is_made_again(file: Path, name: str, damage: Callable[[Path], object]) -> None:
    first = registry.resolve(str(file), {})
    whole = (first / "model.safetensors").read_bytes()
    damage(first / name)
    assert registry.resolve(str(file), {}) == first
    assert (first / "model.safetensors").read_bytes() == whole
    assert [own.name for own in first.parent.iterdir()] == [first.name]


def test_a_conversion_that_was_killed_is_removed_at_the_next_one_and_a_running_one_is_not(
    file: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache" / "mint" / "gguf"
    killed, running, new, old = (cache / f".other-{name}" for name in ("killed", "running", "new", "old"))
    for folder in (killed, running, new, old):
        (folder / "folder").mkdir(parents=True)
    (killed / "lock").touch()
    os.utime(old, (0, 0))
    with (running / "lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = registry.resolve(str(file), {})
    assert {own.name for own in cache.iterdir()} == {running.name, new.name, folder.name}


def test_a_conversion_that_would_fill_the_disk_is_not_begun(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _place: SimpleNamespace(free=100_000))
    with pytest.raises(
        InvalidRequestError,
        match=r"a folder of 0\.3 MB in float32, and .*gguf has 0\.1 MB left\. Free disk space there",
    ):
        registry.resolve(str(file), {})


def test_lists_of_models_read_the_context_from_the_header_and_convert_nothing(file: Path, tmp_path: Path) -> None:
    listed = FolderStorage(tmp_path, Settings(models=f"own={file}")).models()
    assert {model.model_name: model.max_context_length for model in listed}["own"] == 128
    assert BaseModels(FakeEngine(), {"own": str(file)}).context_length("own") == 128
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda whole: whole[:5000], r"it has 5000 bytes, and its tensors end at byte \d+\. Copy or download"),
        (lambda whole: whole[:-1], r"it has \d+ bytes, and its tensors end at byte \d+\. Copy or download"),
        (lambda whole: whole[:500], r"it has 500 bytes, and its header alone needs more\. Copy or download"),
        (lambda whole: b"", r"it does not begin with GGUF\. Give a GGUF file"),
        (lambda whole: b"PK" + whole[2:], r"it does not begin with GGUF\. Give a GGUF file"),
        (lambda whole: whole[:4] + b"\x09" + whole[5:], r"it is of version 9 of the format; versions 2 and 3 are read"),
    ],
)
def test_a_damaged_file_is_refused_in_words_and_leaves_nothing(
    file: Path, tmp_path: Path, content: Callable[[bytes], bytes], message: str
) -> None:
    file.write_bytes(content(file.read_bytes()))
    with pytest.raises(InvalidRequestError, match=f"small\\.gguf: cannot be read as a GGUF model: {message}"):
        registry.resolve(str(file), {})
    assert not list((tmp_path / "cache" / "mint" / "gguf").iterdir())


@pytest.mark.parametrize("name", ["blk.1.attn_q", "blk.0.ffn_norm", "token_embd", "output_norm"])
def test_a_file_without_one_of_its_tensors_is_refused_by_its_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / "part.gguf"
    _write_gguf(path, without=name)
    with pytest.raises(InvalidRequestError, match=r"lacks the tensor (model|lm_head)\.[\w.]+\. Give a complete file"):
        registry.resolve(str(path), {})


@pytest.mark.parametrize(("architecture", "head_dim"), [("qwen3", 32), ("qwen3", 16), ("llama", 16)])
def test_the_width_of_heads_is_that_of_the_file(tmp_path: Path, architecture: str, head_dim: int) -> None:
    path = tmp_path / "heads.gguf"
    _write_gguf(path, architecture=architecture, head_dim=head_dim)
    config = AutoConfig.from_pretrained(registry.resolve(str(path), {}))
    assert (config.model_type, config.head_dim) == (architecture, head_dim)


def test_gemmas_attention_is_scaled_by_the_width_of_its_heads(tmp_path: Path) -> None:
    path = tmp_path / "gemma.gguf"
    _write_gguf(path, architecture="gemma3", head_dim=24, without="output.")
    config = AutoConfig.from_pretrained(registry.resolve(str(path), {}))
    assert (config.model_type, config.head_dim, config.query_pre_attn_scalar) == ("gemma3_text", 24, 24)


@pytest.mark.parametrize(
    ("architecture", "layers", "hidden", "heads", "head_dim", "scalar"),
    [
        # the published models, and what their config.json says
        ("gemma3", 62, 5376, 32, 128, 168),
        ("gemma3", 48, 3840, 16, 256, 256),
        ("gemma3", 26, 1152, 4, 256, 256),
        ("gemma2", 46, 4608, 32, 128, 144),
        ("gemma2", 42, 3584, 16, 256, 256),
        ("gemma2", 26, 2304, 8, 256, 256),
        ("llama", 62, 5376, 32, 128, None),
    ],
)
def test_the_scale_of_attention_is_that_of_the_published_gemmas(
    tmp_path: Path, architecture: str, layers: int, hidden: int, heads: int, head_dim: int, scalar: int | None
) -> None:
    sizes = {"block_count": layers, "embedding_length": hidden, "attention.key_length": head_dim}
    header = _header(tmp_path, architecture, {**sizes, "attention.head_count": heads})
    assert header.query_pre_attn_scalar == scalar


def _header(folder: Path, architecture: str, fields: Mapping[str, float]) -> GgufHeader:
    writer = gguf.GGUFWriter(folder / "header.gguf", architecture)
    for key, value in fields.items():
        add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
        add(f"{architecture}.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufHeader(gguf.GGUFReader(folder / "header.gguf"))


@pytest.mark.parametrize(
    ("architecture", "said", "expected"),
    [
        ("starcoder2", {"rope.freq_base": 1e6}, {"rope_parameters.rope_theta": 1e6}),
        ("starcoder2", {"attention.sliding_window": 40}, {"sliding_window": 40}),
        ("phi3", {"attention.sliding_window": 2047}, {"sliding_window": 2047}),
        ("phi3", {"rope.dimension_count": 12}, {"rope_parameters.partial_rotary_factor": 0.75}),
        ("stablelm", {"rope.dimension_count": 8, "rope.freq_base": 5e5},
         {"rope_parameters.partial_rotary_factor": 0.5, "rope_parameters.rope_theta": 5e5}),
        ("nemotron", {"attention.layer_norm_epsilon": 0.25}, {"norm_eps": 0.25}),
        ("falcon", {"attention.layer_norm_epsilon": 0.25}, {"layer_norm_epsilon": 0.25}),
        ("qwen3moe", {"expert_feed_forward_length": 24}, {"moe_intermediate_size": 24}),
        ("qwen2moe", {"expert_feed_forward_length": 24, "expert_shared_feed_forward_length": 48},
         {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 48}),
        ("qwen3", {"attention.key_length": 32}, {"head_dim": 32}),
        ("qwen3", {"attention.key_length": 128, "rope.freq_base": 5e5}, {}),  # transformers reads the base itself
        ("qwen2", {"attention.sliding_window": 20}, {}),
        ("gemma3", {"attention.key_length": 256, "rope.freq_base": 5e5}, {}),
        ("llama", {"attention.key_length": 16, "rope.dimension_count": 16, "rope.freq_base": 5e5}, {}),
    ],
)  # fmt: skip
def test_what_transformers_does_not_read_of_a_header_is_corrected(
    tmp_path: Path, architecture: str, said: dict[str, float], expected: dict[str, float]
) -> None:
    sizes = {"block_count": 2, "embedding_length": 64, "attention.head_count": 4, "attention.head_count_kv": 2,
             "feed_forward_length": 96, "context_length": 128}  # fmt: skip
    header = _header(tmp_path, architecture, {**sizes, **said})
    config = AutoConfig.from_pretrained(tmp_path, gguf_file="header.gguf").to_dict()
    found = header.corrected(config)
    rope = {f"rope_parameters.{key}": value for key, value in found.pop("rope_parameters", {}).items()
            if value != config["rope_parameters"].get(key)}  # fmt: skip
    assert {**found, **rope} == pytest.approx(expected)


def test_a_tensor_of_another_shape_than_the_header_says_is_named(tmp_path: Path) -> None:
    path = tmp_path / "heads.gguf"
    _write_gguf(path, architecture="qwen3", head_dim=32)
    content = path.read_bytes()
    key = b"qwen3.attention.key_length"
    place = content.index(key) + len(key) + 4
    path.write_bytes(content[:place] + (48).to_bytes(4, "little") + content[place + 4 :])
    told = r"its tensor model\.layers\.0\.\S+ has the shape \[\d+(, 64)?\], and its header says \[\d+(, 64)?\]"
    with pytest.raises(InvalidRequestError, match=told):
        registry.resolve(str(path), {})


def test_numbers_that_are_not_finite_are_told_with_the_name_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "infinite.gguf"
    _write_gguf(path, infinite="blk.1.ffn_norm")
    told = r"infinite\.gguf.*post_attention_layernorm\.weight has numbers that are not finite"
    with pytest.raises(InvalidRequestError, match=told):
        registry.resolve(str(path), {})
    assert not [*(tmp_path / "cache" / "mint").glob("*/*/config.json")]


@pytest.mark.parametrize(("layers", "without"), [(2**31, None), (1, None), (2, "blk.1.")])
def test_a_file_that_says_another_number_of_layers_is_refused_at_once(
    tmp_path: Path, layers: int, without: str | None
) -> None:
    path = tmp_path / "layers.gguf"
    _write_gguf(path, layers=layers, without=without)
    with pytest.raises(InvalidRequestError, match=rf"llama\.block_count = {layers}: is not the number of layers"):
        registry.resolve(str(path), {})


def test_a_part_of_a_split_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "small-00001-of-00002.gguf"
    _write_gguf(path, edit=lambda writer: writer.add_uint16("split.count", 2))
    with pytest.raises(InvalidRequestError, match=r"split\.count = 2: is one part of a split file\. Merge the parts"):
        registry.resolve(str(path), {})


@pytest.mark.parametrize("name", ["bos", "eos", "unknown"])
def test_a_special_token_that_the_file_does_not_have_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "small.GGUF"  # in capitals it is one, too
    _write_gguf(path)
    key = f"tokenizer.ggml.{name}_token_id"
    before, after = path.read_bytes().split(key.encode())
    path.write_bytes(before + key.encode() + after[:4] + (10_000).to_bytes(4, "little") + after[8:])
    with pytest.raises(InvalidRequestError, match=rf"{key} = 10000: is not among the {len(WORDS)} tokens of the file"):
        registry.resolve(str(path), {})


def _llama3_factors(factor: float, theta: float) -> np.ndarray:
    """By which llama.cpp's converter divides the frequencies of Llama 3, number by number as it computes them."""
    factors = []
    for pair in range(HIDDEN // HEADS // 2):
        wavelength = 2 * np.pi * theta ** (2 * pair / (HIDDEN // HEADS))
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def _linear(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(8.0)


def _yarn(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(32)


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"edit": _linear}, {"rope_type": "linear", "factor": 8.0}),
        ({"edit": _yarn}, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}),
        (
            {"tensors": {"rope_freqs.weight": _llama3_factors(32.0, 10_000.0)}},
            {"rope_type": "llama3", "factor": 32.0, **LLAMA3},
        ),
        ({"tensors": {"rope_freqs.weight": np.ones(8, np.float32)}}, {"rope_type": "default"}),
    ],
    ids=["linear", "yarn", "llama 3", "factors of 1"],
)
def test_the_scaling_of_positions_is_read(tmp_path: Path, given: dict[str, Any], expected: dict[str, Any]) -> None:
    path = tmp_path / "scaled.gguf"
    _write_gguf(path, **given)
    folder = registry.resolve(str(path), {})
    config = AutoConfig.from_pretrained(folder)
    assert config.rope_parameters == {"rope_theta": 10_000.0, **expected}
    tokens = np.random.default_rng(1).integers(3, 96, 60).tolist()
    with mint.ServiceClient() as service:
        sampler = service.create_sampling_client(base_model=str(path))
        found = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()[1:]
    reference = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, config=config)
    assert np.abs(np.array(found, np.float64) - _logprobs(reference, tokens)).max() <= 1e-4


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"tensors": {"rope_freqs.weight": np.linspace(1, 8, 8, dtype=np.float32)}},
            "8 factors that are not Llama 3's",
        ),
        ({"tensors": {"rope_factors_long.weight": np.ones(8, np.float32)}}, "longrope"),
        ({"edit": lambda writer: (_yarn(writer), writer.add_rope_scaling_yarn_log_mul(0.1))}, "yarn_log_multiplier"),
    ],
)
def test_a_scaling_that_cannot_be_read_exactly_is_refused(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    path = tmp_path / "scaled.gguf"
    _write_gguf(path, **given)
    with pytest.raises(InvalidRequestError, match=f"{message}.*Give the Hugging Face folder"):
        registry.resolve(str(path), {})


def test_a_file_with_tensors_that_the_model_does_not_have_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "biases.gguf"
    _write_gguf(path, tensors={"blk.0.attn_q.bias": np.ones(HIDDEN, np.float32)})
    with pytest.raises(InvalidRequestError, match=f"transformers leaves out {HIDDEN} numbers of it"):
        registry.resolve(str(path), {})


def test_a_cache_that_cannot_be_written_is_named(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "no-folder").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "no-folder"))
    with pytest.raises(InvalidRequestError, match=r"cannot be written to .*no-folder.* set XDG_CACHE_HOME"):
        registry.resolve(str(file), {})
