"""How scopes share a sampler: none waits behind another's flood, shares are equal, and no draw depends on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest
from conftest import Twin, limit_sampling
from engine_data import job

from mint.engine.memory.sampling_limits import BESIDE
from mint.engine.model.attention import PAGE_POSITIONS
from mint.engine.protocol import SampleBatch, SampleJob
from mint.engine.sampling.admission import fair_shares, may_begin
from mint.engine.sampling.sampler import LEAST_PREFILL
from mint.engine.torch_engine import TorchEngine

PAGE_BYTES = 2 * 2 * 2 * PAGE_POSITIONS * 16 * 4
"""Keys and values of two layers with two kv heads of 16 numbers in float32."""


def asked(scope: str, seed: int, *, prompt: list[int] | None = None, samples: int = 1, tokens: int = 12) -> SampleJob:
    return job(prompt or [3, 4, 5], cache_scope=scope, seed=seed, num_samples=samples, max_tokens=tokens)


class Watched:
    """A batch, and how many sequences of each scope get tokens in each step."""

    def __init__(self, engine: TorchEngine) -> None:
        self.batch: SampleBatch = engine.open_batch()
        self.ended: dict[str, int] = {}
        self._steps = 0
        self._jobs = 0
        self._heard: set[tuple[str, int, int]] = set()

    def add(self, own: SampleJob, name: str = "") -> None:
        self._jobs += 1
        number = self._jobs

        def listen(sample: int, token: int, logprob: float) -> None:
            self._heard.add((own.cache_scope, number, sample))

        self.batch.add(name or str(number), own, listen)

    def step(self) -> Counter[str]:
        """The sequences by scope."""
        self._heard.clear()
        self._steps += 1
        for name in self.batch.step():
            self.ended[name] = self._steps
        return Counter(scope for scope, _, _ in self._heard)


@pytest.fixture
def watched(engine: TorchEngine) -> Watched:
    limit_sampling(engine, rows=16)
    return Watched(engine)


@pytest.mark.parametrize("samples", [1, 4])
def test_a_flood_does_not_hold_up_the_first_request_of_another_scope(watched: Watched, samples: int) -> None:
    for seed in range(100):
        watched.add(asked("many", seed))
    watched.step()
    assert watched.step() == {"many": 16}
    watched.add(asked("one", 0, samples=samples), "first")
    assert [watched.step() for _ in range(10)] == [{"many": 16, "one": samples}] * 10
    watched.step()
    assert "first" in watched.ended


def test_a_request_with_more_samples_than_rows_does_not_hold_up_another_scope(watched: Watched) -> None:
    watched.add(asked("many", 0, samples=40))
    watched.step()
    watched.add(asked("one", 0))
    assert watched.step() == {"many": 40, "one": 1}


def test_long_prompts_do_not_hold_up_the_prompt_of_another_scope(watched: Watched, engine: TorchEngine) -> None:
    limit_sampling(engine, prefill_tokens=64)
    for seed in range(15):
        watched.add(asked("many", seed, prompt=[6 + seed] * 200))
    watched.step()
    watched.add(asked("one", 0))
    assert watched.step() == {"one": 1}


def test_short_prompts_of_a_flood_join_in_slices_beside_the_sequences_of_others(
    watched: Watched, engine: TorchEngine
) -> None:
    limit_sampling(engine, prefill_tokens=BESIDE * 4 * LEAST_PREFILL)
    watched.add(asked("one", 0))
    watched.step()
    for seed in range(15):
        watched.add(asked("many", seed))
    assert [watched.step()["many"] for _ in range(4)] == [4, 8, 12, 15]


def test_scopes_that_always_ask_get_equal_shares_of_the_rows(watched: Watched) -> None:
    scopes = [f"scope {number}" for number in range(8)]
    for number, scope in enumerate(scopes):  # the first has come long before the last, and asks for groups
        for seed in range(60):
            watched.add(asked(scope, seed, tokens=3 + seed % 7, samples=1 + (number == 0)))
    for _ in range(20):
        watched.step()
    all_heard: Counter[str] = Counter()
    for _ in range(60):
        heard = watched.step()
        assert heard.total() >= 14
        all_heard += heard
    had = [all_heard[scope] for scope in scopes]
    assert sum(had) ** 2 / (len(had) * sum(tokens**2 for tokens in had)) >= 0.95, had  # Jain's index


def test_spare_rows_go_back_once_a_scope_has_its_share(watched: Watched) -> None:
    for seed in range(100):
        watched.add(asked("early", seed, tokens=6 + seed % 3))
    watched.step()
    for seed in range(100):
        watched.add(asked("late", seed, tokens=6 + seed % 3))
    rows = [watched.step() for _ in range(30)]
    assert max(step.total() for step in rows) == 20
    assert all(step.total() <= 16 and abs(step["early"] - step["late"]) <= 2 for step in rows[-10:]), rows


def test_where_memory_is_short_the_scope_with_the_most_rows_gives_way(engine: TorchEngine, twin: Twin) -> None:
    small = twin(engine, {}, kv_cache_bytes=10 * PAGE_BYTES)
    watched = Watched(small)
    for seed in range(4):
        watched.add(asked("many", seed, tokens=140))
    watched.step()
    watched.add(asked("one", 0, tokens=140), "one")
    while watched.batch.keys:
        watched.step()
    assert small.sampling_counters()["preemptions"] > 0
    assert watched.ended["one"] < 150  # it never started again


def test_samples_are_the_same_whatever_scopes_do_beside_them(engine: TorchEngine, watched: Watched) -> None:
    jobs = [
        asked(f"scope {seed % 3}", seed, prompt=[3 + seed % 5] * (1 + 9 * (seed % 4)), samples=1 + seed % 3)
        for seed in range(24)
    ]
    batch, together = watched.batch, {}
    for place, own in enumerate(jobs):
        batch.add(str(place), own)
        together |= batch.step()
    while batch.keys:
        together |= batch.step()
    for place, own in enumerate(jobs):
        (alone,) = engine.sample([own])
        for one, other in zip(alone.samples, together[str(place)].samples, strict=True):
            assert one.tokens.tobytes() == other.tokens.tobytes()
            assert one.logprobs.tobytes() == other.logprobs.tobytes()


# --- the rules -----------------------------------------------------------------------------------------------------


FAIR: dict[str, tuple[Mapping[str, int], int, Mapping[str, int]]] = {
    "nobody": ({}, 10, {}),
    "enough for all": ({"a": 3, "b": 4}, 10, {"a": 3, "b": 4}),
    "equal shares": ({"a": 50, "b": 60}, 10, {"a": 5, "b": 5}),
    "what one does not want is for the others": ({"a": 100, "b": 1, "c": 100}, 11, {"a": 5, "b": 1, "c": 5}),
    "more scopes than there is": ({"a": 9, "b": 9, "c": 9}, 2, {"a": 0, "b": 1, "c": 1}),
}


@pytest.mark.parametrize("name", FAIR)
def test_shares_are_fair(name: str) -> None:
    wanted, budget, expected = FAIR[name]
    assert fair_shares(wanted, budget) == expected


MAY_BEGIN: dict[str, tuple[int, dict[str, int], int, bool]] = {
    "an empty batch takes any": (500, {}, 1, True),
    "up to the limit there is room for all": (4, {"a": 12}, 1, True),
    "a full batch takes no more of the one that fills it": (1, {"a": 16}, 1, False),
    "but of one without rows": (4, {"b": 16}, 2, True),
    "not more than the spare rows": (5, {"b": 16}, 2, False),
    "and not of one that has its share": (1, {"a": 8, "b": 8}, 2, False),
    "nor of one that would have more than its share": (3, {"a": 6, "b": 10}, 2, False),
    "beside a job that is larger than the batch as well": (4, {"b": 40}, 2, True),
    "among more scopes than rows each may have one": (1, {"b": 16}, 40, True),
}


@pytest.mark.parametrize("name", MAY_BEGIN)
def test_a_job_of_scope_a_may_begin_in_a_batch_of_16_rows_and_4_spare_ones(name: str) -> None:
    count, rows, scopes, expected = MAY_BEGIN[name]
    assert may_begin("a", count, Counter(rows), scopes=scopes, limit=16, spare=4) == expected
