"""Uploads, copies and saves that run side by side exceed neither a quota nor the disk's reserve together."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import pytest
from waiting import HANG_S, wait_until

from mint.compose.serving import Server
from mint.server.callers import Quotas
from mint.server.disk_space import DiskSpace
from mint.server.http import file_routes
from mint.server.store import checkpoint_catalog
from mint.server.store.database import Database
from mint.server.store.journal import JOURNAL_FILE
from mint.server.store.keys import ApiKeys
from tests.server.server_harness import API, Person, pass_input, running

MIB = 1 << 20
QUOTA = 8 * MIB


def key_with(data_dir: Path, owner: str, quotas: Quotas) -> str:
    with closing(Database(data_dir / JOURNAL_FILE)) as database:
        return ApiKeys(database).create(owner, quotas)[0]


@pytest.fixture
def ann(tmp_path: Path) -> Iterator[Person]:
    key = key_with(tmp_path, "ann", Quotas(max_checkpoint_bytes=QUOTA))
    with running(tmp_path) as server:
        yield Person(server, key)


# --- uploads -----------------------------------------------------------------------------------------------------


PART = b'--b\r\ncontent-disposition: form-data; name="file"\r\n\r\n'


class Upload:
    """An upload over a socket of its own, whose body is sent bit by bit."""

    def __init__(self, person: Person, length: int | None) -> None:
        host, port = person.server.url.removeprefix("http://").split(":")
        self._socket = socket.create_connection((host, int(port)), timeout=HANG_S)
        size = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
        head = (
            f"POST {API}/checkpoints/upload HTTP/1.1\r\nhost: {host}\r\nx-api-key: {person.key}\r\n"
            f"content-type: multipart/form-data; boundary=b\r\n{size}\r\n\r\n"
        )
        self._is_chunked = length is None
        self._socket.sendall(head.encode())
        self.send(PART)

    def send(self, content: bytes) -> None:
        framed = b"%x\r\n%s\r\n" % (len(content), content) if self._is_chunked else content
        with suppress(ConnectionError):  # it was refused, and the answer is there
            self._socket.sendall(framed)

    def answer(self) -> tuple[int, dict[str, str]]:
        """Status and body."""
        received = b""
        while b"\r\n\r\n" not in received or not received.endswith(b"}"):
            chunk = self._socket.recv(65536)
            assert chunk, received
            received += chunk
        head, _, body = received.partition(b"\r\n\r\n")
        return int(head.split()[1]), json.loads(body)

    def close(self) -> None:
        self._socket.close()


def reserved(server: Server) -> tuple[int, int]:
    """What is reserved for ann, and on the disk."""
    disk = server.service.disk
    return server.service.reservations.used_bytes("ann"), disk.promised_bytes + disk.announced_bytes


def test_uploads_side_by_side_have_one_quota_together(ann: Person) -> None:
    length = int(0.6 * QUOTA)
    first = Upload(ann, length)
    wait_until(lambda: reserved(ann.server)[0] == length)
    for _ in range(3):  # before their bodies are there
        with closing(Upload(ann, length)) as other:
            status, error = other.answer()
            assert status == 400 and error["field"] == "max_checkpoint_bytes" and str(length) in error["message"]
    first.close()  # its sender is gone
    wait_until(lambda: reserved(ann.server) == (0, 0))
    with closing(Upload(ann, length)) as again:
        again.send(bytes(length - len(PART)))
        status, error = again.answer()
        assert status == 400 and error["field"] != "max_checkpoint_bytes"  # it fits, and is no archive
    wait_until(lambda: reserved(ann.server) == (0, 0))


def test_an_owner_who_holds_uploads_open_leaves_some_to_others(tmp_path: Path) -> None:
    keys = [key_with(tmp_path, owner, Quotas()) for owner in ("ann", "bob", "cleo")]
    with running(tmp_path) as server, ExitStack() as opened:
        ann, bob, cleo = (Person(server, key) for key in keys)

        def begin(person: Person, count: int) -> list[Upload]:
            return [opened.enter_context(closing(Upload(person, 1000))) for _ in range(count)]

        held = begin(ann, 4)
        wait_until(lambda: server.service.disk.announced_bytes >= 4 * (1000 - len(PART)))
        for upload in begin(ann, 5):
            status, error = upload.answer()
            assert status == 429 and error["field"] == "uploads" and error["value"] == "4"
        for person in (bob, cleo):
            (upload,) = begin(person, 1)
            upload.send(bytes(1000 - len(PART)))
            assert upload.answer()[0] == 400  # taken; it is no archive
        held[0].send(bytes(1000 - len(PART)))
        assert held[0].answer()[0] == 400
        (again,) = begin(ann, 1)
        again.send(bytes(1000 - len(PART)))
        assert again.answer()[0] == 400


def test_uploads_that_announce_nothing_are_counted_as_they_arrive(ann: Person) -> None:
    with closing(Upload(ann, None)) as first, closing(Upload(ann, None)) as second:
        first.send(bytes(int(0.6 * QUOTA)))
        wait_until(lambda: reserved(ann.server)[0] > 0.6 * QUOTA)
        second.send(bytes(int(0.6 * QUOTA)))
        status, error = second.answer()
        assert status == 400 and error["field"] == "max_checkpoint_bytes"


def test_uploads_side_by_side_leave_the_disks_reserve(ann: Person, monkeypatch: pytest.MonkeyPatch) -> None:
    room = 5 * MIB
    monkeypatch.setattr(DiskSpace, "free_bytes", property(lambda disk: disk.reserve_bytes + room))
    with closing(Upload(ann, 3 * MIB)):
        wait_until(lambda: reserved(ann.server)[1] == 3 * MIB)
        with closing(Upload(ann, 3 * MIB)) as second:
            status, error = second.answer()
            assert status == 429 and error["field"] == "disk_reserve"
        with closing(Upload(ann, MIB)) as third:
            wait_until(lambda: reserved(ann.server)[1] == 4 * MIB)
            third.close()


def test_an_announced_upload_stops_nobodys_training(ann: Person, monkeypatch: pytest.MonkeyPatch) -> None:
    model_id = ann.model(ann.session())
    monkeypatch.setattr(DiskSpace, "free_bytes", property(lambda disk: disk.reserve_bytes + 4 * MIB))
    with closing(Upload(ann, 4 * MIB)):
        wait_until(lambda: reserved(ann.server)[1] == 4 * MIB)
        ann.done("forward_backward", {"model_id": model_id, "seq_id": 1, "forward_backward_input": pass_input()})
        ann.done("optim_step", {"model_id": model_id, "seq_id": 2, "adam_params": {}})
        assert ann.session()


def test_an_upload_ends_when_the_disk_is_filled_by_others(ann: Person, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Upload(ann, MIB)) as upload:
        wait_until(lambda: reserved(ann.server)[0] == MIB)
        monkeypatch.setattr(DiskSpace, "free_bytes", property(lambda disk: disk.reserve_bytes - 1))
        upload.send(bytes(1000))
        status, error = upload.answer()
        assert status == 429 and error["field"] == "disk_reserve"
    wait_until(lambda: reserved(ann.server) == (0, 0))


def test_an_upload_that_comes_too_slowly_ends(ann: Person, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_routes, "CHUNK_TIMEOUT_S", 0.5)
    with closing(Upload(ann, MIB)) as upload:
        ended = threading.Event()

        def drip() -> None:
            while not ended.wait(0.1):
                upload.send(b"x")

        dripping = threading.Thread(target=drip)
        dripping.start()
        try:
            status, error = upload.answer()
        finally:
            ended.set()
            dripping.join()
        assert status == 400 and "too slowly" in error["message"] and "65536 bytes" in error["remedy"]
    wait_until(lambda: reserved(ann.server) == (0, 0))


def test_a_save_counts_what_is_being_uploaded(ann: Person) -> None:
    model_id = ann.model(ann.session())
    with closing(Upload(ann, QUOTA)):
        wait_until(lambda: reserved(ann.server)[0] == QUOTA)
        promise = ann.post("save_weights", {"model_id": model_id, "seq_id": 1, "path": "a"})
        failed = ann.send("POST", f"{API}/retrieve_future", {"request_id": promise["request_id"]})
        assert "checkpoint quota exceeded" in failed.text
    wait_until(lambda: reserved(ann.server) == (0, 0))
    assert ann.done("save_weights", {"model_id": model_id, "seq_id": 2, "path": "a"})["path"]


# --- copies ------------------------------------------------------------------------------------------------------


def test_copies_side_by_side_have_one_quota_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    all_begun = threading.Barrier(4)
    write_manifest = checkpoint_catalog.write_manifest

    def late(*arguments: object) -> None:
        with suppress(threading.BrokenBarrierError):
            all_begun.wait(2.0)  # where all four were let in, all four come here
        write_manifest(*arguments)  # ty: ignore[invalid-argument-type]

    key = key_with(tmp_path, "ann", Quotas())
    with running(tmp_path) as server:
        ann = Person(server, key)
        path = ann.done("save_weights", {"model_id": ann.model(ann.session()), "seq_id": 1, "path": "a"})["path"]
        size = server.service.checkpoints.used_bytes("ann")
        [row] = server.keys.list()
        server.keys.update(row.key_id, Quotas(max_checkpoint_bytes=int(2.5 * size)), None)
        monkeypatch.setattr(checkpoint_catalog, "write_manifest", late)

        def copy(_number: int) -> int:
            return ann.send("POST", f"{API}/copy_weights", {"source_path": path}).status_code

        with ThreadPoolExecutor(4) as pool:
            assert sorted(pool.map(copy, range(4))) == [200, 400, 400, 400]
        assert server.service.checkpoints.used_bytes("ann") <= 2.5 * size
        assert reserved(server)[1] == 0


def test_a_copy_without_links_leaves_the_disks_reserve(ann: Person, monkeypatch: pytest.MonkeyPatch) -> None:
    path = ann.done("save_weights", {"model_id": ann.model(ann.session()), "seq_id": 1, "path": "a"})["path"]
    size = ann.server.service.checkpoints.used_bytes("ann")
    monkeypatch.setattr(DiskSpace, "free_bytes", property(lambda disk: disk.reserve_bytes + size - 1))
    assert ann.send("POST", f"{API}/copy_weights", {"source_path": path}).status_code == 200  # takes no space

    def no_links(*_paths: object) -> None:
        raise OSError("no links here")

    monkeypatch.setattr("os.link", no_links)
    refused = ann.send("POST", f"{API}/copy_weights", {"source_path": path})
    assert refused.status_code == 429 and refused.json()["field"] == "disk_reserve"
    assert len(list((ann.server.service.data_dir / "checkpoints").iterdir())) == 2


# --- after a restart ---------------------------------------------------------------------------------------------


@contextmanager
def held(server: Server) -> Iterator[None]:
    """The engine's thread does nothing in this block."""
    go_on = threading.Event()

    def hold() -> None:
        go_on.wait(HANG_S)

    server.service.call_soon(hold)
    try:
        yield
    finally:
        go_on.set()


