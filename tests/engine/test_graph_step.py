"""A step of fixed shapes computes what the decoder's forward computes, for any rows that come and go.

Without a GPU nothing is captured: the layers run as they would be, with torch's operations for the kernels. Where there
is one, graphs and Triton's kernels are tested, too.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from decoders import new_lora, open_decoder
from engine_data import LORA, job, train
from small_models import write_model

from mint.engine.cuda.graph_step import SPLIT_PAGES, StepGraphs, _Shape, cut_runs
from mint.engine.cuda.lora_slots import MAX_SLOTS, LoraPart, common_spec
from mint.engine.cuda.plain_kernels import PlainKernels
from mint.engine.devices import Device
from mint.engine.lora import LoraRows, LoraWeights
from mint.engine.model.attention import PAGE_POSITIONS
from mint.engine.model.decoder import Decoder
from mint.engine.protocol import LoraSpec
from mint.engine.quantized.number_formats import Quantization
from mint.engine.quantized.quantized_matrix import QuantizedMatrix
from mint.engine.sampling.decode_step import EagerSteps
from mint.engine.sampling.kv_cache import KVCache
from mint.engine.sampling.prefill import PromptPart, run_prompts
from mint.engine.torch_engine import TorchEngine

OTHER = LoraSpec(rank=3, seed=1, train_attn=False, train_mlp=True, train_unembed=False)
PAGES = 512


@pytest.fixture(scope="module", params=["qwen3", "qwen2", "llama"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random small model of each family: norms of heads, biases, scaled rotation."""
    folder: Path = tmp_path_factory.mktemp("model")
    write_model(folder, "untied" if request.param == "llama" else "tied", family=request.param)
    return folder


