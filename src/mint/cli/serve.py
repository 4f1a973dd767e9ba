"""`mint serve` and `mint keys`: arguments in, one call, something printed. Registered by `cli`."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Generator
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mint.cli.terminal import Json, fail
from mint.errors import InvalidRequestError, MintError

if TYPE_CHECKING:
    from mint.server.callers import Quotas
    from mint.server.store.keys import ApiKeys
    from mint.types.sampling import LogprobsMode

keys_app = typer.Typer(no_args_is_help=True, help="API keys of a data directory, also while a server runs there.")

DataDir = Annotated[Path | None, typer.Option(help="where the server's data lies; MINT_HOME if not given")]
LogprobsModeOption = typer.Option(
    help="of samples whose request names none: raw (temperature 1) or processed (as they were drawn)"
)
Quota = typer.Option(help="a limit of this key's owner; the server's default if not given")


def serve(
    host: Annotated[str | None, typer.Option(help="the address to listen on; 127.0.0.1 if not given")] = None,
    port: Annotated[int | None, typer.Option(help="8500 if not given; 0 takes a free one")] = None,
    data_dir: DataDir = None,
    model: Annotated[list[str] | None, typer.Option(help="a base model to serve, NAME[=PATH]; may be repeated")] = None,
    api_keys: Annotated[
        bool | None, typer.Option("--api-keys/--no-api-keys", help="whether callers need a key; yes once one was made")
    ] = None,
    insecure: Annotated[bool | None, typer.Option("--insecure", help="listen beyond this machine without keys")] = None,
    public_url: Annotated[str | None, typer.Option(help="how clients reach it behind a proxy: https://NAME")] = None,
    operator: Annotated[
        list[str] | None, typer.Option(help="an owner whose keys open dashboard and metrics; may be repeated")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="a TOML file; flags and environment come first")] = None,
    log_format: Annotated[str | None, typer.Option(help="console or json")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error")] = None,
    max_body_mb: Annotated[int | None, typer.Option(help="the largest request, in MiB; 64 if not given")] = None,
    logprobs_mode: Annotated[str | None, LogprobsModeOption] = None,
    cluster: Annotated[
        str | None,
        typer.Option(help="several processes train and sample: local (this machine), auto (this Ray), ray://HOST:PORT"),
    ] = None,
    trainers: Annotated[
        int | None, typer.Option(help="with --cluster: how many processes train; 2 if not given")
    ] = None,
    samplers: Annotated[
        int | None, typer.Option(help="with --cluster: how many processes sample; if not given, the server's own does")
    ] = None,
    shard_base: Annotated[
        bool | None,
        typer.Option(help="with --cluster: those that train divide the layers of the base; each needs less memory"),
    ] = None,
    tensor_parallel: Annotated[
        int | None,
        typer.Option(help="cut layers into fixed chunks, which 1, 2, 4 or 8 of those that train compute together"),
    ] = None,
    expert_parallel: Annotated[
        bool | None,
        typer.Option(help="with --cluster: those that train divide the experts of the base, and send each other rows"),
    ] = None,
    reductions: Annotated[
        str | None,
        typer.Option(
            help="with --cluster: exact (the same results on any number of processes), or ordinary (on one number)"
        ),
    ] = None,
    sampler: Annotated[
        list[str] | None,
        typer.Option(
            help="a model server that samples: vllm=http://HOST:PORT, or workers: those that join; may be repeated"
        ),
    ] = None,
    sampler_folder: Annotated[
        Path | None, typer.Option(help="where it reads LoRAs, if it is elsewhere: a folder that both have")
    ] = None,
    mirror: Annotated[
        str | None,
        typer.Option(help="an object storage that gets a copy of the data, seconds later: s3://BUCKET/FOLDER"),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="only say whether it would start; exit code 0 or 1")] = False,
) -> None:
    """Serves the API over HTTP: set MINT_BASE_URL to its address, and loops run there unchanged."""
    from mint.compose import serving
    from mint.config import read_serve_settings

    given = {
        "host": host,
        "port": port,
        "data_dir": data_dir,
        "models": tuple(model or ()) or None,
        "api_keys": api_keys,
        "insecure": insecure,
        "public_url": public_url,
        "operators": tuple(operator or ()) or None,
        "log_format": log_format,
        "log_level": log_level,
        "max_body_mb": max_body_mb,
        "logprobs_mode": logprobs_mode,
        "cluster": cluster,
        "trainers": trainers,
        "samplers": samplers,
        "shard_base": shard_base,
        "tensor_parallel": tensor_parallel,
        "expert_parallel": expert_parallel,
        "reductions": reductions,
        "sampler": ",".join(sampler or ()) or None,
        "sampler_folder": sampler_folder,
        "mirror": mirror,
    }
    try:
        settings = read_serve_settings({name: value for name, value in given.items() if value is not None}, config)
        if check:
            _print_findings(serving.check(settings))
        else:
            serving.serve(settings, announce=typer.echo)
    except MintError as error:
        fail(error)


def _print_findings(findings: list[Any]) -> None:
    table = Table("", "check", "", box=None)
    for finding in findings:
        table.add_row("[green]ok[/green]" if finding.ok else "[red]no[/red]", finding.check, escape(finding.text))
    Console().print(table)
    if not all(finding.ok for finding in findings):
        raise typer.Exit(1)


@keys_app.command()
def create(
    owner: Annotated[str, typer.Option(help="whom the key stands for; several keys may have one owner")],
    data_dir: DataDir = None,
    max_sessions: Annotated[int | None, Quota] = None,
    max_models: Annotated[int | None, Quota] = None,
    max_waiting_requests: Annotated[int | None, Quota] = None,
    max_checkpoint_bytes: Annotated[int | None, Quota] = None,
    logprobs_mode: Annotated[str | None, LogprobsModeOption] = None,
    max_journal_bytes: Annotated[int | None, Quota] = None,
    max_snapshot_bytes: Annotated[int | None, Quota] = None,
    key_stdin: Annotated[bool, typer.Option("--key-stdin", help="register the key on standard input")] = False,
    key_file: Annotated[Path | None, typer.Option(help="register the key in this file")] = None,
    as_json: Json = False,
) -> None:
    """Makes a key and prints it. Only its hash is stored, so it cannot be shown again."""
    from mint.server.callers import Quotas  # deferred: loads the database

    quotas = Quotas(
        max_sessions, max_models, max_waiting_requests, max_checkpoint_bytes, max_journal_bytes, max_snapshot_bytes
    )
    with _opened_keys(data_dir, as_json, make=True) as keys:
        own = _own_key(from_stdin=key_stdin, file=key_file)
        key, row = keys.create(owner, quotas, key=own, logprobs_mode=_logprobs_mode(logprobs_mode))
    if as_json:
        shown = None if own is not None else key
        settings = {"quotas": asdict(row.quotas), "logprobs_mode": row.logprobs_mode}
        typer.echo(json.dumps({"key": shown, "owner": row.owner, "key_id": row.key_id, **settings}))
        return
    people = Console(stderr=True)
    if own is None:
        typer.echo(key)
        people.print("Keep it: it is not shown again. Clients: MINT_API_KEY or TINKER_API_KEY.")
    people.print(
        f"Key {row.key_id} stands for {escape(row.owner)}. A server that runs without keys asks from its next start on."
    )


@keys_app.command(name="list")
def list_keys(data_dir: DataDir = None, as_json: Json = False) -> None:
    """All keys ever made, by how they begin."""
    with _opened_keys(data_dir, as_json, only_read=True) as keys:
        rows = keys.list()
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows]))
        return
    table = Table("owner", "quotas", box=None)
    for name in ("id", "key", "made", "last used", "revoked"):
        table.add_column(name, no_wrap=True)
    for row in rows:
        bounds = ", ".join(f"{name} {value}" for name, value in asdict(row.quotas).items() if value is not None)
        times = (_day(row.created_at), _day(row.last_used_at), _day(row.revoked_at))
        table.add_row(escape(row.owner), bounds, row.key_id, escape(row.hint), *times)
    Console().print(table)


@keys_app.command()
def show(
    key_id: Annotated[str, typer.Argument(help="as `mint keys list` shows it")],
    data_dir: DataDir = None,
    config: Annotated[Path | None, typer.Option(help="the server's TOML file, for the defaults that it sets")] = None,
    as_json: Json = False,
) -> None:
    """The quotas of a key, and how much its owner uses of them. Defaults are those of a server that starts now."""
    with _opened_keys(data_dir, as_json, only_read=True) as keys:
        row = keys.row(key_id)
        used = keys.use_of(row.owner)
        defaults, mode = _defaults(keys, data_dir, config)
    if as_json:
        own_defaults = {**asdict(defaults), "logprobs_mode": mode}
        typer.echo(json.dumps({**asdict(row), "defaults": own_defaults, "used": asdict(used)}))
        return
    table = Table("quota", "limit", "used", title=f"{row.key_id} of {row.owner}", box=None)
    for name, limit in asdict(row.quotas).items():
        use = getattr(used, name)
        shown = f"{getattr(defaults, name):,} (default)" if limit is None else f"{limit:,}"
        table.add_row(name, shown, "" if use is None else f"{use:,}")
    table.add_row("logprobs_mode", row.logprobs_mode or f"{mode} (default)", "")
    Console().print(table)


def _defaults(keys: ApiKeys, data_dir: Path | None, config: Path | None) -> tuple[Quotas, LogprobsMode]:
    """The quotas and the `logprobs_mode` that hold where a key has none of its own."""
    from mint.compose.owner_quotas import default_quotas  # deferred: loads the database
    from mint.config import read_serve_settings
    from mint.server.disk_space import folder_bytes
    from mint.server.limits import MAX_WAITING_REQUESTS

    settings = read_serve_settings({} if data_dir is None else {"data_dir": data_dir}, config)
    free_bytes = shutil.disk_usage(settings.folder).free
    stored_bytes = keys.stored_bytes() + folder_bytes(settings.folder / "snapshots")
    quotas = default_quotas(settings, free_bytes=free_bytes, stored_bytes=stored_bytes)
    return replace(quotas, max_waiting_requests=MAX_WAITING_REQUESTS), settings.logprobs_mode


@keys_app.command()
def update(
    key_id: Annotated[str, typer.Argument(help="as `mint keys list` shows it")],
    data_dir: DataDir = None,
    max_sessions: Annotated[int | None, Quota] = None,
    max_models: Annotated[int | None, Quota] = None,
    max_waiting_requests: Annotated[int | None, Quota] = None,
    max_checkpoint_bytes: Annotated[int | None, Quota] = None,
    logprobs_mode: Annotated[str | None, LogprobsModeOption] = None,
    max_journal_bytes: Annotated[int | None, Quota] = None,
    max_snapshot_bytes: Annotated[int | None, Quota] = None,
    reset: Annotated[bool, typer.Option("--reset", help="first take all back to the server's defaults")] = False,
    as_json: Json = False,
) -> None:
    """Changes settings of a key, also on a server that runs, within a second. What is not given stays as it is."""
    from mint.server.callers import Quotas  # deferred: loads the database

    given = Quotas(
        max_sessions, max_models, max_waiting_requests, max_checkpoint_bytes, max_journal_bytes, max_snapshot_bytes
    )
    with _opened_keys(data_dir, as_json) as keys:
        mode = _logprobs_mode(logprobs_mode)
        row = keys.row(key_id)
        if given == Quotas() and mode is None and not reset:
            names = ", ".join(f"--{name.replace('_', '-')}" for name in [*asdict(given), "logprobs_mode"])
            raise InvalidRequestError(
                "are not given", field="quotas", value="(none)", remedy=f"Give {names}, or --reset"
            )
        kept = mode if reset else mode or row.logprobs_mode
        row = keys.update(key_id, given if reset else given.with_defaults(row.quotas), kept)
    own = {**asdict(row.quotas), "logprobs_mode": row.logprobs_mode}
    shown = ", ".join(f"{name} {value}" for name, value in own.items() if value is not None)
    typer.echo(json.dumps(asdict(row)) if as_json else f"Key {row.key_id} of {row.owner}: {shown or 'no own quotas'}.")


@keys_app.command()
def revoke(
    key_id: Annotated[str, typer.Argument(help="as `mint keys list` shows it")],
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Ends a key within a second, also on a server that runs. Its owner's work stays."""
    with _opened_keys(data_dir, as_json) as keys:
        row = keys.revoke(key_id)
    typer.echo(json.dumps(asdict(row)) if as_json else f"Key {row.key_id} of {row.owner} is revoked.")


