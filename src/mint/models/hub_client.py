"""The HTTP client with which `huggingface_hub` asks the hub: it waits only so long, and takes only hashes as names.

The library asks for the list of a model's files without a time limit. Here its limit for downloads, 10 seconds or
HF_HUB_DOWNLOAD_TIMEOUT, holds for all requests: so long a hub may send nothing at all. A slow download sends bytes.

The library names files and folders of its cache by what a hub calls their hashes, and does not look at them. A hub that
says `../../name` would have a file written outside of the cache.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from functools import cache
from http import HTTPStatus
from typing import Any

from mint.errors import InvalidRequestError

_HASH = re.compile(r"[0-9a-fA-F]{40,128}")
_ASKED = "mint_asked"  # the path of the first request, which stays that of the requests to which it is redirected
_API = "/api/models/"
_WAITS = ("connect", "read", "write", "pool")


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
            value=os.environ.get("HF_ENDPOINT"),
            remedy="Write it as https://HOST, or unset it",
        ) from error
    return constants


@cache
def use_careful_client() -> None:
    """Lets `huggingface_hub` ask with this client from now on, in all of this process."""
    patience_s = float(hub_settings().HF_HUB_DOWNLOAD_TIMEOUT)
    from huggingface_hub import get_session, set_client_factory  # deferred as above

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
    """What the library takes from an answer to name files or folders."""
    headers = response.headers
    goes_on = response.is_redirect and "://" not in headers.get("Location", "://")  # the library follows these itself
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
