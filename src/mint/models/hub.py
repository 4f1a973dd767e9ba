"""Downloads base models from the Hugging Face hub into its standard cache, where `registry.resolve` finds them.

`huggingface_hub` downloads and retries, and reads the user's settings: HF_TOKEN, HF_ENDPOINT (a mirror),
HF_HUB_OFFLINE, HF_HOME. Here: what is worth downloading, whether it fits, whether it arrived whole, and plain errors.

The library waits without a limit for the list of a model's files. Here its limit for downloads, 10 seconds or
HF_HUB_DOWNLOAD_TIMEOUT, holds for all requests: so long a hub may send nothing at all. And it names files and folders
of its cache by what a hub calls their hashes, and does not look at them: a hub that says `../../name` would have a file
written elsewhere.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mint.errors import CheckpointError, InvalidRequestError, MintError, UnknownBaseModelError
from mint.models.registry import HUB_COPIES, HUB_FILES, hub_settings, missing_files

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_HASH = re.compile(r"[0-9a-fA-F]{40,128}")
_ASKED = "mint_asked"  # the path of the first request, which stays that of the requests to which it is redirected
_API = "/api/models/"
_WAITS = ("connect", "read", "write", "pool")
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
    _use_careful_client()
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
    if revision is not None and isinstance(error, errors.RevisionNotFoundError):
        return InvalidRequestError(
            f"is no revision of {name}",
            field="revision",
            value=revision,
            remedy=f"Name a branch, a tag or a commit that {endpoint}/{name} has, or leave it out",
        )
    if isinstance(error, errors.HfHubHTTPError) and error.response.status_code in (401, 403, 404):
        return UnknownBaseModelError(
            f"cannot be had from {endpoint}, which answers {error.response.status_code}",
            field="model",
            value=name,
            remedy="Check the name, the token in HF_TOKEN, and HF_ENDPOINT",
        )
    chosen = "" if revision is None else f" --revision {shlex.quote(revision)}"
    remedy = (
        f"On a machine with access run `hf download {name}{chosen} --local-dir DIR`, copy DIR here, and set "
        f"MINT_MODELS={name}=DIR"
    )
    if hub_settings().HF_HUB_OFFLINE:
        return HubUnreachableError(
            f"{name} cannot be downloaded, because HF_HUB_OFFLINE is set", remedy=f"Unset it. Or else: {remedy}"
        )
    first = str(error).strip().split("\n")[0] or type(error).__name__
    return HubUnreachableError(
        f"{name} cannot be downloaded from {endpoint}: {first}", remedy=f"{remedy}. HF_ENDPOINT names a mirror"
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


# --- how the library asks --------------------------------------------------------------------------------------------


@cache
def _use_careful_client() -> None:
    """Lets `huggingface_hub` ask with this client from now on, in all of this process."""
    patience_s = float(hub_settings().HF_HUB_DOWNLOAD_TIMEOUT)
    from huggingface_hub import get_session, set_client_factory  # deferred: 0.3 s

    made_by_library = get_session()
    client = type(made_by_library)  # of httpx or httpx2, as the version of the library has it
    before = made_by_library.event_hooks

    def prepare(request: Any) -> None:
        # `timeout=None` of a request comes before the client's own timeout
        limits = request.extensions.get("timeout", {})
        request.extensions.setdefault(_ASKED, request.url.path)
        request.extensions["timeout"] = {name: limits.get(name) or patience_s for name in _WAITS}

    hooks = {"request": [*before["request"], prepare], "response": [*before["response"], _require_hashes]}
    set_client_factory(lambda: client(event_hooks=hooks, follow_redirects=True, timeout=patience_s))


def _require_hashes(response: Any) -> None:
    """Refuses an answer that names a commit or a file by something that is no hash."""
    for name in _names(response):
        if name is not None and _HASH.fullmatch(str(name)) is None:
            raise InvalidRequestError(
                f"answers with {str(name)[:80]!r} in place of a hash, and files are stored under it",
                field="HF_ENDPOINT",
                value=f"{response.request.url.scheme}://{response.request.url.netloc.decode()}",
                remedy="Let HF_ENDPOINT name the hub, or a mirror that you trust",
            )


def _names(response: Any) -> Iterator[Any]:
    """The values of an answer by which the library names files or folders."""
    headers = response.headers
    # The library follows a redirect within the hub, and takes names only from what is behind it.
    goes_on = response.is_redirect and not urlsplit(headers["Location"]).netloc
    if response.request.method == "HEAD" and "X-Repo-Commit" in headers and not goes_on:
        yield headers["X-Repo-Commit"]
        etag = headers.get("X-Linked-Etag") or headers.get("ETag")
        yield None if etag is None else etag.lstrip("W/").strip('"')
    if _API not in response.request.extensions[_ASKED] or response.status_code != HTTPStatus.OK:
        return
    following = headers.get("Link")
    if following is not None and _API not in following:
        yield following  # the next page of the list would not be looked at
    try:
        answer = json.loads(response.read())
    except ValueError:
        return  # the library says what is wrong
    if isinstance(answer, dict):
        yield answer.get("sha")
    elif isinstance(answer, list):
        files = [entry for entry in answer if isinstance(entry, dict)]
        yield from (entry["lfs"].get("oid") for entry in files if isinstance(entry.get("lfs"), dict))
