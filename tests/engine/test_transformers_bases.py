"""Every causal model that transformers loads trains and samples: with the numbers of transformers and PEFT."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_data import ADAM, CROSS_ENTROPY, LORA, datum, job, random_data, train
from peft import PeftModel
from small_models import (
    FAMILIES,
    ODD_NAMES,
    OTHER_FAMILIES,
    UNSUPPORTED_BY_PEFT,
    WITHOUT_MLP_IN_PEFT,
    write_model,
    write_other_model,
)
from transformers import PreTrainedModel

from mint.engine.bases.base_model import BaseSampler
from mint.engine.bases.cache_sizes import CacheSizes
from mint.engine.bases.sampler_difference import largest_logprob_difference
from mint.engine.devices import Device
from mint.engine.model.torch_operations import TorchOperations
from mint.engine.protocol import (
    LORA_ALPHA,
    LoraSpec,
    MicroBatching,
    PassResult,
    SampleResult,
    StopRule,
    TrainDatum,
    resolve_loss,
)
from mint.engine.torch_engine import TorchEngine
from mint.engine.transformers.base import TransformersBase
from mint.engine.transformers.decoder import ModelCache, TransformersDecoder
from mint.engine.transformers.measurements import measure
from mint.engine.transformers.sampler import CacheUse
from mint.errors import InvalidRequestError
from mint.models.folder import ModelFolder
from mint.models.peft_format import write_peft

OTHERS = pytest.mark.parametrize("family", OTHER_FAMILIES)


def _engine(folder: Path, **settings: str) -> TorchEngine:
    engine = TorchEngine(dtype="float32", threads=1, device="cpu", **settings)  # ty: ignore[invalid-argument-type]
    engine.load_base("base", str(folder))
    return engine


def _trained(folder: Path, lora: LoraSpec = LORA) -> TorchEngine:
    """An engine with model `m`, whose lora is no longer zero."""
    engine = _engine(folder)
    engine.create_model("m", "base", lora)
    train(engine, "m")
    return engine


def _gradients(engine: TorchEngine, data: list[TrainDatum]) -> dict[str, np.ndarray]:
    """Those of a pass, from the first moments after a step that starts the optimizer anew."""
    state = engine.read_state("m")
    engine.write_state("m", type(state)(state.weights))
    engine.forward_backward("m", data, CROSS_ENTROPY)
    engine.optim_step("m", ADAM)
    moments = engine.read_state("m").exp_avg
    assert moments is not None
    return {name: array / (1 - ADAM.beta1) for name, array in moments.items()}


@OTHERS
def test_training_equals_transformers_with_peft(family: str, tmp_path: Path) -> None:
    if family in UNSUPPORTED_BY_PEFT:
        pytest.skip("PEFT has no lora on Mamba's out_proj")
    reference = write_other_model(tmp_path / "base", family)
    engine = _trained(tmp_path / "base")
    weights = engine.read_state("m").weights
    write_peft(tmp_path / "lora", weights, rank=LORA.rank, alpha=LORA_ALPHA, base_model=str(tmp_path / "base"))
    model = PeftModel.from_pretrained(reference, tmp_path / "lora", is_trainable=True).eval()
    data = random_data(3, count=3)
    found = engine.forward("m", data, CROSS_ENTROPY)
    for example, ours in zip(data, found.logprobs, strict=True):
        logits = model(input_ids=torch.from_numpy(example.tokens)[None]).logits[0].float()
        targets = torch.from_numpy(example.targets)
        theirs = logits.log_softmax(-1)[torch.arange(len(targets)), targets]
        assert np.abs(ours - theirs.detach().numpy()).max() <= 2e-5
        (-theirs * torch.from_numpy(example.weights)).sum().backward()
    expected = {
        name.replace("base_model.model.", "").replace(".default", ""): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    gradients = _gradients(engine, data)
    assert gradients.keys() == expected.keys()
    scale = max(float(np.abs(gradient).max()) for gradient in gradients.values())
    for name, gradient in gradients.items():
        theirs = expected[name]
        wanted = np.zeros_like(gradient) if theirs is None else theirs.numpy()
        assert np.abs(gradient - wanted).max() <= 1e-4 * scale, name


@pytest.mark.parametrize("family", ["gpt2", "olmo_hybrid", *sorted(UNSUPPORTED_BY_PEFT)])
def test_a_batch_of_sequences_trains_as_one_at_a_time_does_and_repeats_bit_for_bit(family: str, tmp_path: Path) -> None:
    write_other_model(tmp_path, family)
    engine = _trained(tmp_path)
    state, data = engine.read_state("m"), random_data(3)

    def train_with(micro_batching: MicroBatching | None) -> tuple[PassResult, dict[str, np.ndarray], str]:
        engine.write_state("m", state)
        found = engine.forward_backward("m", data, CROSS_ENTROPY, micro_batching=micro_batching)
        engine.optim_step("m", ADAM)
        return found, dict(engine.read_state("m").exp_avg or {}), engine.state_digest("m")

    alone, alone_moments, _ = train_with(MicroBatching(1, recompute=False))
    batched, moments, digest = train_with(None)
    _, _, repeated = train_with(batched.micro_batching)
    assert batched.micro_batching is not None and batched.micro_batching.rows > max(len(own.tokens) for own in data)
    assert digest == repeated
    for one, other in zip(alone.logprobs, batched.logprobs, strict=True):
        assert np.abs(one - other).max() <= 2e-5
    scale = max(float(np.abs(moment).max()) for moment in moments.values())
    assert all(np.abs(moments[name] - alone_moments[name]).max() <= 1e-4 * scale for name in moments)


@pytest.mark.parametrize("mixes", [False, True])
def test_a_model_whose_sequences_see_one_another_trains_one_at_a_time(mixes: bool, tmp_path: Path) -> None:
    write_other_model(tmp_path, "gpt2")
    decoder = TransformersDecoder(ModelFolder(tmp_path), TorchOperations(torch.float32, torch.device("cpu")))
    if mixes:
        layer = decoder._model.get_submodule("transformer.h.0.mlp")
        layer.register_forward_hook(lambda _module, _inputs, output: output + 0.1 * output.mean(0))
    assert (measure(decoder, torch.float32, 1 << 30).micro_batch_rows == 1) == mixes


@OTHERS
def test_greedy_samples_equal_generate_and_the_sampler_agrees_with_the_trainer(family: str, tmp_path: Path) -> None:
    reference = write_other_model(tmp_path, family)
    engine = _trained(tmp_path)
    prompt = np.random.default_rng(1).integers(3, 97, 30)
    (base,) = engine.sample([job(prompt, temperature=0.0, max_tokens=24)])
    generated = reference.generate(
        torch.from_numpy(prompt)[None], max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert base.samples[0].tokens.tolist() == generated[0, len(prompt) :].tolist()
    engine.publish("m", "w")
    (result,) = engine.sample([job(prompt, weights_id="w", num_samples=3, max_tokens=24)])
    for sample in result.samples:
        whole = np.concatenate([prompt, sample.tokens])
        trained = engine.forward("m", [datum(whole, prompt=len(prompt))], CROSS_ENTROPY)
        assert np.abs(trained.logprobs[0][len(prompt) - 1 :] - sample.logprobs).max() <= 1e-3


@pytest.mark.parametrize("family", ["falcon_h1", "granitemoehybrid", "nemotron_h", "lfm2", "olmo_hybrid"])
def test_samples_that_a_hybrid_decodes_together_are_those_that_it_decodes_alone(family: str, tmp_path: Path) -> None:
    """Those of one job share a batch, jobs with prompts of other lengths take turns."""
    write_other_model(tmp_path, family)
    engine = _trained(tmp_path)
    engine.publish("m", "w")
    rng = np.random.default_rng(4)
    jobs = [
        job(rng.integers(3, 97, length), weights_id="w", num_samples=4, max_tokens=20, seed=length)
        for length in (1, 7, 30)
    ]
    together = engine.sample(jobs)
    for own, result in zip(jobs, together, strict=True):
        (again,) = engine.sample([own])
        for sample, other in zip(result.samples, again.samples, strict=True):
            assert np.array_equal(sample.tokens, other.tokens) and np.array_equal(sample.logprobs, other.logprobs)
        (one,) = engine.sample([replace(own, num_samples=1)])
        assert np.array_equal(one.samples[0].tokens, result.samples[0].tokens)
        assert np.abs(one.samples[0].logprobs - result.samples[0].logprobs).max() <= 3e-5  # 1.5e-5 without AVX-512


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        # at this width some time steps are below the limit
        ("nemotron_h", {"hidden_size": 256, "intermediate_size": 512, "mamba_num_heads": 8, "mamba_head_dim": 64,
                        "head_dim": 64}),
        ("zamba2", {**ODD_NAMES["zamba2"], "time_step_min": 0.5}),
        ("mamba2", {"num_heads": 12, "head_dim": 8, "expand": 2, "n_groups": 1, "state_size": 8,
                    "time_step_limit": [0.5, 0.9]}),
    ],
)  # fmt: skip
def test_mamba_decodes_from_its_cache_what_it_computes_over_whole_sequences(
    family: str, changes: dict[str, object], tmp_path: Path
) -> None:
    """transformers limits time steps over whole sequences alone."""
    _require_cache_of_whole_sequences(tmp_path, write_other_model(tmp_path, family, **changes))


def test_bamba_decodes_from_its_cache_what_it_computes_over_whole_sequences(tmp_path: Path) -> None:
    """Its code takes the position of a token behind a cache for 0, unless it is told."""
    mamba = {"mamba_n_heads": 4, "mamba_d_head": 24, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
    reference = write_other_model(tmp_path, "bamba", attn_layer_indices=[1], **mamba)
    _require_cache_of_whole_sequences(tmp_path, reference)


def test_bamba_is_told_positions_in_bfloat16_too_where_rounding_hides_what_they_change(tmp_path: Path) -> None:
    mamba = {"mamba_n_heads": 4, "mamba_d_head": 24, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
    model = write_other_model(tmp_path, "bamba", num_hidden_layers=8, attn_layer_indices=[4], **mamba)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(1 / 3)
    model.save_pretrained(tmp_path)
    decoder = TransformersDecoder(ModelFolder(tmp_path), TorchOperations(torch.bfloat16, torch.device("cpu")))
    assert measure(decoder, torch.bfloat16, 1 << 30).cache_use is CacheUse.SHARED
    assert decoder.tells_positions


def _require_cache_of_whole_sequences(folder: Path, reference: PreTrainedModel) -> None:
    engine = _engine(folder)
    settings = engine.load_base("base", "").settings
    assert settings["sampling_cache"] != "none" and settings["sampler_trainer_logit_difference"] <= 1e-4
    tokens = np.random.default_rng(1).integers(3, 97, 30)
    (result,) = engine.sample([job(tokens, temperature=0.0, num_samples=2, max_tokens=40)])
    for sample in result.samples:
        whole = torch.from_numpy(np.concatenate([tokens, sample.tokens]))[None]
        with torch.no_grad():
            logits = reference(input_ids=whole, use_cache=False).logits[0, len(tokens) - 1 : -1]
        assert np.array_equal(logits.argmax(-1).numpy(), sample.tokens)
        best = logits.log_softmax(-1).amax(-1).numpy()
        assert np.abs(best - sample.logprobs).max() <= 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_both_implementations_give_the_same_numbers(family: str, tmp_path: Path) -> None:
    write_model(tmp_path, "tied", family=family)
    lora = LoraSpec(4, 7, train_attn=True, train_mlp=family not in WITHOUT_MLP_IN_PEFT, train_unembed=True)
    engines = [_engine(tmp_path), _engine(tmp_path, implementation="transformers")]
    assert [engine.load_base("base", "").settings["implementation"] for engine in engines] == ["mint", "transformers"]
    data = random_data(2, policy=True)
    for loss in ("cross_entropy", "ppo"):
        logprobs = []
        engines[0].create_model("m", "base", lora)
        state = engines[0].read_state("m")
        for engine in engines:
            engine.create_model("m", "base", lora)
            engine.write_state("m", state)
            logprobs.append(engine.forward_backward("m", data, resolve_loss(loss)).logprobs)
            engine.optim_step("m", ADAM)
        for one, other in zip(*logprobs, strict=True):
            assert np.abs(one - other).max() <= 2e-5
        moments = [engine.read_state("m").exp_avg or {} for engine in engines]
        scale = max(float(np.abs(moment).max()) for moment in moments[0].values())
        assert all(np.abs(moments[0][name] - moments[1][name]).max() <= 1e-4 * scale for name in moments[0])


def test_recomputed_activations_change_no_bit(tmp_path: Path) -> None:
    write_other_model(tmp_path, "gemma2")
    digests = []
    for recompute in (False, True):
        engine = TorchEngine(dtype="float32", threads=1, device="cpu", recompute=recompute)
        engine.load_base("base", str(tmp_path))
        engine.create_model("m", "base", LORA)
        train(engine, "m")
        digests.append(engine.state_digest("m"))
    assert digests[0] == digests[1]


LONG_ROPE = {"hidden_size": 64, "max_position_embeddings": 128, "original_max_position_embeddings": 40,
             "sliding_window": 100,
             "rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75,
                                 "original_max_position_embeddings": 40, "short_factor": [1.0] * 6,
                                 "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0]}}  # fmt: skip
"""As Phi-4-mini has it: beyond 40 tokens all positions of a sequence are rotated otherwise."""


@pytest.mark.parametrize("ends_early", [False, True])
def test_a_sequence_that_grows_beyond_longropes_switch_goes_on_from_the_logits_of_the_whole_sequence(
    ends_early: bool, tmp_path: Path
) -> None:
    reference = write_other_model(tmp_path, "phi3", **LONG_ROPE)
    engine = _trained(tmp_path)
    engine.publish("m", "w")
    prompt = np.random.default_rng(1).integers(3, 97, 30)
    (result,) = engine.sample([job(prompt, temperature=0.0, max_tokens=24)])
    assert result.samples[0].tokens.tolist() == _greedy(reference, prompt, 24)
    stop = StopRule(token_ids=frozenset(range(3, 8))) if ends_early else StopRule()
    (result,) = engine.sample([job(prompt, weights_id="w", num_samples=16, max_tokens=30, stop=stop)])
    lengths = {len(sample.tokens) for sample in result.samples}
    assert (len(lengths) > 1) == ends_early
    for sample in result.samples:
        whole = np.concatenate([prompt, sample.tokens])
        if len(whole) < 43:
            continue
        trained = engine.forward("m", [datum(whole, prompt=len(prompt))], CROSS_ENTROPY).logprobs[0]
        assert np.abs(trained[40:] - sample.logprobs[41 - len(prompt) :]).max() <= 1e-4


def _greedy(model: PreTrainedModel, prompt: np.ndarray, count: int) -> list[int]:
    """Each token by a forward of the whole sequence."""
    tokens = torch.from_numpy(prompt)[None]
    for _ in range(count):
        with torch.no_grad():
            tokens = torch.cat([tokens, model(input_ids=tokens, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return tokens[0, len(prompt) :].tolist()


def test_a_short_sequence_beside_a_long_one_keeps_its_rotations(tmp_path: Path) -> None:
    write_other_model(tmp_path, "phi3", **LONG_ROPE)
    rng = np.random.default_rng(2)
    data = [datum(rng.integers(3, 97, length)) for length in (12, 70)]
    found = []
    for rows in (256, 1):
        engine = TorchEngine(dtype="float32", threads=1, device="cpu", micro_batch_rows=rows)
        engine.load_base("base", str(tmp_path))
        engine.create_model("m", "base", LORA)
        found.append(engine.forward("m", data, CROSS_ENTROPY).logprobs)
    for one, other in zip(*found, strict=True):
        assert np.abs(one - other).max() <= 1e-5


def test_an_encoder_is_refused(tmp_path: Path) -> None:
    write_other_model(tmp_path, "bert")
    with pytest.raises(InvalidRequestError, match=r"it is an encoder.*is_decoder"):
        _engine(tmp_path)


def test_without_a_cache_the_difference_of_sampler_and_trainer_is_measured_too(tmp_path: Path) -> None:
    mamba = {"mamba_n_heads": 4, "mamba_d_head": 24, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
    write_other_model(tmp_path, "bamba", **mamba)
    settings = _engine(tmp_path).load_base("base", "").settings
    assert settings["sampling_cache"] == "none"
    # 0 where torch adds alike in both, as without AVX-512
    assert 0 <= settings["sampler_trainer_logit_difference"] < 1e-3


@pytest.mark.parametrize("family", ["glm4", "gpt2"])
def test_the_difference_of_sampler_and_trainer_is_told_in_bfloat16_too(family: str, tmp_path: Path) -> None:
    """It is about the largest that other sequences and another lora show."""
    write_other_model(tmp_path, family, seed=5)
    engine = TorchEngine(dtype="bfloat16", threads=1, device="cpu")
    told = engine.load_base("base", str(tmp_path)).settings["sampler_trainer_logit_difference"]
    engine.create_model("m", "base", LORA)
    train(engine, "m")
    engine.publish("m", "w")
    rng = np.random.default_rng(9)
    prompts = [rng.integers(3, 97, length) for length in (5, 11, 18, 26, 33)]
    jobs = [job(prompt, weights_id="w", num_samples=4, max_tokens=24, seed=len(prompt)) for prompt in prompts]
    seen = 0.0
    for prompt, result in zip(prompts, engine.sample(jobs), strict=True):
        data = [datum(np.concatenate([prompt, sample.tokens]), prompt=len(prompt)) for sample in result.samples]
        for logprobs, sample in zip(engine.forward("m", data, CROSS_ENTROPY).logprobs, result.samples, strict=True):
            seen = max(seen, float(np.abs(logprobs[len(prompt) - 1 :] - sample.logprobs).max()))
    # Other seeds gave 0.6 to 1.8 times; another processor adds up in another order.
    assert seen > 0 and seen / 4 <= told <= seen * 4


class _ShiftedSampler:
    """A sampler whose logprobs are 0.125 too large; or one that fails."""

    def __init__(self, sampler: BaseSampler, error: str | None = None) -> None:
        self._sampler = sampler
        self._error = error
        self.add, self.cancel = sampler.add, sampler.cancel

    @property
    def keys(self) -> Collection[str]:
        return self._sampler.keys

    def step(self) -> dict[str, SampleResult]:
        return {
            key: replace(
                result,
                samples=[replace(sample, logprobs=sample.logprobs + np.float32(0.125)) for sample in result.samples],
                error=self._error,
            )
            for key, result in self._sampler.step().items()
        }


@pytest.mark.parametrize("longest", [3, 12, 256])
def test_a_planted_difference_of_sampler_and_trainer_is_found(longest: int, tmp_path: Path) -> None:
    base = _base(tmp_path)
    sampler = _ShiftedSampler(base.open_sampler())
    found = largest_logprob_difference(base, sampler, weight_bytes=1 << 40, longest=longest)
    assert found == pytest.approx(0.125, abs=1e-4)


def test_a_difference_that_cannot_be_measured_is_not_told_as_a_number(tmp_path: Path) -> None:
    base = _base(tmp_path)
    sampler = _ShiftedSampler(base.open_sampler(), "no finite logits")
    assert largest_logprob_difference(base, sampler, weight_bytes=0, longest=256) is None


def _base(folder: Path) -> TransformersBase:
    write_other_model(folder, "glm4")
    device = Device("cpu", None, gpu_kernels=False)
    caches = CacheSizes(kv_cache=1 << 24, prefix_cache=0)
    return TransformersBase(
        "base", ModelFolder(folder), device, torch.float32, recompute=None, micro_batch_rows=None, caches=caches
    )


def test_a_config_that_transformers_own_code_cannot_run_is_refused_in_one_sentence(tmp_path: Path) -> None:
    write_other_model(tmp_path, "deepseek_v3")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "n_group": 3}))
    with pytest.raises(InvalidRequestError, match="DeepseekV3ForCausalLM of transformers cannot run 24 tokens"):
        _engine(tmp_path)


def test_where_a_cache_cannot_be_repeated_each_sample_runs_the_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_other_model(tmp_path, "glm4")
    own = job([5, 6, 7, 8], num_samples=4, max_tokens=20)
    (expected,) = _engine(tmp_path).sample([own])

    def cannot(_cache: ModelCache, _copies: int) -> None:
        raise AttributeError("no such method")

    monkeypatch.setattr(ModelCache, "repeat", cannot)
    engine = _engine(tmp_path)
    assert engine.load_base("base", "").settings["sampling_cache"] == "separate prompts"
    (found,) = engine.sample([own])
    for sample, other in zip(found.samples, expected.samples, strict=True):
        assert np.array_equal(sample.tokens, other.tokens)
        assert np.abs(sample.logprobs - other.logprobs).max() <= 3e-5


def test_what_was_measured_at_load_is_told(tmp_path: Path) -> None:
    write_other_model(tmp_path / "dense", "glm4")
    write_other_model(tmp_path / "hybrid", "olmo_hybrid")
    dense = _engine(tmp_path / "dense").load_base("base", "").settings
    hybrid = _engine(tmp_path / "hybrid").load_base("base", "").settings
    assert dense["sampling_cache"] == hybrid["sampling_cache"] == "shared prompt"
    for settings in (dense, hybrid):
        assert settings["implementation"] == "transformers"
        assert 0 <= settings["sampler_trainer_logit_difference"] < 1e-3


def test_an_experts_lora_alone_is_refused_where_experts_are_no_linear_layers(tmp_path: Path) -> None:
    write_model(tmp_path, "untied", family="gpt_oss")
    engine = _engine(tmp_path, implementation="transformers")
    with pytest.raises(InvalidRequestError, match="trains no linear layer"):
        engine.create_model("m", "base", LoraSpec(4, 0, train_attn=False, train_mlp=True, train_unembed=False))
    settings = engine.create_model("m", "base", LORA)
    assert settings["trained_modules"] == ["k_proj", "lm_head", "o_proj", "q_proj", "v_proj"]


def test_a_folder_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    write_other_model(tmp_path, "glm4")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(InvalidRequestError, match="down_proj"):
        _engine(tmp_path)


def test_code_in_a_model_folder_never_runs(tmp_path: Path) -> None:
    write_other_model(tmp_path, "glm4")
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    said = r"config\.json: transformers cannot make a causal language model of it.*runs no code from a model folder"
    with pytest.raises(InvalidRequestError, match=said):
        _engine(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_an_encoder_with_a_decoder_is_refused_by_name(tmp_path: Path) -> None:
    write_other_model(tmp_path, "glm4")
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(InvalidRequestError, match="language model of it: model_type = 't5' is none in transformers"):
        _engine(tmp_path)


def test_an_unknown_family_is_refused_by_name(tmp_path: Path) -> None:
    write_other_model(tmp_path, "glm4")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "nobody_knows"}))
    with pytest.raises(
        InvalidRequestError, match=r"nobody_knows.*[^.]\. transformers .* is installed: a newer one may know it"
    ):
        _engine(tmp_path)
