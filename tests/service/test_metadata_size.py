"""`user_metadata` has one limit wherever it is kept; a request with more fails and leaves no row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from service_harness import BASE, STEP, Harness, failure, open_service

from mint.errors import InvalidRequestError, MintError
from mint.server.callers import LOCAL

KIB = 1 << 10


def metadata(size: int) -> dict[str, Any]:
    """Metadata whose JSON has this many bytes."""
    return {"note": "x" * (size - len('{"note":""}'))}


def assert_names_the_limit(error: MintError) -> None:
    assert isinstance(error, InvalidRequestError), error
    for part in ("user_metadata", f"{256 * KIB + 1} bytes", str(256 * KIB)):
        assert part in str(error), error


def test_a_model_has_at_most_256_kib_of_metadata(tmp_path: Path) -> None:
    harness = Harness(open_service(tmp_path))

    def create(number: int, size: int) -> str:
        body = {"session_id": harness.session_id, "model_seq_id": number, "base_model": BASE}
        return harness.wait(harness.submit("create_model", {**body, "user_metadata": metadata(size)}))["model_id"]

    name = create(0, 256 * KIB)
    run = harness.service.training_runs.run(LOCAL.owner, name)
    assert run.user_metadata == metadata(256 * KIB)
    assert_names_the_limit(failure(lambda: create(1, 256 * KIB + 1)))
    stored = harness.service.journal.database.values("SELECT coalesce(sum(length(user_metadata)), 0) FROM runs")[0]
    assert stored < 257 * KIB
    harness.service.stop()


def test_a_checkpoint_has_at_most_256_kib_of_metadata_and_training_goes_on(tmp_path: Path) -> None:
    harness = Harness(open_service(tmp_path))
    model = harness.create_model()
    body = {"path": "a", "user_metadata": metadata(256 * KIB + 1)}
    assert_names_the_limit(failure(lambda: harness.run("save_weights", model, 1, body)))
    assert_names_the_limit(failure(lambda: harness.run("save_weights_for_sampler", model, 2, body)))
    assert_names_the_limit(failure(lambda: harness.run("save_weights_external", model, 3, body)))
    assert not harness.service.checkpoints.checkpoints(LOCAL.owner).checkpoints
    harness.run("optim_step", model, 4, STEP)
    harness.run("save_weights", model, 5, {"path": "b", "user_metadata": metadata(256 * KIB)})
    [stored] = harness.service.checkpoints.checkpoints(LOCAL.owner).checkpoints
    assert stored.user_metadata == metadata(256 * KIB)
    harness.service.stop()


def test_a_session_has_at_most_256_kib_of_metadata(tmp_path: Path) -> None:
    service = open_service(tmp_path)
    body = json.dumps({"user_metadata": metadata(256 * KIB)}).encode()
    error = failure(lambda: service.sessions.create(LOCAL, body))
    assert (
        isinstance(error, InvalidRequestError) and f"{len(body)} bytes" in str(error) and "user_metadata" in str(error)
    )
    service.stop()
