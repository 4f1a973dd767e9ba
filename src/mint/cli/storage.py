"""`mint runs|checkpoints|sessions|models`: what is kept, as tables for people and as JSON for scripts.

With `MINT_BASE_URL` set, the server is asked. Without it, or with `--data-dir`, the data directory is read as its
operator, who sees what everyone owns: no engine is started and no session is touched. Registered by `cli`.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import BaseModel
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from mint.cli.runs import RL_COLUMNS, rl_row, rl_runs, run_folder, show_run_folder
from mint.cli.terminal import fail
from mint.errors import InvalidRequestError, MintError
from mint.rl.tracking.terminal_text import paragraph
from mint.types.records import (
    AccessScope,
    Checkpoint,
    CopyWeightsRequest,
    PageQuery,
    TrainingRun,
)

if TYPE_CHECKING:
    from mint.cli.storage_source import Kept

runs_app = typer.Typer(no_args_is_help=True, help="Training runs: what was trained, from what, and its checkpoints.")
checkpoints_app = typer.Typer(no_args_is_help=True, help="Saved weights: list, publish, keep, copy, move, delete.")
sessions_app = typer.Typer(no_args_is_help=True, help="Sessions, living and ended.")
models_app = typer.Typer(no_args_is_help=True, help="Base models that can be used by name.")

DataDir = Annotated[Path | None, typer.Option(help="read this folder as its operator; MINT_HOME without a server")]
Json = Annotated[bool, typer.Option("--json", help="for scripts: one JSON document")]
Limit = Annotated[int, typer.Option(min=1, max=1000, help="how many at most")]
Offset = Annotated[int, typer.Option(min=0, help="how many to leave out first")]
Accessible = Annotated[bool, typer.Option("--accessible", help="also what others have published")]
CheckpointArgument = Annotated[str, typer.Argument(help="mint://RUN/weights/NAME, or its ckpt_… id")]
Ttl = Annotated[int | None, typer.Option(help="seconds until it is deleted; for good if not given")]

PIPE_WIDTH = 240
"""Where nobody watches, a row is not broken to the width of a terminal."""


# --- commands ----------------------------------------------------------------------------------------------------


@runs_app.command(name="list")
def list_runs(
    limit: Limit = 20,
    offset: Offset = 0,
    accessible: Accessible = False,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Training runs, newest first; and the RL runs whose folders are on this machine."""
    with _kept(data_dir) as kept:
        page = kept.runs(PageQuery(limit=limit, offset=offset, access_scope=_scope(accessible)))
        if as_json:
            document = {"training_runs": [_run_json(run) for run in page.training_runs], "cursor": _plain(page.cursor)}
            _print_json({**document, "rl_runs": rl_runs(data_dir, limit)})
            return
        rows = [
            (
                run.training_run_id,
                run.base_model,
                "" if run.lora_rank is None else str(run.lora_rank),
                run.model_owner,
                _time(run.last_request_time),
                "" if run.last_checkpoint is None else run.last_checkpoint.checkpoint_id,
                "diverged" if run.corrupted else "",
            )
            for run in page.training_runs
        ]
        columns = ("run", "base model", "rank", "owner", "last request (UTC)", "last checkpoint", "")
        _print_table(columns, rows, f"{len(rows)} of {page.cursor.total_count} runs")
        found = rl_runs(data_dir, limit)
        if found:
            _print_table(RL_COLUMNS, [rl_row(run) for run in found], f"RL runs on this machine: {len(found)}")


