"""The rest of the matrix: service client, REST client, downloads, errors, the session's life, the command line.

Run inside a tinker SDK's own environment: imports nothing of mint.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from capability import Lab, Refused, case, must_refuse
from data import logprobs_of, loss_of, plain_datum

DAY = timedelta(days=1)


def saved(lab: Lab, name: str = "kept") -> tuple[Any, str, str]:
    """A trainer, and the paths of a training and a sampler checkpoint of it."""
    trainer = lab.trainer()
    state = trainer.save_state(name).result().path
    return trainer, state, trainer.save_weights_for_sampler(name).result().path


@case("Service client", "ServiceClient, get_server_capabilities")
def capabilities(lab: Lab) -> str:
    names = [row.model_name for row in lab.service.get_server_capabilities().supported_models]
    assert lab.base_model in names, names
    return ", ".join(names)


@case("Service client", "a second session beside the first")
def second_session(lab: Lab) -> None:
    other = lab.tinker.ServiceClient(user_metadata={"who": "second"})
    first, second = lab.trainer(), other.create_lora_training_client(base_model=lab.base_model, rank=8)
    assert first.model_id.split(":")[0] != second.model_id.split(":")[0]


@case("Service client", "close", needs="ServiceClient.close")
def close(lab: Lab) -> None:
    other = lab.tinker.ServiceClient()
    other.create_sampling_client(base_model=lab.base_model)
    other.close("success", detail="done").result()


@case("Service client", "with ServiceClient() as …", needs="ServiceClient.__exit__")
def context(lab: Lab) -> None:
    with lab.tinker.ServiceClient() as other:
        trainer = other.create_lora_training_client(base_model=lab.base_model, rank=8)
        assert loss_of(trainer.forward([plain_datum(lab.types)], "cross_entropy").result()) > 0


@case("Service client", "copy_weights (service client)", needs="ServiceClient.copy_weights")
def service_copy(lab: Lab) -> str:
    _trainer, state, _sampler = saved(lab)
    path = lab.tinker.ServiceClient(project_id="matrix").copy_weights(state).result()
    trainer = lab.service.create_training_client_from_state(path)
    assert loss_of(trainer.forward([plain_datum(lab.types)], "cross_entropy").result()) > 0
    return "a new checkpoint"


@case("Service client", "create_custom_loss, forward_backward_custom with it", needs="ServiceClient.create_custom_loss")
def custom_loss(lab: Lab) -> str:
    def negated(logprobs: Any) -> Any:
        loss = -logprobs.sum()
        return loss, {"custom/negated:sum": loss}

    handle = lab.service.create_custom_loss(negated, {"logprobs": 1}).result()
    trainer = lab.trainer()
    data = [plain_datum(lab.types)]
    expected = -logprobs_of(trainer.forward(data, "cross_entropy").result()).sum()
    measured = trainer.forward_backward_custom(data, handle).result().metrics["custom/negated:sum"]
    assert abs(measured - expected) < 1e-3, (measured, expected)
    return "computed by the SDK"


@case("REST", "get_training_run, …_by_tinker_path")
def training_run(lab: Lab) -> None:
    trainer, state, _sampler = saved(lab)
    rest = lab.rest()
    run = rest.get_training_run(trainer.model_id).result()
    assert (run.training_run_id, run.base_model, run.lora_rank) == (trainer.model_id, lab.base_model, 8), run
    assert run.last_checkpoint.tinker_path == state, run
    assert rest.get_training_run_by_tinker_path(state).result().training_run_id == trainer.model_id


@case("REST", "list_training_runs (limit, offset)")
def training_runs(lab: Lab) -> None:
    made = {lab.trainer().model_id for _ in range(2)}
    rest = lab.rest()
    page = rest.list_training_runs(limit=2, offset=0).result()
    assert len(page.training_runs) == 2 and page.cursor.total_count >= 2, page
    everything = rest.list_training_runs(limit=100, offset=0).result().training_runs
    assert made <= {row.training_run_id for row in everything}
    other = rest.list_training_runs(limit=2, offset=1).result().training_runs
    assert other[0].training_run_id == page.training_runs[1].training_run_id


@case("REST", "list_checkpoints, list_user_checkpoints")
def checkpoints(lab: Lab) -> None:
    trainer, state, sampler = saved(lab)
    rest = lab.rest()
    rows = rest.list_checkpoints(trainer.model_id).result().checkpoints
    assert {row.tinker_path for row in rows} == {state, sampler}, rows
    kinds = {row.checkpoint_id: row.checkpoint_type for row in rows}
    assert kinds == {"weights/kept": "training", "sampler_weights/kept": "sampler"}, kinds
    everything = rest.list_user_checkpoints(limit=100, offset=0).result().checkpoints
    assert {state, sampler} <= {row.tinker_path for row in everything}


@case("REST", "get_weights_info_by_tinker_path")
def weights_info(lab: Lab) -> None:
    _trainer, state, _sampler = saved(lab)
    info = lab.rest().get_weights_info_by_tinker_path(state).result()
    assert (info.base_model, info.is_lora, info.lora_rank) == (lab.base_model, True, 8), info


@case("REST", "publish_…, unpublish_checkpoint_from_tinker_path")
def publish(lab: Lab) -> None:
    trainer, state, _sampler = saved(lab)
    rest = lab.rest()

    def is_public() -> bool:
        rows = rest.list_checkpoints(trainer.model_id).result().checkpoints
        return next(row.public for row in rows if row.tinker_path == state)

    assert not is_public()
    rest.publish_checkpoint_from_tinker_path(state).result()
    assert is_public()
    rest.unpublish_checkpoint_from_tinker_path(state).result()
    assert not is_public()


@case("REST", "set_checkpoint_ttl_from_tinker_path", needs="RestClient.set_checkpoint_ttl_from_tinker_path")
def ttl(lab: Lab) -> None:
    trainer, state, _sampler = saved(lab)
    rest = lab.rest()

    def expiry() -> Any:
        rows = rest.list_checkpoints(trainer.model_id).result().checkpoints
        return next(row.expires_at for row in rows if row.tinker_path == state)

    rest.set_checkpoint_ttl_from_tinker_path(state, 7200).result()
    left = expiry() - datetime.now(UTC)
    assert timedelta(minutes=115) < left <= timedelta(hours=2), left
    rest.set_checkpoint_ttl_from_tinker_path(state, None).result()
    assert expiry() is None


@case("REST", "delete_checkpoint, …_from_tinker_path")
def delete(lab: Lab) -> None:
    trainer, state, sampler = saved(lab)
    rest = lab.rest()
    rest.delete_checkpoint(trainer.model_id, "weights/kept").result()
    rest.delete_checkpoint_from_tinker_path(sampler).result()
    assert rest.list_checkpoints(trainer.model_id).result().checkpoints == []
    must_refuse(lambda: trainer.load_state(state).result())


@case("REST", "get_session, list_sessions")
def sessions(lab: Lab) -> None:
    trainer = lab.trainer()
    session_id = trainer.model_id.split(":")[0]
    rest = lab.rest()
    assert trainer.model_id in rest.get_session(session_id).result().training_run_ids
    assert session_id in rest.list_sessions(limit=100, offset=0).result().sessions


@case("REST", "get_sampler")
def sampler(lab: Lab) -> None:
    client = lab.sampler()
    client = client.result() if hasattr(client, "result") else client
    found = lab.rest().get_sampler(client._sampling_session_id)
    found = found.result() if hasattr(found, "result") else found
    assert found.base_model == lab.base_model, found


@case("REST", "search_sessions", needs="RestClient.search_sessions")
def search(lab: Lab) -> None:
    session_id = lab.trainer().model_id.split(":")[0]
    found = lab.rest().search_sessions(lab.types.SessionSearchRequest()).result()
    assert session_id in [row.session_id for row in found.sessions], found


@case("REST", "get_server_capabilities (REST)", needs="RestClient.get_server_capabilities")
def rest_capabilities(lab: Lab) -> None:
    names = [row.model_name for row in lab.rest().get_server_capabilities().result().supported_models]
    assert lab.base_model in names


def or_refused(call: Callable[[], Any]) -> str:
    """What an optional call returns; `Refused` where the server declines it in a typed sentence."""
    try:
        return str(call())[:120]
    except Exception as error:
        first = error

        def again() -> Any:
            raise first

        raise Refused(must_refuse(again)) from error


@case("REST", "copy_weights", needs="RestClient.copy_weights")
def rest_copy(lab: Lab) -> str:
    _trainer, state, _sampler = saved(lab)
    return or_refused(lambda: lab.rest().copy_weights(state, "matrix").result())


@case("REST", "assign_session_project", needs="RestClient.assign_session_project")
def project(lab: Lab) -> str:
    session_id = lab.trainer().model_id.split(":")[0]
    return or_refused(lambda: lab.rest().assign_session_project(session_id, "a-project").result())


@case("REST", "export_session_trace", needs="RestClient.export_session_trace")
def trace(lab: Lab) -> str:
    session_id = lab.trainer().model_id.split(":")[0]
    return or_refused(lambda: lab.rest().export_session_trace(session_id).result())


@case("REST", "whoami", needs="RestClient.whoami")
def whoami(lab: Lab) -> str:
    return or_refused(lambda: lab.rest().whoami().result())


@case("REST", "get_audit_log", needs="RestClient.get_audit_log")
def audit(lab: Lab) -> str:
    return or_refused(lambda: lab.rest().get_audit_log().result())


@case("REST", "get_billing_usage", needs="RestClient.get_billing_usage")
def billing(lab: Lab) -> str:
    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    return or_refused(lambda: lab.rest().get_billing_usage(now - DAY, now).result())


@case(
    "REST",
    "get_current_checkpoint_storage_usage",
    needs="RestClient.get_current_checkpoint_storage_usage",
)
def storage(lab: Lab) -> str:
    return or_refused(lambda: lab.rest().get_current_checkpoint_storage_usage().result())


ADAPTER_FILES = {"adapter_config.json", "adapter_model.safetensors"}


@case(
    "Downloads",
    "get_checkpoint_archive_url_from_tinker_path, the tar behind it",
    needs="RestClient.get_checkpoint_archive_url_from_tinker_path",
)
def archive(lab: Lab) -> str:
    _trainer, _state, sampler = saved(lab)
    rest = lab.rest()
    url = rest.get_checkpoint_archive_url_from_tinker_path(sampler).result().url
    with urllib.request.urlopen(url, timeout=60) as answer:
        content = io.BytesIO(answer.read())
    with tarfile.open(fileobj=content, mode="r:*") as opened:
        names = opened.getnames()
    assert {Path(name).name for name in names} >= ADAPTER_FILES, names
    return ", ".join(sorted(names))


@case(
    "Downloads",
    "save_weights_external, get_external_weights_urls, the files behind them",
    needs="TrainingClient.save_weights_external",
)
def external(lab: Lab) -> str:
    trainer = lab.trainer()
    path = trainer.save_weights_external("out", ttl_seconds=3600).result().path
    found = lab.rest().get_external_weights_urls(path).result()
    for url in found.urls.values():
        with urllib.request.urlopen(url, timeout=60) as answer:
            assert answer.read(4)
    assert {Path(name).name for name in found.urls} >= ADAPTER_FILES, found.urls
    return ", ".join(sorted(found.urls))


@case("Errors", "an unknown loss")
def bad_loss(lab: Lab) -> str:
    trainer = lab.trainer()
    sentence = must_refuse(lambda: trainer.forward_backward([plain_datum(lab.types)], "nonsense").result())
    if sentence.startswith("ValidationError"):
        return f"refused by the SDK itself: {sentence}"  # 0.6.0 then waits for ever for the turn that it has lost
    assert loss_of(trainer.forward_backward([plain_datum(lab.types)], "cross_entropy").result()) > 0
    return sentence


@case("Errors", "a token outside the vocabulary: the next call works")
def bad_token(lab: Lab) -> str:
    trainer = lab.trainer()
    bad = plain_datum(lab.types, [40, 10_000_000, 41])
    sentence = must_refuse(lambda: trainer.forward_backward([bad], "cross_entropy").result(), words="10000000")
    assert loss_of(trainer.forward_backward([plain_datum(lab.types)], "cross_entropy").result()) > 0
    return sentence


@case("Errors", "a bad token in a sample request")
def bad_sample(lab: Lab) -> str:
    prompt = lab.types.ModelInput.from_ints([40, 10_000_000])
    params = lab.types.SamplingParams(max_tokens=2)
    return must_refuse(lambda: lab.sampler().sample(prompt, 1, params).result())


@case("Errors", "an unknown base model")
def bad_model(lab: Lab) -> str:
    return must_refuse(
        lambda: lab.service.create_lora_training_client(base_model="nobody/nothing-7B", rank=8).get_info(),
        words="nobody/nothing-7B",
    )


@case("Errors", "an unknown checkpoint")
def bad_path(lab: Lab) -> str:
    trainer = lab.trainer()
    path = trainer.save_state("there").result().path.replace("there", "elsewhere")
    return must_refuse(lambda: trainer.load_state(path).result())


@case("Errors", "a wrong API key")
def bad_key(lab: Lab) -> str:
    right = os.environ["TINKER_API_KEY"]
    os.environ["TINKER_API_KEY"] = "tml-not-a-key-of-this-server"  # 0.6.0 prefers it to an argument
    try:
        return must_refuse(lambda: lab.tinker.ServiceClient().get_server_capabilities(), words="key")
    finally:
        os.environ["TINKER_API_KEY"] = right


def session_of(lab: Lab) -> str:
    return str(lab.trainer().model_id.split(":")[0])


def post(path: str, body: dict[str, Any]) -> int:
    """The status of a raw request with the SDK's own settings."""
    request = urllib.request.Request(
        f"{os.environ['TINKER_BASE_URL']}/api/v1/{path}",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json", "X-API-Key": os.environ["TINKER_API_KEY"]},
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@case("Session", "heartbeats: an idle session stays, an unknown one is 410")
def heartbeat(lab: Lab) -> None:
    trainer = lab.trainer()
    time.sleep(12)  # the SDK beats every 10 s
    assert post("session_heartbeat", {"session_id": session_of(lab)}) == 200
    assert post("session_heartbeat", {"session_id": "nobody"}) in (404, 410)
    assert loss_of(trainer.forward([plain_datum(lab.types)], "cross_entropy").result()) > 0


ABORTED = -signal.SIGABRT
"""How some of these commands end on a busy machine after their work is done: the SDK's transport (pyqwest) aborts while
the interpreter ends, in about one of twenty; over its other transport (httpx), in none of 120."""


def cli(lab: Lab, *arguments: str) -> str:
    """The output of this SDK's command line; a failure is the case's. One that aborted at its end is run again."""
    for _ in range(3):
        done = subprocess.run(
            [str(Path(sys.executable).with_name("tinker")), *arguments],
            capture_output=True,
            text=True,
            timeout=120,
            cwd=lab.work_dir,
            env={**os.environ, "COLUMNS": "250", "NO_COLOR": "1"},
        )
        if done.returncode != ABORTED:
            break
    said = (done.stderr or done.stdout)[-300:]
    assert done.returncode == 0, f"tinker {' '.join(arguments)}: exit {done.returncode}: {said}"
    return done.stdout


@case("Command line", "tinker run list, run info")
def cli_run(lab: Lab) -> None:
    trainer = lab.trainer()
    assert trainer.model_id in cli(lab, "--format", "json", "run", "list")
    assert lab.base_model in cli(lab, "run", "info", trainer.model_id)
    cli(lab, "run", "list", "--limit", "1")


@case("Command line", "tinker checkpoint list, info, publish, unpublish")
def cli_checkpoint(lab: Lab) -> None:
    trainer, state, sampler = saved(lab)
    listed = cli(lab, "--format", "json", "checkpoint", "list", "--run-id", trainer.model_id)
    assert state in listed and sampler in listed
    cli(lab, "checkpoint", "list")
    assert "kept" in cli(lab, "checkpoint", "info", state)
    cli(lab, "checkpoint", "publish", state)
    cli(lab, "checkpoint", "unpublish", state)


@case("Command line", "tinker checkpoint delete --yes")
def cli_delete(lab: Lab) -> str:
    trainer, state, sampler = saved(lab)
    detail = ""
    try:
        cli(lab, "checkpoint", "delete", state, "--yes")
        cli(lab, "checkpoint", "delete", sampler, "--yes")
    except AssertionError as error:
        if "unexpected extra argument" not in str(error):
            raise
        detail = "with --run-id; by path this SDK calls its own `list` command by mistake"
        cli(lab, "checkpoint", "delete", "--run-id", trainer.model_id, "--yes")
    assert lab.rest().list_checkpoints(trainer.model_id).result().checkpoints == []
    return detail


@case("Command line", "tinker checkpoint download")
def cli_download(lab: Lab) -> str:
    trainer = lab.trainer()
    state = trainer.save_state("down").result().path
    target = lab.work_dir / "download"
    target.mkdir()
    cli(lab, "checkpoint", "download", state, "--output", str(target))
    names = {path.name for path in target.rglob("*") if path.is_file()}
    assert names >= ADAPTER_FILES, names
    return ", ".join(sorted(names))


@case("Command line", "tinker checkpoint set-ttl", needs="RestClient.set_checkpoint_ttl_from_tinker_path")
def cli_ttl(lab: Lab) -> None:
    _trainer, state, _sampler = saved(lab)
    cli(lab, "checkpoint", "set-ttl", state, "--ttl", "7200")
    cli(lab, "checkpoint", "set-ttl", state, "--remove")


@case("Command line", "tinker model list, auth status", needs="RestClient.get_server_capabilities")
def cli_models(lab: Lab) -> None:
    assert lab.base_model in cli(lab, "model", "list")
    cli(lab, "auth", "status")


@case("Command line", "tinker version")
def cli_version(lab: Lab) -> str:
    return cli(lab, "version").strip()
