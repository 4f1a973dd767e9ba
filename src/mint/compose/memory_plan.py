"""`mint plan --model`: what a base model on this machine, or on another one, will take. Loads no weights."""

from __future__ import annotations

from typing import Literal, cast

from mint.config import Settings
from mint.engine.cuda.operations import CudaOperations
from mint.engine.devices import Device
from mint.engine.lora import parameter_count
from mint.engine.memory.device_group import GroupPlan, plan_group, read_group
from mint.engine.memory.plan import MemoryPlan, plan_memory
from mint.engine.model.config import read_decoder_config
from mint.engine.model.weights import list_sites
from mint.engine.protocol import LoraSpec
from mint.engine.quantized.number_formats import Quantization
from mint.engine.torch_engine import DTYPES
from mint.engine.transformers.meta_model import tensors_of_config
from mint.errors import InvalidRequestError
from mint.models.folder import ModelFolder
from mint.models.registry import missing_files, resolve

DeviceName = Literal["cpu", "cuda"]

USUAL_CONTEXT = 2048
"""The tokens of a sequence where none are given, or those of the model's context if they are fewer."""


def plan_model(
    settings: Settings,
    model: str,
    *,
    context: int | None,
    group: int,
    rank: int,
    device: DeviceName | None = None,
    device_gib: float | None = None,
) -> MemoryPlan:
    """The plan for groups of `group` sequences of `context` tokens, and a lora of `rank` on the default matrices.

    A folder with config.json alone is enough: the names and shapes of tensors are then those of transformers.

    `device`: None for the one that the engine would take here. `device_gib`: its memory, if it is not in this machine.

    Raises:
        UnknownBaseModelError: the model's files are not on this machine.
        InvalidRequestError: mint's own decoder does not compute the family, the context is longer than the model's, or
            there is no GPU here and no memory of another one is given.
    """
    folder = ModelFolder(resolve(model, settings.model_aliases, config_alone=True))
    try:
        config = read_decoder_config(folder.config)
    except InvalidRequestError as error:
        raise InvalidRequestError(
            "runs on transformers, whose memory is measured when the model is loaded and not planned",
            field="--model",
            value=model,
            remedy="Load it: the log and get_info() say what was measured. docs/models.md has the families",
        ) from error
    context = min(USUAL_CONTEXT, config.max_position_embeddings) if context is None else context
    if context > config.max_position_embeddings:
        raise InvalidRequestError(
            f"is longer than the context of {model}",
            field="--context",
            value=context,
            remedy=f"Give at most {config.max_position_embeddings}",
        )
    here = Device(device, settings.native_folder, gpu_kernels=settings.native is not False)
    dtype = here.default_dtype if settings.dtype is None else DTYPES[settings.dtype]
    given = None if device_gib is None else int(device_gib * (1 << 30))
    if here.is_gpu and given is None and not here.is_present:
        raise InvalidRequestError(
            "is not in this machine", field="--device", value="cuda", remedy="Add its memory: --device-memory 24"
        )
    if here.is_gpu:
        operations = CudaOperations(dtype, here.torch, memory_bytes=given)
    else:
        operations = here.operations(config, dtype)
    return plan_memory(
        config,
        tensors_of_config(folder) if missing_files(folder.path) else folder.tensors(),
        operations,
        LoraSpec(rank, 0, train_attn=True, train_mlp=True, train_unembed=True),
        context=context,
        group=group,
        memory_bytes=here.memory_bytes if given is None else given,
        free_bytes=here.free_bytes if given is None else given,
        quantization=settings.quantize,
        kv_cache_bytes=None if settings.kv_cache_mib is None else settings.kv_cache_mib << 20,
        micro_batch_rows=settings.micro_batch_rows,
    )


def plan_gpus(
    settings: Settings, model: str, gpus: str, *, context: int | None, group: int, rank: int, tenants: int
) -> GroupPlan:
    """The plan for `tenants` models in training on several GPUs, such as `8xH100`.

    Raises:
        As `plan_model`, and InvalidRequestError: the GPUs are not known.
    """
    devices = read_group(gpus)

    def plan_of(context: int | None, quantization: str | None) -> MemoryPlan:
        own = settings
        if quantization is not None:
            own = settings.model_copy(update={"quantize": cast(Quantization, quantization)})
        gib = devices.kind.memory_gib
        return plan_model(own, model, context=context, group=group, rank=rank, device="cuda", device_gib=gib)

    lora = LoraSpec(rank, 0, train_attn=True, train_mlp=True, train_unembed=True)
    usual = plan_of(context, None).context
    config = read_decoder_config(ModelFolder(resolve(model, settings.model_aliases, config_alone=True)).config)
    return plan_group(
        config,
        plan_of,
        devices,
        context=usual,
        tenants=tenants,
        lora_parameters=parameter_count(list_sites(config, lora), rank),
    )
