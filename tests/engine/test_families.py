"""Every family gives the numbers of transformers, logits, gradients and greedy decoding, and keeps the promises."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_data import CROSS_ENTROPY, LORA, datum, job, random_data, take_gradient, train
from safetensors.torch import load_file, save_file
from small_models import FAMILIES, write_model
from transformers import AutoModelForCausalLM

from mint.engine.protocol import LORA_ALPHA, LoraSpec, SampleResult, StopRule, TrainDatum
from mint.engine.torch_engine import TorchEngine
from mint.models.folder import ModelFolder

FOLDERS = pytest.mark.parametrize(
    ("family", "shape"), list(itertools.product(FAMILIES, ["tied", "untied"])), ids=lambda value: value
)
LORAS_OF_PARTS = [(False, True, False), (True, False, False)]
"""Whether attention, the MLP and the unembedding have a LoRA."""
MIXED: dict[str, Any] = {"num_experts": 5, "num_experts_per_tok": 3, "norm_topk_prob": False, "mlp_only_layers": [1]}
"""A mixture with a dense layer, and shares that do not add up to one."""


def _engine(folder: Path, dtype: str = "float32") -> TorchEngine:
    engine = TorchEngine(dtype="bfloat16" if dtype == "bfloat16" else "float32", threads=1, device="cpu")
    engine.load_base("base", str(folder))
    return engine


def _log_softmax(model: torch.nn.Module, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(tokens)[None]).logits[0].float().log_softmax(-1).numpy()


@pytest.mark.parametrize("shards", [None, "40KB"], ids=["one_file", "sharded"])
@FOLDERS
def test_logprobs_equal_those_of_transformers(family: str, shape: str, shards: str | None, tmp_path: Path) -> None:
    reference = write_model(tmp_path, shape, family=family, seed=3, shards=shards)
    assert (tmp_path / "model.safetensors").exists() == (shards is None)
    engine = _engine(tmp_path)
    engine.create_model("m", "base", LORA)
    rng = np.random.default_rng(0)
    for length in (1, 2, 17, 300):
        tokens, targets = rng.integers(0, 97, (2, length))
        ours = engine.forward("m", [TrainDatum(tokens, targets, np.ones(length, np.float32))], CROSS_ENTROPY)
        theirs = _log_softmax(reference, tokens)[np.arange(length), targets]
        assert np.abs(ours.logprobs[0] - theirs).max() <= 1e-4


@FOLDERS
def test_all_logits_of_a_prompt_equal_those_of_transformers(family: str, shape: str, tmp_path: Path) -> None:
    reference = write_model(tmp_path, shape, family=family, seed=4)
    engine, vocab = _engine(tmp_path), reference.config.vocab_size
    prompt = np.random.default_rng(1).integers(0, vocab, 40)
    result = engine.sample([job(prompt, max_tokens=0, topk_prompt_logprobs=vocab)])[0]
    assert result.topk_prompt_logprobs is not None
    for row, found in zip(_log_softmax(reference, prompt), result.topk_prompt_logprobs[1:], strict=False):
        assert found is not None and len(found) == vocab
        assert max(abs(row[token] - value) for token, value in found) <= 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_sampling_equals_transformers_generate(family: str, tmp_path: Path) -> None:
    reference = write_model(tmp_path, "tied", family=family, seed=5)
    rng = np.random.default_rng(4)
    prompts = [rng.integers(2, 97, length) for length in (1, 5, 17, 33)]
    stop = StopRule(frozenset([1]))
    results = _engine(tmp_path).sample([job(prompt, temperature=0.0, max_tokens=40, stop=stop) for prompt in prompts])
    for prompt, result in zip(prompts, results, strict=True):
        generated = reference.generate(
            torch.from_numpy(prompt)[None], max_new_tokens=40, do_sample=False, eos_token_id=1, pad_token_id=0
        )
        assert result.samples[0].tokens.tolist() == generated[0, len(prompt) :].tolist()


def test_experts_of_one_tensor_may_be_stored_one_by_one(tmp_path: Path) -> None:
    """As transformers writes Qwen3.5-MoE, which is published with stacked experts."""
    prompt = np.random.default_rng(1).integers(0, 97, 40)
    asked = job(prompt, max_tokens=4, prompt_logprobs=True)
    found = []
    for apart in (False, True):
        folder = tmp_path / str(apart)
        write_model(folder, "tied", family="qwen3_5_moe_text", experts_apart=apart)
        assert ("model.layers.0.mlp.experts.0.up_proj.weight" in ModelFolder(folder).tensors()) == apart
        found.append(_bits(_engine(folder).sample([asked])[0]))
    assert found[0] == found[1]


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
def test_tensors_that_predict_further_tokens_are_left_out_as_transformers_leaves_them_out(
    family: str, tmp_path: Path
) -> None:
    """Published files of these families have them."""
    write_model(tmp_path / "plain", "tied", family=family)
    shutil.copytree(tmp_path / "plain", tmp_path / "published")
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    layer = {name.replace("model.layers.1.", "mtp.layers.0."): own.clone() for name, own in tensors.items()}
    further = {name: own for name, own in layer.items() if name.startswith("mtp.")} | {"mtp.fc.weight": torch.ones(3)}
    save_file(tensors | further, tmp_path / "published" / "model.safetensors", {"format": "pt"})
    asked = job(np.random.default_rng(1).integers(0, 97, 20), max_tokens=4, prompt_logprobs=True)
    found = [_bits(_engine(tmp_path / name).sample([asked])[0]) for name in ("plain", "published")]
    assert found[0] == found[1]


def test_a_mixture_with_dense_layers_equals_transformers(tmp_path: Path) -> None:
    reference = write_model(tmp_path, "untied", family="qwen3_moe", **MIXED)
    engine = _engine(tmp_path)
    engine.create_model("m", "base", LORA)
    example = random_data(5, count=1)[0]
    ours = engine.forward("m", [example], CROSS_ENTROPY).logprobs[0]
    assert np.abs(ours - _log_softmax(reference, example.tokens)[np.arange(len(ours)), example.targets]).max() <= 1e-4


@pytest.mark.parametrize("positions", [40, 500])
def test_llama_3s_rope_scaling_is_that_of_transformers(positions: int, tmp_path: Path) -> None:
    """At positions within the first context and beyond it, and it makes a difference there."""
    reference = write_model(tmp_path, "tied", family="llama", seed=6)
    plain = write_model(tmp_path / "plain", "tied", family="llama", seed=6, rope_parameters={"rope_theta": 500.0})
    prompt = np.random.default_rng(2).integers(0, 97, positions)
    ours = _engine(tmp_path).sample([job(prompt, max_tokens=0, prompt_logprobs=True)])[0].prompt_logprobs
    assert ours is not None
    at = np.arange(positions - 1), prompt[1:]
    assert np.abs(ours[1:] - _log_softmax(reference, prompt)[at]).max() <= 1e-4
    assert np.abs(ours[1:] - _log_softmax(plain, prompt)[at]).max() > 0.01


# --- gradients -----------------------------------------------------------------------------------------------------


class _Merged:
    """transformers in float64 with `W + scale · B @ A` in place of every W, so that its autograd gives the loras'
    gradients: no lora arithmetic of ours, nor of PEFT's, which cannot target single experts."""

    def __init__(self, folder: Path, weights: Mapping[str, np.ndarray], scale: float) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        self._model.config._experts_implementation = "eager"
        self._base = {name: tensor.detach() for name, tensor in self._model.named_parameters()}
        if "lm_head.weight" not in self._base:
            self._base["lm_head.weight"] = self._base["model.embed_tokens.weight"]
        self._scale = scale
        self.parts = {name: torch.from_numpy(array).double().requires_grad_() for name, array in weights.items()}

    def backward(self, data: list[TrainDatum]) -> None:
        for example in data:
            tokens = torch.from_numpy(example.tokens)[None]
            hidden = torch.func.functional_call(self._model.model, self._body(), (tokens,)).last_hidden_state[0]
            logits = hidden @ self._merge("lm_head", self._base["lm_head.weight"]).T
            logits = logits / getattr(self._model.config, "logits_scaling", 1.0)
            logprobs = logits.log_softmax(-1).gather(1, torch.from_numpy(example.targets)[:, None])[:, 0]
            (-torch.from_numpy(example.weights) * logprobs).sum().backward()

    def _body(self) -> dict[str, torch.Tensor]:
        """The parameters below the unembedding; transformers holds the experts of a layer in one tensor."""
        found = {}
        for name, tensor in self._base.items():
            stem = name.rsplit(".", 1)[0]
            if f"{stem}.0.gate_up_proj.lora_A.weight" in self.parts and name.endswith("_proj"):
                last = name.removeprefix(f"{stem}.")
                turned = self._model.config.model_type == "gpt_oss"
                parts = [self._expert(stem, index, last, own.T if turned else own) for index, own in enumerate(tensor)]
                tensor = torch.stack([part.T if turned else part for part in parts])
            elif name.endswith("experts.gate_up_proj"):
                half = tensor.shape[1] // 2
                parts = [("gate", slice(None, half)), ("up", slice(half, None))]
                merged = [
                    [self._expert(stem, index, f"{part}_proj", own[rows]) for part, rows in parts]
                    for index, own in enumerate(tensor)
                ]
                tensor = torch.stack([torch.cat(pair) for pair in merged])
            elif name.endswith("experts.down_proj"):
                tensor = torch.stack([self._expert(stem, index, "down_proj", own) for index, own in enumerate(tensor)])
            else:
                tensor = self._merge(name.removesuffix(".weight"), tensor)
            found[name.removeprefix("model.")] = tensor
        del found["lm_head.weight"]
        return found

    def _expert(self, experts: str, index: int, layer: str, own: torch.Tensor) -> torch.Tensor:
        return self._merge(f"{experts}.{index}.{layer}", own)

    def _merge(self, module: str, own: torch.Tensor) -> torch.Tensor:
        if f"{module}.lora_A.weight" not in self.parts:
            return own
        return own + self._scale * self.parts[f"{module}.lora_B.weight"] @ self.parts[f"{module}.lora_A.weight"]


