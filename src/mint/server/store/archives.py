"""Checkpoints as tar archives: written as a stream of known length, and read from strangers without extracting.

Reading gives copies of a few files known by name, in unnamed temporary files; whatever else an archive can hold is
refused or, where it is known to be harmless, skipped. Knows the limits of archives; knows nothing of what the files
mean.
"""

from __future__ import annotations

import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Self

from mint.errors import InvalidRequestError
from mint.models.foreign_tensors import MAX_HEADER_BYTES

MAX_MEMBERS = 64
MAX_UPLOAD_BYTES = 16 * 1024**3
MAX_FILE_BYTES = 16 * 1024**3
MAX_EXTENSION_BYTES = 64 * 1024
FREE_EXPANSION_BYTES = 64 * 1024**2
MAX_EXPANSION = 16
"""An archive may unpack to so many bytes and so many times its size: trained weights hardly shrink, bombs do."""

BLOCK, CHUNK, _PACKED_CHUNK = tarfile.BLOCKSIZE, 1024 * 1024, 64 * 1024
_STORED_BLOCK = 65_535
_GZIP_START = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"

PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
OPTIMIZER, MANIFEST, COMPLETE = "optimizer.safetensors", "mint.json", "checkpoint_complete"
WANTED: Mapping[str, int] = {
    PEFT_CONFIG: MAX_HEADER_BYTES,
    PEFT_WEIGHTS: MAX_FILE_BYTES,
    OPTIMIZER: MAX_FILE_BYTES,
    MANIFEST: MAX_HEADER_BYTES,
}
"""The files that are read, and how large each may be."""

SKIPPED = frozenset(
    [COMPLETE, "README.md", ".gitattributes", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
     "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja",
     "generation_config.json", "config.json", "trainer_state.json"]
)  # fmt: skip
"""What training tools put beside an adapter; not read."""

_RESOURCE_FORK = "._"  # what macOS' tar writes beside every file
_PICKLED = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")


# --- writing -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """A file of an archive to be written: its content is asked for once, and has exactly `size` bytes."""

    name: str
    size: int
    content: Callable[[], Iterator[bytes]]

    @classmethod
    def of_bytes(cls, name: str, content: bytes) -> Part:
        """A small file."""
        return cls(name, len(content), lambda: iter([content]))


