"""`mint sessions end` over a server: an owner ends sessions of its own, and learns nothing of others'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from owners import Place, refusal
from typer.testing import CliRunner, Result

from mint.cli.main import app
from mint.errors import NotFoundError, SessionEndedError


def run(*arguments: str, **options: Any) -> Result:
    return CliRunner().invoke(app, ["sessions", *arguments], **options)


def is_active(session_id: str, data_dir: Path) -> bool:
    listed = json.loads(run("list", "--data-dir", str(data_dir), "--json").stdout)["sessions"]
    [found] = [one for one in listed if one["session_id"] == session_id]
    return found["status"] is not None


def test_an_owner_ends_a_session_after_a_yes(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    client = place.client("alice")
    trainer = client.create_lora_training_client("mint/tiny", rank=4)
    trainer.save_state("kept").result()
    monkeypatch.setenv("MINT_BASE_URL", place.url)
    monkeypatch.setenv("MINT_API_KEY", "alice")
    for answer in ("n\n", ""):
        asked = run("end", client.session_id, input=answer)
        assert asked.exit_code == 1 and trainer.model_id in asked.stderr
    assert is_active(client.session_id, place.data_dir)
    ended = run("end", client.session_id, input="y\n")
    assert ended.exit_code == 0 and f"session {client.session_id} has ended" in ended.stdout
    assert not is_active(client.session_id, place.data_dir)
    assert isinstance(refusal(lambda: trainer.save_state("more").result()), SessionEndedError)
    assert len(place.folders()) == 1  # the named checkpoint stays
    again = run("end", client.session_id, "--yes")
    assert again.exit_code == 1 and "has ended" in again.stderr and len(again.stderr.splitlines()) == 1


def test_nobody_ends_the_session_of_another_owner(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    client = place.client("alice")
    monkeypatch.setenv("MINT_BASE_URL", place.url)
    monkeypatch.setenv("MINT_API_KEY", "bob")
    unknown, others = (run("end", name, "--yes", "--json") for name in ("sess-none", client.session_id))
    assert (unknown.exit_code, others.exit_code) == (1, 1)
    assert json.loads(others.stdout.replace(client.session_id, "sess-none")) == json.loads(unknown.stdout)
    assert isinstance(refusal(lambda: place.rest("bob").end_session(client.session_id).result()), NotFoundError)
    assert is_active(client.session_id, place.data_dir)
    monkeypatch.setenv("MINT_API_KEY", "alice")
    own = run("end", client.session_id, "--yes", "--json")
    assert json.loads(own.stdout) == {"session_id": client.session_id, "state": "ended"}
    assert not is_active(client.session_id, place.data_dir)
