"""A mirror in object storage brings a data directory back as it was, and nobody waits for it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_objects import FakeObjects
from service_harness import STEP, Harness, datum, failure, open_service, pass_body
from waiting import wait_until

from mint.errors import InvalidRequestError, NotFoundError, RequestFailedError
from mint.server.identity import IDENTITY_FILE
from mint.server.mirror.copying import FOLDER
from mint.server.mirror.manifest import CONTENT, MANIFEST, MirrorManifest
from mint.server.mirror.mirror import BUSY_SHARE, EVERY_S, LATE_S, LONGEST_PAUSE_S, Mirror
from mint.server.mirror.objects import open_objects
from mint.server.mirror.restore import UNFINISHED, restore
from mint.server.store.journal import JOURNAL_FILE
from mint.server.worker import worker

URL = "s3://bucket/folder"


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def mirror_of(data_dir: Path, objects: FakeObjects, **options: object) -> Mirror:
    return Mirror(data_dir, objects, address=URL, **options)  # ty: ignore[invalid-argument-type]


def train(harness: Harness, model_id: str, steps: range) -> list[str]:
    """The digests after some steps, of which each is two requests."""
    digests = []
    for step in steps:
        harness.run("forward_backward", model_id, 2 * step + 1, pass_body(datum(1, 2, 3 + step)))
        digests.append(harness.run("optim_step", model_id, 2 * step + 2, STEP)["state_digest"])
    return digests


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    service = open_service(tmp_path / "data")
    yield Harness(service)
    service.stop()


@pytest.fixture
def objects() -> FakeObjects:
    return FakeObjects()


def files_below(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for name in ("snapshots", "published", "checkpoints")
        for path in sorted((folder / name).rglob("*"))
        if path.is_file()
    }


def test_what_is_mirrored_comes_back_with_its_bits_and_goes_on(
    tmp_path: Path, harness: Harness, objects: FakeObjects
) -> None:
    data_dir = harness.service.data_dir
    model_id = harness.create_model()
    first = train(harness, model_id, range(3))
    harness.run("save_weights", model_id, 7, {"path": "kept"})
    harness.run("save_weights_for_sampler", model_id, 8, {"sampling_session_seq_id": 0})
    harness.run("forward_backward", model_id, 9, pass_body(datum(1, 2, 3)))  # an open gradient
    mirror = mirror_of(data_dir, objects)
    mirror.update()
    assert mirror.state.problem is None and mirror.state.states == 1
    wanted = files_below(data_dir)
    assert len(wanted) >= 5
    after = harness.run("optim_step", model_id, 10, STEP)["state_digest"]
    harness.service.stop()
    shutil.rmtree(data_dir)

    restored = restore(objects, tmp_path / "new", url=URL)
    assert restored.files == len(wanted) and files_below(tmp_path / "new") == wanted
    again = Harness(open_service(tmp_path / "new"), harness.session_id)
    assert again.run("optim_step", model_id, 10, STEP)["state_digest"] == after
    assert first[-1] != after
    again.service.stop()


def test_only_what_is_new_is_sent_and_what_is_needed_no_more_goes(harness: Harness, objects: FakeObjects) -> None:
    model_id = harness.create_model()
    train(harness, model_id, range(4))
    harness.run("save_weights", model_id, 9, {"path": "kept"})
    mirror = mirror_of(harness.service.data_dir, objects)
    mirror.update()
    sent = mirror.state.sent_bytes
    assert objects.written[-1] == MANIFEST and objects.written.count(MANIFEST) == 1
    mirror.update()
    assert mirror.state.sent_bytes == sent and mirror.state.states == 1  # nothing has changed
    harness.run("forward_backward", model_id, 10, pass_body(datum(1, 2, 3)))
    before = list(objects.written)
    mirror.update()
    new = objects.written[len(before) :]
    assert new[-1] == MANIFEST and not set(new[:-1]) & set(before)
    for step in range(6):
        harness.run("optim_step", model_id, 11 + step, STEP) if step % 2 else harness.run(
            "forward_backward", model_id, 11 + step, pass_body(datum(1, 2, 3))
        )
        mirror.update()
    for _ in range(2):
        harness.run("forward", model_id, 17 + _, {"forward_input": pass_body(datum(1, 2))["forward_backward_input"]})
        mirror.update()
    assert len(objects.content) < len(set(objects.written))
    manifest = MirrorManifest.decode(objects.get(MANIFEST))
    assert manifest.number == mirror.state.states


def test_neither_a_slow_nor_a_lost_storage_holds_up_a_request(harness: Harness, objects: FakeObjects) -> None:
    model_id = harness.create_model()
    clock = Clock()
    mirror = mirror_of(harness.service.data_dir, objects, every_s=0.01, clock=clock)
    objects.gate.clear()
    mirror.start()
    wait_until(lambda: (harness.service.data_dir / FOLDER).is_dir())
    train(harness, model_id, range(2))  # while the first state is being sent
    assert mirror.state.states == 0
    clock.now = LATE_S + 1
    warning = mirror.state.warning
    assert warning is not None and "121 s ago" in warning and URL not in warning
    objects.is_down = True
    objects.gate.set()
    wait_until(lambda: mirror.state.problem is not None)
    train(harness, model_id, range(2, 4))
    objects.is_down = False
    wait_until(lambda: mirror.state.problem is None and mirror.state.lag_s == 0.0)
    assert mirror.state.warning is None
    mirror.close(within_s=60)
    assert not (harness.service.data_dir / FOLDER).exists()


def test_a_storage_that_was_down_for_days_is_mirrored_to_again(harness: Harness, objects: FakeObjects) -> None:
    mirror = mirror_of(harness.service.data_dir, objects)
    objects.is_down = True
    pauses_s = [mirror.update() for _ in range(1100)]
    assert pauses_s == sorted(pauses_s) and pauses_s[-1] == LONGEST_PAUSE_S
    objects.is_down = False
    mirror.update()
    assert mirror.state.states == 1 and mirror.state.problem is None


def test_a_service_that_stops_in_order_leaves_its_last_state(
    tmp_path: Path, harness: Harness, objects: FakeObjects
) -> None:
    mirror = mirror_of(harness.service.data_dir, objects, every_s=3600)
    mirror.start()
    wait_until(lambda: mirror.state.states == 1)
    model_id = harness.create_model()
    digests = train(harness, model_id, range(2))
    harness.service.stop()
    mirror.close(within_s=60)
    restore(objects, tmp_path / "new", url=URL)
    again = Harness(open_service(tmp_path / "new"), harness.session_id)
    again.restore(model_id)
    assert again.digest(model_id) == digests[-1]
    again.service.stop()


def test_a_large_journal_is_copied_for_a_twentieth_of_the_time_at_most(harness: Harness, objects: FakeObjects) -> None:
    cpu = Clock()
    read = harness.service.data_dir / FOLDER

    def work() -> float:
        cpu.now += 1.0 if read.is_dir() else 0.0  # a second while a copy is there
        return cpu.now

    mirror = mirror_of(harness.service.data_dir, objects, clock=Clock(), cpu_clock=work)
    pause_s = mirror.update()
    assert pause_s > EVERY_S and 1.0 / (pause_s + 1.0) <= BUSY_SHARE
    assert mirror.update() == EVERY_S, "nothing has changed"


def test_what_came_after_the_mirror_is_named_to_its_clients(
    tmp_path: Path, harness: Harness, objects: FakeObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "LOST_S", 0.3)
    model_id = harness.create_model()
    train(harness, model_id, range(2))
    mirror_of(harness.service.data_dir, objects).update()
    lost = harness.send("forward_backward", model_id, 5, pass_body(datum(1, 2, 9)))
    harness.wait(lost)
    later = Harness(harness.service)
    harness.service.stop()

    restore(objects, tmp_path / "new", url=URL)
    service = open_service(tmp_path / "new")
    again = Harness(service, harness.session_id)
    for call in (lambda: again.wait(lost), lambda: Harness(service, later.session_id).create_model()):
        error = failure(call)
        assert isinstance(error, NotFoundError) and "from a mirror; what came later is lost" in str(error)
    behind = failure(lambda: again.run("optim_step", model_id, 6, STEP))
    assert isinstance(behind, RequestFailedError)
    assert f"request 5 of {model_id} never arrived" in str(behind) and "from a mirror" in str(behind)
    assert "last checkpoint" in str(behind)
    service.stop()


def test_a_mirror_is_of_one_data_directory_and_of_one_process(
    tmp_path: Path, harness: Harness, objects: FakeObjects
) -> None:
    data_dir = harness.service.data_dir
    old = mirror_of(data_dir, objects)
    old.update()
    with pytest.raises(InvalidRequestError, match="mirror of another data directory"):
        other = open_service(tmp_path / "other")
        try:
            mirror_of(tmp_path / "other", objects).start()
        finally:
            other.stop()
    restore(objects, tmp_path / "new", url=URL)
    service = open_service(tmp_path / "new")
    new = mirror_of(tmp_path / "new", objects)
    new.update()
    assert new.state.states == 1
    harness.create_model()
    old.update()  # it lives on a node that was cut off
    assert old.state.states == 1 and "written by another process" in (old.state.problem or "")
    with pytest.raises(InvalidRequestError, match="brought back elsewhere"):
        mirror_of(data_dir, objects).start()
    Harness(service).create_model()
    new.update()
    assert new.state.problem is None and new.state.states == 2
    service.stop()


def test_a_file_that_is_missing_keeps_nothing_else_back(
    tmp_path: Path, harness: Harness, objects: FakeObjects, caplog: pytest.LogCaptureFixture
) -> None:
    data_dir = harness.service.data_dir
    model_id = harness.create_model()
    train(harness, model_id, range(3))
    harness.run("save_weights", model_id, 7, {"path": "kept"})
    harness.run("save_weights", model_id, 8, {"path": "gone"})
    newest = max((data_dir / "checkpoints").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    shutil.rmtree(newest)
    mirror = mirror_of(data_dir, objects)
    mirror.update()
    assert mirror.state.problem is None and f"checkpoints/{newest.name} is not in the mirror" in caplog.text
    assert restore(objects, tmp_path / "new", url=URL).files == len(files_below(data_dir))


def test_damage_is_refused_and_bringing_back_may_be_cut_off(
    tmp_path: Path, harness: Harness, objects: FakeObjects
) -> None:
    model_id = harness.create_model()
    digests = train(harness, model_id, range(2))
    with pytest.raises(InvalidRequestError, match="has no mirror"):
        restore(objects, tmp_path / "new", url=URL)
    mirror_of(harness.service.data_dir, objects).update()
    sound = dict(objects.content)
    harness.service.stop()
    for name in [name for name in sound if name.startswith(CONTENT)]:
        objects.content = sound | {name: sound[name][:-1] + bytes([sound[name][-1] ^ 1])}
        with pytest.raises(InvalidRequestError, match="damaged"):
            restore(objects, tmp_path / "new", url=URL)
        assert not (tmp_path / "new" / JOURNAL_FILE).exists()
        assert (tmp_path / "new" / UNFINISHED).is_dir()
    manifest = json.loads(sound[MANIFEST]) | {"journal_bytes": 1}
    objects.content = sound | {MANIFEST: json.dumps(manifest).encode()}
    with pytest.raises(InvalidRequestError, match="checksum of the manifest"):
        restore(objects, tmp_path / "new", url=URL)
    objects.content = sound
    restore(objects, tmp_path / "new", url=URL)
    assert not (tmp_path / "new" / UNFINISHED).exists()
    with pytest.raises(InvalidRequestError, match="has data already"):
        restore(objects, tmp_path / "new", url=URL)
    again = Harness(open_service(tmp_path / "new"), harness.session_id)
    again.restore(model_id)
    assert again.digest(model_id) == digests[-1]
    again.service.stop()
    assert (tmp_path / "new" / IDENTITY_FILE).stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("url", ["", "bucket", "http://host/bucket", "s3://", "file://", "ftp://host/a"])
def test_what_is_no_object_storage_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequestError, match="no address of an object storage"):
        open_objects(url, field="--mirror")


def test_a_password_in_an_address_is_not_repeated() -> None:
    with pytest.raises(InvalidRequestError) as refused:
        open_objects("https://ann:secret@host/bucket?sig=secret", field="--mirror")
    assert "secret" not in str(refused.value)


def test_a_folder_is_an_object_storage(tmp_path: Path, harness: Harness) -> None:
    pytest.importorskip("obstore", reason="pip install 'mint[mirror]'")
    objects = open_objects(f"file://{tmp_path}/objects", field="--mirror")
    model_id = harness.create_model()
    digests = train(harness, model_id, range(2))
    mirror = Mirror(harness.service.data_dir, objects, address="folder")
    mirror.update()
    harness.service.stop()
    restore(objects, tmp_path / "new", url="folder")
    again = Harness(open_service(tmp_path / "new"), harness.session_id)
    again.restore(model_id)
    assert again.digest(model_id) == digests[-1]
    again.service.stop()
    with pytest.raises(FileNotFoundError):
        objects.get("nothing")
    objects.remove(["nothing", MANIFEST])
    assert MANIFEST not in set(objects.names())
