"""`mint runs|checkpoints|sessions|models`: lists, shows and changes what is stored.

The commands ask the server at `MINT_BASE_URL`. Without that variable, or with `--data-dir`, they read the data
directory as its operator, who sees what everyone owns.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal

from mint.cli.base_models import pull
from mint.cli.run_names import RUN_HELP, Run, complete_run, find_checkpoint, find_run, run_of_model
from mint.cli.runs import RUN_COLUMNS, is_failed_start, newest_runs, run_row, show_run_folder
from mint.cli.storage.tables import (
    checkpoint_json,
    metadata_text,
    print_checkpoint,
    print_checkpoints,
    print_facts,
    print_json,
    print_sentence,
    print_table,
    record_json,
    run_json,
    time_text,
)
from mint.cli.terminal import Json, fail, renamed
from mint.errors import InvalidRequestError, MintError, MissingExtraError, NotFoundError
from mint.runs.terminal_text import counted, paragraph

if TYPE_CHECKING:
    from mint.cli.storage.storage import Storage
    from mint.types.records import CheckpointsListResponse, PageQuery, TrainingRunsResponse

runs_app = typer.Typer(no_args_is_help=True, help="Models that a service trains, and the run folders of this machine.")
checkpoints_app = typer.Typer(
    no_args_is_help=True,
    help="Saved weights: list, publish, keep, copy, move, delete. A CHECKPOINT is mint://MODEL_ID/weights/NAME, a "
    "ckpt_… id, or a run (its last checkpoint): its name, its number or latest.",
)
sessions_app = typer.Typer(no_args_is_help=True, help="Sessions, living and ended.")
models_app = typer.Typer(no_args_is_help=True, help="Base models that can be used by name.")
models_app.command()(pull)

DataDir = Annotated[Path | None, typer.Option(help="read this folder as its operator; MINT_HOME without a server")]
Limit = Annotated[int, typer.Option(min=1, max=1000, help="how many at most")]
Offset = Annotated[int, typer.Option(min=0, help="how many to leave out first")]
Accessible = Annotated[bool, typer.Option("--accessible", help="also what others have published")]
CHECKPOINT_HELP = "mint://MODEL_ID/weights/NAME, a ckpt_… id, a run (its last checkpoint), or latest"
CheckpointArgument = Annotated[
    str, typer.Argument(metavar="CHECKPOINT", help=CHECKPOINT_HELP, autocompletion=complete_run)
]
Ttl = Annotated[int | None, typer.Option(help="seconds until it is deleted; for good if not given")]


@runs_app.command(name="list")
def list_runs(
    limit: Limit = 20,
    offset: Offset = 0,
    accessible: Accessible = False,
    failed_starts: Annotated[
        bool, typer.Option("--failed-starts", help="list runs that ended before their first step, too")
    ] = False,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """The models of the service, newest first; and the runs whose folders are on this machine. `--json` has all."""
    found = _runs_here(data_dir, limit)
    query = _page_query(limit, offset, accessible)
    page = _models_page(query, data_dir, has_runs=bool(found), as_json=as_json)
    made_by = {model: run["name"] for run in found for model in run["models"]}
    if as_json:
        shown = [] if page is None else page.training_runs
        models = [{**run_json(model), "run": made_by.get(model.training_run_id)} for model in shown]
        cursor = None if page is None else record_json(page.cursor)
        print_json({"training_runs": models, "cursor": cursor, "rl_runs": found})
        return
    if page is not None:
        rows = [
            (
                run.training_run_id,
                made_by.get(run.training_run_id, ""),
                run.base_model,
                "" if run.lora_rank is None else str(run.lora_rank),
                run.model_owner,
                time_text(run.last_request_time),
                "" if run.last_checkpoint is None else run.last_checkpoint.checkpoint_id,
                "diverged" if run.corrupted else "",
            )
            for run in page.training_runs
        ]
        columns = ("model", "run", "base model", "rank", "owner", "last request (UTC)", "last checkpoint", "")
        print_table(columns, rows, f"{len(rows)} of {counted(page.cursor.total_count, 'model')}")
    if found:
        left_out = [] if failed_starts else [run["name"] for run in found if is_failed_start(run)]
        rows = [run_row(number, run) for number, run in enumerate(found, 1) if run["name"] not in left_out]
        print_table(RUN_COLUMNS, rows, f"runs on this machine: {len(found)}")
        if left_out:
            names = ", ".join(left_out[:3]) + (", …" if len(left_out) > 3 else "")
            print_sentence(f"{len(left_out)} of them ended before the first step: {names} (--failed-starts lists them)")
        for run in found:
            if run["state"] == "unreadable":
                print_sentence(f"{run['name']} cannot be read. {run['error']}")


def _runs_here(data_dir: Path | None, limit: int) -> list[dict[str, Any]]:
    """The newest runs of this machine; none where numpy is missing, which reads them, and a server is asked."""
    from mint.config import read_settings  # deferred: `mint --help` answers at once

    try:
        return newest_runs(data_dir, limit)
    except ModuleNotFoundError as error:
        if error.name != "numpy" or data_dir is not None or read_settings().base_url is None:
            raise
        return []


def _models_page(
    query: PageQuery, data_dir: Path | None, *, has_runs: bool, as_json: bool
) -> TrainingRunsResponse | None:
    """A page of models; None if there are runs of a server elsewhere, and no service has worked in the folder or
    none is installed that could read it."""
    from mint.cli.storage.storage import open_storage  # deferred: loads the SDK, or the server

    try:
        with open_storage(data_dir) as storage:
            return storage.runs(query)
    except (NotFoundError, MissingExtraError) as error:
        if has_runs:
            return None
        fail(error, as_json=as_json)
    except MintError as error:
        fail(error, as_json=as_json)


@runs_app.command(name="show")
def show_run(
    run: Annotated[str, typer.Argument(help=f"{RUN_HELP}; or a model's id", autocompletion=complete_run)],
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """A model and its checkpoints; or a run: its state, curve, evaluations, findings and checkpoints."""
    try:
        show_run_folder(find_run(run, data_dir, by_model=False), as_json=as_json)
    except NotFoundError as error:
        _show_model(run, data_dir, no_run=error, as_json=as_json)
    except MintError as error:
        fail(error, as_json=as_json)


@runs_app.command(name="stop")
def stop_run(run: Run, data_dir: DataDir = None) -> None:
    """Ends a run after its step, which it saves, as Ctrl-C does."""
    from mint.runs.interrupt import request_stop
    from mint.runs.reader import RunReader  # deferred: `mint --help` answers at once

    try:
        folder = find_run(run, data_dir)
        state = RunReader(folder).summary().state
        if state != "running":
            raise InvalidRequestError(f"is {state}", field="run", value=run, remedy="There is nothing to stop")
        request_stop(folder)
    except MintError as error:
        fail(error, as_json=False)
    typer.echo(f"{folder.name} ends after this step and saves it")


def _show_model(model_id: str, data_dir: Path | None, *, no_run: NotFoundError, as_json: bool) -> None:
    """Prints a model; fails with `no_run` if there is none, because most names are meant for runs."""
    from mint.cli.storage.storage import open_storage  # deferred: loads the SDK, or the server

    try:
        with open_storage(data_dir) as storage:
            model = storage.run(model_id)
            saved = storage.checkpoints_of(model_id).checkpoints
    except NotFoundError:
        fail(no_run, as_json=as_json)
    except MintError as error:
        fail(error, as_json=as_json)
    made_by = run_of_model(model.training_run_id, data_dir)
    if as_json:
        print_json({**run_json(model), "run": made_by, "checkpoints": [checkpoint_json(one) for one in saved]})
        return
    print_facts(
        {
            "model": model.training_run_id,
            "run": made_by,
            "base model": model.base_model,
            "rank": model.lora_rank,
            "owner": model.model_owner,
            "last request": time_text(model.last_request_time),
            "metadata": metadata_text(model.user_metadata),
            "diverged": "yes: its replay gave other bits" if model.corrupted else None,
        }
    )
    print_checkpoints(saved, len(saved))


@checkpoints_app.command(name="list")
def list_checkpoints(
    run: Annotated[
        str | None,
        typer.Argument(help="those of this model or run; all if not given", autocompletion=complete_run),
    ] = None,
    limit: Limit = 100,
    offset: Offset = 0,
    accessible: Accessible = False,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Checkpoints, newest first."""
    with _storage(data_dir, as_json) as storage:
        if run is None:
            page = storage.checkpoints(_page_query(limit, offset, accessible))
        else:
            page = _checkpoints_of(storage, run, data_dir)
        if as_json:
            cursor = None if page.cursor is None else record_json(page.cursor)
            print_json({"checkpoints": [checkpoint_json(one) for one in page.checkpoints], "cursor": cursor})
            return
        total = len(page.checkpoints) if page.cursor is None else page.cursor.total_count
        print_checkpoints(page.checkpoints, total)


