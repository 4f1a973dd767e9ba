"""A checkpoint as files for others: a lora in PEFT's format, alone or in a .tar.gz that `uploads` takes back.

The weights' tensors are renamed as PEFT names them; their bytes are streamed from the disk as they are. So loras of
experts that a checkpoint of the base holds in one tensor (GPT-OSS, Qwen3.5-MoE) stay apart, which PEFT does not know:
`mint export` stacks them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from mint.engine.protocol import LORA_ALPHA
from mint.models.peft_files import CONFIG_FILE, WEIGHTS_FILE
from mint.models.peft_format import config_json, peft_header
from mint.models.untrusted_files import COMPLETE_FILE, MANIFEST_FILE, OPTIMIZER_FILE
from mint.server.service import archives
from mint.server.service.archives import ArchiveMember
from mint.server.store import checkpoint_folders
from mint.server.store.checkpoint_folders import Manifest

ARCHIVE = "checkpoint.tar.gz"
ARCHIVE_FORMAT = 1
PEFT_FILES = (CONFIG_FILE, WEIGHTS_FILE)


def open_file(folder: Path, name: str) -> tuple[int, Iterator[bytes]]:
    """Size in bytes and content of `ARCHIVE`, or of one of its members, for the checkpoint in a folder."""
    members = {member.name: member for member in _members(folder, checkpoint_folders.read_manifest(folder))}
    if name == ARCHIVE:
        return archives.tar_gz(members.values())
    return members[name].size, members[name].content()


def _members(folder: Path, manifest: Manifest) -> list[ArchiveMember]:
    weights = folder / checkpoint_folders.WEIGHTS_FILE
    header, start, modules = peft_header(weights)
    rank = manifest.lora_spec.rank
    config = config_json(modules, rank=rank, alpha=LORA_ALPHA, base_model=manifest.base_model)
    size = len(header) + weights.stat().st_size - start
    members = [
        ArchiveMember.of_bytes(CONFIG_FILE, config),
        ArchiveMember(WEIGHTS_FILE, size, lambda: _content(weights, header, start)),
        ArchiveMember.of_bytes(MANIFEST_FILE, _manifest_json(manifest)),
    ]
    optimizer = folder / checkpoint_folders.OPTIMIZER_FILE
    if checkpoint_folders.OPTIMIZER_FILE in manifest.files:
        members.append(ArchiveMember(OPTIMIZER_FILE, optimizer.stat().st_size, lambda: _content(optimizer)))
    # the last one: older clients see by it that nothing is missing
    return [*members, ArchiveMember.of_bytes(COMPLETE_FILE, b"")]


def _manifest_json(manifest: Manifest) -> bytes:
    """mint.json: what PEFT's own files do not say, so that an upload of the archive restores the same state."""
    content = {
        "format": ARCHIVE_FORMAT,
        "base_model": manifest.base_model,
        "lora": manifest.lora,
        "seed_given": manifest.seed_given,
        "step": manifest.step,
        "path": manifest.path,
        "base_fingerprint": manifest.base_fingerprint,
    }
    return json.dumps(content, indent=2).encode()


def _content(path: Path, first: bytes = b"", start: int = 0) -> Iterator[bytes]:
    yield first
    with path.open("rb") as file:
        file.seek(start)
        while chunk := file.read(archives.CHUNK):
            yield chunk
