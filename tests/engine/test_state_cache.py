"""States of delta nets in sampling: one for each sequence, kept for prompts that begin alike, and never mixed up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_data import LORA, job, train
from small_models import write_model

from mint.engine.cpu import recorded_step
from mint.engine.cpu.recorded_step import RecordedStep
from mint.engine.model.decoder import Decoder
from mint.engine.protocol import SampleJob, SampleResult, StopRule
from mint.engine.torch_engine import TorchEngine

FAMILY = "qwen3_5_text"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp(FAMILY)
    write_model(found, "tied", family=FAMILY)
    return found


@pytest.fixture(params=[False, True], ids=["torch", "native"])
def native(request: pytest.FixtureRequest, native_folder: Path) -> Path | None:
    """The folder of the kernels in C, or None."""
    return native_folder if request.param else None


def _engine(folder: Path, native: Path | None, **settings: Any) -> TorchEngine:
    """An engine with published weights `w` and empty caches."""
    engine = TorchEngine(**{"dtype": "float32", "threads": 1, "device": "cpu", "native": native, **settings})
    engine.load_base("base", str(folder))
    engine.create_model("m", "base", LORA)
    train(engine, "m", steps=1)
    engine.publish("m", "w")
    return engine


def _bits(result: SampleResult) -> list[bytes]:
    assert result.error is None
    return [part.tobytes() for sample in result.samples for part in (sample.tokens, sample.logprobs)]


def _prefilled(engine: TorchEngine, jobs: list[SampleJob]) -> tuple[int, list[SampleResult]]:
    before = engine.sampling_counters().get("prefilled", 0)
    results = engine.sample(jobs)
    return engine.sampling_counters()["prefilled"] - before, results


def _tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(2, 97, count).tolist()


def _next_turns(opening: SampleJob, answer: SampleResult) -> list[SampleJob]:
    return [
        job([*opening.prompt.tolist(), *sample.tokens.tolist(), *_tokens(7, seed=1)], weights_id="w", max_tokens=9)
        for sample in answer.samples
    ]


@pytest.mark.parametrize("first", [5, 32, 63, 64, 65, 100])
def test_the_next_turn_goes_on_from_the_state_of_the_last(folder: Path, native: Path | None, first: int) -> None:
    engine = _engine(folder, native)
    opening = job(_tokens(first), weights_id="w", num_samples=4, max_tokens=30)
    count, (answer,) = _prefilled(engine, [opening])
    assert count == first
    turns = _next_turns(opening, answer)
    count, warm = _prefilled(engine, turns)
    assert count == 4 * (1 + 7)  # the last token of an answer was drawn, but never read
    assert [_bits(result) for result in warm] == [_bits(result) for result in _engine(folder, native).sample(turns)]


def test_a_sequence_that_ends_early_leaves_its_own_state(folder: Path, native: Path | None) -> None:
    """Its row stays in the batch for a while."""
    engine = _engine(folder, native)
    stop = StopRule(frozenset(range(2, 12)))
    opening = job(_tokens(20), weights_id="w", num_samples=12, max_tokens=60, stop=stop)
    (answer,) = engine.sample([opening])
    lengths = {len(sample.tokens) for sample in answer.samples}
    assert len(lengths) > 3 and max(lengths) > 10
    turns = _next_turns(opening, answer)
    count, warm = _prefilled(engine, turns)
    assert count == 12 * (1 + 7)
    assert [_bits(result) for result in warm] == [_bits(result) for result in _engine(folder, native).sample(turns)]


def test_a_prompt_that_comes_again_computes_its_last_token_alone(folder: Path, native: Path | None) -> None:
    engine = _engine(folder, native)
    jobs = [job(_tokens(80), weights_id="w", num_samples=2, seed=seed) for seed in range(4)]
    count, together = _prefilled(engine, jobs)
    assert count == 80 + 3
    count, again = _prefilled(engine, jobs)
    assert count == 4
    assert [_bits(result) for result in again] == [_bits(result) for result in together]
    assert [_bits(_engine(folder, native).sample([own])[0]) for own in jobs] == [_bits(result) for result in together]


@pytest.mark.parametrize("shared", [33, 64, 90])
def test_a_common_beginning_is_kept_once_it_has_come_twice(folder: Path, native: Path | None, shared: int) -> None:
    engine = _engine(folder, native)
    prompts = [[*_tokens(shared), 2 + place, *_tokens(20, seed=place)] for place in range(4)]
    jobs = [job(prompt, weights_id="w") for prompt in prompts]
    counts = []
    for own in jobs:
        count, (warm,) = _prefilled(engine, [own])
        counts.append(count)
        assert _bits(warm) == _bits(_engine(folder, native).sample([own])[0])
    # The second finds keys and values without a state, and leaves the state there.
    assert counts == [shared + 21, shared + 21, 21, 21]


def test_no_state_is_shared_between_scopes_or_weights(folder: Path) -> None:
    engine = _engine(folder, None)
    prompt = _tokens(70)
    for scope, weights, expected in (("a", "w", 70), ("b", "w", 70), ("b", None, 70), ("b", "w", 1)):
        count, _ = _prefilled(engine, [job(prompt, weights_id=weights, cache_scope=scope)])
        assert count == expected


def test_without_room_for_states_they_are_computed_again(folder: Path) -> None:
    engine = _engine(folder, None, prefix_cache_bytes=0)
    own = job(_tokens(70), weights_id="w", num_samples=3)
    first, again = engine.sample([own])[0], engine.sample([own])[0]
    assert _bits(first) == _bits(again)
    assert engine.sampling_counters()["reused"] == 0


def test_more_sequences_than_slots_take_turns(folder: Path, native: Path | None) -> None:
    """Those of one job, too."""
    jobs = [job(_tokens(30, seed), weights_id="w", num_samples=3, seed=seed) for seed in range(5)]
    plenty = _engine(folder, native)
    state = plenty.sample(jobs)
    slot_bytes = 4 * (3 * (2 * 32 + 128) + 16 * 128)
    engine = _engine(folder, native, kv_cache_bytes=2 * 8 * slot_bytes + 1)
    assert [_bits(result) for result in engine.sample(jobs)] == [_bits(result) for result in state]
    group = job(_tokens(30), num_samples=9, max_tokens=20)
    assert _bits(engine.sample([group])[0]) == _bits(plenty.sample([group])[0])


@pytest.mark.parametrize("failing", [3, 6, 9])
def test_a_step_that_was_interrupted_starts_its_jobs_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """Some layers have gone on to the next state by then, and others have not."""
    jobs = [job(_tokens(30, seed), weights_id="w", num_samples=2, max_tokens=12, seed=seed) for seed in range(3)]
    expected = [_bits(result) for result in _engine(folder, None).sample(jobs)]
    engine = _engine(folder, None)
    real = Decoder.logits
    calls: list[int] = []

    def logits(self: Decoder, *arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == failing:
            raise MemoryError("no memory")
        return real(self, *arguments)

    monkeypatch.setattr(Decoder, "logits", logits)
    assert [_bits(result) for result in engine.sample(jobs)] == expected
    assert engine.sampling_counters()["preemptions"] == 6


RECORDED: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "vocab_size": 112, "linear_num_value_heads": 16, "linear_num_key_heads": 8, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("threads", [1, 2])
def test_recorded_steps_give_the_bits_of_the_forward(
    tmp_path: Path, native_folder: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, threads: int
) -> None:
    """While rows end, others join, and pages are added."""
    write_model(tmp_path, "tied", family=FAMILY, **RECORDED)
    stop = StopRule(frozenset(range(2, 7)))
    jobs = [
        job(_tokens(20 + 9 * seed, seed), weights_id="w", num_samples=6, max_tokens=70, seed=seed, stop=stop)
        for seed in range(4)
    ]
    recordings = []
    real = RecordedStep._record
    monkeypatch.setattr(RecordedStep, "_record", lambda self: recordings.append(1) or real(self))
    found = []
    for most in (1 << 30, 0):
        monkeypatch.setattr(recorded_step, "RECORDED_BYTES", most)
        recordings.clear()
        engine = _engine(tmp_path, native_folder, threads=threads, dtype=dtype)
        found.append([_bits(result) for result in engine.sample(jobs)])
        if not recordings and most:
            pytest.skip("this processor lacks the kernels' instructions")
        assert bool(recordings) == bool(most)
    assert found[0] == found[1]
