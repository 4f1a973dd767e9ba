"""`mint export`: a checkpoint becomes a folder that other tools load. Joins checkpoints, registry and formats."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Literal

from mint.config import read_settings
from mint.engine.protocol import LORA_ALPHA
from mint.errors import InvalidRequestError, MissingExtraError
from mint.models import hf_format, peft_format, registry

ExportFormat = Literal["peft", "hf"]


def export_checkpoint(path: str, *, output: Path, format: ExportFormat, data_dir: Path | None = None) -> None:
    """Writes the checkpoint at `path` to the new folder `output`: `peft` an adapter, `hf` a merged model.

    `data_dir` None is `MINT_HOME`. The folder appears whole or not at all.

    Raises:
        InvalidRequestError: `output` exists, or `path` is no checkpoint path.
        NotFoundError: there is no such checkpoint.
        CheckpointError: it is damaged.
        UnknownBaseModelError: its base model is not known here any more.
    """
    try:
        from mint.server.checkpoints import open_checkpoint  # deferred: needs the `local` extra
    except ImportError as error:
        raise MissingExtraError("exporting needs the service", remedy="pip install 'mint[local]'") from error
    if output.exists():
        raise InvalidRequestError("exists already", field="--output", value=str(output), remedy="Name a new folder")
    settings = read_settings()
    manifest, weights = open_checkpoint((data_dir or settings.home_dir).expanduser(), path)
    base, rank = registry.resolve(manifest.base_model, settings.model_aliases), manifest.lora_spec.rank
    output.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    try:
        if format == "peft":
            peft_format.write_peft(staging, weights, rank=rank, alpha=LORA_ALPHA, base_model=str(base))
        else:
            hf_format.write_merged(staging, base, weights, scale=LORA_ALPHA / rank)
        staging.chmod(0o755)
        staging.replace(output)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
