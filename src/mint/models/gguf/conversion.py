"""Reads and dequantises a GGUF file into a Hugging Face folder, with tokenizer and chat template.

The numbers are those of transformers' own reading of the file, in float32, in which every quantised value is exact.
What transformers passes over in silence is read or refused here: see `header`.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from mint.errors import InvalidRequestError
from mint.models.gguf import gpt_oss
from mint.models.gguf.header import GgufHeader
from mint.models.gguf.layout import CutOffError, GgufLayout, read_layout
from mint.models.quiet_transformers import quiet_transformers
from mint.models.tensor_files import write_file, write_later_tensors, write_tensors

_MXFP4 = 39
"""The number of this quantization in a file."""

_BYTES_PER_NUMBER = 4
"""A folder holds float32. Its configuration and tokenizer are small beside the weights."""


def require_convertible(file: Path, disk: Path) -> None:
    """Checks, from the header alone, that a file has all its bytes, and that its folder fits on the disk of `disk`.

    Raises:
        InvalidRequestError: it does not, or the file is no GGUF file.
    """
    try:
        layout = read_layout(file)
    except ValueError as error:
        remedy = "Copy or download the file again" if isinstance(error, CutOffError) else "Give a GGUF file"
        raise _unreadable(file, str(error), remedy) from error
    _require_all_bytes(file, layout)
    _require_space(file, layout, disk)


def convert(file: Path, folder: Path) -> None:
    """Writes the folder, which must not be there yet.

    Raises:
        InvalidRequestError: the file is damaged or not complete, or transformers does not know its architecture.
        OSError: the folder cannot be written.
    """
    # Deferred: only GGUF files need them, and they take seconds to import.
    from gguf import GGUFReader
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    given: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    try:
        header = GgufHeader(GGUFReader(file))
        header.require_whole()  # first: transformers would make as many layers as the file says
        header.require_known_tokens()
        if header.architecture == gpt_oss.ARCHITECTURE:
            _convert_gpt_oss(file, header, folder)
            return
        scaling = header.rope_scaling()
        with quiet_transformers():
            tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, **given)
            described: Any = AutoConfig.from_pretrained(file.parent, **given)
            for name, value in header.corrected(described.to_dict()).items():
                setattr(described, name, value)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                file.parent, config=described, output_loading_info=True, ignore_mismatched_sizes=True, **given
            )
        model, found = loaded
    except InvalidRequestError as error:
        raise _unreadable(file, str(error)) from error
    except Exception as error:  # damaged files give errors of every kind; the tokenizers' are plain exceptions
        if isinstance(error, OSError) and error.errno is not None:  # of the disk; those of transformers have no number
            raise
        first = str(error).strip().split("\n")[0]
        remedy = "Give an undamaged file of an architecture that transformers reads, or a Hugging Face folder"
        raise _unreadable(file, first, remedy) from error
    _require_all_loaded(file, found)
    _require_nothing_left(file, header, model)
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    if scaling:
        _scale_positions(config, scaling)
    config |= {"architectures": [type(model).__name__], "dtype": "float32"}
    tensors = {name: tensor.float().contiguous().numpy() for name, tensor in model.state_dict().items()}
    for name, values in tensors.items():
        if not np.isfinite(values).all():
            raise _unreadable(file, f"its tensor {name} has numbers that are not finite", "Give an undamaged file")
    if config.get("tie_word_embeddings"):
        tensors.pop("lm_head.weight", None)
    if config["model_type"] == "qwen3_moe":
        tensors = _experts_apart(tensors)
    folder.mkdir()
    tokenizer.save_pretrained(folder)
    write_tensors(folder / "model.safetensors", tensors, {"format": "pt"})
    ends = {"eos_token_id": model.config.eos_token_id, "bos_token_id": model.config.bos_token_id}
    write_file(folder / "generation_config.json", [json.dumps(ends, indent=2).encode()])
    write_file(folder / "config.json", [json.dumps(config, indent=2, default=str).encode()])


def _convert_gpt_oss(file: Path, header: GgufHeader, folder: Path) -> None:
    """Does what `convert` does, with one tensor in memory at a time. Experts in MXFP4 are not widened."""
    from transformers import PreTrainedTokenizerFast  # deferred: it takes seconds

    config = gpt_oss.read_config(header)
    arrays = gpt_oss.published_tensors(header.tensors, config["num_hidden_layers"])
    config["vocab_size"] = arrays["model.embed_tokens.weight"].shape[0]
    config["tie_word_embeddings"] = "lm_head.weight" not in arrays
    if gpt_oss.has_mxfp4(header.tensors):
        config["quantization_config"] = gpt_oss.QUANTIZATION
    with quiet_transformers():
        # not AutoTokenizer, which reads the configuration first, and fails at the scaling of positions
        tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(
            file.parent, gguf_file=file.name, local_files_only=True
        )
    folder.mkdir()
    tokenizer.save_pretrained(folder)
    write_later_tensors(folder / "model.safetensors", arrays, {"format": "pt"})
    ends = {name: config.get(name) for name in ("eos_token_id", "bos_token_id")}
    write_file(folder / "generation_config.json", [json.dumps(ends, indent=2).encode()])
    write_file(folder / "config.json", [json.dumps(config, indent=2).encode()])


def _require_all_bytes(file: Path, layout: GgufLayout) -> None:
    """Refuses a file that ends before its tensors do.

    Raises:
        InvalidRequestError: says how many bytes there are, and how many there should be.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType  # deferred: they take a part of a second

    needed = 0
    for tensor in layout.tensors:
        if tensor.kind not in list(GGMLQuantizationType):
            continue  # the library names it
        numbers, size_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.kind)]
        needed = max(needed, layout.data + tensor.offset + math.prod(tensor.shape) // numbers * size_bytes)
    size_bytes = file.stat().st_size
    if size_bytes < needed:
        problem = f"it has {size_bytes} bytes, and its tensors end at byte {needed}"
        raise _unreadable(file, problem, "Copy or download the file again")


def _require_space(file: Path, layout: GgufLayout, disk: Path) -> None:
    """Refuses to begin what cannot end.

    Raises:
        InvalidRequestError: the disk has too little free space.
    """
    numbers = sum(math.prod(tensor.shape) for tensor in layout.tensors)
    needed = _BYTES_PER_NUMBER * numbers
    experts = [tensor for tensor in layout.tensors if tensor.name.endswith(gpt_oss.EXPERTS)]
    is_gpt_oss = layout.fields.get("general.architecture") == gpt_oss.ARCHITECTURE
    if is_gpt_oss and all(tensor.kind == _MXFP4 for tensor in experts):  # they stay so
        kept = sum(math.prod(tensor.shape) for tensor in experts)
        needed += gpt_oss.stored_bytes(kept) - _BYTES_PER_NUMBER * kept
    free = shutil.disk_usage(disk).free
    if needed > free:
        raise InvalidRequestError(
            f"becomes a folder of {needed / 1e6:.1f} MB in float32, and {disk} has {free / 1e6:.1f} MB left",
            field="base_model",
            value=str(file),
            remedy="Free disk space there, or set XDG_CACHE_HOME to a folder on a larger disk",
        )


def _require_all_loaded(file: Path, found: dict[str, Any]) -> None:
    """Refuses a file without a tensor that the model has, or with one of another shape: transformers would take random
    numbers.

    Raises:
        InvalidRequestError: names one.
    """
    remedy = "Give a complete file, or a Hugging Face folder"
    for name, stored, wanted in sorted(found["mismatched_keys"]):
        problem = f"its tensor {name} has the shape {list(stored)}, and its header says {list(wanted)}"
        raise _unreadable(file, problem, remedy)
    missing = sorted(found["missing_keys"])
    if missing:
        more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise _unreadable(file, f"it lacks the tensor {missing[0]}{more}", remedy)


def _require_nothing_left(file: Path, header: GgufHeader, model: Any) -> None:
    """Refuses a file with tensors that transformers has left out, such as biases that its config does not have.

    Raises:
        InvalidRequestError: the file has more numbers than the model.
    """
    tensors = {tensor.data_ptr(): tensor.numel() for tensor in model.state_dict().values()}
    left = header.parameters - sum(tensors.values())
    if left > 0:
        remedy = "Give the Hugging Face folder of this model"
        raise _unreadable(file, f"transformers leaves out {left} numbers of it", remedy)


def _scale_positions(config: dict[str, Any], scaling: dict[str, Any]) -> None:
    """Adds the scaling to a model's config. Gemma 3 scales the positions of the layers that see everything."""
    parameters: dict[str, Any] = config["rope_parameters"]
    of_layers = parameters.get("full_attention", parameters)
    of_layers |= scaling


def _experts_apart(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors with each expert's matrices by themselves, as Qwen3-MoE is published; nothing is copied. transformers
    holds the experts of a layer in one tensor, gate above up."""
    found: dict[str, np.ndarray] = {}
    for name, values in tensors.items():
        stem, _, layer = name.rpartition(".experts.")
        if not stem:
            found[name] = values
            continue
        parts = ("gate_proj", "up_proj") if layer == "gate_up_proj" else (layer,)
        for expert, matrix in enumerate(values):
            for part, own in zip(parts, np.split(matrix, len(parts)), strict=True):
                found[f"{stem}.experts.{expert}.{part}.weight"] = own
    return found


def _unreadable(file: Path, problem: str, remedy: str | None = None) -> InvalidRequestError:
    message = f"cannot be read as a GGUF model: {problem}"
    return InvalidRequestError(message, field="base_model", value=str(file), remedy=remedy)
