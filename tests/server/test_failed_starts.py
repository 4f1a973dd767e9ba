"""A start that fails leaves nothing behind in the process: no thread, no open journal, no process of the engine."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from mint.compose.embedded import open_embedded
from mint.compose.serving import Server
from mint.config import read_serve_settings
from mint.engine.fake_engine import FakeEngine
from mint.errors import CheckpointError, InvalidRequestError, JournalError, MintError
from mint.models.registry import BUNDLED
from mint.server.service.service import Service
from tests.server.server_harness import running


class ClosableEngine(FakeEngine):
    """Counts how often its processes are ended."""

    def __init__(self) -> None:
        super().__init__()
        self.closings = 0

    def close(self) -> None:
        self.closings += 1


def left_by(start: Callable[[], object], error: type[Exception]) -> set[threading.Thread]:
    """The threads that a start leaves that fails."""
    before = set(threading.enumerate())
    with pytest.raises(error):
        start()
    return set(threading.enumerate()) - before


def test_a_server_that_may_not_write_to_its_mirror_leaves_nothing(tmp_path: Path) -> None:
    pytest.importorskip("obstore", reason="pip install 'mint[mirror]'")
    mirror = f"file://{tmp_path}/objects"
    with running(tmp_path / "first", mirror=mirror):
        pass
    engine = ClosableEngine()
    settings = read_serve_settings({"port": 0, "data_dir": tmp_path / "second", "mirror": mirror})
    assert left_by(lambda: Server(settings, engine=engine), InvalidRequestError) == set()
    assert engine.closings == 1
    with running(tmp_path / "second"):
        pass


def test_a_server_without_its_model_leaves_nothing(tmp_path: Path) -> None:
    engine = ClosableEngine()
    settings = read_serve_settings({"models": ("no/such-model",), "data_dir": tmp_path, "port": 0})
    assert left_by(lambda: Server(settings, engine=engine), MintError) == set()
    assert engine.closings == 1


@pytest.mark.parametrize("kept_bytes", [-100, 4])
def test_a_server_whose_model_has_a_weight_file_that_is_cut_off_does_not_start(tmp_path: Path, kept_bytes: int) -> None:
    base = tmp_path / "base"
    shutil.copytree(BUNDLED["mint/tiny"], base)
    weights = base / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept_bytes])
    settings = read_serve_settings({"models": (f"own={base}",), "data_dir": tmp_path / "data", "port": 0})
    with pytest.raises(CheckpointError, match=rf"{weights} cannot be read: .*Copy or download the model again"):
        Server(settings, engine=FakeEngine())


def test_an_embedded_service_without_its_data_directory_leaves_nothing(tmp_path: Path) -> None:
    engine = ClosableEngine()
    (tmp_path / "file").touch()
    assert left_by(lambda: open_embedded(data_dir=tmp_path / "file", engine=engine), JournalError) == set()
    assert engine.closings == 1


def test_an_embedded_service_that_cannot_start_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = Service.start

    def fail_late(service: Service) -> None:
        start(service)
        raise OSError("the disk is gone")

    monkeypatch.setattr(Service, "start", fail_late)
    engine = ClosableEngine()
    assert left_by(lambda: open_embedded(data_dir=tmp_path, engine=engine), OSError) == set()
    assert engine.closings == 1
