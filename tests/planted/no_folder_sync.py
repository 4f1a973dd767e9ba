"""A bug: files are synced, and their names are not."""

from pathlib import Path

from mint.models import tensor_files

_sync = tensor_files._sync


def _sync_files(path: Path) -> None:
    if not path.is_dir():
        _sync(path)


tensor_files._sync = _sync_files