@pytest.fixture(
    params=["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]
)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def _graphs(decoder: Decoder, pages: KVCache, *buckets: int) -> StepGraphs:
    if decoder.device.type == "cpu":
        return StepGraphs(decoder, pages, PlainKernels(), capture=False, buckets=buckets)
    from mint.engine.cuda.kernels import TritonKernels  # needs Triton

    return StepGraphs(decoder, pages, TritonKernels(), buckets=buckets)


def _lora(decoder: Decoder, spec: LoraSpec, seed: int) -> LoraWeights:
    with torch.inference_mode(mode=False):
        lora = new_lora(decoder, spec)
        lora.flat.copy_(torch.randn(lora.flat.shape, generator=torch.Generator().manual_seed(seed)) * 0.05)
    return lora


def _pages(decoder: Decoder) -> KVCache:
    """Filled with what no sequence has written."""
    pages = KVCache(decoder.config, decoder.dtype, decoder.device, 1 << 30)
    generator = torch.Generator().manual_seed(0)
    for layer in range(decoder.config.num_hidden_layers):
        for plane in pages.planes(layer):
            plane[:PAGES].copy_(torch.randn(plane[:PAGES].shape, generator=generator))
    return pages


@torch.inference_mode()
def test_rows_that_come_and_go_have_the_logits_of_the_decoders_forward(family: Path, device: str) -> None:
    decoder = open_decoder(family, device=device)
    pages, rng = _pages(decoder), np.random.default_rng(0)
    graphs = _graphs(decoder, pages, 2, 4, 8)
    loras = [None, _lora(decoder, LORA, 1), _lora(decoder, LORA, 2), _lora(decoder, OTHER, 3)]
    for _ in range(6):
        counts = [int(count) for count in rng.integers(0, 12, len(loras)) * (rng.random(len(loras)) < 0.5)]
        if not sum(counts):
            continue
        ends = np.cumsum(counts).tolist()
        runs = [LoraRows(end - n, end, lora) for end, n, lora in zip(ends, counts, loras, strict=True) if n]
        table = rng.permutation(PAGES)[: 2 * SPLIT_PAGES * ends[-1]].reshape(ends[-1], -1)
        last = PAGE_POSITIONS * int(rng.integers(1, 2 * SPLIT_PAGES))
        positions = np.maximum(0, last - rng.integers(1, 9, ends[-1]) * rng.integers(1, 50, ends[-1]))
        step = graphs.open(table, table[:, 0], positions, runs)
        for _ in range(4):
            if not step.fits(positions):
                step = graphs.open(table, table[:, 0], positions, runs)
            tokens = rng.integers(0, decoder.config.vocab_size, ends[-1])
            found = step.run(tokens, positions)
            expected = EagerSteps(decoder, pages).open(table, table[:, 0], positions, runs).run(tokens, positions)
            torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
            positions = positions + 1


@pytest.mark.parametrize("kind", ["nf4", "int8", "fp8"])
@torch.inference_mode()
def test_rows_of_a_quantized_base_have_the_logits_of_the_decoders_forward(
    kind: Quantization, tmp_path: Path, device: str
) -> None:
    write_model(tmp_path, "tied", hidden_size=128, intermediate_size=192, head_dim=32, num_attention_heads=4)
    decoder = open_decoder(tmp_path, device=device, quantization=kind)
    assert all(isinstance(matrix, QuantizedMatrix) for matrix in decoder.weights.matrices.values())
    pages, table, positions = _pages(decoder), np.array([[5, 9], [7, 3], [5, 1]]), np.array([70, 63, 64])
    runs, tokens = [LoraRows(0, 3, _lora(decoder, LORA, 1))], np.array([1, 2, 3])
    found = _graphs(decoder, pages, 4).open(table, table[:, 0], positions, runs).run(tokens, positions)
    expected = EagerSteps(decoder, pages).open(table, table[:, 0], positions, runs).run(tokens, positions)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


@torch.inference_mode()
def test_nothing_is_written_but_the_new_keys_and_values_of_the_rows(family: Path, device: str) -> None:
    decoder = open_decoder(family, device=device)
    pages = _pages(decoder)
    before = [
        plane[:PAGES].clone() for layer in range(decoder.config.num_hidden_layers) for plane in pages.planes(layer)
    ]
    table, positions = np.array([[5, 9], [7, 3], [5, 1]]), np.array([70, 63, 64])
    graphs = _graphs(decoder, pages, 8)
    graphs.open(table, table[:, 0], positions, [LoraRows(0, 3, None)]).run(np.array([1, 2, 3]), positions)
    after = [plane[:PAGES] for layer in range(decoder.config.num_hidden_layers) for plane in pages.planes(layer)]
    for old, new in zip(before, after, strict=True):
        changed = (old != new).any(-1).any(1).nonzero().tolist()
        assert changed == [[1, 0], [7, 63], [9, 6]]


@torch.inference_mode()
def test_a_rows_logits_do_not_depend_on_its_company_within_a_bucket(family: Path, device: str) -> None:
    decoder = open_decoder(family, device=device)
    pages, rng = _pages(decoder), np.random.default_rng(0)
    graphs = _graphs(decoder, pages, 16)
    lora = _lora(decoder, LORA, 1)
    table = rng.permutation(PAGES)[:44].reshape(11, 4)
    positions, tokens = rng.integers(0, 250, 11), rng.integers(0, 60, 11)

    def logits(rows: np.ndarray) -> torch.Tensor:
        step = graphs.open(table[rows], table[rows, 0], positions[rows], [LoraRows(0, len(rows), lora)])
        return step.run(tokens[rows], positions[rows]).clone()

    together = logits(np.arange(11))
    for rows in (np.array([4]), np.array([10, 4, 0])):
        torch.testing.assert_close(logits(rows), together[rows], rtol=0, atol=1e-5)
        assert device == "cpu" or torch.equal(logits(rows), together[rows])


@torch.inference_mode()
def test_weights_that_change_are_seen_by_the_next_step_that_is_opened(family: Path, device: str) -> None:
    decoder = open_decoder(family, device=device)
    pages = _pages(decoder)
    graphs = _graphs(decoder, pages, 2)
    lora, table, positions, tokens = _lora(decoder, LORA, 1), np.array([[5]]), np.array([20]), np.array([3])
    runs = [LoraRows(0, 1, lora)]
    before = graphs.open(table, table[:, 0], positions, runs).run(tokens, positions)
    lora.flat.mul_(-3)
    after = graphs.open(table, table[:, 0], positions, runs).run(tokens, positions)
    expected = EagerSteps(decoder, pages).open(table, table[:, 0], positions, runs).run(tokens, positions)
    torch.testing.assert_close(after, expected, rtol=1e-5, atol=2e-5)
    assert not torch.allclose(before, after, atol=1e-2)


class _Counted(PlainKernels):
    used = 0

    def swiglu(self, product: torch.Tensor, lora: LoraPart | None) -> tuple[torch.Tensor, torch.Tensor]:
        self.used += 1
        return super().swiglu(product, lora)


def test_a_whole_batch_samples_the_same_tokens(family: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def engine() -> TorchEngine:
        engine = TorchEngine(dtype="float32", threads=1, device="cpu")
        engine.load_base("base", str(family))
        engine.create_model("m", "base", LORA)
        train(engine, "m", steps=1)
        engine.publish("m", "w")
        return engine

    rng = np.random.default_rng(1)
    jobs = [
        job(rng.integers(2, 60, length), num_samples=3, max_tokens=limit, weights_id=name, seed=length)
        for length, limit, name in ((5, 70, "w"), (60, 9, None), (130, 2, "w"), (62, 1, "w"), (3, 20, None))
    ]
    kernels = _Counted()
    plain = engine().sample(jobs)
    monkeypatch.setattr(
        Device,
        "decode_steps",
        lambda self, decoder, cache, states: StepGraphs(decoder, cache, kernels, capture=False, buckets=(4, 8)),
    )
    fixed = engine()
    for found, expected in zip(fixed.sample(jobs), plain, strict=True):
        assert found.error is None
        for own, other in zip(found.samples, expected.samples, strict=True):
            assert own.tokens.tolist() == other.tokens.tolist()
            np.testing.assert_allclose(own.logprobs, other.logprobs, rtol=0, atol=1e-5)
    assert kernels.used > 0


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_captured_stays_on_the_device_and_never_waits_for_it(family: Path, dtype: torch.dtype) -> None:
    # Tensors without data: mixing them with others on a CPU raises, and so does reading anything back.
    decoder = open_decoder(family, dtype, device="meta")
    pages = KVCache(decoder.config, dtype, decoder.device, 1 << 24)
    graphs = StepGraphs(decoder, pages, PlainKernels(), capture=False, buckets=(64,))
    lora = new_lora(decoder, LORA)
    inputs = torch.zeros((5, 64), dtype=torch.int32, device="meta")
    kind = common_spec([lora])
    graphs.place(kind, [lora])
    hidden = graphs.hidden(inputs, splits=1, kind=kind)
    logits = decoder.logits(hidden, [LoraRows(0, 64, lora)])
    assert hidden.shape == (64, decoder.config.hidden_size)
    assert logits.shape == (64, decoder.config.vocab_size)
    assert hidden.is_meta
    assert logits.is_meta
    for wait in (lambda: hidden.cpu(), lambda: hidden[0, 0].item(), lambda: hidden + torch.zeros(64, 1)):
        with pytest.raises((RuntimeError, NotImplementedError)):
            wait()


@torch.inference_mode()
def test_a_prompt_is_run_without_reading_anything_back(family: Path) -> None:
    decoder = open_decoder(family, device="meta")
    pages = KVCache(decoder.config, decoder.dtype, decoder.device, 1 << 24)
    lora = new_lora(decoder, LORA)
    parts = [
        PromptPart(np.arange(70) % 50, 10, np.array([3, 4]), None),
        PromptPart(np.arange(33), 0, np.array([7]), lora),
    ]
    hidden = run_prompts(decoder, pages, parts)
    assert hidden.is_meta
    assert hidden.shape == (60 + 33, decoder.config.hidden_size)


def test_one_graph_too_many_costs_the_oldest_alone(tmp_path: Path) -> None:
    write_model(tmp_path, "tied")
    decoder = open_decoder(tmp_path)
    graphs = _graphs(decoder, KVCache(decoder.config, decoder.dtype, decoder.device, 1 << 20), 4)
    loras = [new_lora(decoder, spec) for spec in (OTHER, LORA)]
    other, own = (common_spec([lora]) for lora in loras)
    for kind, lora in zip((other, own), loras, strict=True):
        graphs.place(kind, [lora])
    for shape in (_Shape(4, 1, other), _Shape(4, 2, own), _Shape(4, 1, None), _Shape(4, 4, own)):
        graphs._captured[shape] = (cast(Any, None), torch.zeros(1))  # a graph needs a GPU
    graphs._drop_oldest(None)
    assert [shape.kind for shape in graphs._captured] == [own, None, own] and list(graphs._slots) == [own]
    graphs._drop_oldest(None)
    assert list(graphs._slots) == [own]  # another graph reads it
    graphs.place(own, [new_lora(decoder, LORA) for _ in range(2)])  # more slots lie at another address
    assert [shape.kind for shape in graphs._captured] == [None]


@torch.inference_mode()
def test_a_graph_that_replaces_the_last_of_its_kind_reads_the_slots_that_were_just_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path, "tied")
    decoder = open_decoder(tmp_path)
    graphs = _graphs(decoder, KVCache(decoder.config, decoder.dtype, decoder.device, 1 << 20), 4)
    inputs = torch.tensor([[5, 6, 7, 8], [0, 0, 0, 0], [0, 0, 0, 0], [0, 1, 2, 3]], dtype=torch.int32)
    lora = _lora(decoder, LORA, seed=1)
    kind = common_spec([lora])
    monkeypatch.setattr(graphs, "_capture", False)
    graphs.place(kind, [lora])
    expected = graphs.hidden(inputs, 2, kind)
    for shape in (_Shape(4, 1, kind), _Shape(4, 1, None)):
        graphs._captured[shape] = (cast(Any, None), torch.zeros(1))

    def record(shape: _Shape) -> tuple[Any, torch.Tensor]:
        """As a capture, which runs the layers; a graph needs a GPU."""
        return SimpleNamespace(replay=lambda: None), graphs._run(shape)

    monkeypatch.setattr(graphs, "_record", record)
    monkeypatch.setattr(graphs, "_capture", True)
    monkeypatch.setattr("mint.engine.cuda.graph_step.MAX_GRAPHS", 2)
    graphs.place(kind, [lora])
    assert torch.equal(graphs.hidden(inputs, 2, kind), expected)
    assert list(graphs._captured) == [_Shape(4, 1, None), _Shape(4, 2, kind)] and list(graphs._slots) == [kind]


@torch.inference_mode()
def test_a_step_that_cannot_be_captured_is_run_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_model(tmp_path, "tied")
    decoder = open_decoder(tmp_path)
    graphs = _graphs(decoder, KVCache(decoder.config, decoder.dtype, decoder.device, 1 << 20), 4)
    inputs = torch.tensor([[5, 6, 7, 8], [0, 0, 0, 0], [-1, -1, -1, -1], [0, 1, 2, 3]], dtype=torch.int32)
    expected = graphs.hidden(inputs, 1, None)

    def out_of_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(graphs, "_record", out_of_memory)
    monkeypatch.setattr(graphs, "_capture", True)
    assert torch.equal(graphs.hidden(inputs, 1, None), expected)
    assert "without CUDA graphs" in caplog.text and not graphs._capture


@torch.inference_mode()
def test_a_draw_that_cannot_be_captured_is_run_behind_the_graph_of_the_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_model(tmp_path, "tied")
    decoder = open_decoder(tmp_path)
    graphs = _graphs(decoder, KVCache(decoder.config, decoder.dtype, decoder.device, 1 << 20), 4)
    inputs = torch.tensor([[5, 6, 7, 8], [0, 0, 0, 0], [-1, -1, -1, -1], [0, 1, 2, 3]], dtype=torch.int32)
    rules, loras = torch.full((4, 4), 0.5, dtype=torch.float64), [LoraRows(0, 4, None)]
    expected = graphs.drawn(inputs, 1, None, loras, rules, is_restricted=True)
    captured: list[str] = []

    def capture(shape: _Shape) -> Any:
        captured.append(shape.draws)
        if shape.draws == "nothing":
            return SimpleNamespace(replay=lambda: None), graphs._run(shape)
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graphs, "_record", capture)
    monkeypatch.setattr(graphs, "_capture", True)
    for _ in range(2):
        assert torch.equal(graphs.drawn(inputs, 1, None, loras, rules, is_restricted=True), expected)
    assert captured == ["restricted", "nothing"]
    assert "drawing outside of CUDA graphs" in caplog.text and graphs._capture


