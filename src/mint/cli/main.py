"""`mint`: registers the commands. Each is in the file of its noun, and imports what is heavy only when it runs."""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from mint.cli import analysis, dashboard, export, runs, serve, train
from mint.cli.bench import bench
from mint.cli.chaos import chaos
from mint.cli.cluster import scale, status, worker
from mint.cli.plan import plan
from mint.cli.recover import recover
from mint.cli.storage import commands as storage
from mint.cli.terminal import fail, renamed
from mint.errors import MintError, MissingExtraError
from mint.extras import install_command
from mint.version import VERSION

LOCAL_COMMANDS = frozenset({"bench", "chaos", "demo", "export", "keys", "plan", "plot", "recover", "worker"})
"""Commands that need more of `mint[local]` than numpy, which `mint[rl]` has."""


EXAMPLES = {
    "bisect": "mint bisect latest",
    "checkpoints delete": "mint checkpoints delete mint://MODEL_ID/weights/NAME",
    "checkpoints show": "mint checkpoints show latest",
    "diagnose": "mint diagnose latest",
    "eval": "mint eval latest math",
    "export": "mint export latest --output folder",
    "keys create": "mint keys create --owner alice",
    "models pull": "mint models pull HuggingFaceTB/SmolLM2-135M-Instruct",
    "plot": "mint plot latest --output curve.png",
    "rollouts": "mint rollouts latest",
    "runs show": "mint runs show latest",
    "runs stop": "mint runs stop latest",
    "train": "mint train rl task=math base_model=mint/tiny",
    "worker": "mint worker --join http://HOST:8500",
}
"""A whole command for whoever left out an argument, or gave one too many."""

UsageError: Any = typer.BadParameter.__base__
"""The error of the command line's parser; typer has no public name for it."""


class _Commands(TyperGroup):
    """The commands; a package that is not installed is one sentence that says what to install."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except MissingExtraError as error:  # from an import of mint's own
            is_numpy = isinstance(error.__cause__, ModuleNotFoundError) and error.__cause__.name == "numpy"
            fail(_missing("numpy", ctx.invoked_subcommand) if is_numpy else error)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] == "mint":
                raise
            fail(_missing(error.name, ctx.invoked_subcommand))
        except UsageError as error:
            if isinstance(error, typer.BadParameter):
                _name_value(error)
            _add_remedy(error)
            raise


def _missing(package: str, command: str | None) -> MissingExtraError:
    """The error for a package that a command imports and that is not installed: the one extra that is enough."""
    remedy = install_command("local")
    if package == "numpy" and command not in LOCAL_COMMANDS:
        remedy += f" to train or serve on this machine; {install_command('rl')} to train on a server and to read runs"
    return MissingExtraError(f"mint {command} needs the package {package}, which is not installed", remedy=remedy)


def _name_value(error: typer.BadParameter) -> None:
    """Says which value an argument must not have; typer only repeats what pydantic says about it."""
    from pydantic import ValidationError

    from mint.types.validation_errors import wording  # deferred: `mint --help` answers at once

    if isinstance(error.__cause__, ValidationError):
        first = error.__cause__.errors()[0]
        value = "" if first["type"] == "value_error" else f"{first['input']!r} "  # its own message has the value
        error.message = f"{value}{wording(first)}"


def _add_remedy(error: Any) -> None:
    """Adds an example where an argument is missing or one too many, and the close name to a value that is no choice."""
    is_missing = isinstance(error, typer.BadParameter) and not error.message
    command = error.ctx.command_path.partition(" ")[2] if error.ctx is not None else ""
    no_choice = re.match(r"'(.*)' is not one of (.*)", error.message)
    if (is_missing or "unexpected extra argument" in error.message) and command in EXAMPLES:
        before = f"{error.message}. " if error.message else ""
        error.message = f"{before}Write for example {EXAMPLES[command]}"
    elif no_choice:
        close = get_close_matches(no_choice[1], re.findall(r"'([^']*)'", no_choice[2]), n=1)
        error.message += f" Did you mean {close[0]}?" if close else ""


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="LoRA fine-tuning and reinforcement learning of language models, on any machine.",
)
app.command(cls=train.DemoCommand)(train.demo)
app.command(cls=train.TrainCommand)(train.train)
app.command()(serve.serve)
app.command()(status)
app.command()(scale)
app.command()(worker)
app.command()(recover)
app.add_typer(serve.keys_app, name="keys")
app.add_typer(storage.models_app, name="models")
app.add_typer(storage.runs_app, name="runs")
app.add_typer(storage.checkpoints_app, name="checkpoints")
app.add_typer(storage.sessions_app, name="sessions")
app.command()(export.export)
app.command()(dashboard.dashboard)
app.command()(runs.rollouts)
app.command()(runs.plot)
app.command(name="eval", context_settings=renamed(seeds="heldout-samples"))(analysis.evaluate)
app.command()(analysis.diagnose)
app.command()(analysis.bisect)
app.command(context_settings=renamed(samples="group-size"))(analysis.doctor)
app.command(context_settings=renamed(group="group-size", tokens="mean-tokens"))(plan)
app.command(context_settings=renamed(prompts="batch-size", group="group-size", new="max-tokens"))(bench)
app.command()(chaos)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mint {VERSION}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version and exit")
    ] = False,
) -> None:
    """LoRA fine-tuning and reinforcement learning of language models, on any machine."""
    from mint.config import unknown_variables  # deferred: `mint --help` answers at once

    try:
        unknown = unknown_variables()
    except MintError as error:
        fail(error)
    if unknown:
        typer.echo(f"warning: {', '.join(unknown)} in the environment: mint reads no such variable", err=True)


if __name__ == "__main__":
    app()
