"""Named checkpoints: `tinker://{model_id}/weights/{name}` (with optimizer) and `…/sampler_weights/{name}`
(without); `mint://` is the same.

A checkpoint is a folder `checkpoints/<uuid>/` with `weights.safetensors`, perhaps `optimizer.safetensors`, and
`manifest.json`, written last: a folder without a manifest is no checkpoint. Users' names never become file names.
Knows no engine and no request.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
import uuid
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from mint.engine.protocol import LoraSpec, ModelState
from mint.errors import CheckpointError, InvalidRequestError, NotFoundError
from mint.models.tensor_files import write_file
from mint.server.store.journal import Journal
from mint.server.store.rows import CheckpointRow
from mint.server.store.snapshot_files import read_optimizer, read_weights, write_optimizer, write_weights

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)
_PATH = re.compile(
    r"(?:mint|tinker)://(?P<model_id>[^/]+)/(?P<kind>weights|sampler_weights|external_weights)/(?P<name>[^/]+)"
)
_ALIAS = re.compile(r"ckpt_[0-9a-f]{32}", re.ASCII)

TRAINING = "weights"
SAMPLER = "sampler_weights"
EXTERNAL = "external_weights"
MIN_TTL_S, MAX_TTL_S = 1, 10 * 366 * 24 * 3600
WEIGHTS_FILE = "weights.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
MANIFEST_FILE = "manifest.json"
JOURNAL_FILE = "journal.sqlite3"


@dataclass(frozen=True)
class CheckpointPath:
    """The three parts of a checkpoint's path."""

    model_id: str
    kind: str
    name: str

    @property
    def uri(self) -> str:
        """The path as the wire has it; the SDK shows `mint://`."""
        return f"tinker://{self.model_id}/{self.kind}/{self.name}"

    @classmethod
    def parse(cls, path: str) -> CheckpointPath:
        """From `mint://…` or its alias `tinker://…`.

        Raises:
            InvalidRequestError: the text is no such path.
        """
        match = _PATH.fullmatch(path)
        if match is None:
            raise InvalidRequestError(
                "is not a checkpoint path",
                field="path",
                value=path,
                remedy="Pass what save_state or save_weights_for_sampler returned: mint://MODEL_ID/weights/NAME",
            )
        return cls(**match.groupdict())


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is. `files` maps file names to their SHA-256."""

    path: str
    base_model: str
    lora: dict[str, Any]
    seed_given: bool
    step: int
    created_at: float
    files: dict[str, str] = field(default_factory=dict)

    @property
    def lora_spec(self) -> LoraSpec:
        """The shape of the lora."""
        return LoraSpec(**self.lora)


def check_name(name: str) -> str:
    """The name, if it may name a checkpoint.

    Raises:
        InvalidRequestError: it may not.
    """
    if not NAME.fullmatch(name):
        raise InvalidRequestError(
            "cannot name a checkpoint",
            field="name",
            value=name,
            remedy="Use 1 to 128 letters, digits, dots, dashes and underscores, starting with a letter or digit",
        )
    return name


def check_ttl(seconds: int | None) -> int | None:
    """How long a checkpoint is to be kept; None is for ever.

    Raises:
        InvalidRequestError: not between a second and ten years.
    """
    if seconds is not None and not MIN_TTL_S <= seconds <= MAX_TTL_S:
        remedy = f"Pass {MIN_TTL_S} to {MAX_TTL_S} seconds, or nothing to keep it for good"
        raise InvalidRequestError("is out of range", field="ttl_seconds", value=seconds, remedy=remedy)
    return seconds


def folder_size(folder: Path) -> int:
    """The bytes of a checkpoint's files."""
    return sum(path.stat().st_size for path in folder.iterdir())


