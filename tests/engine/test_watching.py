"""Jobs that are watched: every token in order, and a cancelled job gone at once with no effect on the others."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import numpy as np
import pytest
from engine_data import LORA, job, train

from mint.engine import sampler as sampler_module
from mint.engine.protocol import CANCELLED, SampleJob, SampleResult, StopRule
from mint.engine.sampler import Sampler
from mint.engine.torch_engine import TorchEngine


@dataclass
class Watch:
    """Notes tokens; `cancel(job, tokens so far)` says who is no longer wanted."""

    jobs: Collection[int]
    cancel: Callable[[int, int], bool] = lambda job, seen: False
    seen: dict[tuple[int, int], list[tuple[int, float]]] = field(default_factory=dict)
    asked: list[int] = field(default_factory=list)

    @property
    def listeners(self) -> Collection[int]:
        return self.jobs

    def token(self, job: int, sample: int, token: int, logprob: float) -> None:
        self.seen.setdefault((job, sample), []).append((token, logprob))

    def is_cancelled(self, job: int) -> bool:
        self.asked.append(job)
        return self.cancel(job, max((len(own) for (j, _), own in self.seen.items() if j == job), default=0))


@pytest.fixture
def published(engine: TorchEngine) -> TorchEngine:
    engine.create_model("m", "base", LORA)
    train(engine, "m")
    engine.publish("m", "w")
    return engine


def _jobs() -> list[SampleJob]:
    return [
        job([3, 4, 5], weights_id="w", num_samples=4, max_tokens=20, seed=1),
        job([9] * 33, num_samples=3, max_tokens=30, seed=2, logprobs_mode="processed", temperature=0.7),
        job([7, 8], weights_id="w", num_samples=2, max_tokens=12, seed=3, topk_sample_logprobs=2),
    ]


def _bits(result: SampleResult) -> list[tuple[bytes, bytes]]:
    return [(sample.tokens.tobytes(), sample.logprobs.tobytes()) for sample in result.samples]


def test_a_watch_hears_each_token_of_its_jobs_in_order_and_changes_no_bit(published: TorchEngine) -> None:
    alone = published.sample(_jobs())
    watch = Watch(jobs={0, 1})
    watched = published.sample(_jobs(), watch)
    assert [_bits(one) for one in alone] == [_bits(other) for other in watched]
    assert {place for place, _ in watch.seen} == set(watch.asked) == {0, 1}
    for (place, index), heard in watch.seen.items():
        sample = watched[place].samples[index]
        assert [token for token, _ in heard] == sample.tokens.tolist()
        assert np.array_equal(np.array([logprob for _, logprob in heard], np.float32), sample.logprobs)


def test_samples_that_stop_are_heard_to_their_last_token(published: TorchEngine) -> None:
    free = published.sample(_jobs()[:1])[0].samples[0].tokens
    stopping = job(
        [3, 4, 5], weights_id="w", num_samples=4, max_tokens=20, seed=1, stop=StopRule(frozenset([int(free[4])]))
    )
    watch = Watch(jobs=[0])
    (result,) = published.sample([stopping], watch)
    assert any(sample.stopped for sample in result.samples)
    for index, sample in enumerate(result.samples):
        assert [token for token, _ in watch.seen[0, index]] == sample.tokens.tolist()


@pytest.mark.parametrize("gone", [0, 1, 2])
@pytest.mark.parametrize("after", [0, 1, 7])
def test_the_others_keep_their_bits_when_a_job_is_cancelled(published: TorchEngine, gone: int, after: int) -> None:
    expected = published.sample(_jobs())
    watch = Watch(jobs=[gone], cancel=lambda place, seen: seen >= after)
    results = published.sample(_jobs(), watch)
    assert results[gone].error == CANCELLED and results[gone].samples == []
    assert max((len(heard) for heard in watch.seen.values()), default=0) == after
    for place in {0, 1, 2} - {gone}:
        assert results[place].error is None and _bits(results[place]) == _bits(expected[place])
        if expected[place].samples[0].topk is not None:
            tables = [[sample.topk for sample in found[place].samples] for found in (expected, results)]
            for one, other in zip(*tables, strict=True):
                assert one is not None and other is not None and one.logprobs.tobytes() == other.logprobs.tobytes()


def test_a_cancelled_job_frees_its_rows_and_cache_at_once(
    published: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    plain = Sampler._decode

    def counted(self: Sampler) -> object:
        rows.append(self._cache._cells.shape[2])
        return plain(self)

    monkeypatch.setattr(Sampler, "_decode", counted)
    many = [job([3], num_samples=2, max_tokens=10), job([4, 5], num_samples=7, max_tokens=10)]
    published.sample(many, Watch(jobs=[0], cancel=lambda place, seen: seen >= 3))
    assert rows == [9, 9] + [7] * 7  # 2 of 9 rows are too few to be worth moving the others, but for a cancelled job


def test_a_job_that_waits_can_be_cancelled_and_makes_room(
    published: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler_module, "MAX_ROWS", 4)
    expected = published.sample(_jobs())
    prefills: list[int] = []
    plain = Sampler._prefill_batch
    monkeypatch.setattr(Sampler, "_prefill_batch", lambda self, batch: prefills.extend(batch) or plain(self, batch))
    watch = Watch(jobs=[0, 1], cancel=lambda place, seen: place == 1 or seen >= 5)
    results = published.sample(_jobs(), watch)
    assert [result.error for result in results] == [CANCELLED, CANCELLED, None]
    assert prefills == [0, 2] and _bits(results[2]) == _bits(expected[2])


def test_a_job_that_has_ended_keeps_its_answer_though_nobody_wants_it_any_more(published: TorchEngine) -> None:
    short, long = job([3, 4], max_tokens=2), job([5, 6], max_tokens=9)
    watch = Watch(jobs=[0, 1], cancel=lambda place, seen: seen >= 2 and place == 0)
    first, second = published.sample([short, long], watch)
    assert first.error is None and len(first.samples[0].tokens) == 2 and second.error is None


def test_jobs_of_two_bases_are_watched_under_their_own_places(published: TorchEngine, tied: tuple) -> None:
    published.load_base("other", str(tied[0]))
    jobs = [job([3, 4], base=base, max_tokens=5, seed=seed) for seed, base in enumerate(["base", "other"] * 2)]
    expected = published.sample(jobs)
    watch = Watch(jobs=range(4), cancel=lambda place, seen: place == 3 and seen >= 2)
    results = published.sample(jobs, watch)
    assert [result.error for result in results] == [None, None, None, CANCELLED]
    for place in range(3):
        assert _bits(results[place]) == _bits(expected[place])
        assert [token for token, _ in watch.seen[place, 0]] == results[place].samples[0].tokens.tolist()


def test_prompt_questions_of_a_cancelled_neighbour_do_not_matter(published: TorchEngine) -> None:
    asking = job([3] * 9, max_tokens=0, prompt_logprobs=True, prompt_alt_tokens_k=2)
    (alone,) = published.sample([asking])
    results = published.sample(
        [asking, job([4], max_tokens=40)], Watch(jobs=[0, 1], cancel=lambda place, seen: place == 1)
    )
    assert (
        results[1].error == CANCELLED and results[0].prompt_logprobs is not None and alone.prompt_logprobs is not None
    )
    assert results[0].prompt_logprobs.tobytes() == alone.prompt_logprobs.tobytes()


def test_everything_may_be_cancelled(published: TorchEngine) -> None:
    for after in (0, 3):
        results = published.sample(_jobs(), Watch(jobs=range(3), cancel=lambda place, seen, after=after: seen >= after))
        assert [result.error for result in results] == [CANCELLED] * 3


def test_diverged_weights_are_never_heard(published: TorchEngine) -> None:
    broken = {name: np.full_like(array, 1e30) for name, array in published.read_state("m").weights.items()}
    published.load_weights("broken", "base", LORA, broken)
    watch = Watch(jobs=range(2))
    results = published.sample([job([3, 4], weights_id="broken"), job([3, 4], weights_id="w")], watch)
    assert results[0].error and results[0].error != CANCELLED and results[1].error is None
    assert {place for place, _ in watch.seen} == {1}
