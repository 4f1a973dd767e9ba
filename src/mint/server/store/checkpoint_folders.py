"""The folder of a checkpoint: its files, and the manifest that names them with their hashes.

It is `checkpoints/<uuid>/` with `weights.safetensors`, perhaps `optimizer.safetensors`, and `manifest.json`, which is
written last: a folder without a manifest is no checkpoint. Users' names never become file names.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from mint.engine.protocol import LoraSpec, ModelState
from mint.errors import CheckpointError, JournalError
from mint.models.fingerprint import require_same_weights
from mint.models.tensor_files import write_file
from mint.server.store.snapshot_files import read_optimizer, read_weights, reading, write_optimizer, write_weights

log = logging.getLogger("mint.store")

WEIGHTS_FILE = "weights.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
MANIFEST_FILE = "manifest.json"


@dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint's manifest.json.

    `files` maps file names to their SHA-256. `base_fingerprint` is that of the base model (`models/fingerprint.py`);
    None where an older mint saved the checkpoint.
    """

    path: str
    base_model: str
    lora: dict[str, Any]
    seed_given: bool
    step: int
    created_at: float
    files: dict[str, str] = field(default_factory=dict)
    base_fingerprint: str | None = None

    @property
    def lora_spec(self) -> LoraSpec:
        return LoraSpec(**self.lora)

    def require_base(self, fingerprint: str) -> None:
        """Checks that a base model with this fingerprint has the weights on which the checkpoint was trained.

        Raises:
            CheckpointError: it has others.
        """
        require_same_weights(self.path, self.base_model, recorded=self.base_fingerprint, found=fingerprint)


_MANIFEST, _LORA = TypeAdapter(Manifest), TypeAdapter(LoraSpec)


def folder_size(folder: Path) -> int:
    """The size of a checkpoint's files together, in bytes."""
    return sum(path.stat().st_size for path in folder.iterdir())


def write_checkpoint(folder: Path, state: ModelState, manifest: Manifest, *, optimizer: bool) -> Manifest:
    """Writes the folder; it is durable when this returns. Writing it again replaces it."""
    write_weights(folder / WEIGHTS_FILE, state.weights)
    names = [WEIGHTS_FILE]
    if optimizer:
        write_optimizer(folder / OPTIMIZER_FILE, state)
        names.append(OPTIMIZER_FILE)
    whole = replace(manifest, files={name: _sha256(folder / name) for name in names})
    write_manifest(folder, whole)
    return whole


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes manifest.json; replaces an old one in one step."""
    content = asdict(manifest)
    write_file(folder / MANIFEST_FILE, [_json(content | {"sha256": _checksum(content)})])


def _json(content: dict[str, Any]) -> bytes:
    return json.dumps(content, indent=2).encode()


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(_json(content)).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder; that of an older mint has no checksum.

    Raises:
        CheckpointError: it is missing or damaged; names the checkpoint by its `ckpt_…` id.
        JournalError: it cannot be read now.
    """
    try:
        text = (folder / MANIFEST_FILE).read_bytes()
        content = json.loads(text)
        known = content.pop("sha256", None)
        if known is not None and (known != _checksum(content) or text != _json(content | {"sha256": known})):
            raise ValueError("its checksum differs")
        if known is None:
            Manifest(**content)  # no other field, such as a checksum whose name is damaged
        manifest = _MANIFEST.validate_json(_json(content), strict=True)
        _LORA.validate_json(json.dumps(vars(manifest.lora_spec)), strict=True)
        return manifest
    except (FileNotFoundError, ValueError, TypeError, AttributeError, RecursionError) as error:
        log.error("the manifest in %s is damaged or missing: %s", folder, error)
        raise CheckpointError(
            f"checkpoint ckpt_{folder.name.replace('-', '')} is damaged: its manifest cannot be used",
            remedy=_remedy(folder),
        ) from error
    except OSError as error:
        raise JournalError(f"a manifest cannot be read: {error.strerror}", remedy="See the server's log") from error


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
    with reading(manifest.path, remedy=_remedy(folder)):
        weights = read_weights(folder / WEIGHTS_FILE)
        return manifest, read_optimizer(folder / OPTIMIZER_FILE, weights) if optimizer else ModelState(weights)


def check_files(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Compares files of a checkpoint with the hashes in its manifest.

    Raises:
        CheckpointError: a file is damaged.
    """
    with reading(manifest.path, remedy=_remedy(folder)):
        for name in names:
            if _sha256(folder / name) != manifest.files.get(name):
                raise CheckpointError(f"{folder / name} does not have the hash that its manifest names")


def _remedy(folder: Path) -> str:
    return f"Use another checkpoint; the operator may restore checkpoints/{folder.name} from a backup"


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            remedy = "Allow the process more open files (ulimit -n)"
            raise JournalError(f"the file {path} cannot be opened now", remedy=remedy) from error
        raise CheckpointError(f"the file {path} cannot be read: {error}") from error
