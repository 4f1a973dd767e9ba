"""Weights leave a server as archives and files behind signed addresses, and come back bit for bit."""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
import tarfile
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import httpx
import numpy as np
import pytest
from archive_maker import multipart
from http_server import http_app
from policies import TOKENS, by_mint, by_torch, load, step

import mint
from mint.compose.embedded import open_embedded
from mint.compose.export import export_checkpoint
from mint.errors import AuthenticationError, MintError
from mint.server.all_routes import ROUTES
from mint.server.callers import Caller, Quotas
from mint.server.http.app import create_app
from mint.server.http.signed_urls import Signer


@dataclass
class World:
    """A server that knows its callers by their key alone."""

    url: str
    data_dir: Path
    quotas: dict[str, Quotas] = field(default_factory=dict)

    def client(self, key: str = "ann") -> mint.ServiceClient:
        return mint.ServiceClient(base_url=self.url, api_key=key)

    def get(self, path: str, key: str = "ann") -> httpx.Response:
        return httpx.get(f"{self.url}/api/v1/{path}", headers={"x-api-key": key})

    def archive(self, path: str, key: str = "ann") -> bytes:
        answer = self.get(route(path) + "/archive", key)
        assert answer.status_code == 302, answer.text
        return httpx.get(answer.headers["location"]).content

    def upload(self, content: bytes, key: str = "ann", **fields: str) -> httpx.Response:
        body, kind = multipart(content, more=[(name, text.encode()) for name, text in fields.items()])
        headers = {"x-api-key": key, "content-type": kind}
        return httpx.post(f"{self.url}/api/v1/checkpoints/upload", content=body, headers=headers)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    data_dir = tmp_path_factory.mktemp("world")
    running = open_embedded(data_dir=data_dir)
    world = World("", data_dir)

    def known(request: Any) -> Caller:
        key = request.headers.get("x-api-key", "")
        if not key:
            raise AuthenticationError("a key is needed", remedy="Send X-API-Key")
        return Caller(key, quotas=world.quotas.get(key, Quotas()))

    try:
        with http_app(running, create_app(running.service, ROUTES, authenticate=known)) as url:
            world.url = url
            yield world
    finally:
        running.release()


@pytest.fixture(scope="module")
def trained(world: World) -> tuple[str, str]:
    """A training checkpoint, and the digest of the state that one more step from it leads to."""
    with world.client() as service:
        client = service.create_lora_training_client(base_model="mint/tiny", rank=8, seed=3)
        for _ in range(2):
            step(client)
        path = client.save_state("trained").result().path
        return path, step(client, TOKENS[::-1])


def route(path: str) -> str:
    run, kind, name = path.split("://")[1].split("/")
    return f"training_runs/{run}/checkpoints/{kind}/{name}"


def test_an_archive_is_a_peft_adapter_with_the_rest_of_the_state(world: World, trained: tuple[str, str]) -> None:
    answer = world.get(route(trained[0]) + "/archive")
    assert answer.status_code == 302
    assert answer.headers["location"].startswith(world.url)
    assert answer.headers["expires"].endswith(" GMT") and parsedate_to_datetime(answer.headers["expires"])
    with urllib.request.urlopen(answer.headers["location"]) as response:
        content = response.read()
        assert int(response.headers["content-length"]) == len(content)
    assert gzip.decompress(content)
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        assert archive.getnames() == [
            "adapter_config.json",
            "adapter_model.safetensors",
            "mint.json",
            "optimizer.safetensors",
            "checkpoint_complete",
        ]
        config = json.load(archive.extractfile("adapter_config.json") or io.BytesIO())
    assert config["base_model_name_or_path"] == "mint/tiny" and config["lora_alpha"] == 32


def test_the_archive_uploaded_again_goes_on_bit_for_bit(world: World, trained: tuple[str, str]) -> None:
    answer = world.upload(world.archive(trained[0]))
    assert answer.status_code == 200, answer.text
    for name in (answer.json()["path"], answer.json()["checkpoint_id"]):
        with world.client() as service:
            client = service.create_training_client_from_state_with_optimizer(name)
            assert step(client, TOKENS[::-1]) == trained[1]


def test_an_archive_of_an_untrained_model_comes_back(world: World) -> None:
    with world.client() as service:
        client = service.create_lora_training_client(base_model="mint/tiny", rank=32, train_attn=False, train_mlp=False)
        path = client.save_state("fresh").result().path
    packed = gzip.compress(gzip.decompress(world.archive(path)))
    assert world.upload(packed).status_code == 200


