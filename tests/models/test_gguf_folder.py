"""A GGUF file is a base model like any other: the same numbers, tokens and chat as transformers reads from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import mint
from mint import types
from mint.errors import InvalidRequestError
from mint.models import registry

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
    tensors: Mapping[str, np.ndarray] = MappingProxyType({}),
    edit: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> None:
    """A random Llama with quantised matrices, as llama.cpp's converter would write it; it says that it has so many
    `layers`. Further `tensors`, and none of a name that has `without` in it; `edit` adds fields."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(layers)
    edit(writer)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
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
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            shapes[f"blk.{layer}.{name}"] = (HIDDEN, HIDDEN)
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


def test_a_file_is_converted_once_and_again_when_it_changes(file: Path) -> None:
    first = registry.resolve(str(file), {})
    stamp = (first / "config.json").stat().st_mtime_ns
    assert registry.resolve("mine", {"mine": str(file)}) == first
    assert (first / "config.json").stat().st_mtime_ns == stamp
    _write_gguf(file)
    assert registry.resolve(str(file), {}) != first
    assert not list(first.parent.glob(".*"))


def test_a_damaged_file_is_refused_and_leaves_nothing(file: Path, tmp_path: Path) -> None:
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(InvalidRequestError, match="cannot be read as a GGUF model"):
        registry.resolve(str(file), {})
    assert not list((tmp_path / "cache" / "mint" / "gguf").iterdir())


@pytest.mark.parametrize("name", ["blk.1.attn_q", "blk.0.ffn_norm", "token_embd", "output_norm"])
def test_a_file_without_one_of_its_tensors_is_refused_by_its_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / "part.gguf"
    _write_gguf(path, without=name)
    with pytest.raises(InvalidRequestError, match=r"lacks the tensor (model|lm_head)\.[\w.]+\. Give a complete file"):
        registry.resolve(str(path), {})


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
