"""`mint models pull` against a server that speaks the hub's protocol."""

from __future__ import annotations

import hashlib
import json
import os
import pty
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_models import write_model

from mint.errors import InvalidRequestError
from mint.models.hub import Download, download, plan_download

COMMIT = "a" * 40
NAME = "lab/small"


class Hub:
    """One model on a server. `asked` lists the files that were fetched, with the byte from which on; `listed` counts
    the requests for the list of its files."""

    def __init__(self, folder: Path) -> None:
        self.files = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
        self.files["pytorch_model.bin"] = b"never fetched"
        self.asked: list[tuple[str, int]] = []
        self.listed = 0
        self.tokens: set[str | None] = set()
        self.damaged = False
        self.breaks_after: int | None = None
        self.status = 200
        self.silent = ""
        self.odd: dict[str, str] = {}  # what it says in place of a hash: as etag, oid or commit
        self.ended = threading.Event()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        self.tokens.add(request.headers.get("Authorization"))
        self.listed += request.path.startswith("/api/")
        parts = request.path.split("?")[0].strip("/").split("/")
        if self.silent and self.silent in request.path:
            self.ended.wait(200)
            return
        if self.status != 200 or "small" not in parts:
            self._send(request, self.status if self.status != 200 else 404, b"{}", {"X-Error-Code": self._code()})
        elif "tree" in parts:
            self._send(request, 200, json.dumps([self._entry(name) for name in self.files]).encode(), {})
        elif parts[0] == "api":
            found = {
                "id": NAME,
                "sha": self.odd.get("commit", COMMIT),
                "siblings": [{"rfilename": name} for name in self.files],
            }
            self._send(request, 200, json.dumps(found).encode(), {})
        else:
            self._send_file(request, parts[-1])

    def _code(self) -> str:
        return {401: "GatedRepo", 404: "RevisionNotFound", 200: "RepoNotFound"}.get(self.status, "")

    def _entry(self, name: str) -> dict[str, Any]:
        content = self.files[name]
        entry: dict[str, Any] = {"type": "file", "path": name, "size": len(content), "oid": self._etag(name)}
        if name.endswith(".safetensors"):
            entry["lfs"] = {"oid": self.odd.get("oid", self._etag(name)), "size": len(content), "pointerSize": 100}
        return entry

    def _etag(self, name: str) -> str:
        digest = hashlib.sha256(self.files[name]).hexdigest()
        return digest if name.endswith(".safetensors") else digest[:40]

    def _send_file(self, request: BaseHTTPRequestHandler, name: str) -> None:
        content = self.files[name]
        start = int((request.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0])
        headers = {
            "ETag": f'"{self.odd.get("etag", self._etag(name))}"',
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
        }
        if request.command == "HEAD":
            self._send(request, 200, content, headers)
            return
        self.asked.append((name, start))
        if self.damaged and name.endswith(".safetensors"):
            content = content[:-1] + bytes([content[-1] ^ 1])
        part = content[start:]
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        cut = self.breaks_after if name.endswith(".safetensors") else None
        self._send(request, 206 if start else 200, part, headers, cut=cut)

    def _send(
        self, request: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str], cut: int | None = None
    ) -> None:
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(body if cut is None else body[:cut])
        if cut is not None:
            request.close_connection = True


@contextmanager
def _served(hub: Hub) -> Generator[str]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            hub.answer(self)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        hub.ended.set()
        server.shutdown()
        server.server_close()


@pytest.fixture
def hub(tmp_path: Path) -> Hub:
    write_model(tmp_path / "model", "tied")
    return Hub(tmp_path / "model")


def _mint(
    tmp_path: Path, endpoint: str, *arguments: str, stdin: int = subprocess.DEVNULL, **environment: str
) -> subprocess.CompletedProcess[str]:
    own = {
        **os.environ,
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(tmp_path / "hf"),
        "MINT_HOME": str(tmp_path / "home"),
        "HF_HUB_OFFLINE": "0",
        **environment,
    }
    return subprocess.run(
        [sys.executable, "-c", _RUN, *arguments],
        env=own,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        stdin=stdin,
    )


_RUN = "from mint.cli.main import app; app()"


