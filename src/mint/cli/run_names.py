"""One way to name a run in all commands: a folder, a name, the beginning of a name, a number, or `latest`.

Where a command takes a checkpoint, a run stands for the last one that it saved.
"""

from __future__ import annotations

from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

import typer

from mint.errors import InvalidRequestError, MintError, NotFoundError

LATEST = "latest"

RUN_HELP = "a run folder, the name of a run or its beginning, its number in `mint runs list`, or latest"


def complete_run(incomplete: str) -> list[str]:
    """The names of runs that begin so, newest first, for the completion of a shell."""
    try:
        return [name for name in [*newest_folders(), LATEST] if name.startswith(incomplete)]
    except MintError:  # a variable of the environment that cannot be used: the command itself says so
        return []


Run = Annotated[str, typer.Argument(help=RUN_HELP, autocompletion=complete_run)]


def find_run(name: str, data_dir: Path | None = None, *, by_model: bool = True) -> Path:
    """The folder of a run of a data directory (None: `MINT_HOME`).

    `name` is the path of its folder, its whole name, `latest`, the beginning of one name only, its number in
    `mint runs list`, or with `by_model` the id of a model that it trained. The first of these that fits counts.

    Raises:
        NotFoundError: no run fits, or `name` is the path of a base model.
        InvalidRequestError: `name` is the beginning of several names.
    """
    from mint.runs.log import is_run  # deferred: `mint --help` answers at once

    if name and (Path(name) / "config.json").is_file():
        if is_run(Path(name)):
            return Path(name)
        raise NotFoundError(
            "is the folder of a base model, not of a run", field="run", value=name, remedy=_where_runs_are(data_dir)
        )
    folders = newest_folders(data_dir)
    if name in folders:
        return folders[name]
    if name == LATEST and folders:
        return next(iter(folders.values()))
    begun = [run for run in folders if run.startswith(name)] if name else []
    if len(begun) == 1:
        return folders[begun[0]]
    if name.isascii() and name.isdecimal() and 1 <= int(name) <= len(folders):
        return list(folders.values())[int(name) - 1]
    if by_model and (trained := run_of_model(name, data_dir)) is not None:
        return folders[trained]
    if begun:
        names = ", ".join(begun[:5]) + (", …" if len(begun) > 5 else "")
        raise InvalidRequestError(
            "is the beginning of several runs", field="run", value=name, remedy=f"Name one: {names}"
        )
    close = get_close_matches(name, [*folders, LATEST] if folders else [], n=1)
    remedy = f"Did you mean {close[0]}?" if close else _where_runs_are(data_dir)
    raise NotFoundError("is not a run", field="run", value=name or "(empty)", remedy=remedy)


def run_of_model(model: str, data_dir: Path | None = None) -> str | None:
    """The name of the run on this machine that trained a model of the service; None if no run has saved it."""
    from mint.runs.reader import RunReader  # deferred: `mint --help` answers at once

    if ":" not in model:
        return None
    for name, folder in newest_folders(data_dir).items():
        with suppress(MintError):  # a damaged run hides no other
            if model in RunReader(folder).models():
                return name
    return None


def find_checkpoint(name: str, data_dir: Path | None = None) -> str:
    """The path of a checkpoint, or its id: `name` itself if it is one, else the last checkpoint of the run it names.

    Raises:
        NotFoundError: no run fits, or the run has saved no checkpoint.
        InvalidRequestError: `name` is the beginning of several names.
    """
    if "://" in name or name.startswith("ckpt_"):
        return name
    from mint.runs.reader import RunReader  # deferred: `mint --help` answers at once

    try:
        folder = find_run(name, data_dir)
    except NotFoundError as error:
        # A client of a server knows the name that it gave a checkpoint, and no run.
        error.remedy = (
            f"{error.remedy}; `mint checkpoints list` has the whole path of each checkpoint, which you can give instead"
        )
        raise
    saved = RunReader(folder).checkpoints()
    if not saved:
        raise NotFoundError(
            "has saved no checkpoint",
            field="run",
            value=name,
            remedy="Train at least save_every steps, or end it with Ctrl-C",
        )
    return saved[-1]["checkpoint"]


def find_resumed(run_dir: Path) -> Path:
    """The folder of the run that `--run-dir` names for a resume. A folder that exists may hold no run yet.

    Raises:
        NotFoundError: no run fits, and there is no such folder.
        InvalidRequestError: it is the beginning of the names of several runs.
    """
    try:
        return find_run(str(run_dir), by_model=False)
    except NotFoundError as error:
        if run_dir.is_dir():
            return run_dir
        error.field = "--run-dir"
        error.remedy = f"{error.remedy}. Leave out --resume to start a new run in this folder"
        raise
    except InvalidRequestError as error:
        error.field = "--run-dir"
        raise


def newest_folders(data_dir: Path | None = None) -> dict[str, Path]:
    """The run folders of a data directory (None: `MINT_HOME`) by name, the one that was written last first."""
    from mint.dashboard.run_folders import RunFolders, stamp_of  # deferred: `mint --help` answers at once

    folders = RunFolders([_data_folder(data_dir)]).find()
    written = {name: max(changed_ns for _, changed_ns in stamp_of(folder)) for name, folder in folders.items()}
    return dict(sorted(folders.items(), key=lambda run: (-written[run[0]], run[0])))


def _where_runs_are(data_dir: Path | None) -> str:
    return f"`mint runs list` shows the runs below {_data_folder(data_dir) / 'runs'}"


def _data_folder(data_dir: Path | None) -> Path:
    from mint.config import read_settings  # deferred: `mint --help` answers at once

    return data_dir or read_settings().home_dir
