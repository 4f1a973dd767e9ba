"""Some space beside the journal is really taken while the disk has room, and is given up where nothing is left."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from mint.server.spare_space import ROOM, SPARE_BYTES, SpareSpace
from mint.server.store.journal import JOURNAL_FILE


class Usage(NamedTuple):
    """What `shutil.disk_usage` gives."""

    total: int
    used: int
    free: int


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The free bytes of the disk: set them with `free[0]`."""
    state = [ROOM * SPARE_BYTES]
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: Usage(1 << 40, 0, state[0]))
    return state


def blocks(file: Path) -> int:
    return file.stat().st_blocks * 512


def test_the_space_has_blocks_of_its_own_and_is_for_its_owner_alone(tmp_path: Path, free: list[int]) -> None:
    spare, file = SpareSpace(tmp_path / JOURNAL_FILE), tmp_path / "journal.spare"
    free[0] -= 1
    spare.take()
    assert not file.exists()
    free[0] += 1
    spare.take()
    assert blocks(file) >= SPARE_BYTES and file.stat().st_mode & 0o777 == 0o600


def test_a_file_that_has_lost_its_blocks_is_made_again(tmp_path: Path, free: list[int]) -> None:
    spare, file = SpareSpace(tmp_path / JOURNAL_FILE), tmp_path / "journal.spare"
    for lost_bytes in (0, SPARE_BYTES):
        file.write_bytes(b"")
        os.truncate(file, lost_bytes)
        spare.take()
        assert blocks(file) >= SPARE_BYTES


def test_it_is_given_up_only_where_less_is_left_than_it_holds(tmp_path: Path, free: list[int]) -> None:
    spare, file = SpareSpace(tmp_path / JOURNAL_FILE), tmp_path / "journal.spare"
    spare.take()
    free[0] = SPARE_BYTES
    spare.release_if_short()
    assert file.exists()
    free[0] = SPARE_BYTES - 1
    spare.release_if_short()
    assert not file.exists()
    spare.release_if_short()  # and where it is gone already, too
