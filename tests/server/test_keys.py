"""Keys are shown once, kept as hashes, end within a second, and are never written anywhere."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mint.cli.main import app
from mint.engine.fake_engine import FakeEngine
from mint.engine.protocol import LoraSpec
from mint.errors import ConflictError, InvalidRequestError, NotFoundError
from mint.server.callers import Quotas
from mint.server.limits import MAX_SNAPSHOTS
from mint.server.store.database import Database
from mint.server.store.journal import JOURNAL_FILE
from mint.server.store.keys import FRESH_S, ApiKeys
from tests.server.server_harness import API, BASE, Person, make_key, running


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = Database(tmp_path / JOURNAL_FILE)
    yield database
    database.close()


def mint(*arguments: str, stdin: str | None = None) -> str:
    result = CliRunner().invoke(app, list(arguments), input=stdin)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_key_is_random_accepted_by_every_client_and_kept_as_a_hash_alone(database: Database, tmp_path: Path) -> None:
    keys = ApiKeys(database)
    made = {keys.create("ann")[0] for _ in range(50)}
    assert len(made) == 50
    assert all(key.startswith("tml-mint-") and len(key) >= len("tml-mint-") + 43 for key in made)
    database.close()
    written = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert not any(key.encode() in written or key[len("tml-mint-") + 8 :].encode() in written for key in made)


def test_a_key_stands_for_its_owner_with_quotas(database: Database) -> None:
    keys = ApiKeys(database)
    key, row = keys.create("ann", Quotas(max_models=2))
    caller = keys.verify(key)
    assert caller is not None and (caller.owner, caller.key_id) == ("ann", row.key_id)
    assert caller.quotas == Quotas(max_models=2)
    for wrong in ("", "tml-mint-", key[:-1], f"{key}x", key.upper(), "\udcff", "ключ"):
        assert keys.verify(wrong) is None


def test_a_revoked_key_ends_within_a_second_also_where_another_process_revokes_it(
    database: Database, tmp_path: Path
) -> None:
    now = [0.0]
    keys = ApiKeys(database, clock=lambda: now[0])
    key, row = keys.create("ann")
    other, _ = keys.create("ann")
    assert keys.verify(key) is not None
    elsewhere = Database(tmp_path / JOURNAL_FILE)
    ApiKeys(elsewhere).revoke(row.key_id)
    elsewhere.close()
    now[0] += FRESH_S
    assert FRESH_S < 1 and keys.verify(key) is None
    assert keys.verify(other) is not None


def test_a_key_is_known_at_once_although_it_was_tried_before_it_was_made(database: Database) -> None:
    now = [0.0]
    keys = ApiKeys(database, clock=lambda: now[0])
    own = "sk-0123456789abcdefghijklmnop"
    assert keys.verify(own) is None
    keys.create("ann", key=own)
    now[0] += FRESH_S
    assert keys.verify(own) is not None


def test_when_a_key_was_used_is_written_rarely(database: Database) -> None:
    now = [0.0]
    keys = ApiKeys(database, clock=lambda: now[0])
    key, _ = keys.create("ann")
    times = set()
    for _ in range(105):
        now[0] += 0.6
        keys.verify(key)
        database.durability.submit(lambda: None).result()  # uses are written on the same thread
        times.add(keys.list()[0].last_used_at)
    assert None not in times and len(times) == 2  # the first use, and one a minute later


@pytest.mark.parametrize(
    "key", ["short", "a" * 64, "ab" * 32, "has spaces " * 6, "ü" * 40, "x" * 600, "", "tab\t" * 10]
)
def test_a_key_of_ones_own_that_can_be_guessed_or_not_sent_is_refused_and_not_shown(
    database: Database, key: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ApiKeys(database).create("ann", key=key)
    assert not key or key not in str(caught.value)


def test_a_key_of_ones_own_may_begin_with_anything_and_is_registered_once(database: Database) -> None:
    own = "sk-0123456789abcdefghijklmnop"
    _, row = ApiKeys(database).create("ann", key=own)
    assert ApiKeys(database).verify(own) is not None and own not in row.hint
    with pytest.raises(ConflictError):
        ApiKeys(database).create("bob", key=own)


@pytest.mark.parametrize("owner", ["", " ann", "local", "a\nb", "x" * 200, "\x1b[31m"])
def test_an_owner_has_a_name_that_can_be_shown(database: Database, owner: str) -> None:
    with pytest.raises(InvalidRequestError):
        ApiKeys(database).create(owner)


def test_a_key_without_quotas_has_the_servers_and_its_own_come_first(database: Database) -> None:
    keys = ApiKeys(database, defaults=Quotas(max_sessions=9, max_models=5))
    key, row = keys.create("ann", Quotas(max_models=7))
    caller = keys.verify(key)
    assert caller is not None and caller.quotas == Quotas(max_sessions=9, max_models=7)
    keys.update(row.key_id, Quotas(max_sessions=2), None)
    caller = keys.verify(key)
    assert caller is not None and caller.quotas == Quotas(max_sessions=2, max_models=5)
    assert keys.row(row.key_id).quotas == Quotas(max_sessions=2)


def test_a_key_keeps_its_logprobs_mode_until_it_is_changed(database: Database) -> None:
    keys = ApiKeys(database)
    key, row = keys.create("ann", Quotas(max_models=7), logprobs_mode="processed")
    caller = keys.verify(key)
    assert caller is not None and (caller.logprobs_mode, caller.quotas.max_models) == ("processed", 7)
    keys.update(row.key_id, row.quotas, None)
    caller = keys.verify(key)
    assert caller is not None and (caller.logprobs_mode, caller.quotas.max_models) == (None, 7)


def test_the_command_line_sets_shows_and_resets_the_logprobs_mode_of_a_key(tmp_path: Path) -> None:
    place = ("--data-dir", str(tmp_path), "--json")
    made = json.loads(mint("keys", "create", "--owner", "ann", "--logprobs-mode", "processed", *place))
    assert made["logprobs_mode"] == "processed"
    mint("keys", "update", made["key_id"], "--max-models", "3", *place)
    shown = json.loads(mint("keys", "show", made["key_id"], *place))
    assert (shown["logprobs_mode"], shown["defaults"]["logprobs_mode"]) == ("processed", "raw")
    assert "processed" in mint("keys", "show", made["key_id"], "--data-dir", str(tmp_path))
    assert json.loads(mint("keys", "update", made["key_id"], "--reset", *place))["logprobs_mode"] is None
    error = refused("keys", "update", made["key_id"], "--data-dir", str(tmp_path), "--logprobs-mode", "cooked")
    assert "--logprobs-mode" in error["error"] and "cooked" in error["error"]
    assert "nope" in refused("keys", "update", "nope", "--data-dir", str(tmp_path))["error"]


def test_the_command_line_shows_and_changes_quotas_beside_a_running_server(tmp_path: Path) -> None:
    made = json.loads(mint("keys", "create", "--owner", "ann", "--data-dir", str(tmp_path), "--json"))
    place = (made["key_id"], "--data-dir", str(tmp_path))
    with running(tmp_path) as server:
        ann = Person(server, made["key"])
        assert ann.session()
        mint("keys", "update", *place, "--max-sessions", "1", "--max-models", "3")
        time.sleep(FRESH_S)
        refused = ann.send("POST", f"{API}/create_session", {})
        assert refused.status_code == 403 and "mint keys update" in refused.text
        shown = json.loads(mint("keys", "show", *place, "--json"))
        assert shown["used"]["max_sessions"] == 1 and shown["quotas"]["max_models"] == 3
        assert "max_models" in mint("keys", "show", *place)
        mint("keys", "update", *place, "--reset", "--max-models", "4")
        time.sleep(FRESH_S)
        assert ann.session()
        shown = json.loads(mint("keys", "show", *place, "--json"))
        assert shown["quotas"]["max_sessions"] is None and shown["quotas"]["max_models"] == 4


def test_the_command_line_shows_and_changes_what_the_snapshots_of_an_owner_may_take(tmp_path: Path) -> None:
    made = json.loads(mint("keys", "create", "--owner", "ann", "--data-dir", str(tmp_path), "--json"))
    place = (made["key_id"], "--data-dir", str(tmp_path))
    with running(tmp_path) as server:
        ann = Person(server, made["key"])
        session_id = ann.session()
        ann.model(session_id)
        used = json.loads(mint("keys", "show", *place, "--json"))["used"]["max_snapshot_bytes"]
        lora = LoraSpec(4, 1, train_attn=True, train_mlp=True, train_unembed=True)
        assert used == MAX_SNAPSHOTS * FakeEngine().state_bytes(BASE, lora)
        mint("keys", "update", *place, "--max-snapshot-bytes", str(used))
        time.sleep(FRESH_S)
        body = {"session_id": session_id, "model_seq_id": 1, "base_model": BASE, "lora_config": {"rank": 4}}
        promise = ann.post("create_model", body)
        failed = ann.send("POST", f"{API}/retrieve_future", {"request_id": promise["request_id"]})
        assert "max_snapshot_bytes" in failed.text and "mint keys update" in failed.text
        mint("keys", "update", *place, "--reset")
        time.sleep(FRESH_S)
        assert ann.done("create_model", {**body, "model_seq_id": 2})["model_id"]
    second = mint(
        "keys", "create", "--owner", "bob", "--max-snapshot-bytes", "7", "--data-dir", str(tmp_path), "--json"
    )
    assert json.loads(second)["quotas"]["max_snapshot_bytes"] == 7


def refused(*arguments: str) -> dict[str, str]:
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 1, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--max-models", "-1"),
        ("--max-models", "1000001"),
        ("--max-models", str(10**30)),
        ("--max-sessions", "0"),
        ("--max-waiting-requests", "0"),
        ("--max-waiting-requests", "4097"),
        ("--max-checkpoint-bytes", "-1"),
        ("--max-checkpoint-bytes", str(10**19)),
        ("--max-snapshot-bytes", "-1"),
    ],
)
def test_a_quota_that_cannot_be_meant_is_refused_with_what_would_be_right(
    tmp_path: Path, option: str, value: str
) -> None:
    made = json.loads(mint("keys", "create", "--owner", "ann", "--data-dir", str(tmp_path), "--json"))
    for command in (("create", "--owner", "bob"), ("update", made["key_id"])):
        error = refused("keys", *command, option, value, "--data-dir", str(tmp_path))
        assert error["field"] == option[2:].replace("-", "_") and error["value"] == value and "Give " in error["remedy"]
    assert len(json.loads(mint("keys", "list", "--data-dir", str(tmp_path), "--json"))) == 1


def test_an_owner_may_have_no_models_and_no_checkpoints(database: Database) -> None:
    keys = ApiKeys(database)
    key, _ = keys.create("ann", Quotas(max_models=0, max_checkpoint_bytes=0))
    caller = keys.verify(key)
    assert caller is not None and caller.quotas == Quotas(max_models=0, max_checkpoint_bytes=0)


def test_an_update_of_a_revoked_key_or_of_nothing_says_so(tmp_path: Path) -> None:
    place = ("--data-dir", str(tmp_path))
    made = json.loads(mint("keys", "create", "--owner", "ann", *place, "--json"))
    nothing = refused("keys", "update", made["key_id"], *place)
    assert nothing["field"] == "quotas" and "--max-models" in nothing["remedy"] and "--reset" in nothing["remedy"]
    mint("keys", "update", made["key_id"], "--reset", *place)
    mint("keys", "revoke", made["key_id"], *place)
    revoked = refused("keys", "update", made["key_id"], "--max-models", "3", *place)
    assert "revoked" in revoked["message"] and "mint keys create --owner ann" in revoked["remedy"]
    assert json.loads(mint("keys", "show", made["key_id"], *place, "--json"))["quotas"]["max_models"] is None


def test_the_number_of_a_default_is_shown_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = ("--data-dir", str(tmp_path))
    made = json.loads(mint("keys", "create", "--owner", "ann", "--max-models", "3", *place, "--json"))
    monkeypatch.setenv("MINT_SERVE_OWNER_SESSIONS", "1234")
    (tmp_path / "mint.toml").write_text("owner_checkpoints_mib = 2\nowner_snapshots_mib = 3\n")
    config = ("--config", str(tmp_path / "mint.toml"))
    shown = {line.split()[0]: line for line in mint("keys", "show", made["key_id"], *place, *config).splitlines()[2:]}
    assert "1,234 (default)" in shown["max_sessions"]
    assert "4,096 (default)" in shown["max_waiting_requests"]
    assert "2,097,152 (default)" in shown["max_checkpoint_bytes"]
    assert "3,145,728 (default)" in shown["max_snapshot_bytes"]
    assert "default" not in shown["max_models"]
    defaults = json.loads(mint("keys", "show", made["key_id"], *place, "--json"))["defaults"]
    assert defaults["max_sessions"] == 1234 and defaults["max_checkpoint_bytes"] > 0
    assert defaults["max_snapshot_bytes"] > 0
    with running(tmp_path) as server:  # what is shown is what holds
        caller = server.keys.verify(made["key"])
        assert caller is not None and caller.quotas.max_sessions == 1234


def test_an_unknown_key_cannot_be_revoked(database: Database) -> None:
    with pytest.raises(NotFoundError):
        ApiKeys(database).revoke("nothing")


def test_the_command_line_makes_lists_and_revokes_beside_a_running_server(tmp_path: Path) -> None:
    first = json.loads(mint("keys", "create", "--owner", "ann", "--data-dir", str(tmp_path), "--json"))
    assert first["owner"] == "ann"
    with running(tmp_path) as server:
        made = json.loads(
            mint("keys", "create", "--owner", "bob", "--max-models", "3", "--data-dir", str(tmp_path), "--json")
        )
        bob = Person(server, made["key"])
        assert bob.session()
        listed = json.loads(mint("keys", "list", "--data-dir", str(tmp_path), "--json"))
        assert [row["owner"] for row in listed] == ["ann", "bob"] and listed[1]["quotas"]["max_models"] == 3
        shown = mint("keys", "list", "--data-dir", str(tmp_path))
        assert "ann" in shown and first["key"] not in shown
        mint("keys", "revoke", listed[1]["key_id"], "--data-dir", str(tmp_path))
        time.sleep(FRESH_S)
        assert bob.send("POST", f"{API}/create_session", {}).status_code == 401
        assert Person(server, first["key"]).session()


def test_a_key_of_ones_own_comes_by_standard_input_or_file(tmp_path: Path) -> None:
    own = "sk-0123456789abcdefghijklmnop"
    made = json.loads(
        mint("keys", "create", "--owner", "ann", "--key-stdin", "--json", "--data-dir", str(tmp_path), stdin=f"{own}\n")
    )
    assert made["key"] is None  # its owner has it
    (tmp_path / "key").write_text("sk-another-0123456789abcdefghij\n")
    mint("keys", "create", "--owner", "bob", "--key-file", str(tmp_path / "key"), "--data-dir", str(tmp_path))
    with running(tmp_path) as server:
        assert Person(server, own).session()


def test_keys_of_a_place_without_data_are_an_error_and_nothing_is_made(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["keys", "list", "--data-dir", str(tmp_path / "none")])
    assert result.exit_code == 1 and not (tmp_path / "none").exists()


def test_both_headers_carry_a_key(tmp_path: Path) -> None:
    key = make_key(tmp_path, "ann")
    with running(tmp_path) as server:
        nobody = Person(server)
        good = [
            {"x-api-key": key},
            {"authorization": f"Bearer {key}"},
            {"authorization": f"bearer {key}", "x-api-key": ""},
        ]
        for headers in good:
            assert nobody.send("POST", f"{API}/create_session", {}, **headers).status_code == 200
        bad = [{}, {"x-api-key": f"{key}x", "authorization": f"Bearer {key}"}, {"authorization": f"Basic {key}"}]
        for headers in bad:
            response = nobody.send("POST", f"{API}/create_session", {}, **headers)
            assert response.status_code == 401 and key not in response.text
            assert "error" not in response.headers["www-authenticate"]  # which would make clients exchange tokens
