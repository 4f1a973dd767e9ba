"""Flags before environment before file; what is not a setting is named; `--check` says what a start would say."""

from __future__ import annotations

import re
import socket
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from default_engine import fake_engine
from typer.testing import CliRunner

from mint import config
from mint.cli.main import app
from mint.compose import embedded
from mint.compose.serving import Server, check
from mint.config import ServeSettings, read_serve_settings
from mint.errors import InvalidRequestError, MintError
from mint.server.store.journal import JOURNAL_FILE
from tests.server.server_harness import API, BASE, Person, make_key, running

DOCUMENT = Path(__file__).parents[2] / "docs" / "server.md"


def write(folder: Path, text: str) -> Path:
    file = folder / "mint.toml"
    file.write_text(text)
    return file


def test_flags_come_before_the_environment_and_that_before_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(
        tmp_path, 'port = 1001\nhost = "localhost"\nlog_format = "json"\nmodels = ["a=mint/tiny", "mint/tiny"]\n'
    )
    monkeypatch.setenv("MINT_SERVE_PORT", "1002")
    monkeypatch.setenv("MINT_SERVE_LOG_FORMAT", "console")
    settings = read_serve_settings({"log_format": "json"}, file)
    assert (settings.host, settings.port, settings.log_format) == ("localhost", 1002, "json")
    assert settings.offered == {"a": "mint/tiny", "mint/tiny": "mint/tiny"}


def test_without_anything_the_defaults_are_safe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MINT_HOME", str(tmp_path))
    settings = read_serve_settings({})
    assert (settings.host, settings.port, settings.insecure, settings.api_keys) == ("127.0.0.1", 8500, False, None)
    assert settings.folder == tmp_path


