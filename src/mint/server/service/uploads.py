"""Makes a checkpoint of a lora from outside: a PEFT folder or archive, or an archive of `downloads`.

Everything is checked against the base model before the first byte is written, so a refused upload leaves nothing
behind.
"""

from __future__ import annotations

import errno
import json
import shutil
import time
import uuid
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mint.config import read_settings
from mint.engine.protocol import LORA_ALPHA, LoraSpec, ModelState
from mint.errors import InvalidRequestError, JournalError, MintError
from mint.models import peft_format, registry
from mint.models.fingerprint import fingerprint, require_same_weights
from mint.models.folder import ModelFolder
from mint.models.peft_files import CONFIG_FILE, WEIGHTS_FILE
from mint.models.peft_format import LayersOf
from mint.models.untrusted_files import MANIFEST_FILE, OPTIMIZER_FILE, UntrustedFiles
from mint.models.untrusted_tensors import UntrustedTensors
from mint.server.ids import model_id, new_session_id
from mint.server.service.downloads import ARCHIVE_FORMAT
from mint.server.storage_reservations import Reservation
from mint.server.store import checkpoint_folders, checkpoints
from mint.server.store.checkpoint_catalog import CheckpointCatalog
from mint.server.store.checkpoint_folders import Manifest
from mint.server.store.journal import Journal
from mint.server.store.rows import CheckpointRow, SessionRow, TrainingRunRow
from mint.server.store.snapshot_files import size_bytes
from mint.types.checkpoint_path import CheckpointPath
from mint.types.training import MAX_RANK, MAX_SEED

SCRATCH_FOLDER = "tmp"
DEFAULT_NAME = "upload"
MAX_STEP = 2**53
MAX_FINGERPRINT = 100
"""Characters of the fingerprint of a base model in an upload."""


@dataclass(frozen=True)
class _Content:
    """The content of an upload, checked."""

    base_model: str
    lora: LoraSpec
    seed_given: bool
    state: ModelState
    notes: tuple[str, ...]
    base_fingerprint: str

    @property
    def has_optimizer(self) -> bool:
        return self.state.exp_avg is not None


def import_checkpoint(
    journal: Journal,
    data_dir: Path,
    source: Path | BinaryIO,
    *,
    owner: str,
    base_model: str | None = None,
    name: str | None = None,
    base_of: Callable[[str], tuple[str, Path]] | None = None,
    layers_of: LayersOf = peft_format.base_layers,
    fingerprint_of: Callable[[Path], str] = fingerprint,
    reservation: Reservation | None = None,
) -> CheckpointRow:
    """Makes a checkpoint, in a new run of `owner`, of a PEFT folder, or of a .tar.gz or .tar of one.

    `base_model` None takes the one that the lora names, which must have the weights on which it was trained, if the
    archive says which. Those of a given `base_model` may be others. `base_of` finds the name to store and the folder of
    a base model; the default looks in `MINT_MODELS`. `layers_of` finds the layers of a base model that can have a lora,
    `fingerprint_of` the fingerprint of its weights. A `reservation` holds what is stored until the checkpoint is there,
    and may refuse it. The row's `user_metadata["notes"]` say what was changed on the way.

    Raises:
        InvalidRequestError: `source` is no lora, is hostile, does not fit the base model, or is more than the owner
            may store.
        CheckpointError: the base model that the lora names has other weights than when it was trained.
        OverloadedError: they would fill the disk up to its reserve.
        JournalError: the files cannot be stored now.
    """

    def before_copy(size_bytes: int) -> None:
        if reservation is not None:
            reservation.hold(reservation.stored_bytes, size_bytes)

    name = checkpoints.check_name(name or DEFAULT_NAME)
    find = base_of or _registered
    with report_storage_faults():
        with UntrustedFiles(source, data_dir / SCRATCH_FOLDER, before_copy=before_copy) as files:
            content = _read(files, base_model, find, layers_of, fingerprint_of)
        catalog = CheckpointCatalog(journal, data_dir)
        if reservation is not None:
            final_bytes = size_bytes(content.state)
            reservation.hold(final_bytes, final_bytes)
        return _store(catalog, data_dir, content, owner=owner, name=name)