def test_samplers_weights_are_an_archive_too(world: World) -> None:
    with world.client() as service:
        client = service.create_lora_training_client(base_model="mint/tiny", rank=4, seed=3)
        path = client.save_weights_for_sampler("s").result().path or ""
    with tarfile.open(fileobj=io.BytesIO(world.archive(path))) as archive:
        assert "optimizer.safetensors" not in archive.getnames()


def test_external_weights_are_files_that_peft_loads(world: World, tmp_path: Path) -> None:
    import peft  # deferred: loading it takes seconds, in every worker

    with world.client() as service:
        client = service.create_lora_training_client(base_model="mint/tiny", rank=8, seed=3)
        step(client)
        saved = client.save_weights_external("download", ttl_seconds=3600).result()
        ours = by_mint(service, saved.path)
    assert "/external_weights/download" in saved.path and (saved.size_bytes or 0) > 100_000
    answer = world.get(route(saved.path) + "/external_weights_urls")
    assert answer.json()["expires"].endswith(("Z", "+00:00"))
    for name, url in answer.json()["urls"].items():
        with urllib.request.urlopen(url) as response:  # no key
            (tmp_path / name).write_bytes(response.read())
    theirs = by_torch(peft.PeftModel.from_pretrained(load(), tmp_path))
    np.testing.assert_allclose(theirs, ours, atol=1e-4)


@pytest.mark.parametrize("kind", ["weights", "sampler_weights"])
def test_only_external_weights_have_addresses_of_files(world: World, trained: tuple[str, str], kind: str) -> None:
    wrong = route(trained[0]).replace("/weights/", f"/{kind}/")
    assert world.get(wrong + "/external_weights_urls").status_code == 404


def test_encryption_and_tokens_are_refused_with_a_sentence(world: World, trained: tuple[str, str]) -> None:
    with world.client() as service:
        client = service.create_lora_training_client(base_model="mint/tiny", rank=4)
        with pytest.raises(MintError, match=r"age_encryption_recipients.*mint checkpoints download"):
            client.save_weights_external("e", age_encryption_recipients=["age1x"]).result()
        with pytest.raises(MintError, match="weights_access_token"):
            service.create_training_client_from_state(trained[0], weights_access_token="secret")


def _forged(location: str) -> dict[str, str]:
    parts = urlsplit(location)
    query = {key: values[0] for key, values in parse_qs(parts.query).items()}
    plain = f"{parts.scheme}://{parts.netloc}"

    def with_query(**changes: str) -> str:
        return f"{plain}{parts.path}?{urlencode({**query, **changes})}"

    signed = f"?{parts.query}"
    flipped = ("0" if query["signature"][0] != "0" else "1") + query["signature"][1:]
    return {
        "no signature": plain + parts.path,
        "another signature": with_query(signature=flipped),
        "no hexadecimal": with_query(signature="é"),
        "upper case": with_query(signature=query["signature"].upper()),
        "later": with_query(expires=str(int(query["expires"]) + 1)),
        "never": with_query(expires=""),
        "no number": with_query(expires="1e9"),
        "long number": with_query(expires="9" * 5000),
        "another file": plain + parts.path.replace("checkpoint.tar.gz", "adapter_config.json") + signed,
        "a file of the folder": plain + parts.path.replace("checkpoint.tar.gz", "manifest.json") + signed,
        "another name": plain + parts.path.replace("/trained/", "/other/") + signed,
        "another kind": plain + parts.path.replace("/weights/", "/sampler_weights/") + signed,
        "a file above": plain + parts.path.replace("checkpoint.tar.gz", "..%2F..%2Furl_secret") + signed,
        "a kind above": plain + parts.path.replace("/weights/", "/..%2f../") + signed,
    }


def test_a_forged_address_opens_nothing(world: World, trained: tuple[str, str]) -> None:
    location = world.get(route(trained[0]) + "/archive").headers["location"]
    assert httpx.get(location).status_code == 200
    for what, url in _forged(location).items():
        assert httpx.get(url).status_code in (401, 404), what


def test_an_expired_address_opens_nothing(world: World) -> None:
    signer = Signer(world.data_dir)
    signature = signer.sign("folder", "file", expires_at=100)
    signer.check("folder", "file", expires_at="100", signature=signature, now=99.9)
    with pytest.raises(AuthenticationError, match="expired"):
        signer.check("folder", "file", expires_at="100", signature=signature, now=100)


