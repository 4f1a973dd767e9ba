"""Objects under one address of an object storage, over obstore: S3 and what speaks its protocol, Google's, Azure's, or
a folder. Credentials and endpoints come from the usual variables, which obstore reads."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from mint.errors import InvalidRequestError, MissingExtraError
from mint.extras import install_command

SCHEMES = ("s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss", "file")
"""How the address of an object storage may begin."""

RETRIES, RETRY_S = 3, 30.0
"""How often, and for how long, one operation is tried again. The mirror tries all of it again later."""


class Objects(Protocol):
    """Objects by name. Each operation raises OSError if the storage does not answer."""

    def put(self, name: str, content: bytes | Path) -> None:
        """Writes an object, in one step: it is there as a whole, or as it was."""
        ...

    def get(self, name: str) -> bytes:
        """The content of an object.

        Raises:
            FileNotFoundError: there is none of this name.
        """
        ...

    def fetch(self, name: str, path: Path) -> None:
        """Writes the content of an object into a file.

        Raises:
            FileNotFoundError: there is none of this name.
        """
        ...

    def names(self) -> Iterator[str]:
        """The names of all objects."""
        ...

    def remove(self, names: Collection[str]) -> None:
        """Removes objects; names that are not there are fine."""
        ...


def open_objects(url: str, *, field: str) -> Objects:
    """The objects under an address, such as `s3://BUCKET/FOLDER` or `file:///FOLDER`. Connects to nothing yet.

    Raises:
        InvalidRequestError: it is no such address; `field` is the setting that has it.
        MissingExtraError: obstore is not installed.
    """
    address = urlsplit(url)
    if address.scheme not in SCHEMES or not (address.netloc or address.path.strip("/")):
        raise InvalidRequestError(
            "is no address of an object storage",
            field=field,
            value=without_secrets(url),
            remedy="Give s3://BUCKET/FOLDER, gs://BUCKET/FOLDER, az://CONTAINER/FOLDER or file:///FOLDER",
        )
    if find_spec("obstore") is None:
        raise MissingExtraError("object storage needs obstore", remedy=install_command("mirror"))
    return _Storage(url, field)


def without_secrets(url: str) -> str:
    """An address as it may be shown: without a password or a query."""
    address = urlsplit(url)
    return address._replace(netloc=address.netloc.rpartition("@")[2], query="", fragment="").geturl()


class _Storage:
    """`Objects` over obstore."""

    def __init__(self, url: str, field: str) -> None:
        import obstore  # deferred: only servers with a mirror need it
        from obstore.exceptions import BaseError

        self._obstore: Any = obstore
        self._failures = (BaseError,)
        retries: Any = {"max_retries": RETRIES, "retry_timeout": timedelta(seconds=RETRY_S)}
        try:
            if urlsplit(url).scheme == "file":
                Path(urlsplit(url).path).mkdir(mode=0o700, parents=True, exist_ok=True)
                self._store: Any = obstore.store.from_url(url)
            else:
                self._store = obstore.store.from_url(url, retry_config=retries)
        except (BaseError, OSError, ValueError) as error:
            raise InvalidRequestError(
                f"cannot be used: {_first_line(error)}",
                field=field,
                value=without_secrets(url),
                remedy="Check the address, who may write there, and the variables of the storage, such as AWS_REGION",
            ) from error

    def put(self, name: str, content: bytes | Path) -> None:
        with self._errors():
            self._obstore.put(self._store, name, content)

    def get(self, name: str) -> bytes:
        with self._errors():
            return bytes(self._obstore.get(self._store, name).bytes())

    def fetch(self, name: str, path: Path) -> None:
        with self._errors(), path.open("wb") as file:
            for part in self._obstore.get(self._store, name):
                file.write(part)

    def names(self) -> Iterator[str]:
        with self._errors():
            for several in self._obstore.list(self._store):
                for own in several:
                    name: str = own["path"]
                    yield name

    def remove(self, names: Collection[str]) -> None:
        for name in names:
            try:
                with self._errors():
                    self._obstore.delete(self._store, name)
            except FileNotFoundError:
                continue

    @contextmanager
    def _errors(self) -> Generator[None]:
        try:
            yield
        except self._failures as error:
            raise OSError(f"the object storage refuses: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
