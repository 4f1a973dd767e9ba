"""Nothing that takes time runs on the server's event loop: while one request is held up, others are answered."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_harness import API, Person, make_key, pass_input, running, sample_body
from waiting import HANG_S

from mint import wire
from mint.compose.event_loop import SOCKETS_IN_A_TURN, new_event_loop
from mint.compose.serving import MAX_THREADS, Server
from mint.server.http.app import OWNER_THREADS
from mint.server.store import keys
from mint.server.store.durability import Durability
from mint.server.store.journal import Journal


class Held:
    """Stands in for a function, and waits in it until the test says so."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.began, self.go_on = threading.Event(), threading.Event()

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.began.set()
        assert self.go_on.wait(HANG_S)
        return self._function(*arguments, **named)


def hold_decoding(_server: Server, patch: pytest.MonkeyPatch) -> Held:
    held = Held(wire.decode)
    patch.setattr(wire, "decode", held)
    return held


def hold_database(_server: Server, patch: pytest.MonkeyPatch) -> Held:
    held = Held(Journal.add_job)
    patch.setattr(Journal, "add_job", lambda *arguments, **named: held(*arguments, **named))
    return held


def hold_disk(_server: Server, patch: pytest.MonkeyPatch) -> Held:
    held = Held(Durability.wait_durable)
    patch.setattr(Durability, "wait_durable", lambda *arguments: held(*arguments))
    return held


def hold_keys(server: Server, patch: pytest.MonkeyPatch) -> Held:
    held = Held(server.keys.verify)
    patch.setattr(server.keys, "verify", held)
    patch.setattr(server.keys, "recall", lambda _key: None)  # as if the key had not been sent for a while
    return held


@pytest.mark.parametrize("hold", [hold_decoding, hold_database, hold_disk, hold_keys])
def test_the_server_answers_while_a_request_is_being_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hold: Callable[..., Held]
) -> None:
    key = make_key(tmp_path, "ada")
    with running(tmp_path) as server, monkeypatch.context() as patch:
        person = Person(server, key)
        model = person.model(person.session())
        body = {"model_id": model, "seq_id": 1, "forward_backward_input": pass_input()}
        held = hold(server, patch)
        answers: list[int] = []
        sender = threading.Thread(
            target=lambda: answers.append(person.send("POST", f"{API}/forward_backward", body).status_code)
        )
        sender.start()
        try:
            assert held.began.wait(HANG_S)
            assert Person(server).send("GET", "/healthz").status_code == 200
            assert answers == []
        finally:
            held.go_on.set()
            sender.join()
        assert answers == [200]


def test_a_poll_with_a_known_key_is_answered_while_all_threads_are_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "FRESH_S", 2 * HANG_S)
    key = make_key(tmp_path, "ada")
    others = [make_key(tmp_path, f"owner{number}") for number in range(MAX_THREADS // OWNER_THREADS)]
    with running(tmp_path) as server:
        person = Person(server, key)
        holders = [Person(server, other) for other in others]
        beats = [(holder, {"session_id": holder.session()}) for holder in holders]
        poll = {"request_id": person.post("asample", sample_body(person.sampler(person.session())))["request_id"]}
        person.result(poll["request_id"])
        go_on, busy = threading.Event(), threading.Semaphore(0)

        def hold(_caller: object, _body: object) -> None:
            busy.release()
            assert go_on.wait(HANG_S)

        monkeypatch.setattr(server.service.sessions, "heartbeat", hold)
        senders = [
            threading.Thread(target=holder.send, args=("POST", f"{API}/session_heartbeat", beat))
            for holder, beat in beats
            for _ in range(OWNER_THREADS)
        ]
        assert len(senders) == MAX_THREADS
        for sender in senders:
            sender.start()
        try:
            assert all(busy.acquire(timeout=HANG_S) for _ in senders)
            headers = {"x-api-key": key, "accept": wire.Encoding.PROTO.value}
            assert httpx.post(f"{server.url}{API}/retrieve_future", json=poll, headers=headers, timeout=5).is_success
        finally:
            go_on.set()
            for sender in senders:
                sender.join()


def test_a_sample_is_decoded_beside_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(tmp_path) as server, monkeypatch.context() as patch:
        person = Person(server)
        sampler = person.sampler(person.session())
        held = hold_decoding(server, patch)
        sender = threading.Thread(target=person.post, args=("asample", sample_body(sampler)))
        sender.start()
        try:
            assert held.began.wait(HANG_S)
            assert person.send("GET", "/healthz").status_code == 200
        finally:
            held.go_on.set()
            sender.join()


def test_a_burst_on_many_sockets_lets_others_run_between() -> None:
    """Each socket is read once, in turns of a few; one that closes before its turn is not read."""
    pairs = [socket.socketpair() for _ in range(100)]
    read: list[int] = []
    between: list[int] = []
    loop = new_event_loop()

    def take(number: int) -> None:
        pairs[number][0].recv(1)
        read.append(number)
        if len(read) == 1:
            loop.remove_reader(pairs[-1 - number][0])

    async def run() -> None:
        for number, (one, other) in enumerate(pairs):
            loop.add_reader(one, take, number)
            other.send(b"x")
        while len(read) < len(pairs) - 1:
            before = len(read)
            await asyncio.sleep(0)
            between.append(len(read) - before)
        await asyncio.sleep(0.01)

    try:
        loop.run_until_complete(asyncio.wait_for(run(), HANG_S))
    finally:
        for pair in pairs:
            pair[0].close(), pair[1].close()
        loop.close()
    assert sorted(read) == sorted(set(range(100)) - {99 - read[0]})
    assert max(between) == SOCKETS_IN_A_TURN


@pytest.mark.parametrize("route", ["retrieve_future", "retrieve_futures", "client/config"])
def test_a_poll_with_a_large_body_is_refused_undecoded(route: str, tmp_path: Path) -> None:
    body = b'{"padding": "' + 64 * 1024 * b"x" + b'"}'
    with running(tmp_path) as server:
        refused = Person(server, make_key(tmp_path, "ada")).send("POST", f"{API}/{route}", body)
    assert refused.status_code == 413 and "at most 65536 bytes" in refused.text
