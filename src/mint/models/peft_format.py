"""A lora in PEFT's file format, which PEFT, transformers and vLLM load unchanged; and back.

Arrays are named as mint names them everywhere: `{module}.lora_A.weight` [r, inputs], `{module}.lora_B.weight` [outputs,
r]. This is the one place that knows PEFT's own names. Where a checkpoint has the experts of a layer in one tensor
(GPT-OSS, Qwen3.5-MoE), PEFT has their loras in one, too: A [experts · r, inputs], B [outputs, r · experts].
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from mint.errors import CheckpointError, InvalidRequestError
from mint.models.expert_layers import layers_of
from mint.models.folder import ModelFolder
from mint.models.peft_files import CONFIG_FILE, WEIGHTS_FILE
from mint.models.tensor_files import StoredTensor, read_header, write_file, write_tensors
from mint.models.untrusted_tensors import UntrustedTensor, UntrustedTensors

UNEMBED = "lm_head"

_PREFIX = "base_model.model."
_EMBEDDING = "model.embed_tokens"
_LAYER = re.compile(
    r"model\.layers\.\d{1,4}\.(?:(?P<attn>self_attn\.(?:[qkvo]|qkv)_proj|linear_attn\.(?:in_proj_(?:qkvz?|z|ba?|a)|out_proj))"
    r"|(?P<mlp>mlp\.(?:experts\.\d{1,4}\.|shared_expert\.)?(?:gate|up|gate_up|down)_proj))",
    re.ASCII,
)
_FROZEN_COPY = re.compile(r"(?P<module>model\.embed_tokens|lm_head)\.(?:base_layer\.)?weight", re.ASCII)
"""The names under which PEFT stores a copy of the base's embeddings if a lora is on one of them."""

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_EXPERT = re.compile(r"\.experts\.\d+\.")
"""The name of an expert that has layers of its own, within a path."""

_EXPERT_LAYERS = ("gate_proj", "up_proj", "down_proj")
"""The last names of layers that PEFT takes for those of experts, wherever they are in a mixture."""

_MIXTURE = re.compile(r"expert|shared_mlp|\.N\..*\.N\.", re.ASCII)
"""Finds parts of an MLP's path that only models with experts have; N stands for a number."""

_LAST_NAME = re.compile(r"[^.]+(?:\.\d+)*$", re.ASCII)
"""The last name of a path. A number has the name before it, too: `0` alone would also name `model.layers.0`."""

_TEXT_PART = "language_model"
"""The part of a path by which models of texts and images call their text model."""

_LAYER_PATH = re.compile(r".*?\.\d+(?=\.)", re.ASCII)
"""The path of the model's layer that a linear layer is in, such as `model.layers.0`."""

_STACKED = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
"""The tensors of experts that are stacked, as `target_parameters`: PEFT wraps the module first for one, then for the
other, so that the first one's lora has `base_layer` in its name."""

_STACKED_EXPERT = re.compile(
    r"(?P<experts>model\.layers\.\d{1,4}\.mlp\.experts)\.(?P<expert>\d+)\.(?P<layer>gate_up|down)_proj\.lora_(?P<half>[AB])\.weight",
    re.ASCII,
)
_STACKED_LORA = re.compile(
    r"(?P<experts>model\.layers\.\d{1,4}\.mlp\.experts)(?P<inner>\.base_layer)?\.lora_(?P<half>[AB])\.weight", re.ASCII
)

_FILL_SEED = 0
_MANY = 100_000
"""So many matrices can a lora have: one of Qwen3-235B-A22B (94 layers of 128 experts) has 73,000."""

_ROWS_AT_ONCE = 4096

_STARTS_AS_BASE = (True, False, "gaussian", "eva", "orthogonal")
"""The initialisations that do not change the base model's weights; PiSSA, OLoRA and LoftQ do."""

