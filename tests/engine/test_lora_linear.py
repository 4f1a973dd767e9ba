"""Products of a base with a lora, apart and merged; and MLPs that take their rows in parts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from engine_data import CROSS_ENTROPY, LORA, datum, flat, job, random_data, take_gradient, train
from transformers import Qwen3ForCausalLM

from mint.engine.cpu import operations
from mint.engine.cpu.operations import CpuOperations
from mint.engine.lora import SiteLora, SiteWeights
from mint.engine.model import lora_linear
from mint.engine.model.linear import Linear
from mint.engine.model.lora_linear import MergedLinear, SeparateLinear
from mint.engine.protocol import LoraSpec
from mint.engine.torch_engine import TorchEngine
from mint.models.random_base import ModelShape, write_random_base

Model = tuple[Path, Qwen3ForCausalLM]


def _engine(tied: Model) -> TorchEngine:
    engine = TorchEngine(dtype="float32", threads=1, device="cpu")
    engine.load_base("base", str(tied[0]))
    engine.create_model("m", "base", LORA)
    return engine


@pytest.mark.parametrize("parts", [(40,), (24, 8, 8)])
@pytest.mark.parametrize("merged", [False, True])
def test_product_and_gradient_equal_the_formula_in_float64(parts: tuple[int, ...], *, merged: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    scale, rank, inputs = 0.5, 4, 20

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    weight, x, grad, residual = draw(sum(parts), inputs), draw(33, inputs), draw(33, sum(parts)), draw(33, sum(parts))
    lora = SiteWeights(draw(rank * len(parts), inputs), tuple(draw(part, rank) for part in parts))
    a, *bs = (part.double().requires_grad_() for part in (lora.a, *lora.bs))
    delta = torch.cat([b @ a[index * rank : (index + 1) * rank] for index, b in enumerate(bs)]) * scale
    leaf = x.double().requires_grad_()
    out = residual.double() + leaf @ (weight.double() + delta).T
    out.backward(grad.double())
    cpu = CpuOperations(torch.float32)
    product: Linear
    if merged:
        product = MergedLinear(cpu, cpu.matrix((weight.double() + delta.detach()).float()), lora, scale)
    else:
        product = SeparateLinear(cpu, cpu.matrix(weight), [SiteLora(slice(0, 33), lora, scale)])
    np.testing.assert_allclose(product.product(x, residual).numpy(), out.detach().numpy(), rtol=1e-4, atol=1e-4)
    grad_x, grads = product.gradient(grad, x)
    assert grad_x is not None
    for ours, theirs in zip((grad_x, *grads), (leaf, a, *bs), strict=True):
        assert theirs.grad is not None
        np.testing.assert_allclose(ours.numpy(), theirs.grad.numpy(), rtol=1e-4, atol=2e-4)
    assert product.gradient(grad, x, for_input=False)[0] is None


def test_merging_changes_rounding_and_nothing_else(tied: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    data, found = random_data(3, count=8, shared=10), []
    for limit in (CpuOperations.merged_bytes, 0):
        monkeypatch.setattr(CpuOperations, "merged_bytes", limit)
        engine = _engine(tied)
        train(engine, "m", steps=1)
        result = engine.forward_backward("m", data, CROSS_ENTROPY)
        found.append((np.concatenate(result.logprobs), flat(take_gradient(engine, "m"))))
    (merged, merged_gradient), (apart, gradient) = found
    assert merged.tobytes() != apart.tobytes()  # both ways were taken
    assert np.abs(merged - apart).max() <= 1e-5
    assert np.abs(merged_gradient - gradient).max() <= 1e-5 * np.abs(gradient).max()


def test_a_lora_that_has_changed_is_merged_again(tied: Model) -> None:
    engine, data = _engine(tied), random_data(4)
    engine.forward("m", data, CROSS_ENTROPY)  # merges the lora as it began
    train(engine, "m", steps=2)
    state = engine.read_state("m")
    trained = engine.forward("m", data, CROSS_ENTROPY)
    other = _engine(tied)
    other.forward("m", data, CROSS_ENTROPY)
    other.write_state("m", state)
    loaded = other.forward("m", data, CROSS_ENTROPY)
    assert [row.tobytes() for row in trained.logprobs] == [row.tobytes() for row in loaded.logprobs]


def test_more_loras_than_are_kept_merged_give_the_same_samples(tied: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = _engine(tied)
    for index in range(3):
        engine.create_model("m", "base", LoraSpec(4, index, True, True, False))
        train(engine, "m", steps=1)
        engine.publish("m", f"w{index}")
    jobs = [job([5, 6, 7], weights_id=f"w{index}", num_samples=2) for index in range(3)]
    kept = engine.sample(jobs)
    monkeypatch.setattr(lora_linear, "MAX_MERGED_LORAS", 1)
    again = engine.sample(jobs)
    for first, second in zip(kept, again, strict=True):
        assert [s.logprobs.tobytes() for s in first.samples] == [s.logprobs.tobytes() for s in second.samples]


@pytest.mark.parametrize("rank", [1, 4])
def test_apart_the_samplers_logprobs_are_the_trainers_in_any_company(
    rank: int, tied: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuOperations, "merged_bytes", 0)
    engine = _engine(tied)
    for name, own_rank in (("other", 3), ("m", rank)):
        engine.create_model(name, "base", LoraSpec(own_rank, 1, True, True, True))
        train(engine, name)
        engine.publish(name, name)
    own = job(list(range(20, 60)), weights_id="m", num_samples=3, max_tokens=12)
    others = [job([7, 8, 9], weights_id="other", num_samples=5), job([7, 8, 9], num_samples=2)]
    alone, beside = engine.sample([own])[0], engine.sample([others[0], own, others[1]])[1]
    for sample, twin in zip(alone.samples, beside.samples, strict=True):
        assert sample.logprobs.tobytes() == twin.logprobs.tobytes()
        whole = np.concatenate([own.prompt, sample.tokens])
        trained = engine.forward("m", [datum(whole)], CROSS_ENTROPY).logprobs[0]
        assert trained[-len(sample.tokens) :].tobytes() == sample.logprobs.tobytes()


def test_published_on_a_base_in_bfloat16_the_samplers_logprobs_are_the_trainers(
    tmp_path: Path, native_folder: Path
) -> None:
    """Published weights may be in bfloat16 then, those in training are in float32."""
    write_random_base(tmp_path, ModelShape(layers=2), seed=0)
    engine = TorchEngine(dtype="bfloat16", threads=1, device="cpu", native=native_folder)
    engine.load_base("base", str(tmp_path))
    lora = LoraSpec(5, 1, True, True, True)
    engine.create_model("m", "base", lora)
    train(engine, "m")
    engine.publish("m", "m")
    engine.load_weights("saved", "base", lora, engine.read_weights("m"))
    jobs = [job(list(range(20, 60)), weights_id=name, num_samples=30, max_tokens=12) for name in ("m", "saved")]
    published, saved = engine.sample(jobs)
    for sample, twin in zip(published.samples, saved.samples, strict=True):
        assert sample.logprobs.tobytes() == twin.logprobs.tobytes()
        trained = engine.forward("m", [datum([*range(20, 60), *sample.tokens])], CROSS_ENTROPY).logprobs[0]
        assert trained[-len(sample.tokens) :].tobytes() == sample.logprobs.tobytes()


def test_an_mlp_in_parts_gives_the_same_bits_and_the_same_gradient(
    tied: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, found = random_data(3, count=12, shared=10), []
    for least in (operations.MIN_MLP_ROWS, 40):
        monkeypatch.setattr(operations, "MIN_MLP_ROWS", least)
        monkeypatch.setattr(operations, "MLP_ENTRIES", least)
        engine = _engine(tied)
        engine.create_model("m", "base", LoraSpec(4, 7, True, True, False))
        result = engine.forward_backward("m", data, CROSS_ENTROPY)
        found.append((b"".join(row.tobytes() for row in result.logprobs), flat(take_gradient(engine, "m"))))
    (whole, whole_gradient), (parts, gradient) = found
    assert whole == parts
    assert whole_gradient.tobytes() != gradient.tobytes()  # sums of other parts
    assert np.abs(whole_gradient - gradient).max() <= 1e-6 * np.abs(gradient).max()
