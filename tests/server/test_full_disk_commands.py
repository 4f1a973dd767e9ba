"""On a disk without a free byte, commands answer and delete, and a server takes a deletion of its owner. Without a free
inode, accepted work waits."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.full_disk import QUICK_SCENES, SCENES

SIZE_KIB = 48 * 1024
INODES = 2000
NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
MOUNT = f'mount -t tmpfs -o size="$1"k,nr_inodes={INODES} tmpfs "$2" || exit 77; shift 2; exec "$@"'


@pytest.mark.parametrize(
    "scene", [pytest.param(name, marks=() if name in QUICK_SCENES else pytest.mark.slow) for name in SCENES]
)
def test_a_full_disk_can_be_read_and_emptied(tmp_path: Path, scene: str) -> None:
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare (util-linux)")
    disk = tmp_path / "disk"
    disk.mkdir()
    script = [sys.executable, str(Path(__file__).with_name("full_disk.py")), scene, str(disk)]
    ended = subprocess.run(
        [*NAMESPACE, MOUNT, "sh", str(SIZE_KIB), str(disk), *script],
        capture_output=True,
        text=True,
        env={**os.environ, "MINT_HOME": str(tmp_path / "home")},
    )
    if ended.returncode == 77 or "unshare" in ended.stderr:
        pytest.skip("this machine lets nobody mount a small disk")
    assert ended.returncode == 0, ended.stderr
