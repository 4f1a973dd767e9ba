"""Finds the folder with a base model's weights by the model's name.

Knows names, aliases, folders and GGUF files; never uses the network.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from mint.errors import InvalidRequestError, UnknownBaseModelError
from mint.models.gguf.folder import gguf_folder
from mint.models.package_index import INDEX_MODELS
from mint.models.peft_files import CONFIG_FILE

BUNDLED = {"mint/tiny": Path(__file__).parent / "tiny"}
"""The base models in the package."""

HUB_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.safetensors")
"""What mint needs of a model on the hub: configuration, tokenizer, chat template, and weights in this format alone."""

HUB_COPIES = ("*/*.safetensors", "consolidated*.safetensors")
"""What is left out of these: the weights once more in another layout, as Mistral (`consolidated`) and GPT-OSS
(`original/`) publish them. They would double the download."""

INDEX_FILE = "model.safetensors.index.json"
"""Says which tensor is in which file, where a model has several."""

_OTHER_VOCABULARIES = ("vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")
"""Files of tokenizers from which transformers makes a `tokenizer.json`."""

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)


def available(aliases: Mapping[str, str]) -> list[str]:
    """The names that can be resolved without a path: the bundled models, those fetched from the package index, the
    aliases."""
    fetched = (name for name, model in INDEX_MODELS.items() if model.file.is_file())
    return sorted({*BUNDLED, *fetched, *aliases})


def resolve(name: str, aliases: Mapping[str, str], *, config_alone: bool = False) -> Path:
    """The folder of `name`: an alias (of a name, folder or file), a bundled model, a local folder, a GGUF file, a
    Hugging Face id whose files are in the local cache, or a model that was fetched from the package index.

    An alias comes before everything else, so that an operator can give any weights any name. With `config_alone`, a
    folder needs no more than its config.json.

    Raises:
        UnknownBaseModelError: there is no base model of that name.
        InvalidRequestError: the folder is incomplete or an adapter's, the GGUF file damaged, or an alias leads back to
            itself.
    """
    target = _follow(name, aliases)
    folder = (
        BUNDLED.get(target)
        or _local_folder(target)
        or _from_gguf(target)
        or _cached_folder(target)
        or _fetched_folder(target)
    )
    if folder is None:
        known = available(aliases)
        if target != name or _is_path(target):
            raise _not_there(name, target)
        similar = get_close_matches(name, known, n=1)
        raise UnknownBaseModelError(
            f"is not a known base model; available are {', '.join(known)}",
            field="base_model",
            value=name,
            remedy=_remedy(name, similar),
        )
    missing = missing_files(folder)
    if config_alone:
        missing = [name for name in missing if name == "config.json"]
    if missing:
        _refuse_adapter(name, folder)
        raise InvalidRequestError(
            f"stands for {folder}, which lacks {', '.join(missing)}",
            field="base_model",
            value=name,
            remedy=_how_to_complete(folder),
        )
    return folder


def recorded_name(name: str, aliases: Mapping[str, str]) -> str:
    """The name under which a base model is stored, so that it means the same in another working directory.

    Of a folder or GGUF file it is the absolute path, without links; an alias and a name of the hub stay as they are.
    """
    if name in aliases or name in BUNDLED:
        return name
    path = _local_folder(name) or _gguf_path(name)
    return name if path is None else str(path)


def _refuse_adapter(name: str, folder: Path) -> None:
    """For a folder that PEFT has written: it has a LoRA, and names the base model that it belongs to."""
    if not (folder / CONFIG_FILE).is_file() or (folder / "config.json").is_file():
        return
    try:
        base = json.loads((folder / CONFIG_FILE).read_bytes()).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        base = None
    named = f" of {base}" if isinstance(base, str) and base else ""
    raise InvalidRequestError(
        f"is a folder with an adapter{named}, not with a base model",
        field="base_model",
        value=name,
        remedy=f"Take {base if named else 'its base model'} as base_model. `mint checkpoints upload` takes the adapter",
    )


def _how_to_complete(folder: Path) -> str:
    if any(folder.glob("pytorch_model*.bin")) and not any(folder.glob("*.safetensors")):
        return (
            "Its weights are pickled (pytorch_model.bin), and a pickle can run code. On a machine that trusts them, "
            "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(DIR) of transformers writes safetensors"
        )
    if not (folder / "tokenizer.json").is_file() and any((folder / name).is_file() for name in _OTHER_VOCABULARIES):
        return (
            "Its tokenizer is in other files. With transformers, AutoTokenizer.from_pretrained(DIR, "
            "use_fast=True).save_pretrained(DIR) writes tokenizer.json"
        )
    return "Complete the folder, or name another one with MINT_MODELS=name=path"


def _is_path(target: str) -> bool:
    """Whether this can only be meant as a path, not as the name of a model."""
    return target.startswith(("/", "~", "./", "../")) or target.lower().endswith(".gguf")


def _not_there(name: str, target: str) -> UnknownBaseModelError:
    if not _is_path(target):
        remedy = (
            f"If {target} is a model of the hub, download it with `mint models pull {target}`. If it is a folder or a "
            ".gguf file, let MINT_MODELS give its absolute path"
        )
        return UnknownBaseModelError(
            f"stands for {target}, which is not on this machine", field="base_model", value=name, remedy=remedy
        )
    what = "does not exist" if target == name else f"stands for {target}, which does not exist"
    try:
        if Path(target).expanduser().exists():
            what = what.replace("does not exist", "is neither a folder nor a .gguf file")
    except (OSError, ValueError, RuntimeError):  # too long, a NUL byte, or `~` of an unknown user
        pass
    return UnknownBaseModelError(
        what, field="base_model", value=name, remedy="Give the path of a Hugging Face folder or of a .gguf file"
    )


def _remedy(name: str, similar: Sequence[str]) -> str:
    """What to do about an unknown name. `mint/…` can only be a bundled model; another one may be on the hub."""
    guess = f"Did you mean {similar[0]}?" if similar else ""
    if is_bundled_name(name):
        return guess or f"The bundled models are {', '.join(BUNDLED)}"
    return f"{guess} {_how_to_add(name)}".lstrip()


def is_bundled_name(name: str) -> bool:
    """Whether a name can only mean a base model in the package."""
    return name.startswith("mint/")


def _how_to_add(name: str) -> str:
    wanted = name if _HUB_NAME.fullmatch(name) and name[0] != "." else "NAME"
    return (
        f"If it is a model of the hub, download it with `mint models pull {wanted}`. If it is a Hugging Face folder or "
        "a .gguf file, there is none of this name in the working directory of mint: give its absolute path, or a name "
        "with MINT_MODELS=name=path"
    )


def missing_files(folder: Path) -> list[str]:
    """The files that a Hugging Face folder lacks to be usable here, in words.

    Raises:
        InvalidRequestError: the index of its weights is damaged.
    """
    missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    return [*missing, *_missing_weights(folder)]


def _missing_weights(folder: Path) -> list[str]:
    if (folder / "model.safetensors").is_file():
        return []
    if not (folder / INDEX_FILE).is_file():
        return [f"model.safetensors (or {INDEX_FILE} with its shards)"]
    return [shard for shard in shard_names(folder) if not (folder / shard).is_file()]


def shard_names(folder: Path) -> list[str]:
    """The weight files that the index in `folder` names, sorted; they need not be there.

    A folder may come from anyone, so that an index may not lead out of it.

    Raises:
        InvalidRequestError: the index is damaged, or names a file that is not directly in the folder.
    """
    path = folder / INDEX_FILE
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, f"cannot be read: {error}") from error
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not names:
        raise _damaged(path, "has no weight_map that gives each tensor the name of its file")
    for tensor, name in names.items():
        # Only the name counts: a file in the cache of Hugging Face is a link to one elsewhere.
        if not isinstance(name, str) or name in ("", ".", "..") or any(sign in name for sign in "/\\\0"):
            raise _damaged(path, f"gives the tensor {tensor} the file {name!r}, which is no name of a file beside it")
    return sorted(set(names.values()))


def _damaged(path: Path, problem: str) -> InvalidRequestError:
    remedy = "Copy or download the model again"
    return InvalidRequestError(problem, field="base_model", value=str(path), remedy=remedy)


def _follow(name: str, aliases: Mapping[str, str]) -> str:
    seen = [name]
    while seen[-1] in aliases:
        target = aliases[seen[-1]]
        if target == seen[-1]:  # `name=name` only offers the name
            return target
        if target in seen:
            raise InvalidRequestError(
                f"leads back to itself: {' -> '.join([*seen, target])}",
                field="MINT_MODELS",
                value=name,
                remedy="Let the chain end at a bundled model, a folder, or a cached Hugging Face id",
            )
        seen.append(target)
    return seen[-1]


def _local_folder(target: str) -> Path | None:
    try:
        path = Path(target).expanduser().resolve()
        return path if target and path.is_dir() else None
    except (OSError, ValueError, RuntimeError):  # too long, a NUL byte, or `~` of an unknown user
        return None


def gguf_file(name: str, aliases: Mapping[str, str]) -> Path | None:
    """The GGUF file that `name` stands for, so that its header can be read without a conversion; None where
    `resolve` takes something else.

    Raises:
        InvalidRequestError: an alias leads back to itself.
    """
    target = _follow(name, aliases)
    if target in BUNDLED or _local_folder(target) is not None:
        return None
    fetched = INDEX_MODELS.get(target)
    if fetched is None or not fetched.file.is_file():
        return _gguf_path(target)
    return fetched.file if _cached_folder(target) is None else None


def _gguf_path(target: str) -> Path | None:
    try:
        path = Path(target).expanduser().resolve()
        return path if path.suffix.lower() == ".gguf" and path.is_file() else None
    except (OSError, ValueError, RuntimeError):
        return None


def _from_gguf(target: str) -> Path | None:
    path = _gguf_path(target)
    return None if path is None else gguf_folder(path)


def hub_settings() -> Any:
    """The module `huggingface_hub.constants`: what the library has read from the environment.

    Raises:
        InvalidRequestError: HF_ENDPOINT is no address, so that no part of the library can be imported.
        ImportError: the library is not installed.
    """
    try:
        from huggingface_hub import constants  # deferred: 0.3 s, and absent from installs that use folders only
    except ValueError as error:
        raise InvalidRequestError(
            f"is no address, or another variable of the hub is wrong ({error})",
            field="HF_ENDPOINT",
            remedy="Write it as https://HOST, or unset it",
        ) from error
    return constants


def _cached_folder(target: str) -> Path | None:
    try:
        hub_settings()
        # Deferred: 0.3 s, and absent from installs that use folders only.
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ImportError:
        return None
    try:
        found = snapshot_download(
            target, local_files_only=True, allow_patterns=list(HUB_FILES), ignore_patterns=list(HUB_COPIES)
        )
        return Path(found)
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def _fetched_folder(target: str) -> Path | None:
    model = INDEX_MODELS.get(target)
    return gguf_folder(model.file) if model is not None and model.file.is_file() else None
