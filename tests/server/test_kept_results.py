"""Results that wait for their clients: one owner's never push out another's."""

from __future__ import annotations

from pathlib import Path

import pytest

from mint.server.queue import futures
from tests.server.server_harness import API, Person, make_key, running, sample_body


def test_an_owner_with_many_results_loses_their_own_oldest_ones_and_is_told_to_send_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [make_key(tmp_path, owner) for owner in ("ann", "bob")]
    with running(tmp_path) as server:
        ann, bob = (Person(server, key) for key in keys)
        hers, his = (person.sampler(person.session()) for person in (ann, bob))
        waiting = bob.post("asample", sample_body(his))["request_id"]
        answer = bob.result(waiting)
        monkeypatch.setattr(futures, "KEEP_BYTES", 4000)
        for seq_id in range(20):
            ann.done("asample", sample_body(hers, seq_id, max_tokens=100))
        assert bob.result(waiting) == answer
        dropped = ann.send("POST", f"{API}/retrieve_future", {"request_id": f"{hers}:0"})
        assert dropped.status_code == 410  # clients of the protocol send the request again
        again = ann.post("asample", sample_body(hers, 0, max_tokens=100))["request_id"]
        assert ann.result(again)["sequences"]
