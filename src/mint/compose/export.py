"""Exports a checkpoint to a folder that other tools load.

The checkpoint is on this machine, or on the server at `MINT_BASE_URL`, which sends it as an archive.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from mint.client.rest_client import RestClient
from mint.config import Settings, read_settings
from mint.engine.bases.lora_layers import is_own_family, lora_layers, output_layer
from mint.engine.protocol import LORA_ALPHA
from mint.errors import InvalidRequestError, MissingExtraError, UnknownBaseModelError
from mint.extras import install_command
from mint.models import hf_format, peft_format, registry
from mint.models.fingerprint import fingerprint, require_same_weights
from mint.models.folder import ModelFolder
from mint.models.peft_files import CONFIG_FILE, WEIGHTS_FILE

ExportFormat = Literal["peft", "hf", "gguf-ready"]

UNWRITABLE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES})
"""A disk or a quota without space, and a folder that may not be written."""


@dataclass(frozen=True)
class _CheckpointWeights:
    """The weights of the checkpoint at `path`, with their rank, alpha and base model; `base_fingerprint` is None where
    an older mint saved it."""

    path: str
    weights: dict[str, np.ndarray]
    rank: int
    alpha: float
    base_model: str
    base_fingerprint: str | None

    def require_base(self, folder: Path) -> None:
        """Checks that a folder has the base model on which they were trained.

        Raises:
            CheckpointError: it has other weights.
        """
        if self.base_fingerprint is not None:
            found = fingerprint(folder)
            require_same_weights(self.path, self.base_model, recorded=self.base_fingerprint, found=found)


def export_checkpoint(
    path: str, *, output: str | Path, format: ExportFormat, data_dir: str | Path | None = None
) -> None:
    """Writes the checkpoint at `path` to the new folder `output`.

    `peft` writes the lora alone, `hf` a merged model, `gguf-ready` a merged model for llama.cpp's converter. `data_dir`
    None is the server at `MINT_BASE_URL` if that is set, else `MINT_HOME`. All formats except `peft` need the base
    model on this machine. The folder appears complete or not at all.

    Raises:
        InvalidRequestError: `output` exists or cannot be written, or `path` is no checkpoint path.
        NotFoundError: there is no such checkpoint.
        CheckpointError: it is damaged, or its base model has other weights on this machine than it was trained on.
        UnknownBaseModelError: its base model is not known here.
        ConnectionLostError: the server cannot be reached.
    """
    settings = read_settings()
    output, data_dir = Path(output), None if data_dir is None else Path(data_dir)
    if os.path.lexists(output):  # also a link to nothing
        raise InvalidRequestError("exists already", field="--output", value=str(output), remedy="Name a new folder")
    try:
        _export_new(path, settings, output=output, format=format, data_dir=data_dir)
    except OSError as error:  # a lost connection is one, too
        if error.errno not in UNWRITABLE:
            raise
        raise _cannot_write(output, error) from error


def _export_new(path: str, settings: Settings, *, output: Path, format: ExportFormat, data_dir: Path | None) -> None:
    staging = _staging_folder(output)
    try:
        if data_dir is None and settings.base_url is not None:
            _from_server(path, settings, settings.base_url, staging, format)
        else:
            _from_disk(path, settings, (data_dir or settings.home_dir).expanduser(), staging, format)
        _allow_reading(staging)
        staging.replace(output)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _staging_folder(output: Path) -> Path:
    """A new folder beside `output`."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    except OSError as error:
        raise _cannot_write(output, error) from error


def _allow_reading(folder: Path) -> None:
    """Gives a folder and its files the modes of what a program makes anew: what was written as temporary files is for
    its owner alone, and another user may serve the export."""
    probe = folder / ".mode"
    probe.touch()
    mode = stat.S_IMODE(probe.stat().st_mode)
    probe.unlink()
    for path in folder.rglob("*"):
        path.chmod(mode | _may_enter(mode) if path.is_dir() else mode)
    folder.chmod(mode | _may_enter(mode))


def _may_enter(mode: int) -> int:
    """The bits that let those enter a folder who may read it."""
    return (mode & 0o444) >> 2


def _cannot_write(output: Path, error: OSError) -> InvalidRequestError:
    return InvalidRequestError(
        f"cannot be written: {error}",
        field="--output",
        value=str(output),
        remedy="Free disk space, or name a folder that can be written",
    )


def _from_disk(path: str, settings: Settings, data_dir: Path, folder: Path, format: ExportFormat) -> None:
    try:
        from mint.server.store.checkpoints import open_checkpoint  # deferred: needs the `local` extra
    except ImportError as error:
        raise _missing(error) from error
    manifest, weights = open_checkpoint(data_dir, path)
    rank, base_model = manifest.lora_spec.rank, manifest.base_model
    checkpoint = _CheckpointWeights(path, weights, rank, LORA_ALPHA, base_model, manifest.base_fingerprint)
    _write(folder, checkpoint, settings, format)


