"""A GGUF file as a Hugging Face folder: read and dequantised once, with tokenizer and chat template, and cached.

The numbers are those of transformers' own reading of the file, in float32, in which every quantised value is exact.
What transformers passes over in silence is read or refused here: see `header`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import tempfile
from pathlib import Path
from typing import Any

from mint.config import read_settings
from mint.errors import InvalidRequestError
from mint.models.gguf.header import GgufHeader
from mint.models.tensor_files import write_file, write_tensors
from mint.models.transformers_progress import without_progress

log = logging.getLogger(__name__)

_READING = 2
"""Counts the ways in which files were read: a folder of an earlier one is not used."""


def gguf_folder(file: Path) -> Path:
    """The folder with the content of a GGUF file. It is written when it is first asked for.

    Raises:
        InvalidRequestError: the file is damaged or not complete, transformers does not know its architecture, or the
            folder cannot be written.
    """
    stat = file.stat()
    key = hashlib.sha256(f"{_READING}\n{file.resolve()}\n{stat.st_size}\n{stat.st_mtime_ns}".encode()).hexdigest()[:16]
    folder = read_settings().cache_dir / "gguf" / f"{file.stem}-{key}"
    if not (folder / "config.json").is_file():
        log.info("reading %s, once", file)
        try:
            _write_folder(file, folder)
        except OSError as error:
            raise InvalidRequestError(
                f"cannot be written to {folder.parent}, which needs about 4 bytes for each parameter: {error.strerror}",
                field="base_model",
                value=str(file),
                remedy="Free disk space there, or set XDG_CACHE_HOME to another folder",
            ) from error
    return folder


def _write_folder(file: Path, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
        content = Path(temporary) / "folder"
        _convert(file, content)
        try:
            content.rename(folder)
        except OSError:  # another process was faster
            if not (folder / "config.json").is_file():
                shutil.rmtree(folder, ignore_errors=True)
                content.rename(folder)


def _convert(file: Path, folder: Path) -> None:
    # Deferred: only GGUF files need them, and they take seconds to import.
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer

    given: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    try:
        header = GgufHeader(GGUFReader(file))
        header.require_whole()  # first: transformers would make as many layers as the file says
        scaling = header.rope_scaling()
        with without_progress():
            tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, **given)
            loaded: Any = AutoModelForCausalLM.from_pretrained(file.parent, output_loading_info=True, **given)
        model, found = loaded
    except InvalidRequestError as error:
        raise _unreadable(file, str(error)) from error
    except Exception as error:  # damaged files give errors of every kind; the tokenizers' are plain exceptions
        first = str(error).strip().split("\n")[0]
        remedy = "Give an undamaged file of an architecture that transformers reads, or a Hugging Face folder"
        raise _unreadable(file, first, remedy) from error
    _require_all_loaded(file, found)
    _require_nothing_left(file, header, model)
    folder.mkdir()
    tokenizer.save_pretrained(folder)
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    if scaling:
        _scale_positions(config, scaling)
    config |= {"architectures": [type(model).__name__], "dtype": "float32"}
    tensors = {name: tensor.float().contiguous().numpy() for name, tensor in model.state_dict().items()}
    if config.get("tie_word_embeddings"):
        tensors.pop("lm_head.weight", None)
    write_tensors(folder / "model.safetensors", tensors, {"format": "pt"})
    ends = {"eos_token_id": model.config.eos_token_id, "bos_token_id": model.config.bos_token_id}
    write_file(folder / "generation_config.json", [json.dumps(ends, indent=2).encode()])
    write_file(folder / "config.json", [json.dumps(config, indent=2, default=str).encode()])


def _require_all_loaded(file: Path, found: dict[str, Any]) -> None:
    """Refuses a file without a tensor that the model has: transformers would take random numbers.

    Raises:
        InvalidRequestError: names one.
    """
    missing = sorted({*found["missing_keys"], *map(str, found["mismatched_keys"])})
    if missing:
        more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise _unreadable(
            file, f"it lacks the tensor {missing[0]}{more}", "Give a complete file, or a Hugging Face folder"
        )


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


def _unreadable(file: Path, problem: str, remedy: str | None = None) -> InvalidRequestError:
    message = f"cannot be read as a GGUF model: {problem}"
    return InvalidRequestError(message, field="base_model", value=str(file), remedy=remedy)
