"""A data directory goes to an S3-compatible server and back: by the scripts in docs/operations.md, which find damage,
and by the mirror of a server."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner
from waiting import wait_until

import mint
from mint.cli.main import app
from mint.types import AdamParams, Datum, ModelInput
from tests.ports import free_port
from tests.server.server_harness import running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

DOCUMENT = Path(__file__).parents[2] / "docs" / "operations.md"
BACK_UP, OBJECT_STORAGE = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(), flags=re.DOTALL | re.MULTILINE)[:2]
DATA = [Datum(model_input=ModelInput.from_ints([1, 2, 3]), loss_fn_inputs={"target_tokens": [2, 3, 4]})]


@dataclass(frozen=True)
class Storage:
    """A bucket on an S3-compatible server, and the script that reaches it."""

    python: Path
    script: Path
    url: str

    @property
    def variables(self) -> dict[str, str]:
        """By which obstore finds the server."""
        keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1"}
        return {**keys, "AWS_ENDPOINT_URL": self.url, "AWS_ALLOW_HTTP": "true"}

    def run(self, action: str, source: object, target: object) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, **self.variables}
        command = [str(self.python), str(self.script), action, str(source), str(target)]
        return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Storage]:
    """Made with packages of the registry: obstore, and moto's server."""
    folder = tmp_path_factory.mktemp("storage")
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    python = folder / "venv" / "bin" / "python"
    installed = subprocess.run([python, "-m", "pip", "install", "--quiet", "obstore", "moto[server]"])
    if installed.returncode:
        pytest.skip("needs a package registry")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    (folder / "object_storage.py").write_text(OBJECT_STORAGE)
    with (folder / "moto.log").open("w") as log:
        server = subprocess.Popen([folder / "venv" / "bin" / "moto_server", "-p", str(port)], stdout=log, stderr=log)

    def answers() -> bool:
        try:
            return httpx.put(f"{url}/backups").is_success
        except httpx.TransportError:
            return False

    try:
        wait_until(answers)
        yield Storage(python, folder / "object_storage.py", url)
    finally:
        server.terminate()
        server.wait()


def step_of(service: mint.ServiceClient, path: str) -> str | None:
    """The digest after one step from a checkpoint."""
    trainer = service.create_training_client_from_state_with_optimizer(path)
    trainer.forward_backward(DATA, "cross_entropy")
    return trainer.optim_step(AdamParams(learning_rate=1e-3)).result(timeout=60).state_digest


def test_a_backup_in_object_storage_is_restored_to_the_same_bits(storage: Storage, tmp_path: Path) -> None:
    with running(tmp_path / "data") as server, mint.ServiceClient(base_url=server.url) as service:
        trainer = service.create_lora_training_client(base_model="mint/tiny", rank=4, seed=1)
        trainer.forward_backward(DATA, "cross_entropy")
        trainer.optim_step(AdamParams(learning_rate=1e-3)).result(timeout=60)
        path = trainer.save_state("kept").result(timeout=60).path
        wanted = step_of(service, path)
        script: dict[str, Any] = {"__name__": "backup"}
        exec(BACK_UP, script)
        script["back_up"](tmp_path / "data", tmp_path / "backup")
    assert storage.run("put", tmp_path / "backup", "s3://backups/monday").returncode == 0
    assert storage.run("get", "s3://backups/monday", tmp_path / "restored").returncode == 0
    assert (tmp_path / "restored").stat().st_mode & 0o077 == 0
    with running(tmp_path / "restored") as server, mint.ServiceClient(base_url=server.url) as service:
        assert [each.tinker_path for each in service.create_rest_client().list_user_checkpoints().result().checkpoints]
        assert step_of(service, path) == wanted


def test_damage_an_unfinished_copy_and_a_prefix_that_is_taken_are_refused(storage: Storage, tmp_path: Path) -> None:
    (tmp_path / "backup" / "checkpoints").mkdir(parents=True)
    (tmp_path / "backup" / "checkpoints" / "weights").write_bytes(bytes(20_000_000))  # sent in parts
    assert storage.run("put", tmp_path / "backup", "s3://backups/tuesday").returncode == 0
    assert storage.run("put", tmp_path / "backup", "s3://backups/tuesday").returncode != 0
    assert storage.run("get", "s3://backups/tuesday", tmp_path / "whole").returncode == 0
    httpx.put(f"{storage.url}/backups/tuesday/checkpoints/weights", content=bytes(19_999_999) + b"1").raise_for_status()
    damaged = storage.run("get", "s3://backups/tuesday", tmp_path / "damaged")
    assert damaged.returncode == 1 and "checkpoints/weights is damaged" in damaged.stderr
    for name in ("STARTED", "journal.sqlite3"):
        httpx.put(f"{storage.url}/backups/wednesday/{name}").raise_for_status()
    assert storage.run("get", "s3://backups/wednesday", tmp_path / "unfinished").returncode != 0
    assert not (tmp_path / "unfinished").exists()


def test_a_server_mirrors_itself_and_is_brought_back(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore", reason="pip install 'mint[mirror]'")
    for name, value in storage.variables.items():
        monkeypatch.setenv(name, value)
    url = "s3://backups/mirror"
    with running(tmp_path / "data", mirror=url) as server, mint.ServiceClient(base_url=server.url) as service:
        trainer = service.create_lora_training_client(base_model="mint/tiny", rank=4, seed=1)
        trainer.forward_backward(DATA, "cross_entropy")
        trainer.optim_step(AdamParams(learning_rate=1e-3)).result(timeout=60)
        path = trainer.save_state("kept").result(timeout=60).path
        wanted = step_of(service, path)
    told = CliRunner().invoke(
        app, ["recover", "--from-mirror", url, "--data-dir", str(tmp_path / "restored"), "--json"]
    )
    assert told.exit_code == 0 and json.loads(told.stdout)["files"] > 2, told.output
    with running(tmp_path / "restored", mirror=url) as server, mint.ServiceClient(base_url=server.url) as service:
        assert step_of(service, path) == wanted
        wait_until(lambda: httpx.get(f"{server.url}/readyz").json()["mirror"]["states"])
        assert "mint_mirror_working 1.0" in httpx.get(f"{server.url}/metrics").text
    refused = CliRunner().invoke(
        app, ["recover", "--from-mirror", "s3://backups/nothing", "--data-dir", str(tmp_path / "n")]
    )
    assert refused.exit_code != 0 and "has no mirror" in refused.output