_CHANGES_FUNCTION = {
    "use_dora": "DoRA rescales every column of the merged weights",
    "use_rslora": "save it with use_rslora=false and lora_alpha = alpha·√r, which is the same function",
    "modules_to_save": "whole layers were trained beside the lora",
    "rank_pattern": "layers have different ranks",
    "alpha_pattern": "layers have different scales",
    "lora_bias": "the lora has biases",
    "layer_replication": "layers are repeated",
    "trainable_token_indices": "rows of the embedding were trained",
    "alora_invocation_tokens": "an activated lora depends on the prompt",
    "target_parameters": "parameters outside of linear layers were trained",
    "use_qalora": "QA-LoRA pools its inputs",
    "use_bdlora": "block-diagonal matrices",
    "arrow_config": "a router over several loras",
    "monteclora_config": "Monte Carlo lora",
    "kasa_config": "KaSA has further factors",
    "velora_config": "VeLoRA has further factors",
    "megatron_config": "Megatron's layers are split",
}
"""PEFT's settings that make a lora compute something else than base + scale · B @ A → what they mean."""


@dataclass(frozen=True)
class PeftConfig:
    """The checked content of adapter_config.json."""

    rank: int
    alpha: float
    base_model: str


@dataclass(frozen=True)
class Layer:
    """A layer of a base model that can have a lora; `part` is attn, mlp or unembed."""

    part: str
    outputs: int
    inputs: int
    module: str | None = None
    """Its path in the model of transformers, by which PEFT knows it, where mint has another name for it."""


LayersOf = Callable[[ModelFolder], Mapping[str, Layer]]
"""Finds the layers of a base model that can have a lora, by PEFT module name."""


def module_names(weights: Iterable[str]) -> list[str]:
    """The layers that have a lora, such as `model.layers.0.self_attn.q_proj`."""
    return sorted({name.rsplit(".lora_", 1)[0] for name in weights})


# --- out ---------------------------------------------------------------------------------------------------------


def config_json(
    modules: Iterable[str],
    *,
    rank: int,
    alpha: float,
    base_model: str,
    parameters: Sequence[str] = (),
    output_layer: str = UNEMBED,
) -> bytes:
    """The content of adapter_config.json; PEFT loads `base_model` first. `parameters` are those outside of linear
    layers that have a lora; `output_layer` is what `modules` calls the output layer."""
    modules = sorted(modules)
    beside = _beside_experts(modules, has_experts=bool(parameters))
    # By their last names PEFT would also find the layers for images, of which some can have no lora.
    is_part = any(_TEXT_PART in name.split(".") for name in modules)
    # The last name of an output layer (`decoder`, in BERT's family) may be that of other modules, too.
    whole_names = {*modules} if is_part else {output_layer}
    named = {name if name in whole_names else _last_name(name) for name in modules if name not in beside}
    whole = [*parameters, *(f"{name}.weight" for name in beside)]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(named),
        **({"target_parameters": whole} if whole else {}),
        "bias": "none",
        "modules_to_save": None,
        "use_rslora": False,
        "use_dora": False,
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    return json.dumps(config, indent=2).encode()


def write_peft(
    folder: Path,
    weights: Mapping[str, np.ndarray],
    *,
    rank: int,
    alpha: float,
    base_model: str,
    output_layer: str = UNEMBED,
) -> None:
    """Writes adapter_config.json and adapter_model.safetensors. `output_layer` is the path of the output layer in the
    base's model of transformers."""
    halves = {f"{UNEMBED}.lora_{half}.weight": f"{output_layer}.lora_{half}.weight" for half in "AB"}
    weights = {halves.get(name, name): array for name, array in weights.items()}
    modules = module_names(weights)
    parameters = _STACKED if any(_EXPERT.search(name) and name.endswith(".gate_up_proj") for name in modules) else ()
    if parameters:
        weights = _stack(weights)
        modules = [name for name in modules if not _EXPERT.search(name)]
    write_tensors(folder / WEIGHTS_FILE, {_PREFIX + name: array for name, array in weights.items()}, {"format": "pt"})
    config = config_json(
        modules, rank=rank, alpha=alpha, base_model=base_model, parameters=parameters, output_layer=output_layer
    )
    write_file(folder / CONFIG_FILE, [config])