def test_a_model_is_downloaded_once_and_found_by_its_name(hub: Hub, tmp_path: Path) -> None:
    with _served(hub) as endpoint:
        first = _mint(tmp_path, endpoint, "models", "pull", NAME, HF_TOKEN="hf_secret")
        assert first.returncode == 0, first.stderr
        fetched = {name for name, _ in hub.asked}
        again = _mint(tmp_path, endpoint, "models", "pull", NAME)
    assert fetched == {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert again.returncode == 0 and len(hub.asked) == len(fetched)
    assert "Bearer hf_secret" in hub.tokens and "hf_secret" not in first.stdout + first.stderr
    found = _resolve(tmp_path)
    assert (Path(found) / "model.safetensors").read_bytes() == hub.files["model.safetensors"]


def test_a_second_copy_of_the_weights_is_not_downloaded(hub: Hub, tmp_path: Path) -> None:
    """Mistral publishes `consolidated.safetensors` beside its shards, and GPT-OSS a folder `original`."""
    copy = hub.files["model.safetensors"]
    hub.files |= {"consolidated.safetensors": copy, "original/other.safetensors": copy}
    with _served(hub) as endpoint:
        result = _mint(tmp_path, endpoint, "models", "pull", NAME)
    assert result.returncode == 0, result.stderr
    assert [name for name, _ in hub.asked if name.endswith(".safetensors")] == ["model.safetensors"]
    assert (Path(_resolve(tmp_path)) / "model.safetensors").is_file()


def _resolve(tmp_path: Path) -> str:
    code = f"from mint.models.registry import resolve; print(resolve({NAME!r}, {{}}))"
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hf")}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_a_download_that_broke_off_goes_on_where_it_was(hub: Hub, tmp_path: Path) -> None:
    hub.files["large.safetensors"] = os.urandom(24 << 20)  # written in parts of 10 MiB
    hub.breaks_after = 21 << 20
    with _served(hub) as endpoint:
        for _ in range(3):  # the library may try again by itself
            if _mint(tmp_path, endpoint, "models", "pull", NAME).returncode == 0:
                break
    assert [start > 0 for name, start in hub.asked if name == "large.safetensors"] == [False, True]
    assert (Path(_resolve(tmp_path)) / "large.safetensors").read_bytes() == hub.files["large.safetensors"]


def test_a_file_that_arrives_damaged_is_refused_and_fetched_again(hub: Hub, tmp_path: Path) -> None:
    with _served(hub) as endpoint:
        hub.damaged = True
        result = _mint(tmp_path, endpoint, "models", "pull", NAME)
        assert result.returncode == 1 and "damaged" in result.stderr and "Traceback" not in result.stderr
        hub.damaged = False
        assert _mint(tmp_path, endpoint, "models", "pull", NAME).returncode == 0
    assert (Path(_resolve(tmp_path)) / "model.safetensors").read_bytes() == hub.files["model.safetensors"]


@pytest.mark.parametrize(
    ("name", "status", "said"),
    [
        (NAME, 401, "set HF_TOKEN"),
        ("lab/nothing", 200, "lab/nothing"),
        ("no/such/name", 200, "organisation/model"),
        (NAME, 404, "Check the name"),
        (NAME, 403, "HF_TOKEN"),
    ],
    ids=["gated", "unknown", "odd", "plain 404", "plain 403"],
)
def test_what_cannot_be_had_is_said_in_one_sentence(
    name: str, status: int, said: str, hub: Hub, tmp_path: Path
) -> None:
    hub.status = status
    with _served(hub) as endpoint:
        result = _mint(tmp_path, endpoint, "models", "pull", name)
    assert result.returncode == 1 and said in result.stderr and "Traceback" not in result.stderr


def test_a_revision_that_is_not_there_is_refused_with_a_remedy(hub: Hub, tmp_path: Path) -> None:
    hub.status = 404
    with _served(hub) as endpoint:
        result = _mint(tmp_path, endpoint, "models", "pull", NAME, "--revision", "nothing")
    assert result.returncode == 1 and f"revision = nothing: is no revision of {NAME}. Name a branch" in result.stderr


def test_who_wants_no_download_is_told_what_else_there_is(hub: Hub, tmp_path: Path) -> None:
    keyboard, terminal = pty.openpty()
    os.write(keyboard, b"n\n")
    with _served(hub) as endpoint:
        result = _mint(tmp_path, endpoint, "train", "rl", "task=math", f"base_model={NAME}", stdin=terminal)
    os.close(keyboard)
    os.close(terminal)
    assert result.returncode == 1 and f"base_model = {NAME}: is not on this machine" in result.stderr
    assert f"mint models pull {NAME}" in result.stderr and "base_model=mint/tiny" in result.stderr


@pytest.mark.parametrize("arguments", [("models", "pull"), ("train", "rl", "task=math", "steps=0")])
def test_an_endpoint_that_is_no_address_is_named(arguments: tuple[str, ...], tmp_path: Path) -> None:
    name = NAME if arguments[0] == "models" else f"base_model={NAME}"
    result = _mint(tmp_path, "http://[::1", *arguments, name)
    assert result.returncode == 1 and "HF_ENDPOINT" in result.stderr and "Traceback" not in result.stderr


def test_a_name_that_is_a_folder_here_is_said_to_be_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / NAME).mkdir(parents=True)
    with pytest.raises(InvalidRequestError, match="folder here"):
        plan_download(NAME)