@pytest.mark.parametrize("is_default", [False, True], ids=["of the key", "of the server"])
def test_saves_that_wait_over_a_restart_have_their_owners_quota(tmp_path: Path, is_default: bool) -> None:
    key_with(tmp_path, "bob", Quotas())
    quota, flags = (0, {"owner_checkpoints_mib": 0}) if is_default else (5000, {})
    key = key_with(tmp_path, "ann", Quotas() if is_default else Quotas(max_checkpoint_bytes=quota))
    with running(tmp_path, stop_within_s=60.0) as server:
        ann = Person(server, key)
        model_id = ann.model(ann.session())
        with held(server):
            for seq_id in range(1, 61):
                ann.post("save_weights", {"model_id": model_id, "seq_id": seq_id, "path": f"a{seq_id}"})
            server.stop()
            wait_until(lambda: server.service._worker._trains.stopping.is_set())
    with running(tmp_path, **flags) as server:  # before ann calls again
        wait_until(lambda: not server.service.pending.training)
        used, folders = server.service.checkpoints.used_bytes("ann"), list((tmp_path / "checkpoints").iterdir())
    assert quota <= used < quota + 2000  # the last save may go beyond it
    assert len(folders) <= (1 if is_default else 4)  # the first server may have begun one


def test_a_save_that_waits_over_a_restart_may_use_the_most_that_a_key_allows(tmp_path: Path) -> None:
    quotas = [Quotas(max_checkpoint_bytes=5), Quotas(max_checkpoint_bytes=9, max_models=3), Quotas(max_sessions=2)]
    with closing(Database(tmp_path / JOURNAL_FILE)) as database:
        keys = ApiKeys(database, defaults=Quotas(max_sessions=1, max_checkpoint_bytes=1))
        rows = [keys.create("ann", each)[1] for each in quotas]
        assert keys.quotas_of("ann") == Quotas(max_sessions=2, max_checkpoint_bytes=9)
        for row in rows[1:]:
            keys.revoke(row.key_id)
        assert keys.quotas_of("ann") == Quotas(max_sessions=1, max_checkpoint_bytes=5)
        keys.revoke(rows[0].key_id)
        assert keys.quotas_of("ann") == Quotas(max_sessions=2, max_checkpoint_bytes=9)
        assert keys.quotas_of("nobody") == Quotas()
