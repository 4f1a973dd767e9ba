"""Several weighted targets per position (top-K distillation): against float64, and against one target at a time."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_data import CROSS_ENTROPY, LORA, datum, flat, random_data, take_gradient, train
from torch.func import functional_call
from transformers import Qwen3ForCausalLM

from mint.engine import packing, target_logprobs
from mint.engine.cpu.operations import CpuOperations
from mint.engine.model.decoder import Decoder
from mint.engine.packing import pack
from mint.engine.protocol import LORA_ALPHA, LoraSpec, MicroBatching, TrainDatum
from mint.engine.torch_engine import TorchEngine

Model = tuple[Path, Qwen3ForCausalLM]


def top_k_data(seed: int, *, count: int = 5, shared: int = 0, vocab: int = 97) -> list[TrainDatum]:
    """Examples of which each has its own K from 1 to 7, and every third one target per position; some weights are 0,
    some negative, some targets come twice."""
    rng = np.random.default_rng(seed)
    data = []
    for index, example in enumerate(random_data(seed, count=count, shared=shared, vocab=vocab)):
        if index % 3 == 2:
            data.append(example)
            continue
        shape = (len(example.tokens), int(rng.integers(1, 8)))
        weights = (rng.normal(0, 1, shape) * (rng.random(shape) < 0.6)).astype(np.float32)
        data.append(TrainDatum(example.tokens, rng.integers(0, vocab, shape), weights))
    return data


def _reference(engine: TorchEngine, folder: Path, data: list[TrainDatum]) -> tuple[list[np.ndarray], dict, float]:
    """Logprobs of all targets, gradients by PEFT name, and the loss, by transformers' model in float64."""
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    weights = {
        name: torch.from_numpy(w).double().requires_grad_() for name, w in engine.read_state("m").weights.items()
    }
    merged = dict(model.named_parameters(remove_duplicate=False))
    for name in weights:
        if name.endswith("lora_A.weight"):
            module = name.removesuffix(".lora_A.weight")
            scale = LORA_ALPHA / len(weights[name])
            change = weights[f"{module}.lora_B.weight"] @ weights[name]
            merged[f"{module}.weight"] = merged[f"{module}.weight"].detach() + scale * change
    logprobs, loss = [], torch.zeros((), dtype=torch.float64)
    for example in data:
        tokens = torch.from_numpy(example.tokens)[None]
        rows = functional_call(model, merged, (tokens,), tie_weights=False).logits[0].log_softmax(-1)
        targets = torch.from_numpy(example.targets.reshape(len(example.tokens), -1))
        own = rows.gather(1, targets).reshape(example.targets.shape)
        loss = loss - (torch.from_numpy(example.weights).double() * own).sum()
        logprobs.append(own.detach().numpy())
    loss.backward()
    return logprobs, {name: w.grad.numpy() for name, w in weights.items() if w.grad is not None}, float(loss.detach())


@pytest.fixture
def model(engine: TorchEngine) -> TorchEngine:
    engine.create_model("m", "base", LORA)
    train(engine, "m")
    return engine


