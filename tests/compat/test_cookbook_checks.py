"""The cookbook's own checks of a server's logprobs, unmodified; `docs/compatibility.md` names them.

They are scripts of the source distribution's `tests`, for every model of a server or for one.
"""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from tests.compat.sdk_environments import cookbook_python, cookbook_source
from tests.compat.served import Served, mint_serve
from tests.compat.stand_in_model import make_stand_in

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

HERE = Path(__file__).parent
MODELS = ("Qwen/Qwen3.5-4B", "Qwen/Qwen3.5-9B-Base")
RATIOS = re.compile(r"^ +([\d.]+) +(\d+) +(\d+) +([\d.]+) +([\d.]+)$", re.MULTILINE)
"""Rows of the second script's two tables: a temperature, two counts, the mean and the largest difference."""


def check(work: Path, script: str, *arguments: str, options: tuple[str, ...] = ()) -> str:
    """What the script prints; `options` are those of the server, beside its models."""
    models = [option for name in MODELS for option in ("--model", f"{name}={make_stand_in(work, name)}")]
    with mint_serve(work / "served", *models, *options) as served:
        return run(served, work, script, *arguments)


def run(served: Served, work: Path, script: str, *arguments: str) -> str:
    done = served.run(
        cookbook_python(),
        HERE / "cookbook_program.py",
        str(cookbook_source() / "tests" / script),
        *arguments,
        owner="checks",
        cwd=work,
        timeout_s=1200,
        more_variables={"TINKER_COOKBOOK_RUNS_DIR": str(work / "runs")},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_samplers_have_the_logprobs_of_trainers(tmp_path: Path) -> None:
    check(tmp_path, "compare_sampling_training_logprobs.py")
    with (tmp_path / "runs" / "sampling_training_logprobs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["model_name"]: float(row["mse[sample, train]"]) for row in rows} == dict.fromkeys(MODELS, 0.0)


@pytest.mark.parametrize("mode", ["processed", "raw"])
def test_logprobs_are_those_of_the_tempered_model_where_the_server_is_told_so(tmp_path: Path, mode: str) -> None:
    options = ("--logprobs-mode", mode)
    printed = check(tmp_path, "validate_temperature_logprobs.py", f"base_model={MODELS[0]}", options=options)
    rows = {float(row[0]): float(row[4]) for row in RATIOS.findall(printed.partition("SEQUENCE-LEVEL")[0])}
    assert rows.keys() == {0.5, 0.7, 1.0, 1.2, 1.5, 1.8}
    assert all((largest < 1e-4) == (mode == "processed" or temperature == 1) for temperature, largest in rows.items())
    [sequence] = RATIOS.findall(printed.partition("SEQUENCE-LEVEL")[2])
    assert int(sequence[2]) > 0 and float(sequence[4]) < 1e-4
