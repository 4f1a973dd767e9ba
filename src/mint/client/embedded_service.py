"""Opens the service in this process, for clients without the address of a server."""

from __future__ import annotations

from pathlib import Path

from mint.client.session import EmbeddedServer
from mint.errors import MissingExtraError
from mint.extras import install_command


def open_embedded_service(data_dir: Path | None = None) -> EmbeddedServer:
    """The service over `data_dir`; None is the folder of the settings.

    Raises:
        MissingExtraError: this installation is that of a client, and cannot compute.
    """
    try:
        from mint.compose.embedded import open_embedded  # deferred: users of a server may not have it installed
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "mint":
            raise
        raise MissingExtraError(
            f"computing on this machine needs the package {error.name}, which is not installed",
            remedy=f"{install_command('local')} to compute on this machine, or set MINT_BASE_URL to use a server",
        ) from error
    return open_embedded(data_dir=data_dir)
