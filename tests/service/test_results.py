"""How long results are kept in memory: each owner has room of their own, and what is journaled is never lost."""

from __future__ import annotations

import asyncio
import time

import pytest
from service_harness import GOOD_PASS, Harness, make_sampler, send_sample

from mint.errors import NotFoundError
from mint.server.callers import LOCAL
from mint.server.queue import futures
from mint.server.queue.futures import KEEP_BYTES, FutureResult, Futures

LARGE = b"x" * (KEEP_BYTES * 5 // 8)


def finish(book: Futures, owner: str, name: str, body: bytes) -> None:
    book.open(name, owner=owner)
    book.finish({name: FutureResult(body)})


def kept(book: Futures, *names: str) -> list[bool]:
    return [book.fingerprint(name) is not None for name in names]


def test_large_results_of_one_owner_drop_nothing_of_another_and_their_own_oldest_first() -> None:
    book = Futures()
    finish(book, "bob", "b:sample:0:0", b"{}")
    for number in range(3):
        finish(book, "ann", f"a:sample:0:{number}", LARGE)
    assert kept(book, "b:sample:0:0", "a:sample:0:0", "a:sample:0:1", "a:sample:0:2") == [True, False, False, True]
    for number in range(3, 40):
        finish(book, "ann", f"a:sample:0:{number}", LARGE[: KEEP_BYTES // 16])
    assert book.finished_count == 1 + 16 and kept(book, "b:sample:0:0") == [True]


def test_the_room_of_dropped_and_repeated_results_is_free_again() -> None:
    book = Futures()
    for _ in range(3):
        finish(book, "ann", "a:sample:0:0", LARGE)
    book.forget("a:sample:0:0")
    finish(book, "ann", "a:sample:0:1", LARGE)
    finish(book, "ann", "a:sample:0:2", LARGE[: KEEP_BYTES // 4])
    assert kept(book, "a:sample:0:0", "a:sample:0:1", "a:sample:0:2") == [False, True, True]


def test_a_look_at_a_samplers_results_takes_no_longer_for_those_of_others() -> None:
    async def look_s(others: int) -> float:
        book = Futures()
        for number in range(others):
            finish(book, "bob", f"s{number % 50}:sample:0:{number}", b"{}")
        own = [f"own:sample:0:{number}" for number in range(20)]
        for name in own:
            finish(book, "ann", name, b"{}")
        book.forget(own.pop(3))
        began = time.process_time()
        for _ in range(200):
            found = await book.wait_for_any("own:sample:0", others + 5, timeout_s=0.0)
        assert [name for _, name, _ in found] == own[4:]
        return time.process_time() - began

    assert asyncio.run(look_s(20_000)) < 10 * asyncio.run(look_s(0))


def test_results_of_all_owners_go_when_they_are_old(monkeypatch: pytest.MonkeyPatch) -> None:
    book = Futures()
    finish(book, "bob", "b:sample:0:0", b"{}")
    monkeypatch.setattr(futures, "KEEP_S", 0.0)
    finish(book, "ann", "a:sample:0:0", b"{}")
    assert kept(book, "b:sample:0:0", "a:sample:0:0") == [False, True]


def test_a_training_result_that_was_dropped_is_read_from_the_journal_again_and_a_sample_is_gone(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(futures, "KEEP_BYTES", 1)  # only the newest result stays in memory
    model = harness.create_model()
    first = harness.send("forward_backward", model, 1, GOOD_PASS)
    answer = harness.answer(first)
    sampler = make_sampler(harness)
    sample = send_sample(harness, sampler, 0)
    harness.answer(sample)
    harness.answer(send_sample(harness, sampler, 1))
    assert kept(harness.service.futures, first, sample) == [False, False]
    assert harness.answer(first) == answer
    with pytest.raises(NotFoundError):
        asyncio.run(harness.service.results.retrieve(LOCAL, sample))


def test_the_event_loop_does_other_work_between_many_results_that_come_at_once() -> None:
    book = Futures()
    names = [f"a:sample:0:{number}" for number in range(20 * futures.RESOLVED_AT_ONCE)]
    for name in names:
        book.open(name, owner="ann")

    async def run() -> tuple[int, list[FutureResult | None]]:
        waiting = asyncio.gather(*(book.wait(name, 60.0) for name in names))
        await asyncio.sleep(0)
        book.finish({name: FutureResult(name.encode()) for name in names})
        turns = 0
        while not waiting.done():
            turns += 1
            await asyncio.sleep(0)
        return turns, await waiting

    turns, results = asyncio.run(run())
    assert turns >= 20
    assert results == [FutureResult(name.encode()) for name in names]
