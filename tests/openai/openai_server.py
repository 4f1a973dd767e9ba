"""A server over the bundled model, with keys for two tenants, and the clients that they open on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
from http_server import http_app

import mint
from mint.compose.embedded import EmbeddedService, open_embedded
from mint.server.all_routes import ROUTES
from mint.server.http.app import create_app
from mint.server.http.auth import by_key
from mint.server.http.key_guesses import GuardedKeys

MODEL = "mint/tiny"


@dataclass(frozen=True)
class Server:
    """A running server, and what a tenant opens on it."""

    url: str
    running: EmbeddedService
    keys: dict[str, str]

    def client(self, owner: str = "ada", *, path: str = "/v1") -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url + path, api_key=self.keys[owner], max_retries=0)

    def async_client(self, owner: str = "ada") -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=self.keys[owner], max_retries=0)

    def mint_client(self, owner: str = "ada") -> mint.ServiceClient:
        return mint.ServiceClient(base_url=self.url, api_key=self.keys[owner])


@contextmanager
def serving(folder: Path, **options: Any) -> Iterator[Server]:
    running = open_embedded(data_dir=folder, **options)
    book = running.service.api_keys()
    keys = {owner: book.create(owner)[0] for owner in ("ada", "bob")}
    app = create_app(running.service, ROUTES, authenticate=by_key(GuardedKeys(book)))
    try:
        with http_app(running, app) as url:
            yield Server(url, running, keys)
    finally:
        running.release()