def _gradients_agree(folder: Path, lora: LoraSpec) -> None:
    engine = _engine(folder)
    engine.create_model("m", "base", lora)
    train(engine, "m", steps=1)  # B is no longer zero, so A has a gradient, too
    reference = _Merged(folder, engine.read_state("m").weights, LORA_ALPHA / lora.rank)
    data = random_data(11, shared=12)
    engine.forward_backward("m", data, CROSS_ENTROPY)
    reference.backward(data)
    ours = take_gradient(engine, "m")
    assert ours.keys() == reference.parts.keys()
    for name, part in reference.parts.items():
        theirs = np.zeros(part.shape) if part.grad is None else part.grad.numpy()
        assert np.abs(ours[name] - theirs).max() <= 2e-5 * max(np.abs(theirs).max(), 1e-2), name
    assert any(np.abs(array).max() > 0 for name, array in ours.items() if "lora_A" in name)


@pytest.mark.parametrize(
    "parts",
    [(True, True, True), *(pytest.param(parts, marks=pytest.mark.slow) for parts in LORAS_OF_PARTS)],
)
@FOLDERS
def test_gradients_equal_autograds_through_merged_weights(
    family: str, shape: str, parts: tuple[bool, bool, bool], tmp_path: Path
) -> None:
    write_model(tmp_path, shape, family=family)
    _gradients_agree(tmp_path, LoraSpec(4, 3, *parts))


