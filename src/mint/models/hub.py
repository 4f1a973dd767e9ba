"""Downloads base models from the Hugging Face hub into its standard cache, where `registry.resolve` finds them.

`huggingface_hub` downloads and retries, and reads the user's settings: HF_TOKEN, HF_ENDPOINT (a mirror),
HF_HUB_OFFLINE, HF_HOME. Here: what is worth downloading, whether it fits, whether it arrived whole, and plain errors.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mint.errors import CheckpointError, InvalidRequestError, MintError, UnknownBaseModelError
from mint.models.hub_client import hub_settings, use_careful_client
from mint.models.registry import HUB_COPIES, HUB_FILES, missing_files

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}")


class HubUnreachableError(MintError):
    """The hub does not answer, or must not be asked."""


@dataclass(frozen=True)
class Download:
    """What a download would fetch: the files of a model at a revision that are not in the cache yet."""

    name: str
    revision: str | None
    files: int
    size_bytes: int


def is_hub_name(name: str) -> bool:
    """Whether a name looks like `organisation/model`, and is no path that exists here."""
    return _NAME.fullmatch(name) is not None and not Path(name).exists()


def plan_download(name: str, revision: str | None = None) -> Download:
    """Asks the hub what there is to download. None of it is downloaded yet.

    Raises:
        InvalidRequestError: `name` is no name of the hub, or access to the model must be asked for first.
        UnknownBaseModelError: the hub has no such model or revision.
        HubUnreachableError: the hub cannot be reached.
    """
    if not is_hub_name(name):
        if _NAME.fullmatch(name):
            raise InvalidRequestError(
                "is also a file or folder here, which comes before the hub",
                field="model",
                value=name,
                remedy="Run the command in another folder",
            )
        raise InvalidRequestError(
            "is no name of the hub", field="model", value=name, remedy="Write it as organisation/model"
        )
    files = _snapshot(name, revision, dry_run=True)
    missing = [file for file in files if file.will_download]
    return Download(name, revision, len(missing), sum(file.file_size or 0 for file in missing))


def download(plan: Download) -> Path:
    """Downloads, with progress bars on stderr, and checks the result; returns the folder in the cache.

    Files that an earlier, interrupted download has finished are not fetched again. One that it has only begun is: the
    library gives each try of a file a name of its own.

    Raises:
        InvalidRequestError: the disk has too little space, or the model has no weights as safetensors.
        CheckpointError: a file arrived damaged; it is deleted.
        HubUnreachableError: as `plan_download`.
    """
    cache = Path(hub_settings().HF_HUB_CACHE)
    cache.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(cache).free
    if plan.size_bytes > free:
        raise InvalidRequestError(
            f"needs {_size(plan.size_bytes)}, and {cache} has {_size(free)} left",
            field="model",
            value=plan.name,
            remedy="Make room, or set HF_HOME to a larger disk",
        )
    folder = Path(_snapshot(plan.name, plan.revision, dry_run=False))
    _verify(folder)
    missing = missing_files(folder)
    if missing:
        raise InvalidRequestError(
            f"lacks {', '.join(missing)} on the hub",
            field="model",
            value=plan.name,
            remedy="Choose a model with safetensors and a tokenizer.json",
        )
    return folder


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.1f} GB" if size_bytes >= 10**9 else f"{size_bytes / 1e6:.1f} MB"


def _snapshot(name: str, revision: str | None, *, dry_run: bool) -> Any:
    use_careful_client()
    # Deferred: 0.3 s, and absent from installs that use folders only.
    from huggingface_hub import constants, errors, snapshot_download

    try:
        return snapshot_download(
            name,
            revision=revision,
            allow_patterns=list(HUB_FILES),
            ignore_patterns=list(HUB_COPIES),
            dry_run=dry_run,
        )
    except MintError:
        raise
    except Exception as error:  # its HTTP library's errors are not part of its interface
        cause = error.__cause__ if isinstance(error, errors.DryRunError | errors.LocalEntryNotFoundError) else None
        raise _refusal(name, revision, constants.ENDPOINT, cause or error) from error


def _refusal(name: str, revision: str | None, endpoint: str, error: BaseException) -> MintError:
    """Why there is nothing to download, in words."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return InvalidRequestError(
            "is only for those whom its owner lets in",
            field="model",
            value=name,
            remedy=f"Ask at {endpoint}/{name}, then set HF_TOKEN to a token of your account",
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return UnknownBaseModelError(
            f"is not at {endpoint}, or is private", field="model", value=name, remedy="Check the name, or set HF_TOKEN"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return InvalidRequestError(
            f"is no revision of {name}",
            field="revision",
            value=revision or "main",
            remedy=f"Name a branch, a tag or a commit that {endpoint}/{name} has, or leave it out",
        )
    if isinstance(error, errors.HfHubHTTPError) and error.response.status_code in (401, 403, 404):
        return UnknownBaseModelError(
            f"cannot be had from {endpoint}, which answers {error.response.status_code}",
            field="model",
            value=name,
            remedy="Check the name, the token in HF_TOKEN, and HF_ENDPOINT",
        )
    first = str(error).strip().split("\n")[0] or type(error).__name__
    return HubUnreachableError(
        f"{name} cannot be downloaded from {endpoint}: {first}",
        remedy=f"On a machine with access run `hf download {name} --local-dir DIR`, copy DIR here, and set "
        f"MINT_MODELS={name}=DIR. HF_ENDPOINT names a mirror",
    )


def _verify(folder: Path) -> None:
    """Compares the files that the hub names by their SHA-256 (all large ones) with that name."""
    for link in folder.rglob("*"):
        file = link.resolve()
        if not link.is_file() or _SHA256.fullmatch(file.name) is None:
            continue
        with file.open("rb") as content:
            found = hashlib.file_digest(content, "sha256").hexdigest()
        if found != file.name:
            file.unlink()
            link.unlink(missing_ok=True)
            raise CheckpointError(f"{link.name} arrived damaged and was deleted", remedy="Download it again")
