"""The HTTP client with which `huggingface_hub` asks the hub: it waits only so long for an answer.

The library asks for the list of a model's files without a time limit. Here its limit for downloads, 10 seconds or
HF_HUB_DOWNLOAD_TIMEOUT, holds for all requests: so long a hub may send nothing at all. A slow download sends bytes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

_WAITS = ("connect", "read", "write", "pool")


@cache
def use_careful_client() -> None:
    """Lets `huggingface_hub` ask with this client from now on, in all of this process."""
    # Deferred: 0.3 s, and absent from installs that use folders only.
    from huggingface_hub import constants, get_session, set_client_factory

    made_by_library = get_session()
    client = type(made_by_library)  # of httpx or httpx2, as the version of the library has it
    before = made_by_library.event_hooks
    patience_s = float(constants.HF_HUB_DOWNLOAD_TIMEOUT)

    def limit_waiting(request: Any) -> None:
        """For requests that the library sends with `timeout=None`, which comes before the client's own timeout."""
        limits = request.extensions.get("timeout", {})
        request.extensions["timeout"] = {name: limits.get(name) or patience_s for name in _WAITS}

    hooks = {"request": [*before["request"], limit_waiting], "response": before["response"]}
    set_client_factory(lambda: client(event_hooks=hooks, follow_redirects=True, timeout=patience_s))