def _from_server(path: str, settings: Settings, base_url: str, folder: Path, format: ExportFormat) -> None:
    try:
        from mint.models.untrusted_files import MANIFEST_FILE, UntrustedFiles  # deferred: needs the `local` extra
    except ImportError as error:
        raise _missing(error) from error
    with tempfile.TemporaryDirectory(dir=folder) as scratch, RestClient(base_url, settings.api_key) as rest:
        archive = rest.download_checkpoint(path, Path(scratch) / "checkpoint.tar.gz").result()
        with UntrustedFiles(archive, Path(scratch)) as files:
            config = peft_format.read_config(files.read(CONFIG_FILE) or b"")
            about = json.loads(files.read(MANIFEST_FILE) or b"{}")
            base_model = str(about.get("base_model") or config.base_model)
            weights_file = files.files[WEIGHTS_FILE]
            if format == "peft":
                weights = peft_format.read_unchecked(weights_file)
            else:
                base = ModelFolder(registry.resolve(base_model, settings.model_aliases))
                weights = peft_format.read_weights(weights_file, config, base, lora_layers(base))
    trained_on = about.get("base_fingerprint")
    checkpoint = _CheckpointWeights(path, weights, config.rank, config.alpha, base_model, trained_on)
    _write(folder, checkpoint, settings, format)


def _write(folder: Path, checkpoint: _CheckpointWeights, settings: Settings, format: ExportFormat) -> None:
    if format == "peft":
        name = _public_name(checkpoint, settings)
        peft_format.write_peft(
            folder,
            checkpoint.weights,
            rank=checkpoint.rank,
            alpha=checkpoint.alpha,
            base_model=name,
            output_layer=_output_layer(checkpoint, settings),
        )
        return
    base = registry.resolve(checkpoint.base_model, settings.model_aliases)
    checkpoint.require_base(base)
    scale = checkpoint.alpha / checkpoint.rank
    write_merged(folder, base, checkpoint.weights, scale=scale, dtype="float32" if format == "hf" else "float16")
    if format == "gguf-ready":
        hf_format.make_gguf_ready(folder, base)


def write_merged(
    folder: Path,
    base: Path,
    weights: Mapping[str, np.ndarray],
    *,
    scale: float,
    dtype: Literal["float32", "float16"] = "float32",
) -> None:
    """Writes `base` + `scale · B @ A` to `folder`: into the tensors of its files, or by transformers where files have
    other names than the model.

    Raises:
        InvalidRequestError: transformers cannot load the base.
        CheckpointError: the lora has a layer that the base lacks, or other shapes; or a weight is too large for
            float16.
    """
    write = hf_format.write_merged
    if not is_own_family(ModelFolder(base)):
        # Deferred: it takes seconds, and own families do not need it.
        from mint.engine.transformers import merged_model

        if merged_model.needs_transformers(base, weights):
            write = merged_model.write_merged
    write(folder, base, weights, scale=scale, dtype=dtype)


def _public_name(checkpoint: _CheckpointWeights, settings: Settings) -> str:
    """The base model that PEFT will load: its name on the hub if it has one, else a folder on this machine. A model of
    the package index is a folder: it is quantized, and that of its name on the hub has other weights.

    Raises:
        CheckpointError: it is on this machine, with other weights.
    """
    base_model, aliases = checkpoint.base_model, settings.model_aliases
    is_local = base_model in registry.BUNDLED or base_model in aliases or Path(base_model).exists()
    try:
        folder = registry.resolve(base_model, aliases)
    except (UnknownBaseModelError, InvalidRequestError):
        if is_local:
            raise
        return base_model  # it need not be on this machine
    checkpoint.require_base(folder)
    is_of_the_hub = not is_local and registry.gguf_file(base_model, aliases) is None
    return base_model if is_of_the_hub else str(folder)


def _output_layer(checkpoint: _CheckpointWeights, settings: Settings) -> str:
    """The path of the base model's output layer in transformers; mint's name for it, which most models have, where the
    layer has no lora, or the base model is not on this machine."""
    if f"{peft_format.UNEMBED}.lora_A.weight" not in checkpoint.weights:
        return peft_format.UNEMBED
    try:
        base = ModelFolder(registry.resolve(checkpoint.base_model, settings.model_aliases))
    except (UnknownBaseModelError, InvalidRequestError):
        return peft_format.UNEMBED
    return output_layer(base)


def _missing(error: ImportError) -> MissingExtraError:
    return MissingExtraError(f"exporting needs the service ({error})", remedy=install_command("local"))
