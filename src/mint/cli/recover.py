"""`mint recover`: lists the models that have stopped, and lets one go on as the operator decides; or brings a data
directory back from its mirror."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mint.cli.terminal import Json, fail
from mint.errors import InvalidRequestError, MintError

if TYPE_CHECKING:
    from mint.engine.protocol import ModelState
    from mint.server.ops.stopped_models import Decided, Decision, StoppedModel


def recover(
    model: Annotated[str | None, typer.Argument(help="a model that has stopped; all are listed if not given")] = None,
    retry: Annotated[bool, typer.Option("--retry", help="try again, and compare as before")] = False,
    accept: Annotated[bool, typer.Option("--accept", help="go on from the state that the replay gives here")] = False,
    at_snapshot: Annotated[
        bool, typer.Option("--at-snapshot", help="go back to the newest sound snapshot; later requests are lost")
    ] = False,
    from_mirror: Annotated[
        str | None, typer.Option(help="bring an empty data directory back from where mint serve --mirror has copied it")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="where the data lies; MINT_HOME if not given")] = None,
    as_json: Json = False,
) -> None:
    """Lists the models that could not be restored with the same bits, or decides how one goes on."""
    from mint.config import read_settings  # deferred: loads the database
    from mint.server.ops import stopped_models

    folder = (data_dir or read_settings().home).expanduser().resolve()
    try:
        if from_mirror is not None:
            if model is not None or retry or accept or at_snapshot:
                remedy = "Bring the data back first, then decide"
                raise InvalidRequestError("takes no other", field="--from-mirror", value=from_mirror, remedy=remedy)
            _restore(from_mirror, folder, as_json)
            return
        decision = _decision(retry=retry, accept=accept, at_snapshot=at_snapshot)
        if decision is None:
            found = stopped_models.stopped_models(folder, _is_sound)
            _list(found if model is None else [_find(found, model)], as_json)
        elif model is None:
            raise InvalidRequestError("is missing", field="MODEL", value="(none)", remedy="`mint recover` lists them")
        else:
            _report(stopped_models.decide(folder, model, decision, _is_sound), as_json)
    except MintError as error:
        fail(error, as_json=as_json)


def _restore(url: str, folder: Path, as_json: bool) -> None:
    from mint.server.mirror.objects import open_objects  # deferred: loads the database
    from mint.server.mirror.restore import restore

    restored = restore(open_objects(url, field="--from-mirror"), folder, url=url)
    if as_json:
        typer.echo(json.dumps({"data_dir": str(folder), **asdict(restored)}))
        return
    typer.echo(
        f"{folder} has the state of {restored.taken} again: the journal and {restored.files} files, "
        f"{restored.size_bytes / (1 << 20):.1f} MiB. What was accepted after that is lost."
    )


def _decision(*, retry: bool, accept: bool, at_snapshot: bool) -> Decision | None:
    from mint.server.ops.stopped_models import Decision  # deferred: loads the database

    choices = {Decision.RETRY: retry, Decision.ACCEPT: accept, Decision.AT_SNAPSHOT: at_snapshot}
    given = [decision for decision, is_given in choices.items() if is_given]
    if len(given) > 1:
        value = " and ".join(f"--{decision}" for decision in given)
        raise InvalidRequestError("exclude each other", field="options", value=value, remedy="Give one of them")
    return given[0] if given else None


def _is_sound(state: ModelState, digest: str) -> bool:
    """Whether the arrays have this digest; True for one of a form that only an engine can compute."""
    if not digest.startswith("b1:"):
        return True
    from mint.engine.state_digest import digest_of_state  # deferred: loads torch

    return digest_of_state(state) == digest


def _find(found: list[StoppedModel], model: str) -> StoppedModel:
    for one in found:
        if one.model_id == model:
            return one
    remedy = "`mint recover` without a model lists those that have"
    raise InvalidRequestError("has not stopped, or is not a model here", field="model", value=model, remedy=remedy)


def _list(found: list[StoppedModel], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"stopped_models": [asdict(one) for one in found]}))
        return
    if not found:
        typer.echo("No model has stopped.")
    for one in found:
        typer.echo(f"{one.model_id} of {one.owner}: {one.reason}")
        typer.echo(f"  newest sound snapshot: {_snapshot(one)}; done since: {_requests(one)}")
        if one.obstacle is not None:
            typer.echo(f"  these cannot be replayed: {one.obstacle}")
    if found:
        typer.echo("Change back what had changed, and use --retry; or --accept; or --at-snapshot: docs/operations.md")


def _report(decided: Decided, as_json: bool) -> None:
    stopped = decided.stopped
    if as_json:
        document = {"decision": decided.decision, "checkpoint": decided.checkpoint}
        typer.echo(json.dumps({**document, **asdict(stopped)}))
        return
    sentences = {
        "retry": "is restored at its next request, and must give what was acknowledged",
        "accept": f"goes on from what the replay gives here. What was acknowledged may differ: {_requests(stopped)}",
        "at-snapshot": f"goes back to {_snapshot(stopped)}. Acknowledged, and lost now: {_requests(stopped)}",
    }
    typer.echo(f"{stopped.model_id} {sentences[decided.decision]}")
    if decided.decision != "retry":
        typer.echo(
            "It is restored at its next request, on the weights, dtype, quantization and kernels that its base model "
            "has then. If its LoRA does not fit that base model, it stops again"
        )
    if decided.checkpoint is not None:
        typer.echo(f"A program that starts anew can load {decided.checkpoint}")


def _snapshot(stopped: StoppedModel) -> str:
    if stopped.snapshot is None:
        return "none"
    return "the new model" if stopped.snapshot == 0 else f"the state after request {stopped.snapshot}"


def _requests(stopped: StoppedModel) -> str:
    return ", ".join(f"{request.seq_id} ({request.kind})" for request in stopped.requests) or "no request"
