"""A step that draws on the device gives the tokens of one that draws on the host, and the host waits for none of them
before it has started the next step. Nothing is captured here: the stand-in for a GPU runs the same operations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from decoders import new_lora, open_decoder
from engine_data import LORA, job, train
from small_models import write_model

from mint.engine.cuda.graph_step import GraphStep, StepGraphs, _DrawnParts
from mint.engine.cuda.lora_slots import common_spec
from mint.engine.cuda.plain_kernels import PlainKernels
from mint.engine.devices import Device
from mint.engine.drawing.device_draw import DrawRules, draw_rows
from mint.engine.drawing.draw import draw
from mint.engine.drawing.random_stream import streams
from mint.engine.lora import LoraRows
from mint.engine.model.attention import PAGE_POSITIONS
from mint.engine.protocol import SampleJob, SampleResult, StopRule
from mint.engine.sampling import sampler
from mint.engine.sampling.kv_cache import KVCache, page_bytes
from mint.engine.torch_engine import TorchEngine

TABLE = np.dtype([("stream", np.uint64), ("temperature", np.float64), ("top_k", np.int64), ("top_p", np.float64)])


def _table(rows: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    table: np.ndarray = np.zeros(rows, TABLE)
    table["stream"] = streams(np.full(rows, seed, np.uint64), np.arange(rows))
    table["temperature"] = rng.choice([0.0, 1e-6, 0.3, 1.0, 2.5], rows)
    table["top_k"] = rng.choice([-1, 0, 1, 7, 10_000], rows)
    table["top_p"] = rng.choice([1.0, 0.9, 0.2], rows)
    return table


@pytest.mark.parametrize("at_once", [None, 1, 4])
@pytest.mark.parametrize("vocab", [3, 64, 1003])
def test_fixed_shapes_draw_what_sorted_rows_draw(vocab: int, at_once: int | None) -> None:
    for seed in range(20):
        table, emitted = _table(17, seed), np.arange(17) + seed
        logits = 3 * torch.randn(17, vocab, generator=torch.Generator().manual_seed(seed))
        rules = DrawRules.of(table, emitted)
        wide = draw_rows(
            logits, torch.from_numpy(rules.columns), is_restricted=rules.is_restricted, rows_at_once=at_once
        )
        own = (table[name].copy() for name in ("temperature", "top_k", "top_p"))
        expected = draw(logits, rules.columns[0].copy(), *own)
        assert wide.dtype == torch.float64
        for found, column in zip(wide, expected, strict=True):
            assert torch.equal(found, column.double())


def test_rows_that_exclude_nothing_are_not_sorted() -> None:
    table = _table(30, 0)
    table["top_k"], table["top_p"] = -1, 1.0
    assert not DrawRules.of(table, np.arange(30)).is_restricted
    table["temperature"], table["top_p"] = 0.0, 0.5
    assert not DrawRules.of(table, np.arange(30)).is_restricted
    table["temperature"][7] = 1.0
    assert DrawRules.of(table, np.arange(30)).is_restricted


@torch.inference_mode()
@pytest.mark.parametrize("is_restricted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_captured_with_its_draw_reads_nothing_back(
    tmp_path: Path, dtype: torch.dtype, is_restricted: bool
) -> None:
    write_model(tmp_path, "tied")
    decoder = open_decoder(tmp_path, dtype, device="meta")  # tensors without data cannot be read
    graphs = StepGraphs(
        decoder, KVCache(decoder.config, dtype, decoder.device, 1 << 24), PlainKernels(), capture=False, buckets=(64,)
    )
    lora = new_lora(decoder, LORA)
    kind = common_spec([lora])
    graphs.place(kind, [lora])
    inputs = torch.zeros((5, 64), dtype=torch.int32, device="meta")
    rules = torch.zeros((4, 64), dtype=torch.float64, device="meta")
    found = graphs.drawn(inputs, 1, kind, [LoraRows(0, 64, lora)], rules, is_restricted=is_restricted)
    assert found.is_meta and found.shape == (3, 64)


class _Events:
    """Starts of steps and waits for their tokens, in order; each wait with the step that it waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started = 0
        self.behind: list[int] = []
        """For each wait, how many later steps had been started by then."""
        start, wait = GraphStep.draw, _DrawnParts.wait
        numbers: dict[int, int] = {}

        def counted_start(step: GraphStep, *arguments: Any) -> _DrawnParts:
            self.started += 1
            pending = start(step, *arguments)
            numbers[id(pending.parts)] = self.started
            return pending

        def counted_wait(pending: _DrawnParts) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            self.behind.append(self.started - numbers[id(pending.parts)])
            return wait(pending)

        monkeypatch.setattr(GraphStep, "draw", counted_start)
        monkeypatch.setattr(_DrawnParts, "wait", counted_wait)


