"""`mint chaos`: breaks servers and programs on this machine on purpose, and says whether anything was lost."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mint.cli.terminal import Json, fail
from mint.errors import InvalidRequestError, MintError

if TYPE_CHECKING:
    from mint.chaos.campaign import CampaignReport

ALL, NONE = "all", "none"


def chaos(
    kills: Annotated[int, typer.Option(min=0, help="SIGKILLs at random times and points")] = 100,
    seed: Annotated[int, typer.Option(min=0, help="of the random kills; the same seed, the same cases")] = 0,
    points: Annotated[bool, typer.Option("--points/--no-points", help="a kill at every point, too")] = True,
    faults: Annotated[str, typer.Option(help="other faults: all, none, or some with commas (disk-full,clock)")] = ALL,
    case: Annotated[list[str] | None, typer.Option(help="run only this case, as a report prints it; repeat")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="a few kills, in a minute")] = False,
    at_once: Annotated[int | None, typer.Option(min=1, help="cases at once; one per core if not given")] = None,
    keep: Annotated[Path | None, typer.Option(help="a new folder, in which violated cases are kept")] = None,
    as_json: Json = False,
) -> None:
    """Kills mint again and again while it trains, fills its disk, turns its clock; all results must have the same bits.

    Everything happens in processes and folders of its own. Exit code 1 if anything was lost, doubled or changed.
    """
    from mint.chaos.campaign import Campaign, quick_cases  # deferred: `mint --help` answers at once
    from mint.chaos.faults import read_case
    from mint.chaos.plan import OTHER_FAULTS

    people = Console(stderr=True, highlight=False)
    try:
        names = _names(faults, list(OTHER_FAULTS))
        cases = [read_case(line) for line in case or ()]
        if keep is not None:
            _make(keep)
        with tempfile.TemporaryDirectory(prefix="mint-chaos-") as temporary:
            campaign = Campaign(
                keep or Path(temporary),
                seed=seed,
                at_once=at_once or os.cpu_count() or 1,
                keep=keep is not None,
                say=lambda line: people.print(line, markup=False, emoji=False, soft_wrap=True),
            )
            if cases or quick:
                report = campaign.run_cases("cases", cases or quick_cases())
            else:
                report = campaign.run(kills=kills, every_point=points, faults=names)
    except MintError as error:
        fail(error, as_json=as_json)
    if as_json:
        typer.echo(json.dumps(report.as_json()))
    else:
        print_report(Console(highlight=False), report)
    raise typer.Exit(0 if report.passed else 1)


def print_report(console: Console, report: CampaignReport) -> None:
    """The table for people, and a line for each violated case that runs it again."""
    table = Table("", "cases", "kills", "same bits", "longest recovery", "s per case", box=None)
    for part in report.parts:
        number, longest = len(part.outcomes), part.longest_recovery_s
        table.add_row(
            part.name,
            str(number),
            str(sum(outcome.kills for outcome in part.outcomes)),
            f"{number - len(part.violated)} of {number}",
            "" if longest is None else f"{longest:.1f} s",
            f"{sum(outcome.seconds for outcome in part.outcomes) / max(1, number):.1f}",
        )
    console.print(table)
    for outcome in report.outcomes:
        for violation in outcome.violations:
            console.print(f"[red]violated[/red] {escape(violation)}", emoji=False, soft_wrap=True)
        if outcome.violations:
            console.print(
                f"  again: mint chaos --case '{outcome.case}' --keep FOLDER", markup=False, emoji=False, soft_wrap=True
            )
    for name in report.never_reached:
        console.print(f"[red]never reached[/red] {name}")
    if report.left_out:
        console.print(f"[yellow]no random kill[/yellow] of {', '.join(report.left_out)}: too few --kills")
    verdict = "[green]nothing was lost[/green]" if report.passed else "[red]not sound[/red]"
    console.print(
        f"{verdict}: {report.kills} kills, {len(report.points)} points with {report.pairs} kinds of work, "
        f"seed {report.seed}, {report.seconds:.0f} s"
    )


def _names(text: str, known: list[str]) -> list[str]:
    if text in (ALL, NONE):
        return known if text == ALL else []
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise InvalidRequestError(
                "is not a fault", field="--faults", value=name, remedy=f"One of {', '.join(known)}, {ALL}, {NONE}"
            )
    return names


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise InvalidRequestError(
            f"cannot be made: {error}", field="--keep", value=folder, remedy="Name a folder that does not exist"
        ) from error