@contextmanager
def report_storage_faults() -> Generator[None]:
    """Turns the errors of a disk that is full or fails, and of a lack of descriptors, into a JournalError."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise JournalError("no space is left for the upload", remedy="Free disk space on the server") from error
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.EIO, errno.EROFS):
            remedy = "Upload it again; if that fails, see the server's log"
            raise JournalError(f"the upload cannot be stored: {error.strerror}", remedy=remedy) from error
        raise


def _registered(name: str) -> tuple[str, Path]:
    aliases = read_settings().model_aliases
    return registry.recorded_name(name, aliases), registry.resolve(name, aliases)


def _read(
    files: UntrustedFiles,
    base_model: str | None,
    find: Callable[[str], tuple[str, Path]],
    layers_of: LayersOf,
    fingerprint_of: Callable[[Path], str],
) -> _Content:
    config = peft_format.read_config(files.read(CONFIG_FILE) or b"")
    if config.rank > MAX_RANK:
        raise InvalidRequestError("is above what mint trains", field="r", value=config.rank, remedy=f"Up to {MAX_RANK}")
    ours = _read_manifest(files.read(MANIFEST_FILE))
    base_name, folder = _find_base(base_model, ours, config.base_model, find)
    base = ModelFolder(folder)
    layers = layers_of(base)
    weights = peft_format.read_weights(files.files[WEIGHTS_FILE], config, base, layers)
    notes = []
    if config.alpha != LORA_ALPHA:
        weights = peft_format.rescale(weights, config.alpha / LORA_ALPHA)
        notes.append(f"lora_alpha {config.alpha:g} became {LORA_ALPHA:g}: B was multiplied by the quotient")
    whole = peft_format.fill(weights, layers, config.rank)
    if len(whole) > len(weights):
        count = (len(whole) - len(weights)) // 2
        notes.append(f"{count} layers had no lora; they have one now that changes nothing until it is trained")
    parts = {layers[module].part for module in peft_format.module_names(whole)}
    seed, seed_given = (0, False) if ours is None else (int(ours["lora"]["seed"]), bool(ours["seed_given"]))
    lora = LoraSpec(config.rank, seed, "attn" in parts, "mlp" in parts, "unembed" in parts)
    state = ModelState(whole)
    optimizer = files.files.get(OPTIMIZER_FILE)
    if optimizer is not None:
        if notes:  # the moments are those of the matrices as they were before
            raise _refused(OPTIMIZER_FILE, "belongs to another lora", "Leave it out, or send an archive of mint")
        state = _read_optimizer(optimizer, whole)
    found = fingerprint_of(folder)
    trained_on = None if ours is None else ours.get("base_fingerprint")
    if base_model is None:
        require_same_weights("this checkpoint", base_name, recorded=trained_on, found=found)
    elif trained_on not in (None, found):
        notes.append(f"it was trained on other weights than those of {base_name}: on those of fingerprint {trained_on}")
    return _Content(base_name, lora, seed_given, state, tuple(notes), found)


def _find_base(
    given: str | None, ours: Mapping[str, Any] | None, named: str, find: Callable[[str], tuple[str, Path]]
) -> tuple[str, Path]:
    """The name to store and the folder of the base model: the given one, else the one of mint.json or
    adapter_config.json."""
    in_file = ["" if ours is None else str(ours["base_model"]), named]
    candidates = [name for name in ([given] if given is not None else in_file) if name != ""]
    for name in candidates:
        try:
            return find(name)
        except MintError:
            continue
    raise InvalidRequestError(
        "is not a base model here",
        field="base_model",
        value=" or ".join(candidates) or "(none)",
        remedy="Say which it is: --model NAME, or a form field base_model; `get_server_capabilities` lists them. The "
        "operator adds one with `mint serve --model NAME=FOLDER`",
    )


def _read_manifest(text: bytes | None) -> dict[str, Any] | None:
    """The content of mint.json, if there is one. Rank and parts are taken from the weights, never from here."""
    if text is None:
        return None
    try:
        content = json.loads(text)
        seed = content["lora"]["seed"]
        trained_on = content.get("base_fingerprint")  # an older mint wrote none
        fine = content["format"] == ARCHIVE_FORMAT and type(seed) is int and 0 <= seed <= MAX_SEED
        fine = fine and (trained_on is None or (isinstance(trained_on, str) and len(trained_on) <= MAX_FINGERPRINT))
        if fine and isinstance(content["base_model"], str) and isinstance(content["seed_given"], bool):
            return content
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _refused(MANIFEST_FILE, f"cannot be read: {type(error).__name__}", "Leave it out") from error
    raise _refused(MANIFEST_FILE, "has a field of a wrong type or value", "Leave it out, or upgrade mint")


def _read_optimizer(file: BinaryIO, weights: Mapping[str, np.ndarray]) -> ModelState:
    """The weights with their moments and step count; checks every name and shape."""
    stored = UntrustedTensors(file, OPTIMIZER_FILE, expected=2 * len(weights))
    wanted = {f"{part}/{name}": array.shape for part in ("exp_avg", "exp_avg_sq") for name, array in weights.items()}
    found = {name: entry.shape for name, entry in stored.entries.items() if entry.dtype == "F32"}
    step = stored.metadata.get("step", "")
    if found != wanted or len(stored.entries) != len(wanted):
        raise _refused(OPTIMIZER_FILE, "does not fit the weights", "Leave it out, or send an archive of mint")
    if not (step.isascii() and step.isdigit() and len(step) < 17 and int(step) <= MAX_STEP):
        raise _refused(OPTIMIZER_FILE, "has no step count", "Leave it out, or send an archive of mint")
    exp_avg = {name: stored.read(f"exp_avg/{name}") for name in weights}
    exp_avg_sq = {name: stored.read(f"exp_avg_sq/{name}") for name in weights}
    if any((array < 0).any() for array in exp_avg_sq.values()):
        raise _refused(OPTIMIZER_FILE, "has negative second moments", "Leave it out")
    return ModelState(weights, int(step), exp_avg, exp_avg_sq)


def _store(catalog: CheckpointCatalog, data_dir: Path, content: _Content, *, owner: str, name: str) -> CheckpointRow:
    """Writes the checkpoint and its rows; removes the folder if the rows cannot be written."""
    session_id = new_session_id()
    run_id = model_id(session_id, 0)
    folder = f"checkpoints/{uuid.uuid4()}"
    now = time.time()
    path = CheckpointPath(run_id, checkpoints.TRAINING, name)
    lora = asdict(content.lora)
    manifest = Manifest(
        path.uri,
        content.base_model,
        lora,
        content.seed_given,
        content.state.step,
        now,
        base_fingerprint=content.base_fingerprint,
    )
    try:
        checkpoint_folders.write_checkpoint(data_dir / folder, content.state, manifest, optimizer=content.has_optimizer)
        size = checkpoint_folders.folder_size(data_dir / folder)
        about = {"uploaded": True, "notes": list(content.notes)}
        row = CheckpointRow(run_id, path.kind, name, folder, now, owner=owner, size_bytes=size, user_metadata=about)
        run = TrainingRunRow(run_id, session_id, owner, now, now, content.base_model, lora, ended_at=now)
        session = SessionRow(session_id, "", None, now, now, owner, {"display_name": f"upload of {name}"}, now)
        catalog.add(session, run, row)
    except BaseException:
        shutil.rmtree(data_dir / folder, ignore_errors=True)
        raise
    return row


def _refused(file: str, problem: str, remedy: str) -> InvalidRequestError:
    return InvalidRequestError(problem, field="file", value=file, remedy=remedy)
