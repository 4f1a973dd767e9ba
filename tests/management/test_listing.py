"""Lists come in pages, newest first, in the fields that clients of the protocol read."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import httpx
import pytest
from owners import Place

from mint.client.rest_client import RestClient
from mint.errors import InvalidRequestError, NotFoundError
from mint.server.store.database import insert
from mint.server.store.rows import CheckpointRow
from mint.types import SessionSearchOwner, SessionSearchRequest, SessionStatusQuery
from mint.types.checkpoint_path import CheckpointPath
from mint.types.records import MAX_PAGE, MAX_WHOLE


def get(place: Place, path: str, owner: str = "alice") -> httpx.Response:
    return httpx.get(f"{place.url}/api/v1/{path}", headers={"x-api-key": owner})


def is_rfc3339_with_zone(text: str) -> bool:
    return "T" in text and datetime.fromisoformat(text).tzinfo is not None


def test_pages_of_checkpoints_hold_each_one_once(place: Place) -> None:
    trainer = place.trainer("alice")
    names = [f"n{i}" for i in range(5)]
    for name in names:
        trainer.save_state(name).result()
    rest = place.rest("alice")
    pages = [rest.list_user_checkpoints(limit=2, offset=offset).result() for offset in (0, 2, 4, 6)]
    seen = [kept.checkpoint_id.partition("/")[2] for page in pages for kept in page.checkpoints]
    assert seen == names[::-1]
    cursors = [page.cursor for page in pages]
    assert [(cursor.offset, cursor.limit, cursor.total_count) for cursor in cursors if cursor is not None] == [
        (0, 2, 5), (2, 2, 5), (4, 2, 5), (6, 2, 5),
    ]  # fmt: skip


def test_the_checkpoints_of_a_run_come_in_pages_and_the_sdk_gives_all(place: Place) -> None:
    trainer = place.trainer("alice")
    names = [f"n{i}" for i in range(20)]
    for name in names:
        trainer.save_state(name, user_metadata={"note": "x" * 250_000}).result()
    path = f"training_runs/{trainer.model_id}/checkpoints"
    page = get(place, f"{path}?limit=3&offset=2").json()
    assert [one["checkpoint_id"] for one in page["checkpoints"]] == [f"weights/n{i}" for i in (17, 16, 15)]
    assert page["cursor"] == {"offset": 2, "limit": 3, "total_count": 20}
    largest = get(place, path)
    assert len(largest.content) < 4_400_000 and 10 < len(largest.json()["checkpoints"]) < 20
    for limit in (1, 1000):
        page = get(place, f"{path}?limit={limit}&offset=20").json()
        assert page["checkpoints"] == [] and page["cursor"]["total_count"] == 20
    found = place.rest("alice").list_checkpoints(trainer.model_id).result()
    assert [kept.checkpoint_id.partition("/")[2] for kept in found.checkpoints] == names[::-1]


def test_a_client_that_knows_no_pages_gets_the_newest_ten_thousand_checkpoints_of_a_run(place: Place) -> None:
    model_id = place.trainer("alice").model_id
    with place.journal().database.transaction() as transaction:
        for number in range(MAX_WHOLE + 1):
            row = CheckpointRow(
                model_id, "weights", f"n{number}", f"checkpoints/{number}", float(number), owner="alice"
            )
            transaction.execute(insert(CheckpointRow, "checkpoints"), **vars(row))
    path = f"training_runs/{model_id}/checkpoints"
    whole = get(place, path).json()
    assert [row["checkpoint_id"] for row in whole["checkpoints"]] == [f"weights/n{i}" for i in range(MAX_WHOLE, 0, -1)]
    assert whole["cursor"] == {"offset": 0, "limit": MAX_WHOLE, "total_count": MAX_WHOLE + 1}
    assert len(get(place, f"{path}?limit={2 * MAX_WHOLE}").json()["checkpoints"]) == MAX_PAGE


def test_sdks_that_know_no_external_checkpoints_get_lists_without_them(place: Place) -> None:
    trainer = place.trainer("alice")
    trainer.save_state("kept").result()
    trainer.save_weights_external("out", ttl_seconds=3600).result()
    listed = {}
    for version in ("0.6.0", "0.27.9", "0.28.0", "0.38.0"):
        headers = {"x-api-key": "alice", "user-agent": f"AsyncTinker/Python {version}"}
        headers["x-stainless-package-version"] = version
        for path in ("checkpoints", f"training_runs/{trainer.model_id}/checkpoints"):
            rows = httpx.get(f"{place.url}/api/v1/{path}", headers=headers).json()["checkpoints"]
            listed.setdefault(version, []).append(sorted(row["checkpoint_type"] for row in rows))
    assert listed["0.6.0"] == listed["0.27.9"] == [["training"]] * 2
    assert listed["0.28.0"] == listed["0.38.0"] == [["external", "training"]] * 2


def test_pages_of_runs_hold_each_one_once(place: Place) -> None:
    client = place.client("alice")
    made = [client.create_lora_training_client("mint/tiny", rank=4).model_id for _ in range(3)]
    rest = place.rest("alice")
    first, rest_of_them = rest.list_training_runs(limit=2).result(), rest.list_training_runs(2, 2).result()
    runs = [*first.training_runs, *rest_of_them.training_runs]
    assert [run.training_run_id for run in runs] == made[::-1]
    assert first.cursor.total_count == 3
    assert rest.list_training_runs(limit=10**6).result().cursor.limit == 1000


def test_a_model_that_was_not_created_is_no_run(place: Place) -> None:
    client, rest = place.client("alice"), place.rest("alice")
    for base, rank in (("mint/tiny", 0), ("lab/nothing", 4)):
        with pytest.raises(InvalidRequestError):
            client.create_lora_training_client(base, rank=rank)
    made = client.create_lora_training_client("mint/tiny", rank=4).model_id
    session_id = made.partition(":")[0]
    assert [run.training_run_id for run in rest.list_training_runs().result().training_runs] == [made]
    assert rest.list_training_runs().result().cursor.total_count == 1
    assert rest.get_session(session_id).result().training_run_ids == [made]
    with pytest.raises(NotFoundError):
        rest.get_training_run(f"{session_id}:train:0").result()
    client.close()  # forgets the requests, and with them why they failed
    assert [run.training_run_id for run in rest.list_training_runs().result().training_runs] == [made]


def test_a_run_and_a_checkpoint_have_the_fields_of_the_protocol(place: Place) -> None:
    trainer = place.trainer("alice", user_metadata={"renderer": "qwen3"})
    trainer.save_state("a", user_metadata={"epoch": "1"}, ttl_seconds=3600).result()
    trainer.save_weights_for_sampler("s").result()
    run = get(place, f"training_runs/{trainer.model_id}").json()
    assert is_rfc3339_with_zone(run.pop("last_request_time"))
    training, sampler = run.pop("last_checkpoint"), run.pop("last_sampler_checkpoint")
    assert run == {
        "training_run_id": trainer.model_id,
        "base_model": "mint/tiny",
        "model_owner": "alice",
        "is_lora": True,
        "corrupted": False,
        "lora_rank": 4,
        "user_metadata": {"renderer": "qwen3"},
    }
    assert is_rfc3339_with_zone(training.pop("time"))
    assert is_rfc3339_with_zone(training.pop("expires_at"))
    assert training.pop("alias").startswith("ckpt_")
    assert training.pop("size_bytes") > 1000
    assert training == {
        "checkpoint_id": "weights/a",
        "checkpoint_type": "training",
        "tinker_path": f"tinker://{trainer.model_id}/weights/a",
        "public": False,
        "user_metadata": {"epoch": "1"},
    }
    assert (sampler["checkpoint_id"], sampler["checkpoint_type"]) == ("sampler_weights/s", "sampler")
    assert "expires_at" not in sampler


def test_a_run_stays_known_after_its_session(place: Place) -> None:
    client = place.client("alice")
    trainer = client.create_lora_training_client("mint/tiny", rank=4)
    trainer.save_state("a").result()
    client.close()
    rest = place.rest("alice")
    assert rest.get_training_run(trainer.model_id).result().last_checkpoint is not None
    session = rest.get_session(trainer.model_id.partition(":")[0]).result()
    assert (session.training_run_ids, session.sampler_ids) == ([trainer.model_id], [])


@pytest.mark.parametrize(
    "query",
    ["limit=-1", "limit=x", "limit=1.5", "offset=-1", f"offset={2**40}", f"limit={'9' * 5000}", "access_scope=all"],
)
@pytest.mark.parametrize("path", ["training_runs", "checkpoints", "sessions"])
def test_a_page_that_cannot_be_is_refused_with_a_sentence(shared: Place, path: str, query: str) -> None:
    answer = get(shared, f"{path}?{query}")
    assert answer.status_code == 400
    assert query.partition("=")[0] in answer.json()["error"]


@pytest.mark.parametrize("method", ["GET", "DELETE"])
@pytest.mark.parametrize("checkpoint", ["weights/%00", "other/a", "weights/...", "weights/%F0%9F%8C%B1", "a"])
def test_an_odd_checkpoint_id_is_refused_with_a_sentence(shared: Place, method: str, checkpoint: str) -> None:
    url = f"{shared.url}/api/v1/training_runs/sess-1:train:0/checkpoints/{checkpoint}"
    answer = httpx.request(method, url, headers={"x-api-key": "alice"})
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]


@pytest.mark.parametrize("path", ["audit?day=2026-01-01", "billing/usage/events", "billing/usage/checkpoints/current"])
def test_what_is_not_kept_is_refused_with_a_sentence(shared: Place, path: str) -> None:
    answer = get(shared, path)
    assert answer.status_code == 400
    assert "is not kept by this server" in answer.json()["error"]


def test_a_trace_is_refused_in_the_form_that_clients_wait_for(shared: Place) -> None:
    session_id = shared.client("alice").session_id
    assert get(shared, f"sessions/{session_id}/trace_export").json()["status"] == "failed"
    assert get(shared, f"sessions/{session_id}/trace_export", "bob").status_code == 404


# --- sessions ----------------------------------------------------------------------------------------------------


def test_a_session_names_its_runs_and_samplers(place: Place) -> None:
    client = place.client("alice", user_metadata={"team": "red"})
    trainer = client.create_lora_training_client("mint/tiny", rank=4)
    client.create_sampling_client(base_model="mint/tiny").result()
    session = place.rest("alice").get_session(client.session_id).result()
    assert session.training_run_ids == [trainer.model_id]
    assert session.sampler_ids == [f"{client.session_id}:sample:0"]
    assert session.user_metadata == {"team": "red"}


def test_sessions_are_listed_newest_first(place: Place) -> None:
    opened = [place.client("alice").session_id for _ in range(3)]
    rest = place.rest("alice")
    assert rest.list_sessions(limit=2).result().sessions == opened[:0:-1]
    assert rest.list_sessions(limit=2, offset=2).result().sessions == opened[:1]


def test_sessions_without_a_project_are_found_in_the_project_that_they_are_shown_in(place: Place) -> None:
    client = place.client("alice")
    path = client.create_lora_training_client("mint/tiny", rank=4).save_state("a").result().path
    rest = place.rest("alice")
    of_copy = CheckpointPath.parse(rest.copy_weights(path).result()).model_id.partition(":")[0]
    found = rest.search_sessions(SessionSearchRequest(project_ids=["default"])).result().sessions
    assert {session.session_id for session in found} == {client.session_id, of_copy}
    assert {session.project_id for session in found} == {"default"}


def test_sessions_are_found_by_what_is_known_of_them(place: Place) -> None:
    red, blue = (place.client("alice", user_metadata={"team": team}) for team in ("red", "blue"))
    trainer = red.create_lora_training_client("mint/tiny", rank=4)
    trainer.save_state("a").result()
    rest = place.rest("alice")
    rest.assign_session_project(red.session_id, "p1").result()
    red_id, blue_id = red.session_id, blue.session_id
    red.close("errored", "out of memory")
    cases: list[tuple[SessionSearchRequest, list[str]]] = [
        (SessionSearchRequest(), [blue_id, red_id]),
        (SessionSearchRequest(user_metadata={"team": "red"}), [red_id]),
        (SessionSearchRequest(session_id=blue_id), [blue_id]),
        (SessionSearchRequest(session_id=blue_id, display_name="nothing"), [blue_id]),
        (SessionSearchRequest(project_ids=["p1"]), [red_id]),
        (SessionSearchRequest(project_ids=["p2"]), []),
        (SessionSearchRequest(statuses=[SessionStatusQuery(type="active")]), [blue_id]),
        (SessionSearchRequest(statuses=[SessionStatusQuery(type="client_finished")]), [red_id]),
        (SessionSearchRequest(statuses=[SessionStatusQuery(type="client_finished", reasons=["errored"])]), [red_id]),
        (SessionSearchRequest(statuses=[SessionStatusQuery(type="client_finished", reasons=["success"])]), []),
        (SessionSearchRequest(statuses=[SessionStatusQuery(type="failed")]), []),
        (SessionSearchRequest(owner=SessionSearchOwner(type="user", owner_urns=["bob"])), []),
    ]
    for request, expected in cases:
        found = rest.search_sessions(request).result().sessions
        assert [session.session_id for session in found] == expected, request
    summary = rest.search_sessions(cases[1][0]).result().sessions[0]
    assert (summary.checkpoints_count, summary.project_id, summary.owner) == (1, "p1", "alice")
    assert summary.checkpoint_storage_bytes
    assert summary.status == {"type": "client_finished", "reason": {"type": "errored"}, "detail": "out of memory"}


@pytest.mark.parametrize(
    ("search", "named"),
    [
        ({"statuses": [{"type": "active", "reasons": ["success"]}]}, "reasons"),
        ({"statuses": [{"type": "client_finished", "reasons": ["bored"]}]}, "reasons"),
        ({"owner": {"type": "own", "owner_urns": ["bob"]}}, "owner_urns"),
        ({"owner": {"type": "user"}}, "owner_urns"),
    ],
)
def test_a_search_that_cannot_be_is_refused_by_its_field(place: Place, search: dict[str, Any], named: str) -> None:
    response = httpx.post(f"{place.url}/api/v1/sessions/search", json=search, headers={"x-api-key": "alice"})
    assert response.status_code == 400 and named in response.json()["error"]


def test_a_search_goes_on_where_its_cursor_says(place: Place) -> None:
    opened = [place.client("alice").session_id for _ in range(5)]
    rest = place.rest("alice")
    seen: list[str] = []
    request = SessionSearchRequest(limit=2)
    while True:
        page = rest.search_sessions(request).result()
        seen += [session.session_id for session in page.sessions]
        if page.next_cursor is None:
            break
        request = request.model_copy(update={"cursor": page.next_cursor})
    assert seen == opened[::-1]


def test_a_question_alone_opens_no_session(place: Place) -> None:
    with RestClient(place.url, "carol") as rest:
        assert rest.get_server_capabilities().result().supported_models
        assert rest.list_sessions().result().sessions == []
