"""A server that is started on a full disk: it ends with one sentence that says what to do, and not with a traceback."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SIZES_KIB = (*(pytest.param(size, marks=pytest.mark.slow) for size in (4, 32, 64)), 128)
"""A disk on which the folders, the locks, the database, or its first tables find no room."""

SERVE = [sys.executable, "-c", "from mint.cli.main import app; app()", "serve", "--port", "0"]
NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
MOUNT = 'mount -t tmpfs -o size="$1"k tmpfs "$2" || exit 77; shift 2; exec "$@"'


def start(tmp_path: Path, size_kib: int, *options: str) -> subprocess.CompletedProcess[str]:
    """What a server on an empty disk of this size says, with more options."""
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare (util-linux)")
    disk = tmp_path / "disk"
    disk.mkdir()
    begin = [*NAMESPACE, MOUNT, "sh", str(size_kib), str(disk)]
    ended = subprocess.run(
        [*begin, *SERVE, "--data-dir", str(disk / "data"), *options],
        capture_output=True,
        text=True,
        env={**os.environ, "MINT_HOME": str(tmp_path / "home")},
    )
    if ended.returncode == 77 or "unshare" in ended.stderr:
        pytest.skip("this machine lets nobody mount a small disk")
    return ended


@pytest.mark.parametrize("size_kib", SIZES_KIB)
def test_a_server_on_a_full_disk_ends_with_one_sentence(tmp_path: Path, size_kib: int) -> None:
    ended = start(tmp_path, size_kib)
    assert ended.returncode == 1
    assert ended.stdout == ""
    [sentence] = ended.stderr.splitlines()
    assert sentence.startswith(("JournalError: ", "InvalidRequestError: "))
    assert "Free disk space, or choose another" in sentence or "Choose another one, or free disk space" in sentence


@pytest.mark.parametrize("size_kib", SIZES_KIB)
def test_a_check_says_that_a_server_would_not_start_on_a_full_disk(tmp_path: Path, size_kib: int) -> None:
    ended = start(tmp_path, size_kib, "--check")
    assert ended.returncode == 1
    assert "Free disk space" in " ".join(ended.stdout.split())