def _checkpoints_of(storage: Storage, name: str, data_dir: Path | None) -> CheckpointsListResponse:
    """The checkpoints of a model; or those of a run, of the model that its last process trained."""
    try:
        return storage.checkpoints_of(name)
    except NotFoundError:
        if ":" in name:  # the id of a model
            raise
    last = find_checkpoint(name, data_dir)
    return storage.checkpoints_of(last.partition("://")[2].partition("/")[0])


@checkpoints_app.command(name="show")
def show_checkpoint(path: CheckpointArgument, data_dir: DataDir = None, as_json: Json = False) -> None:
    """One checkpoint."""
    with _storage(data_dir, as_json) as storage:
        print_checkpoint(storage.checkpoint(find_checkpoint(path, data_dir)), as_json)


@checkpoints_app.command(name="delete")
def delete_checkpoints(
    paths: Annotated[
        list[str],
        typer.Argument(metavar="CHECKPOINTS", help=f"{CHECKPOINT_HELP}; one or more", autocompletion=complete_run),
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask")] = False,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Deletes checkpoints for good. Samplers and models that have loaded them continue."""
    with _storage(data_dir, as_json) as storage:
        chosen = [storage.checkpoint(find_checkpoint(path, data_dir)) for path in paths]
        if not yes:
            for one in chosen:
                typer.echo(f"  {paragraph(one.tinker_path)} ({decimal(one.size_bytes or 0)})", err=True)
            typer.confirm(f"Delete {len(chosen)} of them for good?", abort=True, err=True)
        for one in chosen:
            storage.delete(one.tinker_path)
        if as_json:
            print_json({"deleted": [one.tinker_path for one in chosen]})
        else:
            print_sentence(f"{len(chosen)} deleted")


@checkpoints_app.command(name="publish")
def publish_checkpoint(path: CheckpointArgument, data_dir: DataDir = None, as_json: Json = False) -> None:
    """Lets everyone who knows its path read it."""
    with _storage(data_dir, as_json) as storage:
        path = find_checkpoint(path, data_dir)
        storage.publish(path, public=True)
        print_checkpoint(storage.checkpoint(path), as_json)


@checkpoints_app.command(name="unpublish")
def unpublish_checkpoint(path: CheckpointArgument, data_dir: DataDir = None, as_json: Json = False) -> None:
    """Makes it private: only its owner can read it."""
    with _storage(data_dir, as_json) as storage:
        path = find_checkpoint(path, data_dir)
        storage.publish(path, public=False)
        print_checkpoint(storage.checkpoint(path), as_json)


@checkpoints_app.command(name="ttl")
def set_ttl(
    path: CheckpointArgument,
    seconds: Annotated[str, typer.Argument(help="how long from now; `none` keeps it for good")],
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Sets when a checkpoint expires, counted from now."""
    with _storage(data_dir, as_json) as storage:
        path = find_checkpoint(path, data_dir)
        storage.set_ttl(path, _seconds(seconds))
        print_checkpoint(storage.checkpoint(path), as_json)


@checkpoints_app.command(name="copy")
def copy_checkpoint(
    path: CheckpointArgument,
    project: Annotated[str | None, typer.Option(help="a name to list the copy by")] = None,
    ttl: Ttl = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Copies your own or a published checkpoint into a new run of yours."""
    from mint.types.records import CopyWeightsRequest  # deferred: loads numpy and pydantic

    with _storage(data_dir, as_json) as storage:
        source = find_checkpoint(path, data_dir)
        request = CopyWeightsRequest(source_path=source, destination_project_id=project, ttl_seconds=ttl)
        print_checkpoint(storage.checkpoint(storage.copy(request)), as_json)


@checkpoints_app.command(name="download")
def download_checkpoint(
    path: CheckpointArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="the .tar.gz to write, or a folder")] = Path(),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace a file that is there")] = False,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Writes a checkpoint as a .tar.gz of a PEFT folder. For PEFT itself, `mint export` writes LoRAs on the experts of
    GPT-OSS and Qwen3.5-MoE."""
    with _storage(data_dir, as_json) as storage:
        written = storage.download(find_checkpoint(path, data_dir), output, overwrite=overwrite)
        if as_json:
            print_json({"output": str(written), "size_bytes": written.stat().st_size})
        else:
            print_sentence(f"{written} ({decimal(written.stat().st_size)})")


@checkpoints_app.command(name="upload", context_settings=renamed(base_model="model"))
def upload_checkpoint(
    file: Annotated[Path, typer.Argument(help="a .tar.gz of a PEFT folder, such as `download` writes")],
    model: Annotated[str | None, typer.Option(help="its base model, if it does not say so itself")] = None,
    name: Annotated[str | None, typer.Option(help="what to call it")] = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Makes a checkpoint of a lora that was trained elsewhere."""
    with _storage(data_dir, as_json) as storage:
        try:
            uploaded = storage.upload(file, model, name)
        except InvalidRequestError as error:
            if error.field == "file":  # the server knows the archive by no name
                error.value = str(file)
            raise
        print_checkpoint(storage.checkpoint(uploaded), as_json)


@sessions_app.command(name="list")
def list_sessions(
    limit: Annotated[int, typer.Option(min=1, max=200, help="how many at most")] = 20,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Sessions, newest first."""
    with _storage(data_dir, as_json) as storage:
        found = storage.sessions(limit)
        if as_json:
            print_json({"sessions": [record_json(session) for session in found]})
            return
        rows = [
            (
                session.session_id,
                session.owner,
                "open" if session.status is not None else "ended",
                session.display_name or "",
                session.project_id,
                time_text(session.created_at),
                str(session.checkpoints_count),
                decimal(session.checkpoint_storage_bytes or 0),
            )
            for session in found
        ]
        columns = ("session", "owner", "state", "name", "project", "created (UTC)", "checkpoints", "stored")
        print_table(columns, rows, counted(len(rows), "session"))


@sessions_app.command(name="show")
def show_session(
    session_id: Annotated[str, typer.Argument(help="as `mint sessions list` shows it")],
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """The runs and the living samplers of a session."""
    with _storage(data_dir, as_json) as storage:
        session = storage.session(session_id)
        if as_json:
            print_json({"session_id": session_id, **record_json(session)})
            return
        print_facts(
            {
                "session": session_id,
                "name": session.display_name,
                "metadata": metadata_text(session.user_metadata),
                "models": "\n".join(session.training_run_ids) or "none",
                "samplers": "\n".join(session.sampler_ids) or "none",
            }
        )


@sessions_app.command(name="end")
def end_session(
    session_id: Annotated[str, typer.Argument(help="as `mint sessions list` shows it")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask")] = False,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Ends a session for good: its models and unnamed samplers go, and what they keep on the disk. Named checkpoints
    stay."""
    with _storage(data_dir, as_json) as storage:
        found = storage.session(session_id)
        if not yes:
            for name in (*found.training_run_ids, *found.sampler_ids):
                typer.echo(f"  {paragraph(name)}", err=True)
            typer.confirm(f"End session {paragraph(session_id)} for good?", abort=True, err=True)
        has_ended = storage.end_session(session_id)
        if as_json:
            print_json({"session_id": session_id, "state": "ended" if has_ended else "ending"})
        elif has_ended:
            print_sentence(f"session {session_id} has ended")
        else:
            print_sentence(f"session {session_id} is ended within a minute by the process that serves it")


@models_app.command(name="list")
def list_models(data_dir: DataDir = None, as_json: Json = False) -> None:
    """Base models that can be used by name; others by path or Hugging Face id."""
    with _storage(data_dir, as_json) as storage:
        offered = storage.models()
        if as_json:
            print_json({"supported_models": [record_json(model) for model in offered]})
            return
        rows = [(model.model_name, str(model.max_context_length or "")) for model in offered]
        print_table(("model", "context"), rows, counted(len(rows), "model"))


@contextmanager
def _storage(data_dir: Path | None, as_json: bool) -> Generator[Storage]:
    """The storage to ask; prints an error as one sentence, with `as_json` also as JSON, and exits with code 1."""
    from mint.cli.storage.storage import open_storage  # deferred: loads the SDK, or the server

    try:
        with open_storage(data_dir) as storage:
            yield storage
    except MintError as error:
        fail(error, as_json=as_json)


def _page_query(limit: int, offset: int, accessible: bool) -> PageQuery:
    from mint.types.records import PageQuery  # deferred: loads numpy and pydantic

    return PageQuery(limit=limit, offset=offset, access_scope="accessible" if accessible else "owned")


def _seconds(text: str) -> int | None:
    if text.lower() == "none":
        return None
    if text.isascii() and text.isdigit() and len(text) < 12:
        return int(text)
    raise InvalidRequestError(
        "is neither a number of seconds nor `none`", field="seconds", value=text, remedy="Write 3600 or none"
    )
