"""The files of a lora from outside: a folder or a tar archive, read without being unpacked to named files.

Gives copies of a few files known by name, in temporary files without a name. Whatever else an archive can hold is
refused or, where it is known to be harmless, skipped.
"""

from __future__ import annotations

import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, Self

from mint.errors import InvalidRequestError
from mint.models.peft_files import CONFIG_FILE, WEIGHTS_FILE
from mint.models.untrusted_tensors import MAX_HEADER_BYTES

OPTIMIZER_FILE = "optimizer.safetensors"
MANIFEST_FILE = "mint.json"
COMPLETE_FILE = "checkpoint_complete"
MAX_MEMBERS = 64
MAX_UPLOAD_BYTES = 16 * 1024**3
MAX_FILE_BYTES = 16 * 1024**3
MAX_EXTENSION_BYTES = 64 * 1024
FREE_EXPANSION_BYTES = 64 * 1024**2
MAX_EXPANSION = 16
"""An archive may unpack to `FREE_EXPANSION_BYTES` and 16 times its size: trained weights hardly shrink, bombs do."""

WANTED: Mapping[str, int] = {
    CONFIG_FILE: MAX_HEADER_BYTES,
    WEIGHTS_FILE: MAX_FILE_BYTES,
    OPTIMIZER_FILE: MAX_FILE_BYTES,
    MANIFEST_FILE: MAX_HEADER_BYTES,
}
"""The files that are read, and how many bytes each may have."""

SKIPPED = frozenset(
    {
        COMPLETE_FILE,
        "README.md",
        ".gitattributes",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "merges.txt",
        "tokenizer.model",
        "chat_template.jinja",
        "generation_config.json",
        "config.json",
        "trainer_state.json",
    }
)
"""Files that training tools put beside a lora; not read."""

_BLOCK = tarfile.BLOCKSIZE
_CHUNK = 1024 * 1024
_PACKED_CHUNK = 64 * 1024
_GZIP_MAGIC = b"\x1f\x8b"
_RESOURCE_FORK = "._"  # what macOS' tar writes beside every file
_PICKLED = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")


class UntrustedFiles:
    """The files of a folder or an archive from outside, open for reading. A context manager: the end closes them."""

    def __init__(
        self, source: Path | BinaryIO, scratch: Path, *, before_copy: Callable[[int], None] = lambda size_bytes: None
    ) -> None:
        """Checks and opens the files.

        `source` is a folder, the path of a .tar or .tar.gz, or an open one. Copies of an archive's files are unnamed
        temporary files in the folder `scratch`; `before_copy` is told the size of each, and may refuse it.

        Raises:
            InvalidRequestError: `source` is none of these, or holds what the archive of a lora never holds.
        """
        self._open = ExitStack()
        self._before_copy = before_copy
        self.files: dict[str, BinaryIO] = {}
        try:
            if isinstance(source, Path) and source.is_dir():
                self._open_folder(source)
            elif isinstance(source, Path):
                with _opened(source) as archive:
                    self._copy_members(archive, scratch)
            else:
                self._copy_members(source, scratch)
            for name in (CONFIG_FILE, WEIGHTS_FILE):
                if name not in self.files:
                    raise _refused(f"lacks {name}", "Send a PEFT folder as a .tar.gz")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Closes the files; the copies are deleted with that."""
        self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def read(self, name: str) -> bytes | None:
        """The content of a small file; None if there is no such file."""
        file = self.files.get(name)
        if file is None:
            return None
        file.seek(0)
        return file.read(WANTED[name] + 1)[: WANTED[name]]

    def _open_folder(self, folder: Path) -> None:
        if (folder / "adapter_model.bin").is_file() and not (folder / WEIGHTS_FILE).is_file():
            _check_name("adapter_model.bin")
        for name in WANTED:
            if (folder / name).is_file():
                self.files[name] = self._open.enter_context(_opened(folder / name))

    def _copy_members(self, archive: BinaryIO, scratch: Path) -> None:
        scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, size, content in _members(archive):
            if size > WANTED.get(name, FREE_EXPANSION_BYTES):
                raise _refused(f"holds {name} of {size} bytes, more than mint takes", "Send the lora alone")
            if name not in WANTED:
                continue
            self._before_copy(size)
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
    """Yields name without folder, size and content of every file, in order. Read the content before the next one."""
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
        for _rest in content:  # what the caller left unread: the next header lies behind it
            pass
    raise _refused(f"holds more than {MAX_MEMBERS} entries", "Send the lora alone")


class _Bounded:
    """The blocks of a tar, unpacked if it is a .tar.gz; refuses to give more bytes than the limit on expansion."""

    def __init__(self, archive: BinaryIO) -> None:
        archive.seek(0, 2)
        size = archive.tell()
        archive.seek(0)
        compressed = archive.read(2) == _GZIP_MAGIC  # by content: a file's name says what its sender likes
        archive.seek(0)
        self._stream = _Gunzip(archive) if compressed else archive
        self._left = FREE_EXPANSION_BYTES + MAX_EXPANSION * size

    def header(self) -> tarfile.TarInfo | None:
        """The next entry's header; None at the end of the archive, after gzip's checksum has been verified."""
        block = self._read(_BLOCK)
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
        """Yields an entry's content, then skips the padding after it."""
        if size > most:
            raise _refused(f"holds an entry of {size} bytes, more than {most}", "Send the lora alone")
        if size > self._left:
            raise self._expands()
        return self._chunks(size)

    def _chunks(self, size: int) -> Iterator[bytes]:
        left = size
        while left > 0:
            chunk = self._read(min(_CHUNK, left))
            left -= len(chunk)
            yield chunk
        self._read(-size % _BLOCK)

    def _expands(self) -> InvalidRequestError:
        return _refused("unpacks to far more than its own size", "Send a plain .tar, without compression")

    def _finish(self, stream: _Gunzip) -> None:
        for _ in range(MAX_EXTENSION_BYTES // _BLOCK):
            if stream.is_over:
                return
            self._left -= _BLOCK
            _unpacked(stream, _BLOCK)
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
    """One gzip member, unpacked piece by piece, so that memory is bounded for any header and blocks."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._inflate = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)

    @property
    def is_over(self) -> bool:
        return self._inflate.eof

    def read(self, size: int) -> bytes:
        """At most `size` bytes; none at the end. Raises `zlib.error` for a wrong checksum."""
        while size and not self._inflate.eof:
            packed = self._inflate.unconsumed_tail or self._file.read(_PACKED_CHUNK)
            piece = self._inflate.decompress(packed, size)
            if piece or not packed:
                return piece
        return b""


def _unpacked(stream: _Gunzip | BinaryIO, size: int) -> bytes:
    """The next `size` bytes, fewer at the end."""
    data = bytearray()
    try:
        while len(data) < size and (piece := stream.read(size - len(data))):
            data += piece
    except (OSError, zlib.error) as error:
        raise _refused(f"cannot be unpacked: {error}", "Send a whole .tar.gz") from error
    return bytes(data)


def _parts_of(name: str) -> list[str]:
    """The folder, if there is one, and the file name; a leading `./` is ignored."""
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
    """An extended header may give more precise times and owners, but must not change names, sizes and kinds."""
    for key in (b"path", b"linkpath", b"size", b"GNU.sparse"):
        if b" " + key + (b"=" if key != b"GNU.sparse" else b"") in text:
            raise _refused(f"changes {key.decode()} in an extended header", "Use a short folder name, or format=ustar")


def _refused(problem: str, remedy: str) -> InvalidRequestError:
    return InvalidRequestError(problem, field="file", value="the archive", remedy=remedy)