def _engine(folder: Path, **settings: Any) -> TorchEngine:
    engine = TorchEngine(dtype="float32", threads=1, device="cpu", **settings)
    engine.load_base("base", str(folder))
    engine.create_model("m", "base", LORA)
    train(engine, "m", steps=1)
    engine.publish("m", "w")
    return engine


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines decode by the steps of a GPU."""
    monkeypatch.setattr(
        Device,
        "decode_steps",
        lambda self, decoder, cache, states: StepGraphs(
            decoder, cache, PlainKernels(), capture=False, buckets=(16, 64)
        ),
    )


def _jobs(seed: int, count: int = 12) -> list[SampleJob]:
    rng = np.random.default_rng(seed)
    return [
        job(
            rng.integers(2, 60, int(rng.integers(1, 140))),
            num_samples=int(rng.integers(1, 5)),
            max_tokens=int(rng.choice([1, 2, 3, 40, 90])),
            weights_id=rng.choice(["w", None]),
            seed=int(rng.integers(1 << 40)),
            temperature=float(rng.choice([0.0, 0.7, 1.0])),
            top_k=int(rng.choice([-1, 5])),
            top_p=float(rng.choice([1.0, 0.8])),
            stop=StopRule(frozenset(rng.integers(0, 60, int(rng.integers(0, 5))).tolist())),
        )
        for _ in range(count)
    ]


def _bits(results: list[SampleResult]) -> list[Any]:
    assert [result.error for result in results] == [None] * len(results)
    return [
        (sample.tokens.tolist(), sample.logprobs.tobytes(), sample.stopped)
        for result in results
        for sample in result.samples
    ]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.usefixtures("graphs")
def test_a_batch_that_reads_tokens_late_has_the_samples_of_one_that_reads_them_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    write_model(tmp_path, "tied")
    jobs = _jobs(seed)
    late = _engine(tmp_path)
    events = _Events(monkeypatch)
    found = _bits(late.sample(jobs))
    assert events.started > 80
    monkeypatch.setattr(sampler, "_draws_alone", lambda own: False)
    at_once = _engine(tmp_path)
    assert found == _bits(at_once.sample(jobs))
    assert late.sampling_counters()["sampled"] == at_once.sampling_counters()["sampled"]


@pytest.mark.usefixtures("graphs")
def test_the_host_waits_for_no_token_of_a_batch_before_the_next_step_has_been_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not where a row enters another page either; only where the rows of the batch change, and at its end."""
    write_model(tmp_path, "tied")
    engine = _engine(tmp_path)
    events = _Events(monkeypatch)
    steps = 2 * PAGE_POSITIONS
    results = engine.sample([job([5] * 20, weights_id="w", num_samples=7, max_tokens=steps + 1, seed=3)])
    assert [len(sample.tokens) for sample in results[0].samples] == [steps + 1] * 7
    assert events.started == steps
    assert events.behind == [1] * (steps - 1) + [0]


@pytest.mark.usefixtures("graphs")
def test_a_small_cache_and_cancelled_jobs_change_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path, "tied")
    large = _engine(tmp_path)
    config = open_decoder(tmp_path).config
    small = _engine(tmp_path, kv_cache_bytes=9 * page_bytes(config, torch.float32))
    group = job([5] * 70, weights_id="w", num_samples=6, max_tokens=150, seed=3)
    events = _Events(monkeypatch)
    batch = small.open_batch()
    batch.add("a", group, None)
    batch.add("b", job([7], max_tokens=400), None)
    results: dict[str, SampleResult] = {}
    for step in range(10_000):
        if step == 30:
            batch.cancel("b")
        results |= batch.step()
        if not batch.keys:
            break
    assert small.sampling_counters()["preemptions"] > 0 and max(events.behind) == 1
    assert results["b"].error is not None
    # Prefill computes a preempted sequence again; on such a device its last bits are not those of decoding.
    for found, expected in zip(results["a"].samples, large.sample([group])[0].samples, strict=True):
        assert found.tokens.tolist() == expected.tokens.tolist()
        np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=0, atol=1e-4)


@pytest.mark.usefixtures("graphs")
def test_sequences_that_need_their_logits_are_drawn_from_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path, "tied")
    engine = _engine(tmp_path)
    events = _Events(monkeypatch)
    asked = engine.sample([job([5, 6], logprobs_mode="processed", temperature=0.5)])
    assert asked[0].error is None and events.started == 0
    tables = engine.sample([job([5, 6], topk_sample_logprobs=3)])
    assert tables[0].samples[0].topk is not None and events.started == 0
