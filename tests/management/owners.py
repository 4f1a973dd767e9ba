"""A server on which a key is the name of its owner, and the clients of several owners."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

from starlette.requests import Request

import mint
from mint.client.rest_client import RestClient
from mint.errors import MintError
from mint.server.callers import LOCAL, Caller
from mint.server.service.service import Service
from mint.server.store.database import OpenFor
from mint.server.store.journal import JOURNAL_FILE, Journal

BASE = "mint/tiny"


def owner_is_key(request: Request) -> Caller:
    name = request.headers.get("x-api-key")
    return Caller(name) if name else LOCAL


@dataclass
class Place:
    """A server and its users."""

    url: str
    service: Service
    data_dir: Path
    open: ExitStack = field(default_factory=ExitStack)

    def client(self, owner: str, **options: object) -> mint.ServiceClient:
        return self.open.enter_context(mint.ServiceClient(base_url=self.url, api_key=owner, **options))

    def rest(self, owner: str) -> RestClient:
        return self.open.enter_context(RestClient(self.url, owner))

    def trainer(self, owner: str, **options: object) -> mint.TrainingClient:
        return self.client(owner).create_lora_training_client(BASE, rank=4, seed=1, **options)

    def journal(self) -> Journal:
        """The journal, opened beside the server as a command opens it, until the end of the test."""
        return self.open.enter_context(closing(Journal(self.data_dir / JOURNAL_FILE, OpenFor.COMMAND)))

    def folders(self) -> set[str]:
        """Of checkpoints, on the disk."""
        return {path.name for path in (self.data_dir / "checkpoints").glob("*")}


def refusal(call: Callable[[], object]) -> MintError:
    """The error that a call raises."""
    try:
        call()
    except MintError as error:
        return error
    raise AssertionError("nothing was raised")