@runs_app.command(name="show")
def show_run(
    run_id: Annotated[str, typer.Argument(help="as `mint runs list` shows it; or the folder or name of an RL run")],
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """One training run and its checkpoints; or one RL run: state, curve, readings, findings, checkpoints."""
    folder = run_folder(run_id) if data_dir is None else None
    if folder is not None:
        try:
            show_run_folder(folder, as_json=as_json)
        except MintError as error:
            fail(error)
        return
    with _kept(data_dir) as kept:
        run, saved = kept.run(run_id), kept.checkpoints_of(run_id).checkpoints
        if as_json:
            _print_json({**_run_json(run), "checkpoints": [_checkpoint_json(one) for one in saved]})
            return
        _print_facts(
            {
                "run": run.training_run_id,
                "base model": run.base_model,
                "rank": run.lora_rank,
                "owner": run.model_owner,
                "last request": _time(run.last_request_time),
                "metadata": _metadata(run.user_metadata),
                "diverged": "yes: its replay gave other bits" if run.corrupted else None,
            }
        )
        _print_checkpoints(saved, len(saved))


@checkpoints_app.command(name="list")
def list_checkpoints(
    run_id: Annotated[str | None, typer.Argument(help="those of this run; of all runs if not given")] = None,
    limit: Limit = 100,
    offset: Offset = 0,
    accessible: Accessible = False,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Checkpoints, newest first."""
    with _kept(data_dir) as kept:
        if run_id is None:
            page = kept.checkpoints(PageQuery(limit=limit, offset=offset, access_scope=_scope(accessible)))
        else:
            page = kept.checkpoints_of(run_id)
        if as_json:
            cursor = None if page.cursor is None else _plain(page.cursor)
            _print_json({"checkpoints": [_checkpoint_json(one) for one in page.checkpoints], "cursor": cursor})
            return
        total = len(page.checkpoints) if page.cursor is None else page.cursor.total_count
        _print_checkpoints(page.checkpoints, total)


@checkpoints_app.command(name="show")
def show_checkpoint(path: CheckpointArgument, data_dir: DataDir = None, as_json: Json = False) -> None:
    """One checkpoint."""
    with _kept(data_dir) as kept:
        _print_checkpoint(kept.checkpoint(path), as_json)


@checkpoints_app.command(name="delete")
def delete_checkpoints(
    paths: Annotated[list[str], typer.Argument(help="mint://RUN/weights/NAME or ckpt_… ids")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask")] = False,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Deletes checkpoints for good; what already samples or trains goes on."""
    with _kept(data_dir) as kept:
        chosen = [kept.checkpoint(path) for path in paths]
        if not yes:
            for one in chosen:
                typer.echo(f"  {paragraph(one.tinker_path)} ({decimal(one.size_bytes or 0)})", err=True)
            typer.confirm(f"Delete {len(chosen)} of them for good?", abort=True, err=True)
        for one in chosen:
            kept.delete(one.tinker_path)
        if as_json:
            _print_json({"deleted": [one.tinker_path for one in chosen]})
        else:
            _say(f"{len(chosen)} deleted")


@checkpoints_app.command(name="publish")
def publish_checkpoint(path: CheckpointArgument, data_dir: DataDir = None, as_json: Json = False) -> None:
    """Lets everyone who knows its path read it."""
    with _kept(data_dir) as kept:
        kept.publish(path, public=True)
        _print_checkpoint(kept.checkpoint(path), as_json)


@checkpoints_app.command(name="unpublish")
def unpublish_checkpoint(path: CheckpointArgument, data_dir: DataDir = None, as_json: Json = False) -> None:
    """Lets its owner alone read it."""
    with _kept(data_dir) as kept:
        kept.publish(path, public=False)
        _print_checkpoint(kept.checkpoint(path), as_json)


@checkpoints_app.command(name="ttl")
def set_ttl(
    path: CheckpointArgument,
    seconds: Annotated[str, typer.Argument(help="how long from now; `none` keeps it for good")],
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Says how long a checkpoint is kept from now on."""
    with _kept(data_dir) as kept:
        kept.set_ttl(path, _seconds(seconds))
        _print_checkpoint(kept.checkpoint(path), as_json)


@checkpoints_app.command(name="copy")
def copy_checkpoint(
    path: CheckpointArgument,
    project: Annotated[str | None, typer.Option(help="a name to list the copy by")] = None,
    ttl: Ttl = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Copies a checkpoint, one's own or a published one, into a new run of one's own."""
    request = CopyWeightsRequest(source_path=path, destination_project_id=project, ttl_seconds=ttl)
    with _kept(data_dir) as kept:
        _print_checkpoint(kept.checkpoint(kept.copy(request)), as_json)


@checkpoints_app.command(name="download")
def download_checkpoint(
    path: CheckpointArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="the .tar.gz to write, or a folder")] = Path(),
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Writes a checkpoint as a .tar.gz of a PEFT folder."""
    with _kept(data_dir) as kept:
        written = kept.download(path, output)
        if as_json:
            _print_json({"output": str(written), "size_bytes": written.stat().st_size})
        else:
            _say(f"{written} ({decimal(written.stat().st_size)})")


@checkpoints_app.command(name="upload")
def upload_checkpoint(
    file: Annotated[Path, typer.Argument(help="a .tar.gz of a PEFT folder, such as `download` writes")],
    base_model: Annotated[str | None, typer.Option(help="what it belongs to, if it does not say so itself")] = None,
    name: Annotated[str | None, typer.Option(help="what to call it")] = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Makes a checkpoint of an adapter that was trained elsewhere."""
    with _kept(data_dir) as kept:
        _print_checkpoint(kept.checkpoint(kept.upload(file, base_model, name)), as_json)


@sessions_app.command(name="list")
def list_sessions(
    limit: Annotated[int, typer.Option(min=1, max=200, help="how many at most")] = 20,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Sessions, newest first."""
    with _kept(data_dir) as kept:
        found = kept.sessions(limit)
        if as_json:
            _print_json({"sessions": [_plain(session) for session in found]})
            return
        rows = [
            (
                session.session_id,
                session.owner,
                "active" if session.status is not None else "ended",
                session.display_name or "",
                session.project_id,
                _time(session.created_at),
                str(session.checkpoints_count),
                decimal(session.checkpoint_storage_bytes or 0),
            )
            for session in found
        ]
        columns = ("session", "owner", "state", "name", "project", "created (UTC)", "checkpoints", "stored")
        _print_table(columns, rows, f"{len(rows)} sessions")


@sessions_app.command(name="show")
def show_session(
    session_id: Annotated[str, typer.Argument(help="as `mint sessions list` shows it")],
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """The runs and the living samplers of a session."""
    with _kept(data_dir) as kept:
        session = kept.session(session_id)
        if as_json:
            _print_json({"session_id": session_id, **_plain(session)})
            return
        _print_facts(
            {
                "session": session_id,
                "name": session.display_name,
                "metadata": _metadata(session.user_metadata),
                "runs": "\n".join(session.training_run_ids) or "none",
                "samplers": "\n".join(session.sampler_ids) or "none",
            }
        )


@models_app.command(name="list")
def list_models(data_dir: DataDir = None, as_json: Json = False) -> None:
    """Base models that can be used by name; others by path or Hugging Face id."""
    with _kept(data_dir) as kept:
        offered = kept.models()
        if as_json:
            _print_json({"supported_models": [_plain(model) for model in offered]})
            return
        rows = [(model.model_name, str(model.max_context_length or "")) for model in offered]
        _print_table(("model", "context"), rows, f"{len(rows)} models")


# --- output ------------------------------------------------------------------------------------------------------


@contextmanager
def _kept(data_dir: Path | None) -> Generator[Kept]:
    """What there is to ask; whatever goes wrong is one sentence and exit code 1."""
    from mint.cli.storage_source import open_kept  # deferred: loads the SDK, or the database

    try:
        with open_kept(data_dir) as kept:
            yield kept
    except MintError as error:
        fail(error)


def _print_json(document: dict[str, Any]) -> None:
    typer.echo(json.dumps(document, indent=2))


def _plain(record: BaseModel) -> dict[str, Any]:
    return record.model_dump(mode="json")


def _checkpoint_json(one: Checkpoint) -> dict[str, Any]:
    return {"path": one.tinker_path, **_plain(one)}


def _run_json(run: TrainingRun) -> dict[str, Any]:
    last = {"last_checkpoint": run.last_checkpoint, "last_sampler_checkpoint": run.last_sampler_checkpoint}
    return {**_plain(run), **{key: None if one is None else _checkpoint_json(one) for key, one in last.items()}}


def _print_checkpoint(one: Checkpoint, as_json: bool) -> None:
    if as_json:
        _print_json(_checkpoint_json(one))
        return
    _print_facts(
        {
            "path": one.tinker_path,
            "id": one.alias,
            "type": one.checkpoint_type,
            "size": decimal(one.size_bytes or 0),
            "created": _time(one.time),
            "expires": "never" if one.expires_at is None else _time(one.expires_at),
            "published": "yes" if one.public else "no",
            "metadata": _metadata(one.user_metadata),
        }
    )


def _print_checkpoints(saved: Sequence[Checkpoint], total: int) -> None:
    rows = [
        (
            one.tinker_path,
            one.checkpoint_type,
            decimal(one.size_bytes or 0),
            _time(one.time),
            "" if one.expires_at is None else _time(one.expires_at),
            "yes" if one.public else "",
        )
        for one in saved
    ]
    columns = ("checkpoint", "type", "size", "created (UTC)", "expires (UTC)", "published")
    _print_table(columns, rows, f"{len(rows)} of {total} checkpoints")


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False, caption=caption, caption_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(_text(cell) for cell in row))
    _people().print(table)


def _print_facts(facts: dict[str, Any]) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in facts.items():
        if value is not None:
            table.add_row(name, _text(str(value)))
    _people().print(table)


def _say(sentence: str) -> None:
    typer.echo(paragraph(sentence))


def _people() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PIPE_WIDTH)


def _text(text: str) -> Text:
    """As it is: no markup, and no `:train:` that becomes a picture of one."""
    return Text(paragraph(text))


def _metadata(metadata: dict[str, Any] | None) -> str | None:
    return None if metadata is None else json.dumps(metadata)


def _time(moment: datetime) -> str:
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M}"


def _scope(accessible: bool) -> AccessScope:
    return "accessible" if accessible else "owned"


def _seconds(text: str) -> int | None:
    if text.lower() == "none":
        return None
    if text.isascii() and text.isdigit() and len(text) < 12:
        return int(text)
    raise InvalidRequestError(
        "is neither a number of seconds nor `none`", field="seconds", value=text, remedy="Write 3600 or none"
    )
