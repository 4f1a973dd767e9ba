"""The command that installs an extra names what this installation came from."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from mint import extras

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(("has_gpu", "pins"), [(False, "cpu.txt"), (True, "gpu.txt")])
def test_a_checkout_is_installed_by_its_path_with_its_constraints(
    has_gpu: bool, pins: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_gpu:
        (tmp_path / "nvidia-smi").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    words = shlex.split(extras.install_command("local"))
    assert words == ["pip", "install", "-c", str(ROOT / "constraints" / pins), f"{ROOT}[local]"]


def test_a_checkout_that_was_installed_into_a_folder_of_packages_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout = tmp_path / "my checkout"
    (checkout / "constraints").mkdir(parents=True)
    (checkout / "constraints" / "cpu.txt").touch()
    monkeypatch.setattr(extras, "_SOURCE", tmp_path / "lib")
    monkeypatch.setattr(extras, "_origin", lambda: {"url": checkout.as_uri(), "dir_info": {}})
    assert shlex.split(extras.install_command("rl"))[-1] == f"{checkout}[rl]"


@pytest.mark.parametrize(
    ("origin", "url"),
    [
        ({}, None),
        ({"url": "file:///a/mint-0.1.0.whl", "archive_info": {}}, "file:///a/mint-0.1.0.whl"),
        (
            {"url": "https://host/mint.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "git+https://host/mint.git@abc",
        ),
    ],
)
def test_another_installation_is_named_by_its_origin(
    origin: dict[str, object], url: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "_SOURCE", tmp_path)
    monkeypatch.setattr(extras, "_origin", lambda: origin)
    asked = Requirement(shlex.split(extras.install_command("local,cluster"))[-1])
    assert (asked.name, asked.extras, asked.url) == ("mint", {"local", "cluster"}, url)
