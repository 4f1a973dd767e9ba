"""What a killed process left behind goes after an hour in which a service ran, whatever the time of day says."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

from service_harness import BASE, STEP, Harness, datum, open_service, pass_body
from test_session_lifetime import Clock

from mint.server.store.journal import JOURNAL_FILE, Journal
from mint.server.store.obsolete import OrphanSweep

ORPHANS = ("snapshots/left.safetensors", "checkpoints/left", "published/left.safetensors")
HOUR_S = 3600.0


def leave_orphans(data_dir: Path) -> list[Path]:
    paths = [data_dir / name for name in ORPHANS]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        path.mkdir() if path.suffix == "" else path.write_bytes(b"x")
        os.utime(path, (1, 1))  # by a clock that was wrong then, or that is wrong now
    return paths


def used_data_dir(folder: Path) -> Path:
    """Of a journal with a session: an empty one beside files is refused as lost."""
    harness = Harness(open_service(folder))
    harness.create_model()
    harness.service.stop()
    return folder


def step(harness: Harness, model_id: str, first_seq: int) -> None:
    harness.run("forward_backward", model_id, first_seq, pass_body(datum(1, 2, 3)))
    harness.run("optim_step", model_id, first_seq + 1, STEP)


def test_a_clock_that_jumps_deletes_no_file_that_may_be_in_the_making(tmp_path: Path) -> None:
    orphans = leave_orphans(used_data_dir(tmp_path))
    clock = Clock()
    harness = Harness(open_service(tmp_path, clock=clock))
    clock.wait(harness.service, HOUR_S / 2)
    assert all(path.exists() for path in orphans)
    harness.service.stop()


def test_orphans_go_after_an_hour_and_what_is_named_or_changes_stays(tmp_path: Path) -> None:
    clock = Clock()
    harness = Harness(open_service(tmp_path, clock=clock))
    model_id = harness.create_model()
    step(harness, model_id, 1)
    orphans = leave_orphans(tmp_path)
    growing = tmp_path / "snapshots" / "growing"
    for size in range(6):
        growing.write_bytes(b"x" * size)
        os.utime(growing, ns=(size, size))
        clock.wait(harness.service, HOUR_S / 4)
    assert not any(path.exists() for path in orphans)
    assert growing.exists()
    step(harness, model_id, 3)
    assert BASE in [model.model_name for model in harness.service.capabilities().supported_models]
    harness.service.stop()


def test_the_hour_may_be_that_of_several_services(tmp_path: Path) -> None:
    orphans = leave_orphans(used_data_dir(tmp_path))
    for _ in range(4):
        assert all(path.exists() for path in orphans)
        clock = Clock()
        service = open_service(tmp_path, clock=clock)
        clock.wait(service, HOUR_S / 3)
        service.stop()
    assert not any(path.exists() for path in orphans)


def test_an_orphan_that_is_a_whole_checkpoint_is_set_aside_for_a_week(tmp_path: Path) -> None:
    harness = Harness(open_service(tmp_path))
    model_id = harness.create_model()
    step(harness, model_id, 1)
    harness.run("save_weights", model_id, 3, {"path": "final"})
    [folder] = (tmp_path / "checkpoints").iterdir()
    harness.service.stop()
    content = {path.name: path.read_bytes() for path in folder.iterdir()}
    with closing(Journal(tmp_path / JOURNAL_FILE)) as journal:
        journal.database.write("DELETE FROM checkpoints")
        sweep = OrphanSweep(journal, tmp_path)
        aside = tmp_path / "set_aside" / folder.name
        for _ in range(2):
            sweep.advance(HOUR_S)
        assert not folder.exists()
        for _ in range(7 * 24 - 1):
            sweep.advance(HOUR_S)
            assert {path.name: path.read_bytes() for path in aside.iterdir()} == content
        sweep.advance(HOUR_S)
        assert not aside.exists()
