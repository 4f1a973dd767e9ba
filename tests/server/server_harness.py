"""A real server on a free port over the fake engine, and a client that says exactly what goes over the wire."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from default_engine import fake_engine
from waiting import HANG_S

from mint.compose.serving import Server
from mint.config import read_serve_settings
from mint.server.store.database import Database
from mint.server.store.journal import JOURNAL_FILE
from mint.server.store.keys import ApiKeys

API = "/api/v1"
BASE = "mint/tiny"

_http = httpx.Client(timeout=HANG_S)


@contextmanager
def running(data_dir: Path, *, engine: Any = None, **flags: Any) -> Iterator[Server]:
    """A server that answers until the end of the block."""
    flags = {"port": 0, "data_dir": data_dir, **flags}
    server = Server(read_serve_settings(flags), engine=engine or fake_engine())
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join()


def make_key(data_dir: Path, owner: str) -> str:
    """A key, made as `mint keys create` makes it: beside whatever runs there."""
    data_dir.mkdir(parents=True, exist_ok=True)
    database = Database(data_dir / JOURNAL_FILE)
    try:
        return ApiKeys(database).create(owner)[0]
    finally:
        database.close()


@dataclass
class Person:
    """Somebody with a key (None: without) at a server."""

    server: Server
    key: str | None = None

    def send(self, method: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
        keyed = {"x-api-key": self.key} if self.key is not None else {}
        content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if content is not None:
            named.setdefault("content-type", "application/json")
        return _http.request(method, self.server.url + path, content=content, headers={**keyed, **named})

    def post(self, path: str, body: Any) -> dict[str, Any]:
        response = self.send("POST", f"{API}/{path}", body)
        assert response.status_code == 200, response.text
        return response.json()

    def result(self, request_id: str) -> dict[str, Any]:
        give_up_at = time.monotonic() + HANG_S
        while time.monotonic() < give_up_at:
            response = self.send("POST", f"{API}/retrieve_future", {"request_id": request_id})
            if response.status_code != 408:
                assert response.status_code == 200, response.text
                assert "error" not in response.json(), response.text
                return response.json()
        raise AssertionError(f"{request_id} was never answered")

    def done(self, kind: str, body: Any) -> dict[str, Any]:
        return self.result(self.post(kind, body)["request_id"])

    def session(self) -> str:
        return self.post("create_session", {})["session_id"]

    def model(self, session_id: str) -> str:
        lora = {"rank": 4, "seed": 1}
        body = {"session_id": session_id, "model_seq_id": 0, "base_model": BASE, "lora_config": lora}
        return self.done("create_model", body)["model_id"]

    def sampler(self, session_id: str, number: int = 0) -> str:
        body = {"session_id": session_id, "sampling_session_seq_id": number, "base_model": BASE}
        return self.post("create_sampling_session", body)["sampling_session_id"]


def sample_body(
    sampler_id: str, seq_id: int = 0, *, tokens: list[int] | None = None, max_tokens: int = 3
) -> dict[str, Any]:
    return {
        "sampling_session_id": sampler_id,
        "seq_id": seq_id,
        "prompt": {"chunks": [{"tokens": tokens or [5, 6]}]},
        "sampling_params": {"max_tokens": max_tokens},
        "num_samples": 1,
    }


def pass_input() -> dict[str, Any]:
    datum = {
        "model_input": {"chunks": [{"tokens": [1, 2, 3]}]},
        "loss_fn_inputs": {"target_tokens": {"data": [2, 3, 4], "dtype": "int64"}},
    }
    return {"data": [datum], "loss_fn": "cross_entropy"}
