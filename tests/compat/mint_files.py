"""MinT's public repositories at fixed commits: fetched from GitHub once, kept beside the environments, never part of
this repository. Runs nothing of them.

A machine without GitHub can be given them: unpack the commit's tar file as the folder that `fetched` names.
"""

from __future__ import annotations

import hashlib
import io
import shutil
import tarfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from tests.compat.sdk_environments import peers_home

DOWNLOAD_PATIENCE_S = 120


@dataclass(frozen=True)
class Repository:
    """A commit of a public repository, and the SHA-256 over its Python files (`digest`)."""

    name: str
    commit: str
    python_sha256: str


QUICKSTART = Repository(
    "MindLab-Research/mint-quickstart",
    "596fb0289c22400d60da20466daf77a2f93cd848",
    "b6708aadb3cddbd9fa0d6b6285aa6103508732826d79a99b34efa8c5abe180ee",
)
COOKBOOK = Repository(
    "MindLab-Research/mint-cookbook",
    "d0ed7334854e6ebb003798a16d197ef875bd5686",
    "e583db97e00ab899deba35cd2192ec2e6cd9cd583eb62646fb0c6ce84caae0be",
)


def fetched(repository: Repository) -> Path:
    """The folder with the repository's files, fetched if it is not there.

    Raises:
        OSError: GitHub cannot be reached.
        ValueError: the Python files are not those of the commit.
    """
    folder = peers_home() / f"{repository.name.rpartition('/')[2]}-{repository.commit}"
    if not folder.exists():
        url = f"https://codeload.github.com/{repository.name}/tar.gz/{repository.commit}"
        with urllib.request.urlopen(url, timeout=DOWNLOAD_PATIENCE_S) as response:
            content = response.read()
        partial = folder.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            archive.extractall(partial, filter="data")
        [unpacked] = partial.iterdir()
        unpacked.rename(folder)
        partial.rmdir()
    if digest(folder) != repository.python_sha256:
        raise ValueError(f"{folder} has other Python files than {repository.name} at {repository.commit}: remove it")
    return folder


def digest(folder: Path) -> str:
    """SHA-256 over the paths and contents of all Python files."""
    sha256 = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        content = hashlib.sha256(path.read_bytes()).digest()
        sha256.update(path.relative_to(folder).as_posix().encode() + b"\0" + content)
    return sha256.hexdigest()
