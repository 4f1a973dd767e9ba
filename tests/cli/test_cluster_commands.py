"""`mint status` says what a server says about itself; `mint scale` changes how many processes it has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
from ports import free_port
from typer.testing import CliRunner

from mint.cli.cluster import described
from mint.cli.main import app
from mint.engine.fake_engine import FakeEngine
from tests.server.server_harness import make_key, running

REPLICA = {"process": 44, "jobs": 3, "sequences": 12, "loras": 2, "lora_bytes": 3 << 20}


class OnCluster(FakeEngine):
    """An engine with ranks and replicas."""

    cluster_state: ClassVar[dict[str, Any]] = {
        "trainers": 3, "running": 2, "lost": 1, "ranks": [41, 42], "samplers": 2, "sampling": 1, "samplers_lost": 5,
        "versions": 7, "waiting": 4, "replicas": [REPLICA],
    }  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.resized: list[tuple[int | None, int | None]] = []

    def resize(self, *, trainers: int | None, samplers: int | None) -> None:
        self.resized.append((trainers, samplers))


def test_a_server_without_a_cluster_is_ready(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        shown = CliRunner().invoke(app, ["status", "--url", server.url])
        assert shown.exit_code == 0 and "ready" in shown.stdout and "one process trains" in shown.stdout
        document = json.loads(CliRunner().invoke(app, ["status", "--json"], env={"MINT_BASE_URL": server.url}).stdout)
        assert document == {"url": server.url, "status": "ok"}


def test_ranks_and_replicas_are_shown_with_what_they_have(tmp_path: Path) -> None:
    with running(tmp_path, engine=OnCluster()) as server:
        text = " ".join(CliRunner().invoke(app, ["status", "--url", server.url]).stdout.split())
    for part in (
        "2 of 3 train (processes 41, 42), lost 1 time",
        "1 of 2 sample, lost 5 times; 7 versions of weights; 4 requests waiting",
        "process 44 3 requests, 12 sequences, 2 LoRAs (3.0 MiB)",
    ):
        assert part in text


def test_one_of_a_thing_is_written_in_the_singular() -> None:
    host = {"address": "http://a:1", "up": True, "jobs": 1, "sequences": 1, "loras": 1, "lost": 1}
    gap = {"mean": 0.01, "max": 0.02, "tokens": 1, "alarms": 1}
    external = {"hosts": [host], "versions": 1, "waiting": 1, "gap": gap}
    lines = dict(described({"status": "ok", "cluster": {"external": external}}))
    assert lines["sampler http://a:1"] == "1 request, 1 sequence, 1 LoRA; lost 1 time"
    assert lines["versions"] == "1 of weights; 1 request waiting for a sampler"
    assert lines["sampler − trainer"].endswith("over 1 token; too large 1 time")


def test_scale_says_how_many_processes_there_are_to_be(tmp_path: Path) -> None:
    engine = OnCluster()
    with running(tmp_path, engine=engine) as server:
        for options in (["--trainers", "3"], ["--samplers", "2"], ["--trainers", "1", "--samplers", "4"]):
            shown = CliRunner().invoke(app, ["scale", *options, "--url", server.url])
            assert shown.exit_code == 0 and "2 of 3 train" in shown.stdout, shown.output
    assert engine.resized == [(3, None), (None, 2), (1, 4)]


def test_scale_is_refused_with_the_reason(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        shown = CliRunner().invoke(app, ["scale", "--trainers", "3", "--url", server.url])
        assert shown.exit_code == 1 and "--cluster" in shown.stderr
        shown = CliRunner().invoke(app, ["scale", "--url", server.url])
        assert shown.exit_code == 1 and "--samplers" in shown.stderr
    make_key(tmp_path, "ann")
    with running(tmp_path, operators=("olga",)) as server:
        shown = CliRunner().invoke(app, ["scale", "--trainers", "3", "--url", server.url])
        assert shown.exit_code == 1 and shown.stderr.startswith("AuthenticationError: ") and "key" in shown.stderr
        key = make_key(tmp_path, "bob")
        shown = CliRunner().invoke(
            app, ["scale", "--trainers", "3", "--url", server.url, "--json"], env={"MINT_API_KEY": key}
        )
        assert shown.exit_code == 1 and json.loads(shown.stdout)["code"] == "OperatorOnlyError"
        assert json.loads(shown.stdout)["remedy"]


def test_a_server_that_is_not_ready_gives_its_reason_and_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path) as server:
        monkeypatch.setattr(type(server.service), "is_working", property(lambda _service: False))
        shown = CliRunner().invoke(app, ["status", "--url", server.url])
    assert shown.exit_code == 1 and "not ready" in shown.stdout and "the engine's thread has ended" in shown.stdout


@pytest.mark.parametrize("url", ["127.0.0.1:8500", "http://127.0.0.1:{port}"])
def test_an_address_without_a_server_is_named_with_a_remedy(url: str) -> None:
    shown = CliRunner().invoke(app, ["status", "--url", url.format(port=free_port())])
    assert shown.exit_code == 1 and "127.0.0.1" in shown.stderr
    assert "mint serve" in shown.stderr or "--url" in shown.stderr
