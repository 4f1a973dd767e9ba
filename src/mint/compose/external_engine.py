"""Makes the engine of `--sampler`: this process or its ranks train, and model servers sample."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from mint.config import Settings
from mint.engine.protocol import Engine
from mint.errors import InvalidRequestError

if TYPE_CHECKING:
    from mint.cluster.external.engine import ExternalEngine

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def external_engine(settings: Settings, trainer: Engine) -> ExternalEngine:
    """`trainer`, which samples at the addresses that the settings name.

    Raises:
        InvalidRequestError: one of them is on another machine, and no folder is named that both see.
    """
    from mint.cluster.external.engine import ExternalEngine  # deferred: most runs need none of it
    from mint.cluster.external.samplers import ExternalSamplers

    addresses = settings.sampler_addresses
    folder = settings.sampler_folder
    far = [address for address in addresses if urlsplit(address).hostname not in LOOPBACK]
    if far and folder is None:
        raise InvalidRequestError(
            "is on another machine, and is told where loras lie as a path",
            field="sampler",
            value=", ".join(far),
            remedy="Name a folder on a disk that both have under the same path: --sampler-folder DIR",
        )
    folder = None if folder is None else folder.expanduser().resolve()
    samplers = ExternalSamplers(addresses, api_key=settings.sampler_api_key, shared=folder)
    return ExternalEngine(trainer, samplers)
