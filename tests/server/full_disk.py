"""What happens on a disk without a free byte: `python full_disk.py SCENE DISK`, where DISK is a small disk of its own.

Run by `test_full_disk_commands.py`, in a namespace in which it can mount one. An assertion that fails ends it.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

sys.path[:0] = [
    str(Path(__file__).parents[2]),
    str(Path(__file__).parents[1]),
    str(Path(__file__).parents[1] / "service"),
]

from service_harness import GOOD_PASS, STEP, Harness, failure, make_sampler, open_service  # noqa: E402
from waiting import HANG_S, wait_until  # noqa: E402

from mint.cli.main import app  # noqa: E402
from mint.errors import JournalError  # noqa: E402
from mint.server.store.journal import JOURNAL_FILE, Journal  # noqa: E402
from tests.server.server_harness import API, Person, make_key, pass_input, running  # noqa: E402

SPARE_FILE = "journal.spare"


def free_bytes(disk: Path) -> int:
    found = os.statvfs(disk)
    return found.f_bavail * found.f_frsize


def fill(disk: Path) -> None:
    with (disk / "filler").open("ab", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as error:
            assert error.errno == errno.ENOSPC
    assert free_bytes(disk) == 0


def mint(data: Path, *arguments: str) -> Any:
    answer = CliRunner().invoke(app, [*arguments, "--data-dir", str(data), "--json"])
    assert answer.exit_code == 0, answer.output
    return json.loads(answer.stdout)


def refused(data: Path, *arguments: str) -> None:
    answer = CliRunner().invoke(app, [*arguments, "--data-dir", str(data), "--json"])
    assert answer.exit_code == 1, answer.output
    assert json.loads(answer.stdout)["remedy"], answer.output


def train(data: Path, *, is_killed: bool = False) -> list[str]:
    """Saves two checkpoints in another process; returns their paths."""
    child = os.fork()
    if child == 0:
        service = open_service(data)
        harness = Harness(service)
        model_id = harness.create_model()
        harness.run("optim_step", model_id, 1, STEP)
        for number in (1, 2):
            harness.run("save_weights", model_id, 1 + number, {"path": f"save-{number}"})
        if is_killed:
            os.kill(os.getpid(), signal.SIGKILL)
        service.stop()
        os._exit(0)
    os.waitpid(child, 0)
    make_key(data, "ann")
    return [one["path"] for one in mint(data, "checkpoints", "list")["checkpoints"]]


def files(data: Path) -> dict[str, int]:
    return {str(path.relative_to(data)): path.stat().st_size for path in data.rglob("*") if path.is_file()}


def questions_write_nothing(disk: Path) -> None:
    data = disk / "data"
    paths = train(data)
    before = files(data)
    fill(disk)
    assert [one["path"] for one in mint(data, "checkpoints", "list")["checkpoints"]] == paths
    [key] = mint(data, "keys", "list")
    assert key["owner"] == "ann" and mint(data, "keys", "show", key["key_id"])["used"]["max_checkpoint_bytes"] == 0
    assert mint(data, "recover") == {"stopped_models": []}
    assert len(mint(data, "sessions", "list")["sessions"]) == 1
    assert len(mint(data, "runs", "list")["training_runs"]) == 1
    assert files(data) == before and SPARE_FILE in before


def changes_use_the_spare_space(disk: Path) -> None:
    data = disk / "data"
    newest, oldest = train(data)
    spare = (data / SPARE_FILE).stat()
    assert spare.st_blocks * 512 >= spare.st_size >= 1 << 20
    fill(disk)
    [key] = mint(data, "keys", "list")
    assert mint(data, "keys", "update", key["key_id"], "--max-models", "3")["quotas"]["max_models"] == 3
    fill(disk)
    assert free_bytes(disk) == 0 and not (data / SPARE_FILE).exists()
    (disk / "filler").unlink()
    mint(data, "checkpoints", "publish", newest)
    assert (data / SPARE_FILE).stat().st_size == spare.st_size  # there was room again
    fill(disk)
    refused(data, "checkpoints", "copy", newest)  # a new checkpoint has no claim to it
    assert (data / SPARE_FILE).exists()
    assert mint(data, "checkpoints", "delete", oldest, "--yes") == {"deleted": [oldest]}
    assert free_bytes(disk) > 0
    assert [one["path"] for one in mint(data, "checkpoints", "list")["checkpoints"]] == [newest]
    (disk / "filler").unlink()
    mint(data, "checkpoints", "publish", newest)  # takes the spare space again
    [session] = mint(data, "sessions", "list")["sessions"]
    fill(disk)
    name = session["session_id"]
    assert mint(data, "sessions", "end", name, "--yes") == {"session_id": name, "state": "ended"}
    assert free_bytes(disk) > 0 and not list((data / "snapshots").iterdir())


def after_a_kill(disk: Path) -> None:
    """The log is there, and perhaps not its index: reading may need the space, too."""
    data = disk / "data"
    newest, oldest = train(data, is_killed=True)
    (data / f"{JOURNAL_FILE}-shm").unlink(missing_ok=True)
    fill(disk)
    assert len(mint(data, "checkpoints", "list")["checkpoints"]) == 2
    assert mint(data, "checkpoints", "delete", oldest, "--yes") == {"deleted": [oldest]}
    assert [one["path"] for one in mint(data, "checkpoints", "list")["checkpoints"]] == [newest]


def an_owner_deletes_from_a_server(disk: Path) -> None:
    data = disk / "data"
    data.mkdir()
    key = make_key(data, "ann")
    with running(data) as server:
        ann = Person(server, key)
        model_id = ann.model(ann.session())
        for number in (1, 2):
            ann.done("save_weights", {"model_id": model_id, "seq_id": number, "path": f"save-{number}"})
        fill(disk)
        seq_id = 2
        give_up_at = time.monotonic() + HANG_S
        while server.service.storage_problem is None:  # what fits into the pages that the log has is accepted
            assert time.monotonic() < give_up_at
            seq_id += 1
            ann.send("POST", f"{API}/optim_step", {"model_id": model_id, "seq_id": seq_id, **STEP})
            fill(disk)
        assert ann.send("GET", "/readyz").status_code == 503
        a_pass = {"model_id": model_id, "seq_id": seq_id + 1, "forward_backward_input": pass_input()}
        assert ann.send("POST", f"{API}/forward_backward", a_pass).status_code == 503
        assert (data / SPARE_FILE).exists()  # what a server writes besides does not use it
        path = f"{API}/training_runs/{model_id}/checkpoints/weights"
        assert ann.send("DELETE", f"{path}/save-1").status_code == 200
        assert ann.send("GET", f"{path}/save-1").status_code == 404
        assert ann.send("GET", f"{path}/save-2").status_code == 200
        (disk / "filler").unlink()
        wait_until(lambda: server.service.storage_problem is None)
        wait_until((data / SPARE_FILE).exists)  # made again by itself


def a_stopped_model_is_decided_about(disk: Path) -> None:
    data = disk / "data"
    newest, _ = train(data)
    model_id = newest.removeprefix("mint://").removeprefix("tinker://").partition("/")[0]
    with closing(Journal(data / JOURNAL_FILE)) as journal:
        journal.mark_diverged(model_id, "its replay gave other bits")
    fill(disk)
    assert [one["model_id"] for one in mint(data, "recover")["stopped_models"]] == [model_id]
    for making_a_checkpoint in ("--at-snapshot", "--accept"):
        refused(data, "recover", model_id, making_a_checkpoint)
    assert (data / SPARE_FILE).exists()
    assert mint(data, "recover", model_id, "--retry")["decision"] == "retry"
    assert mint(data, "recover")["stopped_models"] == []


def without_an_inode_accepted_work_waits_and_sampling_goes_on(disk: Path) -> None:
    undisturbed = Harness(open_service(disk / "undisturbed"))
    name = undisturbed.create_model()
    for seq_id, (kind, body) in enumerate(TRAINING, 1):
        undisturbed.run(kind, name, seq_id, body)
    wanted = undisturbed.digest(name)
    undisturbed.service.stop()

    service = open_service(disk / "data")
    harness = Harness(service)
    model_id, sampler = harness.create_model(), make_sampler(harness)
    used_up = use_up_inodes(disk)
    waiting, refused = [], []
    for seq_id, (kind, body) in enumerate(TRAINING, 1):
        try:
            waiting.append(harness.send(kind, model_id, seq_id, body))
        except JournalError:  # the fault was noticed while the loop was still sending
            refused.append((kind, model_id, seq_id, body))
    wait_until(lambda: service.storage_problem is not None)
    assert os.strerror(errno.ENOSPC) in str(service.storage_problem)
    error = failure(lambda: harness.send("optim_step", model_id, len(TRAINING) + 1, STEP))
    assert isinstance(error, JournalError) and error.status == 503
    assert harness.sample(sampler, 0)["sequences"]
    for path in used_up:
        path.unlink()
    wait_until(lambda: service.storage_problem is None)
    waiting += [harness.send(*request) for request in refused]
    for request_id in waiting:
        harness.wait(request_id)
    assert service.storage_problem is None and harness.digest(model_id) == wanted
    service.stop()


TRAINING = [("forward_backward", GOOD_PASS), ("optim_step", STEP), ("save_weights", {"path": "kept"})]


def use_up_inodes(disk: Path) -> list[Path]:
    """Makes empty files until there is no inode left; space is."""
    made: list[Path] = []
    while True:
        try:
            (disk / f"inode-{len(made)}").touch()
        except OSError as error:
            assert error.errno == errno.ENOSPC and free_bytes(disk) > 8 << 20
            return made
        made.append(disk / f"inode-{len(made)}")


def an_export_and_a_check_say_what_to_do(disk: Path) -> None:
    data = disk / "data"
    newest, _ = train(data)
    fill(disk)
    before = set(disk.iterdir())
    for arguments in (["export", newest, "--output", str(disk / "exported")], ["serve", "--check", "--port", "0"]):
        ended = CliRunner().invoke(app, [*arguments, "--data-dir", str(data)])
        assert ended.exit_code == 1 and isinstance(ended.exception, SystemExit), ended
        assert "Free disk space" in " ".join(ended.output.split()), ended.output
    assert set(disk.iterdir()) == before


QUICK_SCENES = ("questions_write_nothing", "changes_use_the_spare_space", "after_a_kill")
"""The part that the quick suite plays."""
SCENES = {
    scene.__name__: scene
    for scene in (
        questions_write_nothing,
        changes_use_the_spare_space,
        after_a_kill,
        an_owner_deletes_from_a_server,
        a_stopped_model_is_decided_about,
        without_an_inode_accepted_work_waits_and_sampling_goes_on,
        an_export_and_a_check_say_what_to_do,
    )
}

if __name__ == "__main__":
    SCENES[sys.argv[1]](Path(sys.argv[2]))
    print("as expected")
