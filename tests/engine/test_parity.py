"""The same numbers as transformers, PEFT and torch.optim, from the same start."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from engine_data import ADAM, CROSS_ENTROPY, LORA, datum, job, random_data, take_gradient, train
from small_models import SHAPES, write_model
from transformers import Qwen3ForCausalLM

from mint.engine.protocol import AdamSpec, LoraSpec, ModelState, StopRule, TrainDatum
from mint.engine.torch_engine import TorchEngine
from mint.models.random_base import ModelShape, write_random_base

Model = tuple[Path, Qwen3ForCausalLM]


@pytest.fixture
def engine(tied: Model, device: str) -> TorchEngine:
    """An engine with the tied model as base `base`, on every device of this machine."""
    engine = TorchEngine(dtype="float32", threads=1, device=device)
    engine.load_base("base", str(tied[0]))
    return engine


def _log_softmax(model: torch.nn.Module, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(tokens)[None]).logits[0].log_softmax(-1).numpy()


@pytest.mark.parametrize("shape", list(SHAPES))
def test_logprobs_equal_those_of_transformers(shape: str, device: str, tmp_path: Path) -> None:
    reference = write_model(tmp_path, shape, seed=3)
    engine = TorchEngine(dtype="float32", threads=1, device=device)
    vocab = engine.load_base("base", str(tmp_path)).vocab_size
    engine.create_model("m", "base", LORA)
    rng = np.random.default_rng(0)
    for length in (1, 2, 15, 16, 17, 100, 300):
        tokens, targets = rng.integers(0, vocab, (2, length))
        ours = engine.forward("m", [TrainDatum(tokens, targets, np.ones(length, np.float32))], CROSS_ENTROPY)
        theirs = _log_softmax(reference, tokens)[np.arange(length), targets]
        assert np.abs(ours.logprobs[0] - theirs).max() <= 1e-4


def test_all_logits_of_a_prompt_equal_those_of_transformers(engine: TorchEngine, tied: Model) -> None:
    prompt = np.random.default_rng(1).integers(0, 97, 40)
    result = engine.sample([job(prompt, max_tokens=0, topk_prompt_logprobs=97)])[0]
    reference = _log_softmax(tied[1], prompt)
    assert result.topk_prompt_logprobs is not None and result.topk_prompt_logprobs[0] is None
    for row, found in zip(reference, result.topk_prompt_logprobs[1:], strict=False):
        assert found is not None
        assert [value for _, value in found] == sorted((value for _, value in found), reverse=True)
        assert max(abs(row[token] - value) for token, value in found) <= 1e-4


@pytest.mark.parametrize("rope", ["top-level", "rope_parameters"])
def test_rope_theta_is_read_from_either_place(rope: str, device: str, tmp_path: Path) -> None:
    import json

    reference = write_model(tmp_path, "tied", rope_parameters={"rope_type": "default", "rope_theta": 50.0})
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("rope_parameters", None)
    config.pop("rope_theta", None)
    config |= {"rope_theta": 50.0} if rope == "top-level" else {"rope_parameters": {"rope_theta": 50.0}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine = TorchEngine(dtype="float32", threads=1, device=device)
    engine.load_base("base", str(tmp_path))
    engine.create_model("m", "base", LORA)
    example = random_data(5, count=1)[0]
    ours = engine.forward("m", [example], CROSS_ENTROPY).logprobs[0]
    theirs = _log_softmax(reference, example.tokens)[np.arange(len(ours)), example.targets]
    assert np.abs(ours - theirs).max() <= 1e-4


class _Reference:
    """The same lora in PEFT, trained by torch: padded nowhere, one example at a time."""

    def __init__(
        self, engine: TorchEngine, base_folder: Path, lora: LoraSpec, dtype: torch.dtype = torch.float32
    ) -> None:
        """The base is of `dtype`, and the lora of what PEFT makes of it: float32 for a base in bfloat16."""
        import peft  # deferred: loading it takes seconds, in every worker

        # A copy: PEFT changes the model that it is given.
        base = Qwen3ForCausalLM.from_pretrained(base_folder, dtype=dtype)
        targets = sorted({name.split(".")[-3] for name in engine.read_state("m").weights})
        config = peft.LoraConfig(r=lora.rank, lora_alpha=32, target_modules=targets, lora_dropout=0.0)
        self.model = peft.get_peft_model(base, config)
        weights = engine.read_state("m").weights
        self.parts = {
            name: dict(self.model.named_parameters())[f"base_model.model.{name.replace('.weight', '.default.weight')}"]
            for name in weights
        }
        with torch.no_grad():
            for name, array in weights.items():
                self.parts[name].copy_(torch.from_numpy(array))

    def backward(self, data: list[TrainDatum]) -> None:
        for example in data:
            logits = self.model(torch.from_numpy(example.tokens)[None]).logits[0]
            logprobs = logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32)).gather(
                1, torch.from_numpy(example.targets)[:, None]
            )[:, 0]
            (-torch.from_numpy(example.weights) * logprobs).sum().backward()


def _relative(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> float:
    """The largest difference, relative to the largest entry of its matrix."""
    return max(float(np.abs(ours[name] - theirs[name]).max() / np.abs(theirs[name]).max()) for name in theirs)


@pytest.mark.parametrize("shape", ["tied", "untied"])
@pytest.mark.parametrize(
    "parts", [(True, True, True), (True, False, False), (False, True, False), (False, False, True)]
)
def test_gradients_equal_those_of_peft(
    shape: str, parts: tuple[bool, bool, bool], device: str, request: pytest.FixtureRequest
) -> None:
    model: Model = request.getfixturevalue(shape)
    engine = TorchEngine(dtype="float32", threads=1, device=device)
    engine.load_base("base", str(model[0]))
    lora = LoraSpec(4, 3, *parts)
    engine.create_model("m", "base", lora)
    train(engine, "m", steps=1)  # B is no longer zero, so A has a gradient, too
    reference = _Reference(engine, model[0], lora)
    data = random_data(11, shared=12)
    engine.forward_backward("m", data, CROSS_ENTROPY)
    reference.backward(data)
    ours = take_gradient(engine, "m")
    theirs = {name: part.grad.numpy() for name, part in reference.parts.items() if part.grad is not None}
    assert ours.keys() == theirs.keys()
    assert _relative(ours, theirs) <= 1e-5


@pytest.mark.parametrize("seed", range(3))
def test_in_bfloat16_gradients_are_as_near_to_float64_as_those_of_peft(
    seed: int, native_folder: Path, tmp_path: Path
) -> None:
    write_random_base(tmp_path, ModelShape(stored="bfloat16"), seed=seed)
    engine = TorchEngine(dtype="bfloat16", threads=1, device="cpu", native=native_folder)
    engine.load_base("base", str(tmp_path))
    lora, rng = LoraSpec(16, seed, True, True, False), np.random.default_rng(seed)
    engine.create_model("m", "base", lora)
    weights = {  # B is zero in a new lora, which would leave A without a gradient
        name: rng.normal(size=own.shape).astype(np.float32) * 0.05 if "lora_B" in name else own
        for name, own in engine.read_state("m").weights.items()
    }
    engine.write_state("m", ModelState(weights))
    data = random_data(seed, count=8)
    engine.forward_backward("m", data, CROSS_ENTROPY)
    exact, theirs = (_Reference(engine, tmp_path, lora, dtype) for dtype in (torch.float64, torch.bfloat16))
    assert {part.dtype for part in theirs.parts.values()} == {torch.float32}
    exact.backward(data)
    theirs.backward(data)
    ours = take_gradient(engine, "m")

    def error(found: dict[str, np.ndarray]) -> float:
        """Of all numbers together, relative to the gradient."""
        pairs = [(found[name], _gradient(part)) for name, part in exact.parts.items()]
        return float(sum(((a - b) ** 2).sum() for a, b in pairs) / sum((b**2).sum() for _, b in pairs)) ** 0.5

    of_peft = error({name: _gradient(part) for name, part in theirs.parts.items()})
    assert error(ours) <= 1.15 * of_peft < 0.05


def _gradient(part: torch.nn.Parameter) -> np.ndarray:
    assert part.grad is not None
    return part.grad.double().numpy()


# With clipping, gradients are near 1e-6: a larger eps, for with 1e-8 Adam would turn their rounding into full steps.
@pytest.mark.parametrize(
    "adam", [ADAM, AdamSpec(3e-3, 0.9, 0.999, 1e-12, 0.1, 0.0), AdamSpec(3e-3, 0.8, 0.9, 1e-3, 0.05, 1.0)]
)
def test_steps_equal_those_of_peft_and_adamw(adam: AdamSpec, engine: TorchEngine, tied: Model) -> None:
    engine.create_model("m", "base", LORA)
    train(engine, "m", steps=1)
    weights = engine.read_state("m")
    engine.write_state("m", type(weights)(weights.weights))  # same weights, fresh moments
    reference = _Reference(engine, tied[0], LORA)
    optimizer = torch.optim.AdamW(
        reference.parts.values(), adam.learning_rate, (adam.beta1, adam.beta2), adam.eps, adam.weight_decay
    )
    for step in range(3):
        for part in (0, 1):  # two passes accumulate
            data = random_data(20 + 2 * step + part)
            engine.forward_backward("m", data, CROSS_ENTROPY)
            reference.backward(data)
        norm = torch.nn.utils.clip_grad_norm_(reference.parts.values(), adam.grad_clip_norm or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        metrics = engine.optim_step("m", adam)
        assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
        theirs = {name: part.detach().numpy() for name, part in reference.parts.items()}
        # Adam divides by the gradient's own size, so each step amplifies the rounding of the smallest gradients.
        assert _relative(dict(engine.read_state("m").weights), theirs) <= (2e-5 if step == 0 else 1e-4)


def test_greedy_sampling_equals_transformers_generate(engine: TorchEngine, tied: Model) -> None:
    rng = np.random.default_rng(4)
    prompts = [rng.integers(2, 97, length) for length in (1, 5, 17, 33)]
    stop = StopRule(frozenset([1]))
    results = engine.sample([job(prompt, temperature=0.0, max_tokens=40, stop=stop) for prompt in prompts])
    for prompt, result in zip(prompts, results, strict=True):
        generated = tied[1].generate(
            torch.from_numpy(prompt)[None], max_new_tokens=40, do_sample=False, eos_token_id=1, pad_token_id=0
        )
        assert result.samples[0].tokens.tolist() == generated[0, len(prompt) :].tolist()


def test_an_initial_lora_changes_nothing_and_is_spread_as_pefts(engine: TorchEngine) -> None:
    engine.create_model("m", "base", LoraSpec(16, 5, True, True, True))
    state = engine.read_state("m")
    for name, array in state.weights.items():
        if "lora_B" in name:
            assert not array.any()
        else:
            bound = 1 / np.sqrt(array.shape[1])
            assert np.abs(array).max() <= bound and abs(array.mean()) < bound / 5
            assert array.std() == pytest.approx(bound / np.sqrt(3), rel=0.15)
    example = datum([3, 4, 5, 6])
    with_lora = engine.forward("m", [example], CROSS_ENTROPY).logprobs[0]
    base = engine.sample([job([3, 4, 5, 6], max_tokens=0, prompt_logprobs=True)])[0].prompt_logprobs
    assert base is not None and np.abs(with_lora - base[1:]).max() <= 1e-5
