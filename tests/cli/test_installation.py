"""`mint doctor` without a task says what is installed, what is missing, and what to do about it."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from typer.testing import CliRunner

from mint.cli.main import app
from mint.compose.installation import EXTRAS, Check, check_installation
from mint.config import read_settings
from mint.engine.cpu.build import TESTED_HERE
from mint.engine.cuda.gpu_report import GpuReport
from mint.engine.cuda.self_check import Verdict
from mint.extras import install_command
from mint.version import VERSION

DECLARED = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def checks() -> dict[str, Check]:
    return {check.name: check for check in check_installation(read_settings())}


def test_the_modules_of_each_extra_are_its_packages() -> None:
    for extra, modules in EXTRAS.items():
        named = [Requirement(text).name.replace("-", "_") for text in DECLARED[extra]]
        packages = [name for name in named if name != "mint"]  # mint[rl] is listed by itself
        assert sorted(packages) == sorted(modules), extra
    assert set(DECLARED) - set(EXTRAS) == {"docs", "dev"}


def test_every_part_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINT_HOME", str(tmp_path / "not there yet"))
    answer = CliRunner().invoke(app, ["doctor", "--json"])
    found = {check["name"]: check for check in json.loads(answer.stdout)["checks"]}
    assert found["mint"]["found"].startswith(VERSION) and found["mint[local]"]["state"] == "ok"
    assert list(found)[-4:] == ["torch", "kernels", "memory", "disk"]
    assert all(check["remedy"] for check in found.values() if check["state"] == "problem")
    assert answer.exit_code == any(check["state"] == "problem" for check in found.values())
    text = CliRunner().invoke(app, ["doctor"]).stdout
    assert [line.split()[0] for line in text.splitlines()] == list(found)
    assert not (tmp_path / "not there yet").exists()


def test_a_bare_install_is_whole_and_a_half_install_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "starlette", None)
    half = checks()["mint[local]"]
    assert (half.state, half.found) == ("problem", "not installed: starlette")
    for module in EXTRAS["local"]:
        monkeypatch.setitem(sys.modules, module, None)
    bare = checks()
    assert bare["mint[local]"].state == "missing" and "torch" not in bare
    assert bare["mint[local]"].remedy is not None and install_command("local") in bare["mint[local]"].remedy


@pytest.mark.skipif(not TESTED_HERE, reason="the kernels are off by default here")
def test_instructions_of_another_processor_are_a_problem_with_one_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINT_INSTRUCTIONS", "neon")
    found = checks()["kernels"]
    assert found.state == "problem"
    assert found.found == "MINT_INSTRUCTIONS = neon is not a set of instructions of this processor"
    assert found.remedy is not None and found.remedy.startswith("Unset it, or choose one of ")


@pytest.mark.skipif(not TESTED_HERE, reason="mint's kernels are not used by default on this system")
def test_a_machine_without_a_compiler_is_told_to_install_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("MINT_NATIVE", raising=False)
    kernels = checks()["kernels"]
    assert kernels.state == "problem" and "Install gcc or clang" in (kernels.remedy or "")
    monkeypatch.setenv("MINT_NATIVE", "0")
    assert checks()["kernels"].state == "missing"


def test_the_report_of_a_gpu_says_that_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    answer = CliRunner().invoke(app, ["doctor", "gpu"])
    assert answer.exit_code == 1 and "cuda" in answer.output and "nvidia-smi" in answer.output


def test_the_report_of_a_gpu_says_what_to_do_about_a_fault_that_may_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts = [
        Verdict("slow", "it took 9 ms", is_passing=True),
        Verdict("wrong", "it differs"),
        Verdict("sound", None),
    ]
    report = GpuReport({"GPU": "a card"}, {"bfloat16": verdicts})
    monkeypatch.setattr("mint.engine.cuda.gpu_report.check_gpu", lambda _version, say: report)
    answer = CliRunner().invoke(app, ["doctor", "gpu"])
    slow, wrong, sound = answer.output.splitlines()[-3:]
    assert answer.exit_code == 1 and "it took 9 ms → another program on this GPU" in slow
    assert wrong.endswith("it differs") and "ok" in sound
    as_json = json.loads(CliRunner().invoke(app, ["doctor", "gpu", "--json"]).output)
    assert [own["is_passing"] for own in as_json["verdicts"]["bfloat16"]] == [True, False, False]