def test_a_signed_address_ends_when_its_checkpoint_is_replaced(world: World) -> None:
    with world.client() as service:
        client = service.create_lora_training_client(base_model="mint/tiny", rank=4, seed=3)
        path = client.save_state("gone").result().path
        location = world.get(route(path) + "/archive").headers["location"]
        client.save_state("gone", overwrite=True).result()
        assert httpx.get(location).status_code == 401


def test_the_secret_is_for_the_servers_user_alone(world: World, trained: tuple[str, str]) -> None:
    world.get(route(trained[0]) + "/archive")
    assert (world.data_dir / "url_secret").stat().st_mode & 0o777 == 0o600
    assert len((world.data_dir / "url_secret").read_bytes()) == 32


def test_what_others_own_is_not_there(world: World, trained: tuple[str, str]) -> None:
    assert world.get(route(trained[0]) + "/archive", key="bob").status_code == 404
    assert world.get(route(trained[0]) + "/archive", key="").status_code == 401
    uploaded = world.upload(world.archive(trained[0]), key="bob").json()["path"]
    assert world.get(route(uploaded) + "/archive", key="ann").status_code == 404
    assert world.get(route(uploaded) + "/archive", key="bob").status_code == 302


def test_uploads_count_against_the_quota(world: World, trained: tuple[str, str]) -> None:
    world.quotas["eve"] = Quotas(max_checkpoint_bytes=2_000_000)
    archive = world.archive(trained[0])
    assert world.upload(archive, key="eve").status_code == 200
    refused = world.upload(archive, key="eve")
    assert 400 <= refused.status_code < 500 and "quota" in refused.json()["error"]


@pytest.mark.parametrize(
    ("error", "words"),
    [(errno.ENOSPC, "Free disk space"), (errno.EMFILE, "Too many open files"), (errno.EIO, "Input/output error")],
)
def test_an_upload_that_cannot_be_stored_is_told_why(
    world: World, trained: tuple[str, str], monkeypatch: pytest.MonkeyPatch, error: int, words: str
) -> None:
    archive = world.archive(trained[0])

    def fail(*_arguments: object, **_options: object) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr("mint.server.store.checkpoint_folders.write_weights", fail)
    before = set((world.data_dir / "checkpoints").iterdir())
    answer = world.upload(archive)
    assert answer.status_code == 503 and words in answer.json()["error"]
    assert set((world.data_dir / "checkpoints").iterdir()) == before


def test_a_damaged_checkpoint_is_not_sent(world: World, trained: tuple[str, str]) -> None:
    with world.client() as service:
        client = service.create_lora_training_client(base_model="mint/tiny", rank=4, seed=3)
        path = client.save_state("damaged").result().path
    folder = max((world.data_dir / "checkpoints").iterdir(), key=lambda folder: folder.stat().st_mtime_ns)
    content = bytearray((folder / "weights.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "weights.safetensors").write_bytes(content)
    answer = world.get(route(path) + "/archive")
    assert answer.status_code == 400 and "damaged" in answer.json()["error"]


@pytest.mark.parametrize("format", ["peft", "hf", "gguf-ready"])
def test_an_export_over_http_computes_what_mint_samples(
    world: World, trained: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    import peft  # deferred: loading it takes seconds, in every worker

    monkeypatch.setenv("MINT_BASE_URL", world.url)
    monkeypatch.setenv("MINT_API_KEY", "ann")
    export_checkpoint(trained[0], output=tmp_path / "out", format=format)
    model = peft.PeftModel.from_pretrained(load(), tmp_path / "out") if format == "peft" else load(tmp_path / "out")
    with world.client() as service:
        ours = by_mint(service, trained[0])
    np.testing.assert_allclose(by_torch(model), ours, atol=0.02 if format == "gguf-ready" else 1e-4)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".out")] == []


def test_an_export_over_http_names_what_is_wrong(
    world: World, trained: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINT_BASE_URL", world.url)
    monkeypatch.setenv("MINT_API_KEY", "bob")
    with pytest.raises(MintError, match="is not a checkpoint here"):
        export_checkpoint(trained[0], output=tmp_path / "out", format="peft")
    monkeypatch.setenv("MINT_BASE_URL", "http://127.0.0.1:9")
    with pytest.raises(MintError, match="cannot be reached"):
        export_checkpoint(trained[0], output=tmp_path / "out", format="peft")
    assert not (tmp_path / "out").exists()