def test_gradients_of_a_mixture_with_dense_layers_equal_autograds(tmp_path: Path) -> None:
    write_model(tmp_path, "untied", family="qwen3_moe", **MIXED)
    _gradients_agree(tmp_path, LORA)


# --- the engine's promises -----------------------------------------------------------------------------------------


@cache
def _busy(family: str, dtype: str, folder: Path) -> TorchEngine:
    """An engine with three published loras of different ranks."""
    write_model(folder, "tied", family=family, vocab_size=331)
    engine = _engine(folder, dtype)
    for index, lora in enumerate((LORA, LoraSpec(16, 1, True, True, False), LoraSpec(3, 2, False, True, True))):
        engine.create_model("m", "base", lora)
        train(engine, "m", steps=1, seed=index)
        engine.publish("m", f"w{index}")
    return engine


def _bits(result: SampleResult) -> list[bytes]:
    assert result.error is None and result.prompt_logprobs is not None
    samples = [part.tobytes() for sample in result.samples for part in (sample.tokens, sample.logprobs)]
    return [result.prompt_logprobs.tobytes(), *samples]


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("family", "threads"), [*((family, 1) for family in FAMILIES), ("qwen3_moe", 2)])
def test_a_job_alone_equals_the_job_in_any_mix(
    family: str, dtype: str, threads: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """In a mixture of experts this says, too: whoever else goes to the same expert changes nothing."""
    engine = _busy(family, dtype, tmp_path_factory.getbasetemp() / f"{family}-{dtype}")
    torch.set_num_threads(threads)
    rng = np.random.default_rng(threads)
    jobs = [
        job(rng.integers(2, 300, size), weights_id=weights, num_samples=samples, max_tokens=6, seed=size,
            prompt_logprobs=True)
        for weights, size, samples in itertools.product([None, "w0", "w1", "w2"], [1, 15, 33], [1, 5])
        if threads == 1 or size * samples == 15 or (size, weights) == (33, "w1")
    ]  # fmt: skip
    alone = [_bits(engine.sample([one])[0]) for one in jobs]
    order = rng.permutation(len(jobs))
    for chosen in (order, order[:7])[: 3 - threads]:
        together = engine.sample([jobs[index] for index in chosen])
        for index, result in zip(chosen, together, strict=True):
            assert _bits(result) == alone[index], f"job {index}"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_samplers_logprobs_are_the_trainers_bit_for_bit(family: str, dtype: str, tmp_path: Path) -> None:
    write_model(tmp_path, "untied", family=family)
    engine = _engine(tmp_path, dtype)
    engine.create_model("m", "base", LORA)
    train(engine, "m", steps=1)
    engine.publish("m", "w")
    prompts = np.random.default_rng(3).integers(20, 90, (3, 21))
    results = engine.sample(
        [job(prompt, weights_id="w", num_samples=4, max_tokens=9, seed=row) for row, prompt in enumerate(prompts)]
    )
    for prompt, result in zip(prompts, results, strict=True):
        for sample in result.samples:
            whole = np.concatenate([prompt, sample.tokens])
            trained = engine.forward("m", [datum(whole, prompt=len(prompt))], CROSS_ENTROPY).logprobs[0]
            assert np.array_equal(trained[len(prompt) - 1 :], sample.logprobs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("head_dim", "kv_heads"), [(128, 4), (256, 4), (256, 2)])
def test_wide_heads_sample_the_bits_that_they_train(head_dim: int, kv_heads: int, dtype: str, tmp_path: Path) -> None:
    """In sampling, heads lie side by side in one product, which is added up in parts where it is too long."""
    write_model(tmp_path, "tied", head_dim=head_dim, num_attention_heads=4, num_key_value_heads=kv_heads)
    engine = _engine(tmp_path, dtype)
    engine.create_model("m", "base", LORA)
    prompt = np.random.default_rng(3).integers(20, 90, 21)
    for sample in engine.sample([job(prompt, num_samples=4, max_tokens=60)])[0].samples:
        whole = np.concatenate([prompt, sample.tokens])
        trained = engine.forward("m", [datum(whole, prompt=len(prompt))], CROSS_ENTROPY).logprobs[0]
        assert np.array_equal(trained[len(prompt) - 1 :], sample.logprobs)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_bfloat16_base_is_near_the_float32_one(family: str, tmp_path: Path) -> None:
    write_model(tmp_path, "tied", family=family, seed=8).to(torch.bfloat16).save_pretrained(tmp_path)
    prompt = np.random.default_rng(7).integers(2, 97, 60)
    ours = {}
    for dtype in ("float32", "bfloat16"):
        found = _engine(tmp_path, dtype).sample([job(prompt, max_tokens=0, prompt_logprobs=True)])[0]
        assert found.prompt_logprobs is not None
        ours[dtype] = found.prompt_logprobs[1:]
    # Loaded anew: `to` would round the rotary frequencies, too.
    exact, theirs = (
        _log_softmax(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype), prompt)[np.arange(59), prompt[1:]]
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert np.abs(ours["float32"] - exact).max() <= 1e-4
    assert np.abs(ours["bfloat16"] - exact).mean() <= 1.2 * np.abs(theirs - exact).mean()