def _gradient(
    engine: TorchEngine, passes: list[list[TrainDatum]], micro_batching: MicroBatching | None = None
) -> np.ndarray:
    engine.clear_gradient("m")
    for data in passes:
        engine.forward_backward("m", data, CROSS_ENTROPY, micro_batching=micro_batching)
    return flat(take_gradient(engine, "m"))


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize(
    ("shape", "parts"),
    [("tied", (True, True, True)), ("untied", (True, True, False)), ("untied", (False, False, True))],
)
def test_logprobs_loss_and_gradient_equal_those_of_transformers_in_float64(
    shape: str,
    parts: tuple[bool, bool, bool],
    chunked: bool,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if chunked:
        monkeypatch.setattr(target_logprobs, "MIN_CHUNK_ROWS", 16)
        monkeypatch.setattr(CpuOperations, "logits_at_once", 97 * 20)
    stored: Model = request.getfixturevalue(shape)
    engine = TorchEngine(dtype="float32", threads=1, device="cpu")
    engine.load_base("base", str(stored[0]))
    engine.create_model("m", "base", LoraSpec(4, 3, *parts))
    train(engine, "m", steps=1)
    data = top_k_data(11, shared=12)
    result = engine.forward_backward("m", data, CROSS_ENTROPY)
    logprobs, gradients, loss = _reference(engine, stored[0], data)
    for own, expected, example in zip(result.logprobs, logprobs, data, strict=True):
        assert own.shape == example.targets.shape and own.dtype == np.float32
        assert np.abs(own - expected).max() <= 1e-4
    assert result.metrics["loss:sum"] == pytest.approx(loss, rel=1e-5, abs=1e-4)
    ours = take_gradient(engine, "m")
    assert ours.keys() == gradients.keys()
    for name, expected in gradients.items():
        assert np.abs(ours[name] - expected).max() <= 2e-5 * np.abs(expected).max(), name


def test_one_column_is_one_target_per_position_to_the_last_bit(model: TorchEngine) -> None:
    single = random_data(3, shared=10)
    column = [TrainDatum(d.tokens, d.targets[:, None], d.weights[:, None]) for d in single]
    assert _gradient(model, [single]).tobytes() == _gradient(model, [column]).tobytes()
    first, second = (model.forward("m", data, CROSS_ENTROPY) for data in (single, column))
    for one, other in zip(first.logprobs, second.logprobs, strict=True):
        assert other.shape == (len(one), 1) and one.tobytes() == other.tobytes()
    assert first.metrics == second.metrics


def test_k_targets_are_the_sum_of_k_examples(model: TorchEngine) -> None:
    (example,) = top_k_data(5, count=1)
    columns = [
        TrainDatum(example.tokens, example.targets[:, k], example.weights[:, k])
        for k in range(example.targets.shape[1])
    ]
    whole, apart = _gradient(model, [[example]]), _gradient(model, [[column] for column in columns])
    assert np.abs(whole - apart).max() <= 2e-6 * np.abs(apart).max()
    logprobs = model.forward("m", [example], CROSS_ENTROPY).logprobs[0]
    for k, column in enumerate(columns):
        assert np.array_equal(logprobs[:, k], model.forward("m", [column], CROSS_ENTROPY).logprobs[0])


def test_a_cell_of_weight_zero_adds_nothing(model: TorchEngine) -> None:
    data = top_k_data(7, shared=10)
    other = [dataclasses.replace(d, targets=np.where(d.weights == 0, (d.targets + 31) % 97, d.targets)) for d in data]
    assert any((one.targets != two.targets).any() for one, two in zip(data, other, strict=True))
    assert _gradient(model, [data]).tobytes() == _gradient(model, [other]).tobytes()
    wide = [
        TrainDatum(d.tokens, np.pad(d.targets, ((0, 0), (0, 3))), np.pad(d.weights, ((0, 0), (0, 3))))
        for d in data
        if d.targets.ndim == 2
    ]
    narrow = [d for d in data if d.targets.ndim == 2]
    assert _gradient(model, [narrow]).tobytes() == _gradient(model, [wide]).tobytes()
    assert not _gradient(model, [[dataclasses.replace(d, weights=np.zeros_like(d.weights)) for d in data]]).any()


@pytest.mark.parametrize("setting", ["prefix", "budget"])
def test_neither_sharing_nor_the_split_changes_the_gradient(
    model: TorchEngine, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = top_k_data(4, count=9, shared=15)
    whole = _gradient(model, [data])
    micro_batching = None
    if setting == "prefix":
        monkeypatch.setattr(packing, "MIN_SHARED", 10**9)
    else:
        assert len(pack(data, 40)) > 2
        micro_batching = MicroBatching(40, recompute=False)
    assert np.abs(whole - _gradient(model, [data], micro_batching)).max() <= 2e-6 * np.abs(whole).max()


def test_a_position_counts_as_one_token_and_its_entropy_once(model: TorchEngine) -> None:
    single = datum([3, 4, 5, 6, 7], prompt=3)
    weights = np.zeros((4, 3), np.float32)
    weights[2:] = [0.5, 0.0, 0.25]
    several = TrainDatum(single.tokens, np.stack([single.targets, single.targets, single.targets + 1], 1), weights)
    one, other = (model.forward("m", [example], CROSS_ENTROPY) for example in (single, several))
    assert one.metrics["tokens:sum"] == other.metrics["tokens:sum"] == 2
    assert one.metrics["entropy:mean"] == other.metrics["entropy:mean"]
    assert one.entropies[0].tobytes() == other.entropies[0].tobytes()


def test_logits_are_computed_once_for_all_targets_of_a_position(
    model: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    plain = Decoder.logits
    monkeypatch.setattr(
        Decoder, "logits", lambda self, hidden, loras: rows.append(len(hidden)) or plain(self, hidden, loras)
    )
    data = [TrainDatum(np.arange(20), np.arange(400).reshape(20, 20) % 97, np.ones((20, 20), np.float32))]
    model.forward("m", data, CROSS_ENTROPY)
    assert sum(rows) == 20
    model.forward_backward("m", data, CROSS_ENTROPY)
    assert sum(rows) == 20 + 2 * 20  # and once more for the gradient


def test_every_cell_of_a_packed_batch_finds_its_target() -> None:
    data = top_k_data(3, count=9, shared=10)
    for batch in pack(data, 60):
        cells = positions = 0
        for index in batch.datum_ids:
            targets = data[index].targets
            pairs = batch.pair_of_cell[cells : cells + targets.size].reshape(len(targets), -1)
            rows = batch.row_of_position[positions : positions + len(targets)]
            np.testing.assert_array_equal(batch.pair_targets[pairs], targets.reshape(len(targets), -1))
            assert (batch.pair_rows[pairs] == rows[:, None]).all()
            np.testing.assert_array_equal(batch.tokens[rows], data[index].tokens)
            cells, positions = cells + targets.size, positions + len(targets)
        assert (np.diff(batch.pair_rows) >= 0).all() and set(batch.pair_rows) == set(range(len(batch.tokens)))