def test_a_lora_is_copied_for_a_graph_only_when_it_has_changed(tmp_path: Path) -> None:
    write_model(tmp_path, "tied")
    decoder = open_decoder(tmp_path)
    graphs = _graphs(decoder, KVCache(decoder.config, decoder.dtype, decoder.device, 1 << 20), 64)
    lora, other = _lora(decoder, OTHER, 1), _lora(decoder, OTHER, 2)
    kind = common_spec([lora])
    table, positions = np.arange(4).reshape(2, 2), np.array([3, 70])

    def run(*own: LoraWeights) -> int:
        """A step that is opened anew; how often the slots were written until then."""
        with torch.inference_mode():
            step = graphs.open(table, table[:, 0], positions, [LoraRows(i, i + 1, lora) for i, lora in enumerate(own)])
            step.run(np.array([5, 6])[: len(own)], positions[: len(own)])
        assert kind is not None
        return graphs._slots[kind].flat._version

    first = run(lora, other)
    assert run(lora, other) == first and run(lora) == first and run(other) == first
    with torch.no_grad():
        lora.flat.mul_(2.0)
    second = run(lora, other)
    assert second > first
    assert run(other, lora) == second
    assert run(_lora(decoder, OTHER, 3)) > second


@torch.inference_mode()
def test_rows_that_enter_another_page_have_their_lora_copied_no_second_time(tmp_path: Path) -> None:
    """Not even where torch does not count the changes of its weights."""
    write_model(tmp_path, "tied")
    decoder = open_decoder(tmp_path)
    graphs = _graphs(decoder, KVCache(decoder.config, decoder.dtype, decoder.device, 1 << 20), 64)
    lora = new_lora(decoder, OTHER)
    kind = common_spec([lora])
    assert lora.flat.is_inference() and kind is not None
    table, positions, runs = np.arange(2).reshape(1, 2), np.array([PAGE_POSITIONS - 1]), [LoraRows(0, 1, lora)]
    step = graphs.open(table, table[:, 0], positions, runs)
    step.run(np.array([5]), positions)
    copied = graphs._slots[kind].flat._version
    assert not step.fits(positions + 1)
    graphs.open(table, table[:, 0], positions + 1, runs, earlier=step).run(np.array([6]), positions + 1)
    assert graphs._slots[kind].flat._version == copied
    graphs.open(table, table[:, 0], positions + 1, runs).run(np.array([6]), positions + 1)
    assert graphs._slots[kind].flat._version > copied


def test_a_batch_is_cut_into_replays_of_few_enough_rows_and_loras(tmp_path: Path) -> None:
    write_model(tmp_path, "tied")
    decoder = open_decoder(tmp_path)
    loras = [None, *(new_lora(decoder, LORA) for _ in range(2 * MAX_SLOTS))]
    rng = np.random.default_rng(0)
    for _ in range(50):
        ends = np.cumsum(rng.integers(1, 40, int(rng.integers(1, 40)))).tolist()
        chosen = rng.integers(0, len(loras), len(ends))
        runs = [LoraRows(a, b, loras[n]) for a, b, n in zip([0, *ends], ends, chosen, strict=False)]
        replays = cut_runs(runs, 64)
        rows = [(row, run.weights) for replay in replays for run in replay for row in range(run.start, run.stop)]
        assert rows == [(row, run.weights) for run in runs for row in range(run.start, run.stop)]
        for replay in replays:
            assert len({id(run.weights) for run in replay}) <= MAX_SLOTS
            tiles = [-(-(run.stop - run.start) // 16) * 16 for run in replay]
            assert sum(tiles[:-1]) + replay[-1].stop - replay[-1].start <= 64
