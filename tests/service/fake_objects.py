"""Objects in memory, which count what is written, can fail, and can be slow."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from pathlib import Path


class FakeObjects:
    """`Objects` in memory. While `is_down`, every operation fails; while `gate` is cleared, writes wait for it."""

    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}
        self.written: list[str] = []
        self.is_down = False
        self.gate = threading.Event()
        self.gate.set()

    def put(self, name: str, content: bytes | Path) -> None:
        self.gate.wait()
        self._require()
        self.written.append(name)
        self.content[name] = content.read_bytes() if isinstance(content, Path) else content

    def get(self, name: str) -> bytes:
        self._require()
        if name not in self.content:
            raise FileNotFoundError(name)
        return self.content[name]

    def fetch(self, name: str, path: Path) -> None:
        path.write_bytes(self.get(name))

    def names(self) -> Iterator[str]:
        self._require()
        yield from list(self.content)

    def remove(self, names: Collection[str]) -> None:
        self._require()
        for name in names:
            self.content.pop(name, None)

    def _require(self) -> None:
        if self.is_down:
            raise OSError("nobody answers")