def write_checkpoint(folder: Path, state: ModelState, manifest: Manifest, *, optimizer: bool) -> Manifest:
    """Writes the folder, durable when this returns; the same content again is fine."""
    write_weights(folder / WEIGHTS_FILE, state)
    names = [WEIGHTS_FILE]
    if optimizer:
        write_optimizer(folder / OPTIMIZER_FILE, state)
        names.append(OPTIMIZER_FILE)
    whole = replace(manifest, files={name: _sha256(folder / name) for name in names})
    write_manifest(folder, whole)
    return whole


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Says what a folder holds, replacing what was said before in one step."""
    write_file(folder / MANIFEST_FILE, [json.dumps(asdict(manifest), indent=2).encode()])


def read_manifest(folder: Path) -> Manifest:
    """What a folder holds.

    Raises:
        CheckpointError: there is no readable manifest.
    """
    try:
        return Manifest(**json.loads((folder / MANIFEST_FILE).read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"the checkpoint in {folder} has no readable manifest: {error}", remedy="Use another checkpoint"
        ) from error


def read_checkpoint(folder: Path, *, optimizer: bool) -> tuple[Manifest, ModelState]:
    """The manifest and the state, every file checked against its hash; moments are None unless asked for.

    Raises:
        CheckpointError: damaged, or without the optimizer that was asked for.
    """
    manifest = read_manifest(folder)
    if optimizer and OPTIMIZER_FILE not in manifest.files:
        raise CheckpointError(
            f"{manifest.path} holds no optimizer",
            remedy="Load it without the optimizer (load_state), or load one that save_state wrote",
        )
    check_files(folder, manifest, (WEIGHTS_FILE, OPTIMIZER_FILE) if optimizer else (WEIGHTS_FILE,))
    weights = read_weights(folder / WEIGHTS_FILE)
    if not optimizer:
        return manifest, ModelState(weights)
    return manifest, read_optimizer(folder / OPTIMIZER_FILE, weights)


def check_files(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Reads files of a checkpoint, and compares them with its manifest.

    Raises:
        CheckpointError: one is damaged.
    """
    for name in names:
        if _sha256(folder / name) != manifest.files.get(name):
            raise CheckpointError(
                f"{manifest.path} is damaged: {folder / name} has not the hash in its manifest",
                remedy="Use another checkpoint",
            )


def alias_of(folder: str) -> str:
    """The `ckpt_…` id of the checkpoint in a folder: another name for its path, as MinT has it."""
    return f"ckpt_{folder.rpartition('/')[2].replace('-', '')}"


def find_checkpoint(journal: Journal, path: str, *, reader: str | None, now: float | None = None) -> CheckpointRow:
    """The row of a path or `ckpt_…` id, if `reader` owns it or it is public; None reads everything.

    Raises:
        InvalidRequestError: the text is neither.
        NotFoundError: there is no such checkpoint for that reader.
    """
    if _ALIAS.fullmatch(path):
        row = journal.checkpoint_in(f"checkpoints/{uuid.UUID(path.removeprefix('ckpt_'))}")
    else:
        parsed = CheckpointPath.parse(path)
        row = journal.checkpoint(parsed.model_id, parsed.kind, parsed.name)
    if row is None or is_expired(row, time.time() if now is None else now):
        raise no_checkpoint(path)
    if reader is not None and reader != row.owner and not row.public:
        raise no_checkpoint(path)
    return row


def is_expired(row: CheckpointRow, now: float) -> bool:
    """Whether a checkpoint's time is over; its files may lie there for a while yet."""
    return row.expires_at is not None and row.expires_at <= now


def no_checkpoint(path: str) -> NotFoundError:
    """What is said of a path that leads nowhere, or to somebody else's."""
    return NotFoundError("is not a checkpoint here", field="path", value=path, remedy="See `mint checkpoints list`")


def open_checkpoint(data_dir: Path, path: str) -> tuple[Manifest, dict[str, np.ndarray]]:
    """The manifest and the weights (PEFT's names, float32) of a path, without a running service.

    Raises:
        InvalidRequestError: the text is no checkpoint path.
        NotFoundError: there is no such checkpoint in `data_dir`.
        CheckpointError: it is damaged.
    """
    if not (data_dir / JOURNAL_FILE).is_file():
        raise NotFoundError("holds no journal", field="data_dir", value=str(data_dir), remedy="Set MINT_HOME")
    journal = Journal(data_dir / JOURNAL_FILE)
    try:
        row = find_checkpoint(journal, path, reader=None)
    finally:
        journal.close()
    manifest, state = read_checkpoint(data_dir / row.folder, optimizer=False)
    return manifest, dict(state.weights)


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"the file {path} cannot be read: {error}", remedy="Use another checkpoint") from error
