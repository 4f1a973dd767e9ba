"""Named checkpoints: their paths, and their folders.

A path is `tinker://{model_id}/weights/{name}` (with optimizer) or `…/sampler_weights/{name}` (without); `mint://` is
the same. A folder is `checkpoints/<uuid>/` with `weights.safetensors`, perhaps `optimizer.safetensors`, and
`manifest.json`, which is written last: a folder without a manifest is no checkpoint. Users' names never become file
names. Knows no engine and no request.
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
    """A checkpoint's path in its parts."""

    model_id: str
    kind: str
    name: str

    @property
    def uri(self) -> str:
        """The path as sent to clients; the SDK shows `mint://`."""
        return f"tinker://{self.model_id}/{self.kind}/{self.name}"

    @classmethod
    def parse(cls, path: str) -> CheckpointPath:
        """The parts of `mint://…` or `tinker://…`.

        Raises:
            InvalidRequestError: the text is not such a path.
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
    """The content of a checkpoint's manifest.json. `files` maps file names to their SHA-256."""

    path: str
    base_model: str
    lora: dict[str, Any]
    seed_given: bool
    step: int
    created_at: float
    files: dict[str, str] = field(default_factory=dict)

    @property
    def lora_spec(self) -> LoraSpec:
        return LoraSpec(**self.lora)


def check_name(name: str) -> str:
    """Returns the name.

    Raises:
        InvalidRequestError: a checkpoint cannot have that name.
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
    """Returns the seconds after which a checkpoint expires; None is never.

    Raises:
        InvalidRequestError: not between a second and ten years.
    """
    if seconds is not None and not MIN_TTL_S <= seconds <= MAX_TTL_S:
        remedy = f"Pass {MIN_TTL_S} to {MAX_TTL_S} seconds, or nothing to keep it for good"
        raise InvalidRequestError("is out of range", field="ttl_seconds", value=seconds, remedy=remedy)
    return seconds


def folder_size(folder: Path) -> int:
    """The size of a checkpoint's files together, in bytes."""
    return sum(path.stat().st_size for path in folder.iterdir())


def write_checkpoint(folder: Path, state: ModelState, manifest: Manifest, *, optimizer: bool) -> Manifest:
    """Writes the folder; it is durable when this returns. Writing it again replaces it."""
    write_weights(folder / WEIGHTS_FILE, state)
    names = [WEIGHTS_FILE]
    if optimizer:
        write_optimizer(folder / OPTIMIZER_FILE, state)
        names.append(OPTIMIZER_FILE)
    whole = replace(manifest, files={name: _sha256(folder / name) for name in names})
    write_manifest(folder, whole)
    return whole


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes manifest.json; replaces an old one in one step."""
    write_file(folder / MANIFEST_FILE, [json.dumps(asdict(manifest), indent=2).encode()])


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder.

    Raises:
        CheckpointError: there is none that can be read.
    """
    try:
        return Manifest(**json.loads((folder / MANIFEST_FILE).read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"the checkpoint in {folder} has no readable manifest: {error}", remedy="Use another checkpoint"
        ) from error


def read_checkpoint(folder: Path, *, optimizer: bool) -> tuple[Manifest, ModelState]:
    """The manifest and the state, after every file was checked against its hash. Without `optimizer`, moments are None.

    Raises:
        CheckpointError: the checkpoint is damaged, or has no optimizer although `optimizer` asks for it.
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
    """Compares files of a checkpoint with the hashes in its manifest.

    Raises:
        CheckpointError: a file is damaged.
    """
    for name in names:
        if _sha256(folder / name) != manifest.files.get(name):
            raise CheckpointError(
                f"{manifest.path} is damaged: {folder / name} does not have the hash that its manifest names",
                remedy="Use another checkpoint",
            )


def alias_of(folder: str) -> str:
    """The `ckpt_…` id of the checkpoint in a folder, which MinT's clients use instead of its path."""
    return f"ckpt_{folder.rpartition('/')[2].replace('-', '')}"


def find_checkpoint(journal: Journal, path: str, *, reader: str | None, now: float | None = None) -> CheckpointRow:
    """The row of a path or `ckpt_…` id, if `reader` owns it or it is public. None may read everything.

    Raises:
        InvalidRequestError: `path` is neither.
        NotFoundError: there is no such checkpoint that `reader` may read.
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
    """Whether a checkpoint has expired; its files are removed some time later."""
    return row.expires_at is not None and row.expires_at <= now


def no_checkpoint(path: str) -> NotFoundError:
    """The error for a path without a checkpoint; a checkpoint of another owner gives the same one."""
    return NotFoundError("is not a checkpoint here", field="path", value=path, remedy="See `mint checkpoints list`")


def open_checkpoint(data_dir: Path, path: str) -> tuple[Manifest, dict[str, np.ndarray]]:
    """The manifest and the weights (mint's names, float32) of a path, without a running service.

    Raises:
        InvalidRequestError: `path` is no checkpoint path.
        NotFoundError: `data_dir` has no such checkpoint.
        CheckpointError: the checkpoint is damaged.
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
