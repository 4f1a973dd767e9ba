"""A recorded step: the bits of the decoder's own forward, whoever comes, leaves or changes meanwhile."""

from __future__ import annotations

import gc
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from decoders import new_lora, open_decoder
from engine_data import job, train
from small_models import write_model

from mint.engine.cpu import recorded_step
from mint.engine.cpu.attention import NativeDecodeAttention
from mint.engine.cpu.build import COMPILERS
from mint.engine.cpu.operations import NativeOperations
from mint.engine.cpu.panels import PanelMatrix
from mint.engine.cpu.recorded_step import RECORDED_BYTES, SPARE_PAGES, NativeSteps, RecordedStep
from mint.engine.lora import LoraRows, LoraWeights
from mint.engine.model.attention import PAGE_POSITIONS
from mint.engine.model.decoder import Decoder
from mint.engine.protocol import LoraSpec, SampleJob, SampleResult, StopRule
from mint.engine.sampling.decode_step import DecodeStep, EagerStep
from mint.engine.sampling.kv_cache import KVCache
from mint.engine.torch_engine import TorchEngine

pytestmark = pytest.mark.skipif(not any(shutil.which(name) for name in COMPILERS), reason="there is no C compiler")

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "vocab_size": 96,
}  # fmt: skip
# transformers takes a Qwen2 head's width from the hidden size alone
WITH_BIASES: dict[str, Any] = {**SHAPE, "hidden_size": 128, "head_dim": None}
MIXED: dict[str, Any] = {**SHAPE, "num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
STACKED: dict[str, Any] = {**SHAPE, "num_local_experts": 16, "num_experts_per_tok": 2, "intermediate_size": 32}
ODD: dict[str, Any] = {**SHAPE, "vocab_size": 97}
LORA = LoraSpec(rank=4, seed=7, train_attn=True, train_mlp=True, train_unembed=True)
ROWS, COLUMNS = 37, 2


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tied model, one that is not and has biases, a mixture of experts, and one with biases, sinks and windows."""
    found = {family: tmp_path_factory.mktemp(family) for family in ("qwen3", "qwen2", "qwen3_moe", "gpt_oss")}
    write_model(found["qwen3"], "tied", **SHAPE)
    write_model(found["qwen2"], "untied", family="qwen2", **WITH_BIASES)
    write_model(found["qwen3_moe"], "tied", family="qwen3_moe", **MIXED)
    write_model(found["gpt_oss"], "tied", family="gpt_oss", **STACKED)
    return found


def _decoder(folder: Path, native_folder: Path, dtype: torch.dtype) -> Decoder:
    decoder = open_decoder(folder, dtype, native=native_folder)
    if not all(isinstance(matrix, PanelMatrix) for matrix in decoder.weights.matrices.values()):
        pytest.skip("this processor lacks the kernels' instructions")
    return decoder


def _steps(decoder: Decoder, pages: KVCache) -> NativeSteps:
    assert isinstance(decoder.operations, NativeOperations)
    return NativeSteps(decoder, decoder.operations, pages)


def _lora(decoder: Decoder, seed: int, **changes: bool) -> LoraWeights:
    lora = new_lora(decoder, LoraSpec(**{**vars(LORA), **changes}))
    lora.flat.normal_(0, 0.1, generator=torch.Generator().manual_seed(seed))
    return lora


class _Batch:
    """Rows of one decoder, with pages of their own that begin with the same noise as those of every other batch."""

    def __init__(self, decoder: Decoder, loras: list[LoraRows], *, recorded: bool) -> None:
        self.decoder, self.loras, self.recorded = decoder, loras, recorded
        self.pages = KVCache(decoder.config, decoder.dtype, CPU, 20 << 20)
        pages = self.pages.take(ROWS * (COLUMNS + 1))
        assert pages is not None
        self.table, self.width = np.tile(pages.reshape(ROWS, -1), 4), COLUMNS
        noise = torch.Generator().manual_seed(0)
        for layer in range(decoder.config.num_hidden_layers):
            for plane in self.pages.planes(layer):
                plane.copy_(torch.randn(plane.shape, generator=noise))
        self.step: DecodeStep | None = None

    def run(self, tokens: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        """Logits of one step, in the way of the sampler."""
        with torch.inference_mode():
            if self.step is None or not self.step.fits(positions):
                self.width = max(self.width, int(positions.max()) // PAGE_POSITIONS + 1)
                table = self.table[:, : self.width]
                if self.recorded:
                    steps = _steps(self.decoder, self.pages)
                    self.step = steps.open(table, table[:, 0], positions, self.loras, earlier=self.step)
                    assert isinstance(self.step, RecordedStep)
                else:
                    self.step = self._eager(np.ascontiguousarray(table), positions)
            return self.step.run(tokens, positions).clone()

    def _eager(self, table: np.ndarray, positions: np.ndarray) -> EagerStep:
        assert isinstance(self.decoder.operations, NativeOperations)
        attention = NativeDecodeAttention(self.decoder.operations.kernels, self.pages, table, positions.copy())
        return EagerStep(self.decoder, attention, self.loras)


def _runs(decoder: Decoder, kind: str) -> list[LoraRows]:
    if kind == "base":
        return [LoraRows(0, ROWS, None)]
    if kind == "one":
        return [LoraRows(0, ROWS, _lora(decoder, 1))]
    mixed = [_lora(decoder, 2, train_unembed=False), None, _lora(decoder, 3), _lora(decoder, 4, train_mlp=False)]
    edges = [0, 1, 11, 30, ROWS]
    return [LoraRows(start, stop, own) for start, stop, own in zip(edges[:-1], edges[1:], mixed, strict=True)]


@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["base", "one", "several"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "qwen3_moe", "gpt_oss"])
def test_a_recorded_step_gives_the_bits_of_the_forward_over_page_boundaries(
    folders: dict[str, Path], native_folder: Path, family: str, dtype: torch.dtype, kind: str, threads: int
) -> None:
    torch.set_num_threads(threads)
    decoder = _decoder(folders[family], native_folder, dtype)
    loras = _runs(decoder, kind)
    eager, recorded = (_Batch(decoder, loras, recorded=own) for own in (False, True))
    rng = np.random.default_rng(1)
    positions = rng.integers(0, COLUMNS * PAGE_POSITIONS - 1, ROWS)
    # two will need a page that the table has not had
    positions[:4] = [0, PAGE_POSITIONS - 3, PAGE_POSITIONS - 1, 2 * PAGE_POSITIONS - 2]
    first = None
    for step in range(6):
        tokens = rng.integers(0, 96, ROWS)
        assert torch.equal(recorded.run(tokens, positions + step), eager.run(tokens, positions + step))
        first = first or recorded.step
    assert recorded.step is first  # none of this takes another recording


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_follows_a_lora_that_changes_under_it(
    folders: dict[str, Path], native_folder: Path, dtype: torch.dtype
) -> None:
    decoder = _decoder(folders["qwen3"], native_folder, dtype)
    loras = _runs(decoder, "one")
    eager, recorded = (_Batch(decoder, loras, recorded=own) for own in (False, True))
    tokens, positions = np.arange(ROWS), np.arange(ROWS)
    before = recorded.run(tokens, positions)
    assert torch.equal(before, eager.run(tokens, positions))
    assert loras[0].weights is not None
    loras[0].weights.flat.mul_(2)
    after = recorded.run(tokens, positions)
    assert torch.equal(after, eager.run(tokens, positions)) and not torch.equal(after, before)


def test_a_step_of_more_pages_than_it_left_room_for_is_recorded_again(
    folders: dict[str, Path], native_folder: Path
) -> None:
    decoder = _decoder(folders["qwen3"], native_folder, torch.float32)
    eager, recorded = (_Batch(decoder, _runs(decoder, "base"), recorded=own) for own in (False, True))
    steps = []
    for spare in (0, SPARE_PAGES, SPARE_PAGES + 1):
        eager.width = recorded.width = COLUMNS + spare
        tokens, positions = np.arange(ROWS), np.arange(ROWS) + PAGE_POSITIONS * len(steps)
        assert torch.equal(recorded.run(tokens, positions), eager.run(tokens, positions))
        steps.append(recorded.step)
    assert steps[0] is steps[1] and steps[1] is not steps[2]


@pytest.mark.parametrize(("tokens", "positions"), [(96, 0), (-1, 0), (0, 512)])
def test_what_the_model_does_not_have_is_refused_at_every_step(
    folders: dict[str, Path], native_folder: Path, tokens: int, positions: int
) -> None:
    decoder = _decoder(folders["qwen3"], native_folder, torch.float32)
    step, places = _Batch(decoder, _runs(decoder, "base"), recorded=True), np.full(ROWS, 500)
    step.run(np.zeros(ROWS, np.int64), places)
    places[5] = positions or 500
    with pytest.raises(IndexError):
        step.run(np.where(np.arange(ROWS) == 5, tokens, 0), places)


def test_what_no_kernel_computes_is_not_recorded(tmp_path: Path, native_folder: Path) -> None:
    write_model(tmp_path, "tied", **ODD)
    decoder = open_decoder(tmp_path, torch.bfloat16, native=native_folder)
    pages = KVCache(decoder.config, decoder.dtype, CPU, 1 << 20)
    table, zeros = np.zeros((2, 1), np.int64), np.zeros(2, np.int64)
    assert isinstance(_steps(decoder, pages).open(table, table[:, 0], zeros, [LoraRows(0, 2, None)]), EagerStep)


def test_a_step_too_large_to_be_kept_is_not_recorded(folders: dict[str, Path], native_folder: Path) -> None:
    decoder = _decoder(folders["qwen3"], native_folder, torch.float32)
    sites = [*decoder.weights.matrices.values(), decoder.weights.unembedding]
    rows = RECORDED_BYTES // (4 * sum(matrix.inputs + 2 * matrix.outputs for matrix in sites))
    pages = KVCache(decoder.config, decoder.dtype, CPU, 1 << 20)
    for count, kind in ((rows, RecordedStep), (rows + 1, EagerStep)):
        table, zeros = np.zeros((count, 1), np.int64), np.zeros(count, np.int64)
        assert isinstance(_steps(decoder, pages).open(table, table[:, 0], zeros, [LoraRows(0, count, None)]), kind)


# --- in the sampler ---


@pytest.fixture
def engine(folders: dict[str, Path], native_folder: Path) -> TorchEngine:
    engine = TorchEngine(dtype="float32", threads=1, device="cpu", native=native_folder)
    engine.load_base("base", str(folders["qwen3"]))
    for name in ("m", "n"):
        engine.create_model(name, "base", LORA)
        train(engine, name, seed=ord(name))
        engine.publish(name, f"{name}-weights")
    return engine


def _jobs() -> list[SampleJob]:
    """Of several loras, lengths and rules; rows end at different steps, some at a stop token."""
    prompts = [[3, 4, 5, 6], [7] * PAGE_POSITIONS, list(range(20, 90)), [9] * (PAGE_POSITIONS - 2), [5, 3]]
    stop = StopRule(token_ids=frozenset(range(20, 26)))
    changes: list[dict[str, Any]] = [
        {"weights_id": "m-weights", "num_samples": 5, "max_tokens": 40, "stop": stop},
        {"weights_id": "n-weights", "num_samples": 3, "max_tokens": 70, "temperature": 0.8},
        {"num_samples": 4, "max_tokens": 12, "top_k": 5},
        {"weights_id": "m-weights", "num_samples": 2, "max_tokens": 9, "temperature": 0.0},
        {"num_samples": 3, "max_tokens": 33, "top_p": 0.9, "logprobs_mode": "processed"},
    ]
    return [job(prompt, seed=index, **own) for index, (prompt, own) in enumerate(zip(prompts, changes, strict=True))]


def _same(found: SampleResult, expected: SampleResult) -> bool:
    return len(found.samples) == len(expected.samples) and all(
        np.array_equal(one.tokens, other.tokens) and np.array_equal(one.logprobs, other.logprobs)
        for one, other in zip(found.samples, expected.samples, strict=True)
    )


@pytest.mark.parametrize("threads", [1, 2])
def test_jobs_that_come_and_go_get_what_they_get_alone_and_unrecorded(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    torch.set_num_threads(threads)
    opened: list[DecodeStep] = []

    plain = NativeSteps.open

    def watched(self: NativeSteps, *arguments: Any, **others: Any) -> DecodeStep:
        opened.append(plain(self, *arguments, **others))
        return opened[-1]

    monkeypatch.setattr(NativeSteps, "open", watched)
    batch, jobs, results = engine.open_batch(), _jobs(), {}
    for index, own in enumerate(jobs):
        batch.add(str(index), own)
        for _ in range(7):
            results |= batch.step()
    while batch.keys:
        results |= batch.step()
    assert opened and all(isinstance(step, RecordedStep) for step in opened)
    torch.set_num_threads(1)
    monkeypatch.setattr(recorded_step, "RECORDED_BYTES", 0)
    opened.clear()
    for index, own in enumerate(jobs):
        assert _same(results[str(index)], engine.sample([own])[0])
    assert opened and all(isinstance(step, EagerStep) for step in opened)


def test_weights_dropped_or_replaced_while_a_batch_runs_are_still_those_it_began_with(engine: TorchEngine) -> None:
    own = job([3, 4, 5, 6], weights_id="m-weights", num_samples=4, max_tokens=60)
    expected = engine.sample([own])[0]
    batch, results = engine.open_batch(), {}
    batch.add("own", own)
    for turn in range(60):
        results |= batch.step()
        if turn % 20 == 5:
            train(engine, "m", steps=1, seed=turn)
            engine.publish("m", "m-weights")
            engine.sample([job([8, 9, 10], weights_id="m-weights", max_tokens=3)])
            engine.drop_weights("m-weights")
            gc.collect()
            engine.sample([job([8, 9, turn], weights_id="n-weights", num_samples=30, max_tokens=5)])
    assert _same(results["own"], expected)