def tar_gz(parts: Iterable[Part]) -> tuple[int, Iterator[bytes]]:
    """The length of the archive in bytes, and its content.

    Nothing is compressed: trained weights hardly shrink, and so the length is known beforehand, by which a client
    notices a download that broke off.
    """
    listed = list(parts)
    plain = sum(BLOCK + part.size + -part.size % BLOCK for part in listed) + 2 * BLOCK
    blocks = -(-plain // _STORED_BLOCK)
    return len(_GZIP_START) + plain + 5 * blocks + 8, _gzip_stored(_tar(listed), plain)


def _tar(parts: Iterable[Part]) -> Iterator[bytes]:
    for part in parts:
        header = tarfile.TarInfo(part.name)
        header.size, header.mode = part.size, 0o644
        yield header.tobuf(tarfile.USTAR_FORMAT)
        yield from part.content()
        yield b"\0" * (-part.size % BLOCK)
    yield b"\0" * (2 * BLOCK)


def _gzip_stored(chunks: Iterator[bytes], size: int) -> Iterator[bytes]:
    """A gzip member of deflate's stored blocks (RFC 1951, 3.2.4)."""
    yield _GZIP_START
    checksum, left, held = 0, size, bytearray()
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


# --- reading -----------------------------------------------------------------------------------------------------


class ForeignFiles:
    """The files of a folder or an archive that came from outside, open for reading; closed with this."""

    def __init__(self, source: Path | BinaryIO, scratch: Path) -> None:
        """`source` is a folder, the path of an archive, or an open one; copies lie in `scratch`, without a name.

        Raises:
            InvalidRequestError: it is neither, or holds what an adapter's archive never holds.
        """
        self._open = ExitStack()
        self.files: dict[str, BinaryIO] = {}
        try:
            if isinstance(source, Path) and source.is_dir():
                self._open_folder(source)
            elif isinstance(source, Path):
                with _opened(source) as archive:
                    self._copy_members(archive, scratch)
            else:
                self._copy_members(source, scratch)
            for name in (PEFT_CONFIG, PEFT_WEIGHTS):
                if name not in self.files:
                    raise _refused(f"lacks {name}", "Send a PEFT folder as a .tar.gz")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Lets go of the files; the copies are gone."""
        self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def read(self, name: str) -> bytes | None:
        """The whole of a small file; None if it is not there."""
        file = self.files.get(name)
        if file is None:
            return None
        file.seek(0)
        return file.read(WANTED[name] + 1)[: WANTED[name]]

    def _open_folder(self, folder: Path) -> None:
        if (folder / "adapter_model.bin").is_file() and not (folder / PEFT_WEIGHTS).is_file():
            _check_name("adapter_model.bin")
        for name in WANTED:
            if (folder / name).is_file():
                self.files[name] = self._open.enter_context(_opened(folder / name))

    def _copy_members(self, archive: BinaryIO, scratch: Path) -> None:
        scratch.mkdir(parents=True, exist_ok=True)
        for name, size, content in _members(archive):
            if size > WANTED.get(name, FREE_EXPANSION_BYTES):
                raise _refused(f"holds {name} of {size} bytes, more than mint takes", "Send the adapter alone")
            if name not in WANTED:
                continue
            copy = self._open.enter_context(tempfile.TemporaryFile(dir=scratch))  # noqa: SIM115 - closed by the stack
            for chunk in content:
                copy.write(chunk)
            self.files[name] = copy


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise InvalidRequestError(
            f"cannot be read: {error.strerror}", field="source", value=str(path), remedy="Name a folder or a .tar.gz"
        ) from error


def _members(archive: BinaryIO) -> Iterator[tuple[str, int, Iterator[bytes]]]:
    """Name without folder, size and content of every file, in order; the content is to be read before the next."""
    stream = _Bounded(archive)
    seen: set[str] = set()
    folders: set[str] = set()
    for _ in range(MAX_MEMBERS):
        header = stream.header()
        if header is None:
            return
        if header.type in (tarfile.XHDTYPE, tarfile.XGLTYPE):
            _check_extension(b"".join(stream.content(header.size, MAX_EXTENSION_BYTES)))
            continue
        if header.isdir() and header.size == 0:
            _parts_of(header.name)
            continue
        if header.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
            raise _refused(f"holds {header.name!a}, which is no ordinary file", "Send plain files: no links")
        *folder, name = _parts_of(header.name) or [""]
        folders.add("/".join(folder))
        _check_name(name)
        if name in seen:
            raise _refused(f"holds {name} twice", "Send each file once")
        if len(folders) > 1:
            raise _refused("holds files in several folders", "Send one PEFT folder")
        seen.add(name)
        content = stream.content(header.size, MAX_FILE_BYTES)
        yield name, header.size, content
        for _rest in content:
            pass
    raise _refused(f"holds more than {MAX_MEMBERS} entries", "Send the adapter alone")


class _Bounded:
    """The blocks of a tar, through gzip where it is compressed, in a bounded number of bytes."""

    def __init__(self, archive: BinaryIO) -> None:
        archive.seek(0, 2)
        size = archive.tell()
        archive.seek(0)
        compressed = archive.read(2) == _GZIP_START[:2]
        archive.seek(0)
        self._stream = _Gunzip(archive) if compressed else archive
        self._left = FREE_EXPANSION_BYTES + MAX_EXPANSION * size

    def header(self) -> tarfile.TarInfo | None:
        """The next entry's header; None at the archive's end, where what gzip adds up must be right."""
        block = self._read(BLOCK)
        if not block.strip(b"\0"):
            if isinstance(self._stream, _Gunzip):
                self._finish(self._stream)
            return None
        try:
            header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except (tarfile.HeaderError, ValueError) as error:
            raise _refused(f"is not a tar archive: {error}", "Send a .tar.gz or a .tar") from error
        if header.size < 0:
            raise _refused("gives a file a negative size", "Send a .tar.gz or a .tar")
        return header

    def content(self, size: int, most: int) -> Iterator[bytes]:
        """An entry's content, and the padding behind it."""
        if size > most:
            raise _refused(f"holds an entry of {size} bytes, more than {most}", "Send the adapter alone")
        if size > self._left:
            raise self._expands()
        return self._chunks(size)

    def _chunks(self, size: int) -> Iterator[bytes]:
        left = size
        while left > 0:
            chunk = self._read(min(CHUNK, left))
            left -= len(chunk)
            yield chunk
        self._read(-size % BLOCK)

    def _expands(self) -> InvalidRequestError:
        return _refused("unpacks to far more than its own size", "Send a plain .tar, without compression")

    def _finish(self, stream: _Gunzip) -> None:
        for _ in range(MAX_EXTENSION_BYTES // BLOCK):
            if stream.is_over:
                return
            self._left -= BLOCK
            _unpacked(stream, BLOCK)
        raise _refused("goes on after its end", "Send the whole file, and nothing behind it")

    def _read(self, size: int) -> bytes:
        self._left -= size
        if self._left < 0:
            raise self._expands()
        data = _unpacked(self._stream, size)
        if len(data) < size:
            raise _refused("ends in the middle", "Send the whole file")
        return data


class _Gunzip:
    """One gzip member, unpacked a piece at a time, whatever its header and its blocks are like."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._inflate = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)

    @property
    def is_over(self) -> bool:
        return self._inflate.eof

    def read(self, size: int) -> bytes:
        """At most `size` bytes; none at the end. A wrong checksum is a `zlib.error`."""
        while size and not self._inflate.eof:
            packed = self._inflate.unconsumed_tail or self._file.read(_PACKED_CHUNK)
            piece = self._inflate.decompress(packed, size)
            if piece or not packed:
                return piece
        return b""


def _unpacked(stream: _Gunzip | BinaryIO, size: int) -> bytes:
    """`size` bytes, fewer at the end."""
    data = bytearray()
    try:
        while len(data) < size and (piece := stream.read(size - len(data))):
            data += piece
    except (OSError, zlib.error) as error:
        raise _refused(f"cannot be unpacked: {error}", "Send a whole .tar.gz") from error
    return bytes(data)


def _parts_of(name: str) -> list[str]:
    """Folder (at most one) and file name; a leading ./ is nothing."""
    parts = [part for part in name.removesuffix("/").split("/") if part != "."]
    if len(parts) > 2 or any(part in ("", "..") or "\\" in part or "\0" in part for part in parts):
        raise _refused(f"holds {name!a}: a path that mint does not follow", "Send one PEFT folder, with no others")
    return parts


def _check_name(name: str) -> None:
    if name.endswith(_PICKLED):
        remedy = "Leave it out; save an adapter_model.bin again with safe_serialization=True"
        raise _refused(f"holds {name!a}, a pickle, which could run code and is never read", remedy)
    if name not in WANTED and name not in SKIPPED and not name.startswith(_RESOURCE_FORK):
        raise _refused(f"holds {name!a}, which mint does not know", f"Send only {', '.join(WANTED)}")


def _check_extension(text: bytes) -> None:
    """Times and owners may be given more precisely than a header can; names, sizes and kinds may not be changed."""
    for key in (b"path", b"linkpath", b"size", b"GNU.sparse"):
        if b" " + key + (b"=" if key != b"GNU.sparse" else b"") in text:
            raise _refused(f"changes {key.decode()} in an extended header", "Use a short folder name, or format=ustar")


def _refused(problem: str, remedy: str) -> InvalidRequestError:
    return InvalidRequestError(problem, field="file", value="the archive", remedy=remedy)