def _stack(weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The loras of a layer's experts as one."""
    found: dict[str, np.ndarray] = {}
    parts: dict[tuple[str, str, str], dict[int, np.ndarray]] = {}
    for name, array in weights.items():
        match = _STACKED_EXPERT.fullmatch(name)
        if match is None:
            found[name] = array
        else:
            parts.setdefault((match["experts"], match["layer"], match["half"]), {})[int(match["expert"])] = array
    for (experts, layer, half), numbered in parts.items():
        arrays = [numbered[expert] for expert in sorted(numbered)]
        inner = ".base_layer" if layer == "gate_up" else ""
        joined = np.concatenate(arrays) if half == "A" else np.stack(arrays, axis=-1).reshape(len(arrays[0]), -1)
        found[f"{experts}{inner}.lora_{half}.weight"] = joined
    return found


def _unstack(name: str, array: np.ndarray, rank: int) -> dict[str, np.ndarray]:
    """The loras of single experts, in order, of one that `_stack` gives; others as they are."""
    match = _STACKED_LORA.fullmatch(name)
    if match is None:
        return {name: array}
    layer, is_a = "gate_up" if match["inner"] else "down", match["half"] == "A"
    parts = array.reshape(-1, rank, array.shape[1]) if is_a else np.moveaxis(array.reshape(len(array), rank, -1), -1, 0)
    return {
        f"{match['experts']}.{expert}.{layer}_proj.lora_{match['half']}.weight": np.ascontiguousarray(part)
        for expert, part in enumerate(parts)
    }


def _beside_experts(modules: Sequence[str], *, has_experts: bool) -> list[str]:
    """The MLP layers beside experts: dense ones, and those of a shared expert. `has_experts`: there are experts
    that `modules` does not have.

    By their last names as `target_modules`, PEFT would take them for the experts. As `target_parameters` it finds them.
    """
    if not (has_experts or _show_experts(modules)):
        return []
    return [name for name in modules if name.endswith(_EXPERT_LAYERS) and not _EXPERT.search(name)]


def _show_experts(modules: Sequence[str]) -> bool:
    """Whether names show that the model has experts, which may be in one tensor and have no lora.

    They do if MLPs have names of several kinds, if one name says so (Hunyuan's `shared_mlp`), if a layer has a list of
    MLPs (LongCat-Flash), or if some layers have a lora on an MLP, and others only elsewhere (ERNIE 4.5, whose first
    layers are dense).
    """
    kinds: dict[str, set[str]] = {}
    for name in modules:
        kinds.setdefault(_last_name(name), set()).add(_NUMBER.sub("N", name))
    mlps = [kinds[last] for last in _EXPERT_LAYERS if last in kinds]
    if any(len(found) > 1 or _MIXTURE.search(min(found)) for found in mlps):
        return True
    dense = _layer_paths(name for name in modules if name.endswith(".gate_proj"))
    return bool(dense) and dense != _layer_paths(modules)


def _layer_paths(modules: Iterable[str]) -> set[str]:
    return {match[0] for match in map(_LAYER_PATH.match, modules) if match is not None}


def _last_name(module: str) -> str:
    match = _LAST_NAME.search(module)
    return module if match is None else match[0]


def peft_header(path: Path) -> tuple[bytes, int, list[str]]:
    """What turns a file with mint's tensor names into one with PEFT's names, without a copy of the tensors.

    Returns the header of the new file, the offset in `path` from which the rest is the same, and the layers.

    Raises:
        CheckpointError: the file is damaged.
    """
    try:
        with path.open("rb") as file:
            header, begin = read_header(file)
        renamed = {"__metadata__": {"format": "pt"}, **{_PREFIX + name: entry for name, entry in header.items()}}
    except (OSError, ValueError, AttributeError, OverflowError, MemoryError) as error:
        raise CheckpointError(f"the tensor file {path} cannot be read: {error}") from error
    text = json.dumps(renamed, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # as safetensors does: tensors begin at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text, begin, module_names(header)


# --- in ----------------------------------------------------------------------------------------------------------


def read_config(text: bytes) -> PeftConfig:
    """Reads adapter_config.json.

    Raises:
        InvalidRequestError: it is no such file, or its settings are not those of a plain lora.
    """
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refused(CONFIG_FILE, "is not JSON", "Send the file that PEFT wrote") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise _refused(CONFIG_FILE, "does not describe a PEFT lora (peft_type LORA)", "Send the file that PEFT wrote")
    for key, meaning in _CHANGES_FUNCTION.items():
        if config.get(key) and not (key == "target_parameters" and _are_layers(config[key])):
            raise _refused(
                key, f"is not supported: {meaning}", "Merge it into the base, or train a plain lora", config[key]
            )
    if config.get("bias", "none") != "none":
        raise _refused("bias", "is not supported: biases were trained", "Train with bias='none'", config["bias"])
    start = config.get("init_lora_weights", True)
    if start not in _STARTS_AS_BASE:
        remedy = "Convert it to a plain lora with PEFT's path_initial_model_for_weight_conversion"
        raise _refused("init_lora_weights", "is not supported: it changes the base model's weights", remedy, start)
    rank = config.get("r")
    alpha = config.get("lora_alpha")
    if type(rank) is not int or rank < 1:
        raise _refused("r", "is not a rank", "A rank is a whole number from 1", rank)
    if type(alpha) not in (int, float) or not 0 < alpha < 1e6:
        raise _refused("lora_alpha", "is not a scale", "It is a number above 0 and below a million", alpha)
    base = config.get("base_model_name_or_path")
    return PeftConfig(rank, float(alpha), base if isinstance(base, str) else "")


def _are_layers(parameters: object) -> bool:
    """Whether `target_parameters` are the weights of layers, and those of the experts that are stored together."""
    if not isinstance(parameters, list) or not all(isinstance(name, str) for name in parameters):
        return False
    return [name for name in parameters if not name.endswith(".weight")] in ([], list(_STACKED))


def base_layers(folder: ModelFolder) -> dict[str, Layer]:
    """The layers of a base model that can have a lora, with their shapes, from the headers of its files.

    They are right for the families of mint's own decoder; `engine/bases/lora_layers.py` knows those of all models.
    """
    tensors = folder.tensors()
    layers: dict[str, Layer] = {}
    for name, tensor in tensors.items():
        found = layers_of(name, tensor.shape, folder.config)
        match = _LAYER.fullmatch(found.names[0])
        shape = tensor.shape[found.is_stacked :]
        if match is not None and len(shape) == 2:
            outputs, inputs = reversed(shape) if found.inputs_first else shape
            layer = Layer(match.lastgroup or "", outputs * found.part[1], inputs)
            layers |= dict.fromkeys(found.names, layer)
    unembed = tensors.get(f"{UNEMBED}.weight", tensors.get(f"{_EMBEDDING}.weight"))
    if unembed is not None:
        outputs, inputs = unembed.shape
        layers[UNEMBED] = Layer("unembed", outputs, inputs)
    return layers


def read_weights(
    file: BinaryIO, config: PeftConfig, base: ModelFolder, layers: Mapping[str, Layer]
) -> dict[str, np.ndarray]:
    """The matrices of adapter_model.safetensors by mint's names, in float32; `layers` are those of `base` that can have
    a lora.

    Reads no tensor before every name and shape was found to fit the base model.

    Raises:
        InvalidRequestError: the file is damaged, holds something else, or is a lora of another model.
    """
    stored = UntrustedTensors(file, WEIGHTS_FILE, expected=2 * len(layers))
    own_names = {layer.module: own for own, layer in layers.items() if layer.module is not None}
    found: dict[str, str] = {}
    for name, entry in stored.entries.items():
        module, dot, half = name.removeprefix(_PREFIX).rpartition(".lora_")
        own = f"{own_names.get(module, module)}{dot}{half}"
        copy = _FROZEN_COPY.fullmatch(own)
        if copy is not None:
            _require_frozen(stored, entry, base.tensors(), copy["module"])
            continue
        found[own] = name
        _check_shape(own, entry, layers, config.rank)
    lone = sorted(name for name in found if _other_half(name) not in found)
    if lone or not found:
        raise _refused(WEIGHTS_FILE, f"lacks the other half of {lone[0] if lone else 'every lora'}", "Send all of it")
    return {
        name: array
        for own, place in sorted(found.items())
        for name, array in _unstack(own, stored.read(place), config.rank).items()
    }


def read_unchecked(file: BinaryIO) -> dict[str, np.ndarray]:
    """Same as `read_weights`, without a base model to compare names and shapes with.

    Raises:
        InvalidRequestError: the file is damaged, or holds anything but loras.
    """
    stored = UntrustedTensors(file, WEIGHTS_FILE, expected=_MANY)
    odd = [name for name in stored.entries if not name.endswith((".lora_A.weight", ".lora_B.weight"))]
    if odd:
        raise _refused(WEIGHTS_FILE, f"holds {odd[0][:120]!a}, which is no lora", "Export with --format hf")
    return {name.removeprefix(_PREFIX): stored.read(name) for name in sorted(stored.entries)}


def rescale(weights: Mapping[str, np.ndarray], factor: float) -> dict[str, np.ndarray]:
    """The same function with a scale that is `factor` times smaller: B is multiplied by `factor`."""
    # In float64, so that the product is rounded once.
    return {
        name: (array.astype(np.float64) * factor).astype(np.float32) if name.endswith(".lora_B.weight") else array
        for name, array in weights.items()
    }


def fill(weights: Mapping[str, np.ndarray], layers: Mapping[str, Layer], rank: int) -> dict[str, np.ndarray]:
    """Adds a lora to each layer that lacks one in a part (attn, mlp, unembed) where another layer has one.

    mint trains these parts as wholes. An added lora changes nothing yet: A is drawn as for a new model, B is zero.
    """
    modules = set(module_names(weights))
    parts = {layers[module].part for module in modules}
    rng = np.random.default_rng(_FILL_SEED)
    filled = dict(weights)
    # Sorted, because all are drawn from one stream: the same file gives the same model.
    for module, layer in sorted(layers.items()):
        if layer.part in parts and module not in modules:
            bound = 1 / np.sqrt(layer.inputs)
            drawn = rng.uniform(-bound, bound, (rank, layer.inputs))
            filled[f"{module}.lora_A.weight"] = drawn.astype(np.float32)
            filled[f"{module}.lora_B.weight"] = np.zeros((layer.outputs, rank), np.float32)
    return filled


def _check_shape(name: str, entry: UntrustedTensor, layers: Mapping[str, Layer], rank: int) -> None:
    module, _, half = name.rpartition(".lora_")
    layer = layers.get(module)
    match = _STACKED_LORA.fullmatch(name)
    if match is not None:
        last = "gate_up_proj" if match["inner"] else "down_proj"
        count = sum(own.startswith(f"{match['experts']}.") and own.endswith(f".{last}") for own in layers)
        layer, rank = layers.get(f"{match['experts']}.0.{last}"), rank * count
    if layer is None or half not in ("A.weight", "B.weight"):
        remedy = f"This base model can have loras on {', '.join(sorted({own.rsplit('.', 1)[-1] for own in layers}))}"
        raise _refused(WEIGHTS_FILE, f"holds {entry.name[:120]!a}, which is no lora of such a layer", remedy)
    wanted = (rank, layer.inputs) if half == "A.weight" else (layer.outputs, rank)
    if entry.shape != wanted:
        problem = f"has {name} of shape {list(entry.shape)}; with r = {rank} and this base model it is {list(wanted)}"
        raise _refused(WEIGHTS_FILE, problem, "Name the base model that the lora was trained on")


def _require_frozen(
    stored: UntrustedTensors, entry: UntrustedTensor, base: Mapping[str, StoredTensor], module: str
) -> None:
    """Refuses a copy of an embedding that differs from the base's: PEFT stores it unchanged if a lora is on it."""
    named = base.get(f"{module}.weight", base.get(f"{_EMBEDDING}.weight"))
    # The files of some tied models on transformers call the embedding otherwise (GPT-2's is `wte`).
    possible = [tensor for tensor in (base.values() if named is None else [named]) if tensor.shape == entry.shape]
    theirs = stored.read(entry.name) if possible else np.empty(0)
    if any(_is_equal(theirs, own) for own in possible):
        return
    problem = f"holds {entry.name!a}, which is not the base model's own {module}"
    raise _refused(WEIGHTS_FILE, problem, "Save the lora with save_embedding_layers=False")


def _is_equal(array: np.ndarray, own: StoredTensor) -> bool:
    """Whether a matrix has the numbers of a tensor of its shape."""
    parts = (slice(at, at + _ROWS_AT_ONCE) for at in range(0, own.shape[0], _ROWS_AT_ONCE))
    return all(np.array_equal(array[part], own.read(part).float().numpy()) for part in parts)


def _other_half(name: str) -> str:
    return name.replace(".lora_A.", ".lora_B.") if ".lora_A." in name else name.replace(".lora_B.", ".lora_A.")


def _refused(field: str, problem: str, remedy: str, value: object = "the lora") -> InvalidRequestError:
    return InvalidRequestError(problem, field=field, value=value, remedy=remedy)
