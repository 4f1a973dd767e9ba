"""Names for checkpoints, given and taken back by the routes that vLLM has for LoRA adapters.

Checks who owns a checkpoint. A path on the server's disk is refused: it belongs to no owner.
"""

from __future__ import annotations

import time

from mint.errors import ConflictError, InvalidRequestError, NotFoundError
from mint.server.callers import Caller
from mint.server.lora_names import NamedLora
from mint.server.openai.models import find_weights
from mint.server.openai.schemas import LoadLoraRequest, UnloadLoraRequest
from mint.server.service.service import Service

MAX_NAME_CHARACTERS = 256


def load_lora(service: Service, caller: Caller, request: LoadLoraRequest) -> str:
    """Makes a name a `model` of `/v1`, for this owner; slow (it reads the checkpoint's manifest). Returns vLLM's words.

    Raises:
        InvalidRequestError: the name is none that can be given, or the path is no path of a checkpoint.
        ConflictError: the name is that of a base model, or is loaded already.
        NotFoundError: there is no such checkpoint for this caller.
        CheckpointError: the checkpoint is damaged.
    """
    name, path = request.lora_name, request.lora_path
    # ids of runs have a colon: to look for the run would tell whether somebody has one of this id
    if not 0 < len(name) <= MAX_NAME_CHARACTERS or ":" in name or name.startswith("ckpt_"):
        remedy = f"Pass 1 to {MAX_NAME_CHARACTERS} characters without a colon, which do not begin with ckpt_"
        raise InvalidRequestError("cannot be the name of a LoRA", field="lora_name", value=name, remedy=remedy)
    if name in service.base_models.names:
        raise ConflictError("is a base model's name", field="lora_name", value=name, remedy="Choose another one")
    if "://" not in path and not path.startswith("ckpt_"):
        remedy = "Upload the adapter (RestClient.upload_checkpoint), and pass the path of its checkpoint (mint://…)"
        raise InvalidRequestError("is no path of a checkpoint", field="lora_path", value=path, remedy=remedy)
    try:
        found = find_weights(service, caller, path)
    except NotFoundError as error:
        raise NotFoundError(
            "is no checkpoint here", field="lora_path", value=path, remedy="See GET /v1/models"
        ) from error
    recorded_name = service.base_models.recorded_name
    given = request.base_model_name
    if given is not None and recorded_name(given) != recorded_name(found.base_model):
        problem = f"is not the base model of the checkpoint, which is {found.base_model}"
        value = request.base_model_name
        raise InvalidRequestError(problem, field="base_model_name", value=value, remedy="Leave it out")
    lora = NamedLora(found.model_path or path, found.base_model, int(time.time()))
    service.lora_names.load(caller.owner, name, lora, in_place=request.load_inplace)
    return f"Success: LoRA adapter '{name}' added successfully."


def unload_lora(service: Service, caller: Caller, request: UnloadLoraRequest) -> str:
    """Takes a name back; the checkpoint stays. Returns vLLM's words.

    Raises:
        NotFoundError: this owner has no such name.
    """
    service.lora_names.unload(caller.owner, request.lora_name)
    return f"Success: LoRA adapter '{request.lora_name}' removed successfully."
