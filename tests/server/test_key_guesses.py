"""Who guesses keys is slowed, wherever a key is taken; their neighbours are not, and time tells nothing of a key."""

from __future__ import annotations

import math
import random
import secrets
import threading
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from mint.errors import OverloadedError
from mint.server.callers import Caller
from mint.server.http import key_guesses
from mint.server.http.key_guesses import GUESSES_WITHIN_S, MAX_ADDRESSES, MAX_GUESSES, GuardedKeys
from mint.server.store.database import Database
from mint.server.store.journal import JOURNAL_FILE
from mint.server.store.keys import ApiKeys
from tests.server.server_harness import API, Person, make_key, running

HERE, THERE = "203.0.113.7", "203.0.113.8"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def keys(tmp_path: Path) -> Iterator[ApiKeys]:
    database = Database(tmp_path / JOURNAL_FILE)
    yield ApiKeys(database)
    database.close()


def guess(guarded: GuardedKeys, address: str, count: int = MAX_GUESSES) -> None:
    for number in range(count):
        assert guarded.verify(f"tml-mint-guess-{number}", address) is None


def test_after_some_wrong_keys_an_address_has_to_wait_even_for_the_right_one(keys: ApiKeys, clock: Clock) -> None:
    guarded = GuardedKeys(keys, clock=clock)
    right, _ = keys.create("ann")
    guess(guarded, HERE)
    clock.now += 1
    for key in ("tml-mint-another", right):
        with pytest.raises(OverloadedError) as caught:
            guarded.verify(key, HERE)
        assert caught.value.retry_after_s == GUESSES_WITHIN_S - 1 and key not in str(caught.value)
    assert guarded.verify(right, THERE) is not None
    clock.now += GUESSES_WITHIN_S - 1
    assert guarded.verify(right, HERE) is not None


def test_guesses_that_are_sent_at_once_learn_no_more_than_those_sent_one_by_one(
    keys: ApiKeys, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    guarded = GuardedKeys(keys, clock=clock)
    right, _ = keys.create("ann")
    everybody_looks, verify = threading.Barrier(4 * MAX_GUESSES), keys.verify

    def verify_together(key: str) -> Caller | None:
        everybody_looks.wait(30.0)  # none has been counted yet
        return verify(key)

    monkeypatch.setattr(keys, "verify", verify_together)

    def answers(number: int) -> bool:
        try:
            guarded.verify(f"tml-mint-guess-{number}", HERE)
        except OverloadedError:
            return False
        return True

    with ThreadPoolExecutor(4 * MAX_GUESSES) as threads:
        assert sum(threads.map(answers, range(4 * MAX_GUESSES))) == MAX_GUESSES
    with pytest.raises(OverloadedError):
        guarded.verify(right, HERE)


def test_a_wrong_key_in_a_loop_is_one_guess_and_is_always_told_so(keys: ApiKeys, clock: Clock) -> None:
    guarded = GuardedKeys(keys, clock=clock)
    guess(guarded, HERE)
    for _ in range(50):
        assert guarded.verify("tml-mint-guess-3", HERE) is None


def test_a_key_that_has_worked_from_an_address_goes_on_working_there(keys: ApiKeys, clock: Clock) -> None:
    guarded = GuardedKeys(keys, clock=clock)
    right, row = keys.create("ann")
    assert guarded.verify(right, HERE) is not None
    guess(guarded, HERE)
    assert guarded.verify(right, HERE) is not None
    keys.revoke(row.key_id)
    assert guarded.verify(right, HERE) is None


def test_a_network_of_ipv6_is_one_address_and_a_mapped_address_is_the_ipv4_one(keys: ApiKeys, clock: Clock) -> None:
    guarded = GuardedKeys(keys, clock=clock)
    for number in range(MAX_GUESSES):
        guarded.verify(f"tml-mint-guess-{number}", f"2001:db8:0:1::{number:x}")
    with pytest.raises(OverloadedError):
        guarded.verify("tml-mint-other", "2001:db8:0:1:ffff::1")
    assert guarded.verify("tml-mint-other", "2001:db8:0:2::1") is None
    guess(guarded, HERE)
    with pytest.raises(OverloadedError):
        guarded.verify("tml-mint-other", f"::ffff:{HERE}")


def test_of_all_addresses_the_newest_ones_are_remembered(keys: ApiKeys, clock: Clock) -> None:
    guarded = GuardedKeys(keys, clock=clock)
    guess(guarded, HERE)
    others = [f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}" for number in range(MAX_ADDRESSES)]
    for address in others[:-1]:
        guarded.verify("tml-mint-guess", address)
    with pytest.raises(OverloadedError):
        guarded.verify("tml-mint-other", HERE)
    guarded.verify("tml-mint-guess", others[-1])
    assert guarded.verify("tml-mint-other", HERE) is None


def test_slow_guesses_of_one_address_take_a_bounded_memory(keys: ApiKeys, clock: Clock) -> None:
    tracemalloc.start()
    guarded = GuardedKeys(keys, clock=clock)
    for number in range(1000):
        clock.now += GUESSES_WITHIN_S / MAX_GUESSES
        guarded.verify(f"tml-mint-slow-{number}", HERE)
    held = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, key_guesses.__file__)])
    tracemalloc.stop()
    assert 0 < sum(each.size for each in held.statistics("filename")) < 20_000  # a guess that is kept takes over 100


def test_the_time_of_a_refusal_does_not_tell_how_much_of_a_key_is_right(keys: ApiKeys) -> None:
    right, _ = keys.create("ann")
    wrong = f"tml-mint-{secrets.token_urlsafe(32)}"
    # All keys are made before the first one is timed: what it takes to make a key must not count.
    tries = [(kind, f"{key[:-4]}{n:04d}") for kind, key in (("near", right), ("far", wrong)) for n in range(300)]
    random.Random(0).shuffle(tries)
    times: dict[str, list[float]] = {"near": [], "far": []}
    for kind, key in tries:
        began_at = time.process_time()
        assert keys.verify(key) is None
        times[kind].append(time.process_time() - began_at)
    wins = sum((near > far) + (near == far) / 2 for near in times["near"] for far in times["far"])
    # Mann-Whitney: the standard score of the ranks, if both come from one distribution
    assert abs(wins - 300 * 300 / 2) / math.sqrt(300 * 300 * 601 / 12) < 4


def test_every_place_that_takes_a_key_counts_guesses_and_says_when_to_come_back(tmp_path: Path) -> None:
    ann, late = make_key(tmp_path, "ann"), make_key(tmp_path, "ann")
    with running(tmp_path) as server:
        known = Person(server, ann)
        assert known.session()
        for number in range(MAX_GUESSES):
            refused = Person(server, f"tml-mint-guess-{number}").send("POST", f"{API}/create_session", {})
            assert refused.status_code == 401
        with httpx.Client(base_url=server.url, timeout=60) as browser:
            responses = [
                Person(server, late).send("POST", f"{API}/create_session", {}),
                Person(server, late).send("GET", "/v1/models"),
                Person(server, late).send("GET", "/"),
                browser.post("/login", data={"key": late}, headers={"origin": server.url}),
            ]
        for response in responses:
            assert response.status_code == 429 and 1 <= int(response.headers["retry-after"]) <= 60, response.text
            assert late not in response.text
        assert known.session() and known.send("GET", "/v1/models").status_code == 200
        elsewhere = {"x_forwarded_for": HERE}
        assert Person(server, late).send("POST", f"{API}/create_session", {}, **elsewhere).status_code == 200
