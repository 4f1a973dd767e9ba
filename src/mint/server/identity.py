"""Which data directory this is, however often it moves, and how often it was brought back and served."""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter

from mint.errors import InvalidRequestError
from mint.models.tensor_files import write_file

IDENTITY_FILE = "identity.json"
STARTS = 1 << 20
"""More than the starts of one server."""


@dataclass(frozen=True)
class Identity:
    """A data directory. Each time that a mirror brings it back begins another `incarnation`, with the state of
    `restored_from`, in seconds since the epoch. `starts` counts those of its server on a cluster that outlives it."""

    data_id: str
    incarnation: int = 1
    restored_from: float | None = None
    starts: int = 0

    @property
    def number(self) -> int:
        """A number that grows with each incarnation and each start."""
        return self.incarnation * STARTS + self.starts

    @property
    def loss(self) -> str:
        """What to tell a client that asks for something unknown: why it may be; empty if nothing was lost."""
        if self.restored_from is None:
            return ""
        return f"this server's data are those of {utc(self.restored_from)}, from a mirror; what came later is lost"

    def write(self, data_dir: Path) -> None:
        """Stores it in the data directory."""
        write_file(data_dir / IDENTITY_FILE, [json.dumps(asdict(self)).encode()])


_IDENTITY = TypeAdapter(Identity)


def identity_of(data_dir: Path) -> Identity | None:
    """The identity of a data directory; None if it has none yet.

    Raises:
        InvalidRequestError: the file is damaged.
    """
    file = data_dir / IDENTITY_FILE
    try:
        return _IDENTITY.validate_json(file.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        remedy = "Remove it; a mirror then needs an address where nothing is yet"
        raise InvalidRequestError("is damaged", field="file", value=file, remedy=remedy) from error


def made_identity(data_dir: Path) -> Identity:
    """The identity of a data directory, which gets one if it has none.

    Raises:
        InvalidRequestError: as `identity_of`.
    """
    identity = identity_of(data_dir)
    if identity is None:
        identity = Identity(uuid.uuid4().hex)
        identity.write(data_dir)
    return identity


def count_start(data_dir: Path) -> Identity:
    """The identity of a data directory at a new start of its server.

    Raises:
        InvalidRequestError: as `identity_of`.
    """
    identity = made_identity(data_dir)
    identity = replace(identity, starts=identity.starts + 1)
    identity.write(data_dir)
    return identity


def utc(seconds: float) -> str:
    """A time since the epoch, for people."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
