"""A checkpoint as a .tar.gz: a stream of bytes whose length is known before it begins.

Archives from outside are read by `models/untrusted_files`.
"""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

CHUNK = 1024 * 1024

_BLOCK = tarfile.BLOCKSIZE
_STORED_BLOCK = 65_535
_GZIP_START = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"


@dataclass(frozen=True)
class ArchiveMember:
    """A file of the archive. `content` is called once, and must give exactly `size` bytes."""

    name: str
    size: int
    content: Callable[[], Iterator[bytes]]

    @classmethod
    def of_bytes(cls, name: str, content: bytes) -> ArchiveMember:
        return cls(name, len(content), lambda: iter([content]))


def tar_gz(members: Iterable[ArchiveMember]) -> tuple[int, Iterator[bytes]]:
    """The length of the archive in bytes, and its content.

    Nothing is compressed, because trained weights hardly shrink. So the length is known beforehand, and a client can
    tell that a download was cut off.
    """
    listed = list(members)
    plain = sum(_BLOCK + member.size + -member.size % _BLOCK for member in listed) + 2 * _BLOCK
    blocks = -(-plain // _STORED_BLOCK)
    return len(_GZIP_START) + plain + 5 * blocks + 8, _gzip_stored(_tar(listed), plain)


def _tar(members: Iterable[ArchiveMember]) -> Iterator[bytes]:
    for member in members:
        header = tarfile.TarInfo(member.name)
        header.size = member.size
        header.mode = 0o644
        yield header.tobuf(tarfile.USTAR_FORMAT)
        yield from member.content()
        yield b"\0" * (-member.size % _BLOCK)
    yield b"\0" * (2 * _BLOCK)


def _gzip_stored(chunks: Iterator[bytes], size: int) -> Iterator[bytes]:
    """A gzip member of deflate's stored blocks (RFC 1951, 3.2.4)."""
    yield _GZIP_START
    checksum = 0
    left = size
    held = bytearray()
    for chunk in chunks:
        checksum = zlib.crc32(chunk, checksum)
        held += chunk
        while len(held) >= min(_STORED_BLOCK, left) > 0:
            block = bytes(held[:_STORED_BLOCK])
            del held[:_STORED_BLOCK]
            left -= len(block)
            length = len(block)
            last = b"\x01" if left == 0 else b"\x00"
            yield last + length.to_bytes(2, "little") + (length ^ 0xFFFF).to_bytes(2, "little") + block
    yield checksum.to_bytes(4, "little") + (size & 0xFFFFFFFF).to_bytes(4, "little")
