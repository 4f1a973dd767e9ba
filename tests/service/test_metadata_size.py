"""`user_metadata` has one limit wherever it is kept, and a page of a listing has one, too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from service_harness import BASE, STEP, Harness, failure, open_service

from mint.errors import InvalidRequestError, MintError
from mint.server.callers import LOCAL
from mint.types.records import PageQuery, SessionSearchRequest

KIB = 1 << 10
MIB = 1 << 20


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
    total = "SELECT coalesce(sum(length(user_metadata)), 0) FROM runs"
    assert harness.stored(lambda journal: journal.database.value(total)) < 257 * KIB
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


def test_a_page_has_at_most_4_mib_of_metadata_and_its_cursor_leads_to_the_next(tmp_path: Path) -> None:
    harness = Harness(open_service(tmp_path))
    service = harness.service
    made = [harness.create_model()]
    for number in range(1, 22):
        body = {"session_id": harness.session_id, "model_seq_id": number, "base_model": BASE}
        body = {**body, "lora_config": {"rank": 1}, "user_metadata": metadata(256 * KIB)}
        made.append(harness.wait(harness.submit("create_model", body))["model_id"])
    for number in range(21):  # shown with the oldest run, too
        save = {"path": f"n{number}", "user_metadata": metadata(256 * KIB)}
        harness.run("save_weights", made[0], number + 1, save)

    seen, offset, pages = [], 0, 0
    while offset < 22:
        page = service.training_runs.runs(LOCAL.owner, PageQuery(limit=1000, offset=offset))
        assert len(page.model_dump_json()) < 4.1 * MIB and page.cursor.total_count == 22
        seen += [run.training_run_id for run in page.training_runs]
        last = page.training_runs[-1].last_checkpoint
        offset, pages = offset + page.cursor.limit, pages + 1
    assert seen == made[::-1] and pages == 2
    assert last is not None and last.checkpoint_id == "weights/n20"

    first = service.checkpoints.checkpoints(LOCAL.owner)
    assert first.cursor is not None and first.cursor.limit == len(first.checkpoints) == 15
    second = service.checkpoints.checkpoints(LOCAL.owner, PageQuery(limit=1000, offset=15))
    assert [one.checkpoint_id for one in second.checkpoints] == [f"weights/n{number}" for number in range(5, -1, -1)]
    service.stop()


def test_a_page_of_found_sessions_has_at_most_4_mib_of_metadata(tmp_path: Path) -> None:
    service = open_service(tmp_path)
    body = json.dumps({"user_metadata": metadata(255 * KIB)}).encode()
    made = {service.sessions.create(LOCAL, body).session_id for _ in range(20)}
    request = SessionSearchRequest(limit=200)
    first = service.stored_sessions.search_sessions(LOCAL.owner, request)
    assert len(first.model_dump_json()) < 4.1 * MIB and first.next_cursor is not None
    rest = request.model_copy(update={"cursor": first.next_cursor})
    second = service.stored_sessions.search_sessions(LOCAL.owner, rest)
    assert second.next_cursor is None
    found = [session.session_id for session in (*first.sessions, *second.sessions)]
    assert len(found) == 20 and set(found) == made
    service.stop()