def test_the_environment_says_several_models_with_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINT_SERVE_MODELS", "Qwen/Qwen3-0.6B=mint/tiny, mint/tiny")
    assert read_serve_settings({}).offered == {"Qwen/Qwen3-0.6B": "mint/tiny", "mint/tiny": "mint/tiny"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prot = 1\n", "prot.*not a setting.*port"),
        ("[serve]\nport = 1\n", "serve.*not a setting"),
        ("key = 'tml-x'\n", "key.*not a setting"),
        ("port = 99999\n", "mint.toml: port = 99999"),
        ("port =\n", "cannot be read"),
        ("log_format = 'xml'\n", "mint.toml: log_format"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read_serve_settings({}, write(tmp_path, text))
    assert re.search(said, str(caught.value)), caught.value


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        read_serve_settings({}, tmp_path / "none.toml")


def test_a_wrong_value_says_where_it_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequestError, match="--port"):
        read_serve_settings({"port": -1})
    monkeypatch.setenv("MINT_SERVE_PORT", "tcp://10.0.0.1:80")
    with pytest.raises(InvalidRequestError, match="MINT_SERVE_PORT"):
        read_serve_settings({})


@pytest.mark.parametrize("entry", ["=mint/tiny", "name=", "="])
def test_a_model_has_a_name(entry: str) -> None:
    with pytest.raises(InvalidRequestError):
        _ = read_serve_settings({"models": (entry,)}).offered


def test_every_setting_is_in_both_tables() -> None:
    page, docstring = DOCUMENT.read_text(), config.__doc__ or ""
    for name in ServeSettings.model_fields:
        variable = f"`MINT_SERVE_{name.upper()}`"
        assert variable in page and variable in docstring, variable
        assert f"`{name}`" in page, name


# --- what is offered ---------------------------------------------------------------------------------------------


def offered(server: Server) -> list[str]:
    answer = Person(server).send("GET", f"{API}/get_server_capabilities").json()
    return [model["model_name"] for model in answer["supported_models"]]


def create(server: Server, base_model: str) -> str:
    person = Person(server)
    body = {"session_id": person.session(), "sampling_session_seq_id": 0, "base_model": base_model}
    return person.send("POST", f"{API}/create_sampling_session", body).json().get("error", "")


def test_without_names_every_registered_model_is_offered_and_no_folder_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINT_MODELS", "mine=mint/tiny")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # without models that were pulled
    monkeypatch.setenv("MINT_NATIVE", "0")  # the compiled kernels are in that cache, too
    with running(tmp_path) as server:
        folder = str(server.service.base_models.folder(BASE))
        assert offered(server) == ["mine", BASE]
        assert create(server, "mine") == "" and create(server, BASE) == ""
        assert "not a base model of this server" in create(server, folder)


def test_with_names_only_those_are_offered(tmp_path: Path) -> None:
    with running(tmp_path, models=("Qwen/Qwen3-0.6B=mint/tiny",)) as server:
        assert offered(server) == ["Qwen/Qwen3-0.6B"]
        assert create(server, "Qwen/Qwen3-0.6B") == ""
        assert "offers Qwen/Qwen3-0.6B" in create(server, BASE)


def test_a_model_that_is_not_there_stops_the_start_and_frees_the_port(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(MintError, match="no/such-model"):
        Server(
            read_serve_settings({"models": ("no/such-model",), "data_dir": tmp_path, "port": port}),
            engine=fake_engine(),
        )
    with socket.socket() as again:
        again.bind(("127.0.0.1", port))


# --- the check ---------------------------------------------------------------------------------------------------


def verdicts(**flags: object) -> dict[str, bool]:
    return {finding.check: finding.ok for finding in check(read_serve_settings(flags))}


def test_the_check_passes_where_a_start_would_and_changes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    assert all(verdicts(data_dir=folder, port=0).values())
    assert not folder.exists()
    make_key(folder, "ann")
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    assert all(verdicts(data_dir=folder, port=0, host="0.0.0.0").values())
    assert {file: before[file] for file in before} == {file: file.read_bytes() for file in before}


def test_the_check_names_everything_that_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        found = verdicts(data_dir=tmp_path / "file" / "data", port=taken.getsockname()[1], models=("no/such-model",))
    assert found == {
        "data directory": False,
        "schema": True,
        "address": True,
        "port": False,
        "open files": True,
        "model": False,
    }
    assert not verdicts(data_dir=tmp_path, host="0.0.0.0", port=0)["address"]
    assert not verdicts(data_dir=tmp_path, host="203.0.113.7", port=0)["port"]


@pytest.mark.parametrize("damage", ["newer", "garbage"])
def test_the_check_reads_the_schema_without_touching_it(tmp_path: Path, damage: str) -> None:
    make_key(tmp_path, "ann")
    file = tmp_path / JOURNAL_FILE
    if damage == "newer":
        with closing(sqlite3.connect(file)) as connection:
            connection.execute("PRAGMA user_version = 99")
            connection.commit()
    else:
        file.write_bytes(b"not a database at all" * 100)
    assert not verdicts(data_dir=tmp_path, port=0, api_keys=True)["schema"]


def test_the_check_ends_with_0_or_1(tmp_path: Path) -> None:
    for host, code in (("127.0.0.1", 0), ("0.0.0.0", 1)):
        arguments = ["serve", "--check", "--host", host, "--port", "0", "--data-dir", str(tmp_path)]
        assert CliRunner().invoke(app, arguments).exit_code == code


def test_the_engines_settings_reach_it_and_what_is_not_set_is_its_own_affair(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MINT_DTYPE", "MINT_THREADS", "MINT_KV_CACHE_MIB", "MINT_RECOMPUTE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("mint.engine.torch_engine.TorchEngine", dict)

    def given() -> dict[str, object]:
        made: Any = embedded.torch_engine(config.read_settings())
        return {name: made[name] for name in ("threads", "dtype", "kv_cache_bytes", "recompute") if name in made}

    monkeypatch.setenv("MINT_THREADS", "1")
    assert given() == {"threads": 1}
    monkeypatch.setenv("MINT_KV_CACHE_MIB", "64")
    monkeypatch.setenv("MINT_RECOMPUTE", "true")
    monkeypatch.setenv("MINT_DTYPE", "bfloat16")
    assert given() == {"threads": 1, "kv_cache_bytes": 64 << 20, "recompute": True, "dtype": "bfloat16"}
    monkeypatch.setenv("MINT_KV_CACHE_MIB", "0")
    with pytest.raises(InvalidRequestError, match="MINT_KV_CACHE_MIB"):
        config.read_settings()
