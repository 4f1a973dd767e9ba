"""What a new sampler samples from (a checkpoint or a base model), and the root of its seeds.

Samplers of weights that a model publishes are made by the worker. Changes nothing.
"""

from __future__ import annotations

from pathlib import Path

from mint.errors import InvalidRequestError
from mint.server.ids import seed_root
from mint.server.store.checkpoint_folders import read_manifest
from mint.server.store.checkpoints import find_checkpoint
from mint.server.store.journal import Journal
from mint.server.store.rows import SamplerRow
from mint.server.worker.base_models import BaseModels
from mint.wire.requests import CreateSamplingSessionRequest


def new_sampler(
    name: str,
    request: CreateSamplingSessionRequest,
    journal: Journal,
    data_dir: Path,
    base_models: BaseModels,
    *,
    reader: str,
) -> SamplerRow:
    """The row of the sampler that a request asks for.

    Raises:
        InvalidRequestError: it names neither a checkpoint nor a base model, or two that do not fit.
        NotFoundError: there is no such checkpoint that `reader` may read.
        UnknownBaseModelError: there is no such base model.
    """
    session_id, number = request.session_id, request.sampling_session_seq_id
    if request.model_path is not None:
        found = find_checkpoint(journal, request.model_path, reader=reader)
        manifest = read_manifest(data_dir / found.folder)
        if request.base_model not in (None, manifest.base_model):
            raise InvalidRequestError(
                f"does not fit the checkpoint, which was saved from {manifest.base_model}",
                field="base_model",
                value=request.base_model,
                remedy="Leave it out",
            )
        root = seed_root(manifest.lora["seed"] if manifest.seed_given else None, number)
        base = manifest.base_model
        path = request.model_path
        return SamplerRow(name, session_id, base, path, found.folder, None, manifest.lora, root)
    if request.base_model is None:
        raise InvalidRequestError(
            "is missing", field="model_path", value="(none)", remedy="Give model_path or base_model"
        )
    base_models.folder(request.base_model)  # raises for an unknown name
    # the seed of the first model of the session that was given one
    models = journal.models_of(session_id)
    seeds = [row.lora["seed"] for row in models if row.seed_given is True and row.lora is not None]
    root = seed_root(seeds[0] if seeds else None, number)
    return SamplerRow(name, session_id, request.base_model, None, None, None, None, root)
