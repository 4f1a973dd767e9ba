"""A GGUF file as a Hugging Face folder: read and dequantised once, with tokenizer and chat template, and cached.

The numbers are those of transformers' own reading of the file, in float32, in which every quantised value is exact.
Knows nothing of what the files of the folder mean.
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
from mint.models.tensor_files import write_file, write_tensors
from mint.models.transformers_progress import without_progress

log = logging.getLogger(__name__)


def gguf_folder(file: Path) -> Path:
    """The folder with the content of a GGUF file. It is written when it is first asked for.

    Raises:
        InvalidRequestError: the file is damaged, or transformers does not know its architecture.
    """
    stat = file.stat()
    key = hashlib.sha256(f"{file.resolve()}\n{stat.st_size}\n{stat.st_mtime_ns}".encode()).hexdigest()[:16]
    folder = read_settings().cache_dir / "gguf" / f"{file.stem}-{key}"
    if not (folder / "config.json").is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
            content = Path(temporary) / "folder"
            log.info("reading %s, once", file)
            _convert(file, content)
            try:
                content.rename(folder)
            except OSError:  # another process was faster
                if not (folder / "config.json").is_file():
                    shutil.rmtree(folder, ignore_errors=True)
                    content.rename(folder)
    return folder


def _convert(file: Path, folder: Path) -> None:
    # Deferred: only GGUF files need them, and they take seconds to import.
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        with without_progress():
            tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
            model: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
    except Exception as error:  # damaged files give errors of every kind; the tokenizers' are plain exceptions
        first = str(error).strip().split("\n")[0]
        raise InvalidRequestError(
            f"cannot be read as a GGUF model: {first}",
            field="base_model",
            value=str(file),
            remedy="Give an undamaged file of an architecture that transformers reads, or a Hugging Face folder",
        ) from error
    folder.mkdir()
    tokenizer.save_pretrained(folder)
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    config |= {"architectures": [type(model).__name__], "dtype": "float32"}
    tensors = {name: tensor.float().contiguous().numpy() for name, tensor in model.state_dict().items()}
    if config.get("tie_word_embeddings"):
        tensors.pop("lm_head.weight", None)
    write_tensors(folder / "model.safetensors", tensors, {"format": "pt"})
    ends = {"eos_token_id": model.config.eos_token_id, "bos_token_id": model.config.bos_token_id}
    write_file(folder / "generation_config.json", [json.dumps(ends, indent=2).encode()])
    write_file(folder / "config.json", [json.dumps(config, indent=2, default=str).encode()])