def test_a_small_disk_is_described_in_megabytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=3_000_000))
    with pytest.raises(InvalidRequestError, match=r"needs 4\.5 MB, and .* has 3\.0 MB left"):
        download(Download(NAME, None, 1, 4_500_000))


def test_without_a_network_the_error_has_the_command_for_another_machine(tmp_path: Path) -> None:
    for environment, said in (({}, "from http://127.0.0.1:9: "), ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set")):
        result = _mint(tmp_path, "http://127.0.0.1:9", "models", "pull", NAME, "--revision", "v1", **environment)
        assert result.returncode == 1 and f"{NAME} cannot be downloaded" in result.stderr and said in result.stderr
        assert f"run `hf download {NAME} --revision v1 --local-dir DIR`, copy DIR here" in result.stderr
        assert "Traceback" not in result.stderr and "..." not in result.stderr and ".. " not in result.stderr


@pytest.mark.parametrize("where", ["etag", "oid", "commit"])
def test_a_hub_cannot_have_a_file_written_outside_of_the_cache(where: str, hub: Hub, tmp_path: Path) -> None:
    hub.odd[where] = "../../../../outside"
    with _served(hub) as endpoint:
        result = _mint(tmp_path, endpoint, "models", "pull", NAME)
    assert result.returncode == 1 and "HF_ENDPOINT" in result.stderr and "Traceback" not in result.stderr
    assert not list(tmp_path.rglob("outside*")) and not hub.asked


@pytest.mark.parametrize("silent", ["/api/", "/tree/"])
def test_a_hub_that_does_not_answer_is_an_error_soon(silent: str, hub: Hub, tmp_path: Path) -> None:
    hub.silent = silent
    with _served(hub) as endpoint:
        began = time.monotonic()
        result = _mint(tmp_path, endpoint, "models", "pull", NAME, HF_HUB_DOWNLOAD_TIMEOUT="1")
    assert result.returncode == 1 and "timed out" in result.stderr and "Traceback" not in result.stderr
    assert time.monotonic() - began < 100


def test_a_training_asks_before_it_downloads_and_makes_nothing_before(hub: Hub, tmp_path: Path) -> None:
    arguments = ("train", "rl", "task=math", f"base_model={NAME}", "steps=0")
    with _served(hub) as endpoint:
        refused = _mint(tmp_path, endpoint, *arguments)
        assert refused.returncode == 1 and f"mint models pull {NAME}" in refused.stderr
        assert not hub.asked and not (tmp_path / "home").exists()
        hub.listed = 0
        allowed = _mint(tmp_path, endpoint, *arguments, "--yes")
        listed = hub.listed
        _mint(tmp_path, endpoint, "models", "pull", NAME, HF_HOME=str(tmp_path / "other"))
    assert "model.safetensors" in {name for name, _ in hub.asked}, allowed.stderr
    assert listed == hub.listed - listed  # as often as `mint models pull`
