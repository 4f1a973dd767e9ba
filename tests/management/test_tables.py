"""`mint runs|checkpoints|sessions|models`: the same columns and JSON from a server and from its folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from default_engine import fake_engine
from http_server import http_server
from owners import Place
from typer.testing import CliRunner, Result

import mint
from mint.cli.main import app

Mint = Callable[..., Result]


def run(*arguments: str, **options: Any) -> Result:
    return CliRunner().invoke(app, list(arguments), **options)


@pytest.fixture(params=["server", "folder"])
def cli(request: pytest.FixtureRequest, place: Place, monkeypatch: pytest.MonkeyPatch) -> Mint:
    """The command line, once over the server and once over the folder that it works in."""
    if request.param == "server":
        monkeypatch.setenv("MINT_BASE_URL", place.url)
        monkeypatch.setenv("MINT_API_KEY", "alice")
    else:
        monkeypatch.setenv("MINT_HOME", str(place.data_dir))
    return run


def document(result: Result) -> Any:
    """What a script reads: the last line, and in these commands the only one."""
    assert result.exit_code == 0, result.output
    [line] = result.stdout.splitlines()
    return json.loads(line)


def test_server_and_folder_give_the_same_json(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    client = place.client("alice", user_metadata={"team": "red"})
    trainer = client.create_lora_training_client("mint/tiny", rank=4, user_metadata={"a": "b"})
    path = trainer.save_state("one", ttl_seconds=3600).result().path
    trainer.save_weights_for_sampler("two").result()
    questions = [
        ("runs", "list"),
        ("runs", "show", trainer.model_id),
        ("checkpoints", "list"),
        ("checkpoints", "list", trainer.model_id),
        ("checkpoints", "show", path),
        ("sessions", "list"),
        ("sessions", "show", client.session_id),
        ("models", "list"),
    ]
    monkeypatch.setenv("MINT_BASE_URL", place.url)
    monkeypatch.setenv("MINT_API_KEY", "alice")
    for question in questions:
        by_server = document(run(*question, "--json"))
        by_folder = document(run(*question, "--data-dir", str(place.data_dir), "--json"))
        assert by_server == by_folder, question
        tables = run(*question), run(*question, "--data-dir", str(place.data_dir))
        assert [table.exit_code for table in tables] == [0, 0]
        assert tables[0].stdout == tables[1].stdout, question


def test_tables_name_what_is_there_in_full(place: Place, cli: Mint) -> None:
    trainer = place.trainer("alice")
    path = trainer.save_state("one").result().path
    listed = cli("checkpoints", "list").stdout
    assert any(line.startswith(path) for line in listed.splitlines())
    assert trainer.model_id in cli("runs", "list").stdout
    assert trainer.model_id.partition(":")[0] in cli("sessions", "list").stdout
    assert "mint/tiny" in cli("models", "list").stdout


def test_a_checkpoint_is_changed_from_the_command_line(place: Place, cli: Mint) -> None:
    path = place.trainer("alice").save_state("one").result().path
    assert document(cli("checkpoints", "publish", path, "--json"))["public"] is True
    assert document(cli("checkpoints", "unpublish", path, "--json"))["public"] is False
    assert document(cli("checkpoints", "ttl", path, "3600", "--json"))["expires_at"] is not None
    assert document(cli("checkpoints", "ttl", path, "none", "--json"))["expires_at"] is None
    copy = document(cli("checkpoints", "copy", path, "--project", "kept", "--json"))
    assert copy["path"] != path
    alias = copy["alias"]
    assert document(cli("checkpoints", "delete", alias, "--yes", "--json")) == {"deleted": [copy["path"]]}
    assert len(document(cli("checkpoints", "list", "--json"))["checkpoints"]) == 1


def test_nothing_is_deleted_without_a_yes(place: Place, cli: Mint) -> None:
    path = place.trainer("alice").save_state("one").result().path
    for answer in ("n\n", ""):
        result = cli("checkpoints", "delete", path, input=answer)
        assert result.exit_code == 1
        assert path in result.stderr
    assert len(place.folders()) == 1
    assert cli("checkpoints", "delete", path, input="y\n").exit_code == 0
    assert place.folders() == set()


def test_one_wrong_path_among_several_deletes_none(place: Place, cli: Mint) -> None:
    path = place.trainer("alice").save_state("one").result().path
    assert cli("checkpoints", "delete", path, path.replace("one", "two"), "--yes").exit_code == 1
    assert len(place.folders()) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("runs", "show", "sess-1:train:0"),
        ("checkpoints", "list", "sess-1:train:0"),
        ("checkpoints", "show", "mint://sess-1:train:0/weights/a"),
        ("checkpoints", "show", "weights/a"),
        ("checkpoints", "delete", "mint://sess-1:train:0/weights/a", "--yes"),
        ("checkpoints", "ttl", "mint://sess-1:train:0/weights/a", "soon"),
        ("checkpoints", "copy", "mint://sess-1:train:0/weights/a"),
        ("checkpoints", "download", "mint://sess-1:train:0/weights/a"),
        ("checkpoints", "upload", "nothing.tar.gz"),
        ("sessions", "show", "sess-1"),
    ],
)
def test_a_failure_is_one_sentence_and_exit_code_1(
    shared: Place, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.setenv("MINT_BASE_URL", shared.url)
    for where in ((), ("--data-dir", str(shared.data_dir))):
        result = run(*arguments, *where)
        assert result.exit_code == 1
        assert result.stdout == ""
        assert len(result.stderr.splitlines()) == 1
        assert "Error: " in result.stderr
        assert isinstance(result.exception, SystemExit)


def test_a_folder_without_a_journal_is_named(tmp_path: Path) -> None:
    result = run("runs", "list", "--data-dir", str(tmp_path / "nothing"))
    assert (result.exit_code, result.stdout) == (1, "")
    assert "holds no journal" in result.stderr
    assert not (tmp_path / "nothing").exists()


def test_runs_that_used_a_server_elsewhere_are_listed_without_a_journal(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "elsewhere"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    result = run("runs", "list", "--data-dir", str(tmp_path))
    assert result.exit_code == 0 and "elsewhere" in result.stdout and "models" not in result.stdout
    listed = json.loads(run("runs", "list", "--data-dir", str(tmp_path), "--json").stdout)
    assert (listed["training_runs"], [one["name"] for one in listed["rl_runs"]]) == ([], ["elsewhere"])


def test_names_that_others_chose_cannot_steer_a_terminal(place: Place, cli: Mint) -> None:
    client = place.client("alice")
    trainer = client.create_lora_training_client("mint/tiny", rank=4)
    rest = place.rest("alice")
    rest.assign_session_project(client.session_id, "\x1b[2J[red]boo[/red]\x07").result()
    trainer.save_state("one").result()
    shown = cli("sessions", "list").stdout
    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert "[red]boo[/red]" in shown


def test_reading_a_folder_takes_no_session_over(tmp_path: Path) -> None:
    with http_server(tmp_path, engine=fake_engine()) as url, mint.ServiceClient(base_url=url) as client:
        trainer = client.create_lora_training_client("mint/tiny", rank=4)
        before = sorted(path.name for path in tmp_path.iterdir())
        assert document(run("runs", "list", "--data-dir", str(tmp_path), "--json"))["cursor"]["total_count"] == 1
        assert sorted(path.name for path in tmp_path.iterdir()) == before
        assert trainer.save_state("still").result().path


def test_an_adapter_leaves_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with http_server(tmp_path / "data") as url, mint.ServiceClient(base_url=url) as client:
        trainer = client.create_lora_training_client("mint/tiny", rank=4, seed=1)
        path = trainer.save_state("one").result().path
        for mode in ("server", "folder"):
            monkeypatch.setenv("MINT_BASE_URL", url)
            where = () if mode == "server" else ("--data-dir", str(tmp_path / "data"))
            archive = tmp_path / mode
            archive.mkdir()
            written = document(run("checkpoints", "download", path, "--output", str(archive), *where, "--json"))
            [part] = archive.iterdir()
            assert part.name.endswith("-weights-one.tar.gz") and path.split("/")[2].replace(":", "-") in part.name
            again = run("checkpoints", "download", path, "--output", str(archive), *where)
            assert again.exit_code == 1 and "exists already" in again.stderr and "--overwrite" in again.stderr
            assert run("checkpoints", "download", path, "-o", str(archive), "--overwrite", *where).exit_code == 0
            uploaded = document(run("checkpoints", "upload", written["output"], "--name", mode, *where, "--json"))
            assert uploaded["path"].endswith(f"/weights/{mode}")
            resumed = client.create_training_client_from_state_with_optimizer(uploaded["path"])
            assert resumed.get_info().lora_rank == 4
