"""What a mirror has: one manifest, which is written last, and lists that it names. Objects are named by their content.

A manifest that is there is whole: everything that it names was written before it. It is replaced in one step.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import TypeAdapter

from mint.server.identity import utc

MANIFEST, CONTENT = "MANIFEST.json", "content/"
"""The names of the manifest, and of all other objects: their SHA-256 behind this."""

FORMAT = "mint-mirror-1"


@dataclass(frozen=True)
class MirroredFile:
    """A file of the data directory: its name there, its size and its content."""

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class MirrorManifest:
    """One state of a data directory.

    `data_id` and `incarnation` are those of the data directory, `writer` names the process that wrote this, `number`
    counts the manifests. `taken_at` is in seconds since the epoch. `journal` names the list of the journal's parts,
    `files` the lists of files.
    """

    data_id: str
    incarnation: int
    writer: str
    number: int
    taken_at: float
    journal_bytes: int
    journal: str
    files: tuple[str, ...]

    def encode(self) -> bytes:
        """As it is stored, with its own checksum."""
        content = {"format": FORMAT, **asdict(self)}
        return _json(content | {"sha256": sha256(_json(content))})

    @classmethod
    def decode(cls, text: bytes) -> MirrorManifest:
        """Reads what `encode` wrote.

        Raises:
            ValueError: it is damaged, or of another format.
        """
        content = json.loads(text)
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError("it is no manifest of this version")
        known = content.pop("sha256", None)
        if known != sha256(_json(content)):
            raise ValueError("the checksum of the manifest differs")
        del content["format"]
        return _MANIFEST.validate_python(content)

    @property
    def taken(self) -> str:
        """When the state was taken, for people, in UTC."""
        return utc(self.taken_at)


_MANIFEST, _FILES, _PARTS = TypeAdapter(MirrorManifest), TypeAdapter(list[MirroredFile]), TypeAdapter(list[str])


def sha256(content: bytes) -> str:
    """The name of a content."""
    return hashlib.sha256(content).hexdigest()


def encode_parts(parts: Iterable[str]) -> bytes:
    """The list of the journal's parts, in order: the content of each."""
    return _json(list(parts))


def decode_parts(text: bytes) -> list[str]:
    """Reads what `encode_parts` wrote."""
    return _PARTS.validate_json(text)


def encode_files(files: Iterable[MirroredFile]) -> bytes:
    """A list of files."""
    return _json([asdict(file) for file in files])


def decode_files(text: bytes) -> list[MirroredFile]:
    """Reads what `encode_files` wrote."""
    return _FILES.validate_json(text)


def _json(content: Any) -> bytes:
    return json.dumps(content, separators=(",", ":"), sort_keys=True).encode()
