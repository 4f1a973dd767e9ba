"""What a `model` of OpenAI's protocol stands for: a base model, a checkpoint, a name that its owner has given to a
checkpoint, or the newest weights of a training run.

Checks who owns them.
"""

from __future__ import annotations

from mint.errors import InvalidRequestError, MintError, NotFoundError
from mint.server.callers import Caller
from mint.server.openai.schemas import ModelCard
from mint.server.service.service import Service
from mint.server.store import checkpoint_folders
from mint.server.store.rows import SamplerRow
from mint.server.store.training_run_catalog import UNKNOWN_BASE
from mint.types.checkpoint_path import CheckpointPath

OWNED_BY_MINT = "mint"


def find_weights(service: Service, caller: Caller, model: str) -> SamplerRow:
    """What to sample from: a checkpoint (`mint://…`, `tinker://…`, `ckpt_…`, or a name that the caller has loaded), a
    run's newest weights, or a base.

    Raises:
        NotFoundError: there is no such model. Other owners' objects give 404, unless they are published.
        CheckpointError: the checkpoint is damaged.
    """
    try:
        if "://" in model or model.startswith("ckpt_"):
            return _saved(service, caller, model)
        loaded = service.lora_names.find(caller.owner, model)
        if loaded is not None:
            return _saved(service, caller, loaded.path)
        if service.is_training_run(model):
            return _newest(service, caller, model)
        if model not in service.base_models.names and _is_path(model):
            raise NotFoundError("names a folder")  # only the operator decides which folders are models
        service.base_models.folder(model)
    except (NotFoundError, InvalidRequestError) as error:
        why = error.message if isinstance(error, _NoWeightsError) else "is not a model here"
        raise NotFoundError(why, field="model", value=model, remedy="See GET /v1/models") from error
    return SamplerRow(f"base:{model}", "", model, None, None, None, None, "")


def find_model(service: Service, caller: Caller, name: str) -> ModelCard:
    """The description of one model; slow, as `list_models`.

    Raises:
        NotFoundError, CheckpointError: as `find_weights`.
    """
    for listed in list_models(service, caller):
        if listed.id == name:
            return listed
    return _model(service, name, find_weights(service, caller, name).base_model, OWNED_BY_MINT, 0)


def list_models(service: Service, caller: Caller) -> list[ModelCard]:
    """The base models, then the caller's newest thousand training runs that have weights, the caller's checkpoints, and
    the names that the caller has loaded.

    Slow: it reads a folder for each.
    """
    models = [_model(service, base, base, OWNED_BY_MINT, 0) for base in service.base_models.names]
    bases: dict[str, str] = {}
    for run in service.training_runs.runs(caller.owner).training_runs:
        bases[run.training_run_id] = run.base_model
        is_saved = run.last_checkpoint is not None or run.last_sampler_checkpoint is not None
        if is_saved or service.has_saved_weights(run.training_run_id):
            created = int(run.last_request_time.timestamp())
            models.append(_model(service, run.training_run_id, run.base_model, run.model_owner, created))
    checkpoints = service.checkpoints.checkpoints(caller.owner).checkpoints
    run_of = {kept.tinker_path: CheckpointPath.parse(kept.tinker_path).model_id for kept in checkpoints}
    bases |= service.training_runs.base_models(caller.owner, {*run_of.values()} - bases.keys())  # of older runs
    for checkpoint in checkpoints:
        base = bases.get(run_of[checkpoint.tinker_path], UNKNOWN_BASE)
        models.append(_model(service, checkpoint.tinker_path, base, caller.owner, int(checkpoint.time.timestamp())))
    for name, lora in service.lora_names.of(caller.owner).items():
        models.append(_model(service, name, lora.base_model, caller.owner, lora.loaded_at))
    return models


class _NoWeightsError(NotFoundError):
    """The run is the caller's, but none of its weights were saved or published."""


def _newest(service: Service, caller: Caller, run_id: str) -> SamplerRow:
    """The newest published or saved weights that still exist; after the session's end, the newest checkpoint."""
    kept = service.checkpoints.checkpoints_of(caller.owner, run_id).checkpoints
    published = service.newest_published(caller, run_id)
    if published is not None:
        return published
    for checkpoint in kept:  # newest first, without those that were deleted since
        if checkpoint.checkpoint_type != "external":
            return _saved(service, caller, checkpoint.tinker_path)
    raise _NoWeightsError("has no weights yet: save or publish some first")


def _saved(service: Service, caller: Caller, path: str) -> SamplerRow:
    found = service.find_checkpoint(path, reader=caller.owner)
    manifest = checkpoint_folders.read_manifest(service.data_dir / found.folder)
    uri = CheckpointPath(found.model_id, found.kind, found.name).uri
    return SamplerRow(f"saved:{uri}", "", manifest.base_model, uri, found.folder, None, manifest.lora, "")


def _is_path(model: str) -> bool:
    return model.startswith(("/", ".", "~")) or ".." in model.split("/")


def _model(service: Service, name: str, base: str, owner: str, created: int) -> ModelCard:
    if base == UNKNOWN_BASE:
        return ModelCard(id=name, created=created, owned_by=owner)
    try:
        length = service.base_models.context_length(base)
    except (MintError, OSError, ValueError):  # its folder is gone, and the list is shown all the same
        length = None
    return ModelCard(id=name, created=created, owned_by=owner, root=base, max_model_len=length)