def _logprobs_mode(given: str | None) -> LogprobsMode | None:
    if given not in (None, "raw", "processed"):
        raise InvalidRequestError("is no mode", field="--logprobs-mode", value=given, remedy="Give raw or processed")
    return given


def _own_key(*, from_stdin: bool, file: Path | None) -> str | None:
    """A key that the operator has made; never from the command line, where every user of the machine can read it."""
    if from_stdin and file is not None:
        raise InvalidRequestError("cannot be given both", field="--key-stdin", value="--key-file", remedy="Give one")
    if from_stdin:
        return sys.stdin.readline().strip()
    if file is None:
        return None
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        remedy = "Name a text file that holds the key alone"
        raise InvalidRequestError(f"cannot be read: {error}", field="--key-file", value=file, remedy=remedy) from error


@contextmanager
def _opened_keys(
    data_dir: Path | None, as_json: bool, *, make: bool = False, only_read: bool = False
) -> Generator[ApiKeys]:
    """The keys of a data directory; an error in the block ends the command with one sentence."""
    from mint.config import read_settings  # deferred: loads the database
    from mint.server.private_files import open_data_dir
    from mint.server.store.database import Database, OpenFor
    from mint.server.store.journal import JOURNAL_FILE
    from mint.server.store.keys import ApiKeys

    folder = (data_dir or read_settings().home).expanduser().resolve()
    try:
        if make:
            try:
                open_data_dir(folder)
            except OSError as error:
                remedy = "Free disk space, or choose another one"
                raise InvalidRequestError(
                    f"cannot be made: {error}", field="--data-dir", value=folder, remedy=remedy
                ) from error
        elif not (folder / JOURNAL_FILE).is_file():
            remedy = "Give the directory that mint serve uses"
            raise InvalidRequestError("holds no server's data", field="--data-dir", value=folder, remedy=remedy)
        opened_for = OpenFor.READING if only_read else OpenFor.COMMAND
        with closing(Database(folder / JOURNAL_FILE, opened_for)) as database:
            yield ApiKeys(database)
    except MintError as error:
        fail(error, as_json=as_json)


def _day(seconds: float | None) -> str:
    return "" if seconds is None else time.strftime("%Y-%m-%d", time.localtime(seconds))
