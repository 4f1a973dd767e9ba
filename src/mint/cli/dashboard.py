"""`mint dashboard`: reads its arguments and starts the server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mint.cli.run_names import find_run
from mint.cli.terminal import fail
from mint.errors import InvalidRequestError, MintError, NotFoundError


def dashboard(
    runs: Annotated[
        list[str] | None, typer.Argument(help="more runs by folder or name, or folders with runs in them")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="the data directory; MINT_HOME if not given")] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free port")] = 8501,
    host: Annotated[str, typer.Option(help="another address requires API keys of the data directory")] = "127.0.0.1",
    open_browser: Annotated[bool, typer.Option("--open", help="open it in a browser")] = False,
    start_runs: Annotated[
        bool, typer.Option("--start-runs", help="let the pages start, resume and evaluate runs of mint's own tasks")
    ] = False,
    task: Annotated[
        list[str] | None,
        typer.Option(help="with --start-runs: another task, path.py:Class or file:PATH; repeatable"),
    ] = None,
) -> None:
    """Shows runs in a browser, during the run and after it.

    `mint serve` shows the runs of its own data directory without this command.
    """
    from mint.compose.dashboard_server import serve_dashboard
    from mint.compose.page_commands import RunCommands
    from mint.config import read_settings  # deferred: `mint --help` answers at once

    try:
        tasks = task or []
        if tasks and not start_runs:
            remedy = "Add --start-runs, or leave it out"
            raise InvalidRequestError("is only for --start-runs", field="--task", value=tasks[0], remedy=remedy)
        extra = [_folder(name, data_dir) for name in runs or []]
        settings = read_settings()
        home = (data_dir or settings.home_dir).expanduser().resolve()
        serve_dashboard(
            home,
            extra,
            host=host,
            port=port,
            open_browser=open_browser,
            commands=RunCommands(settings, home, tasks=tasks) if start_runs else None,
            announce=typer.echo,
        )
    except MintError as error:
        fail(error)


def _folder(name: str, data_dir: Path | None) -> Path:
    """The folder at this path, else the one of the run with this name.

    Raises:
        InvalidRequestError: there is neither.
    """
    folder = Path(name).expanduser()
    if name and folder.is_dir():
        return folder
    try:
        return find_run(name, data_dir)
    except NotFoundError as error:
        raise InvalidRequestError(
            "is not a folder, and no run has this name",
            field="RUNS",
            value=name or "(empty)",
            remedy=f"Name a run folder or a run. {error.remedy}",
        ) from error
