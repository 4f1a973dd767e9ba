"""`mint models pull`, and the question whether to download a base model that is not on this machine."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.filesize import decimal

from mint.cli.terminal import fail
from mint.errors import InvalidRequestError, MintError, UnknownBaseModelError


def pull(
    name: Annotated[str, typer.Argument(help="its name on the Hugging Face hub: organisation/model")],
    revision: Annotated[str | None, typer.Option(help="a branch, tag or commit; the newest if not given")] = None,
) -> None:
    """Downloads a base model into the Hugging Face cache, or goes on with a download that was interrupted.

    HF_TOKEN, HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE are honoured.
    """
    try:
        _download(name, revision, Console(stderr=True))
    except MintError as error:
        fail(error)


def require_base_model(name: str, console: Console, *, yes: bool) -> None:
    """Returns if a base model is on this machine; else offers to download it, if it is one of the hub.

    With `yes` nothing is asked. A server answers for itself (MINT_BASE_URL): then nothing is checked.

    Raises:
        UnknownBaseModelError: it is not here, and nobody said yes.
        MintError: it cannot be downloaded.
    """
    from mint.config import read_settings
    from mint.models.hub import is_hub_name, plan_download
    from mint.models.registry import resolve

    settings = read_settings()
    if settings.base_url is not None:
        return
    try:
        resolve(name, settings.model_aliases)
    except UnknownBaseModelError as error:
        if not is_hub_name(name):
            raise
        if not yes and not sys.stdin.isatty():
            error.remedy = f"Run `mint models pull {name}`, or add --yes to download it now. {error.remedy}"
            raise
        size = decimal(plan_download(name).size_bytes)
        if not yes and not typer.confirm(f"{name} is not on this machine. Download {size}?", err=True):
            raise InvalidRequestError("is not on this machine", field="base_model", value=name) from error
        _download(name, None, console)


def _download(name: str, revision: str | None, console: Console) -> None:
    from mint.models.hub import download, plan_download

    plan = plan_download(name, revision)
    if plan.files:
        console.print(f"{plan.files} files, {decimal(plan.size_bytes)}", highlight=False)
    folder = download(plan)
    console.print(f"{name} is in {folder}", highlight=False, soft_wrap=True)
