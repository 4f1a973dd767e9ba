"""MinT's own public files, unmodified, against `mint serve`: scripts, smoke tests, live tests of its experiments.

They are fetched from GitHub (`mint_files`) and run with mint's own SDK and with `mindlab-toolkit`; without GitHub the
tests are skipped, and `mint_quickstart.py`, which has every call of them, remains.
"""

from __future__ import annotations

import ast
import datetime
import gzip
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

import mint
from tests.compat.mint_data import write_data
from tests.compat.mint_files import COOKBOOK, QUICKSTART, Repository, fetched
from tests.compat.page import PAGE
from tests.compat.sdk_environments import mint_files_python
from tests.compat.served import Served, mint_serve
from tests.compat.stand_in_model import make_stand_in
from tests.generated_page import replace_part

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

HERE = Path(__file__).parent
NAME = "Qwen/Qwen3-0.6B"
"""What the files name."""
SDKS = ("mint", "mindlab-toolkit")

SCRIPTS = {
    "quickstart/quickstart.py": "Done!",
    "demos/rl/adapters/verifiable_math.py": "Saved:",
    "demos/rl/adapters/preference_chat.py": "Saved:",
    "demos/rl/adapters/environment_tooluse.py": "Saved:",
    "advanced/resume.py": "rft-resume-step100",
    "advanced/upload_weights.py": "Uploaded:",
    "advanced/resume_from_upload.py": "resume-from-upload",
}
"""Of mint-quickstart, and what each prints at its end."""
SMOKES = ("sync_smoke", "async_smoke", "checkpoint_resume_smoke", "loss_smoke")
EXPERIMENTS = ("chat-dpo", "dapo-aime", "fingpt", "lawbench")

RESULTS: dict[str, dict[str, str]] = {}
"""File → SDK → what came of it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where everything runs: the model's name is a folder there, and in a cache in the form of the hub's."""
    work = tmp_path_factory.mktemp("work")
    revision = "0" * 40
    model = work / "hf" / "hub" / f"models--{NAME.replace('/', '--')}"
    (model / "snapshots").mkdir(parents=True)
    (model / "snapshots" / revision).symlink_to(make_stand_in(work, NAME))
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(revision)
    return work


@pytest.fixture(scope="module")
def served(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with mint_serve(tmp_path_factory.mktemp("served"), "--model", f"{NAME}={folder / NAME}") as running:
        yield running


def copied(repository: Repository, work_dir: Path) -> Path:
    """A copy of the repository's files to run in."""
    try:
        source = fetched(repository)
    except OSError as error:
        pytest.skip(f"{repository.name} cannot be fetched from GitHub: {error}")
    return Path(shutil.copytree(source, work_dir / "repository"))


def run(
    served: Served, sdk: str, folder: Path, script: Path, *arguments: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    python = Path(sys.executable) if sdk == "mint" else mint_files_python()
    home = folder / "hf"
    named = {"HF_HOME": str(home), "MINT_HOME": str(folder / "home"), **variables}
    if sdk == "mint":
        named["PYTHONPATH"] = str(Path(mint.__file__).parents[1])
    return served.run(
        python,
        script,
        *arguments,
        owner="ann",
        cwd=folder,
        timeout_s=1800,
        variables="MINT",
        more_variables=named,
    )


def record(name: str, sdk: str, done: subprocess.CompletedProcess[str], started_s: float, note: str = "") -> None:
    """Keeps a cell of the page; a process that failed fails the test."""
    cell = f"✓{note}" if done.returncode == 0 else "**fails**"
    RESULTS.setdefault(name, {})[sdk] = cell
    sys.stdout.write(f"{name} with {sdk}: {time.monotonic() - started_s:.0f} s\n")
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-3000:]


def saved_archive(served: Served, target: Path) -> str:
    """A path of a training state, which is also downloaded as the `.tar.gz` that the scripts upload."""
    with mint.ServiceClient(base_url=served.url, api_key=served.key("ann")) as client:
        trainer = client.create_lora_training_client(NAME, rank=16, seed=1)
        path = trainer.save_state("before").result().path
        url = client.create_rest_client().get_checkpoint_archive_url_from_tinker_path(path).result().url
        with urllib.request.urlopen(url, timeout=60) as response:
            content = response.read()
    target.write_bytes(content if content[:2] == b"\x1f\x8b" else gzip.compress(content))
    return str(path)


@pytest.mark.parametrize("sdk", SDKS)
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_of_mints_quickstart_runs(served: Served, folder: Path, script: str, sdk: str, tmp_path: Path) -> None:
    repository = copied(QUICKSTART, tmp_path)
    variables = {}
    if script == "advanced/upload_weights.py":
        saved_archive(served, tmp_path / "archive.tar.gz")
        variables["MINT_UPLOAD_ARCHIVE"] = str(tmp_path / "archive.tar.gz")
    if script == "advanced/resume_from_upload.py":
        variables = {"MINT_RESUME_PATH": saved_archive(served, tmp_path / "archive.tar.gz")}
    started_s = time.monotonic()
    done = run(served, sdk, folder, repository / script, **variables)
    record(script, sdk, done, started_s)
    assert SCRIPTS[script] in done.stdout


@pytest.mark.parametrize("sdk", SDKS)
@pytest.mark.parametrize("name", SMOKES)
def test_a_smoke_test_of_mints_cookbook_passes(
    served: Served, folder: Path, name: str, sdk: str, tmp_path: Path
) -> None:
    started_s = time.monotonic()
    done = run(served, sdk, folder, copied(COOKBOOK, tmp_path) / "tests" / f"{name}.py")
    record(f"tests/{name}.py", sdk, done, started_s)
    assert "PASS" in done.stdout


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_of_mints_cookbook_passes_its_own_live_tests(
    served: Served, folder: Path, name: str, tmp_path: Path
) -> None:
    experiment = copied(COOKBOOK, tmp_path) / "experiments" / name
    write_data(experiment)
    scripts = tmp_path / "bin"
    scripts.mkdir()
    # The tests start `uv run train.py`: here with the interpreter of the kept environment.
    uv = scripts / "uv"
    uv.write_text(f'#!/bin/sh\nshift\nexec {mint_files_python()} "$@"\n')
    uv.chmod(0o755)
    started_s = time.monotonic()
    unittest = ["-m", "unittest", "tests.test_train"]
    done = served.run(
        mint_files_python(),
        *unittest,
        owner="ann",
        cwd=experiment,
        timeout_s=3000,
        variables="MINT",
        more_variables={"HF_HOME": str(folder / "hf"), "PATH": f"{scripts}:/usr/bin:/bin"},
    )
    counted = re.search(r"Ran (\d+) tests", done.stderr)
    record(f"experiments/{name}", "mindlab-toolkit", done, started_s, f" {counted[1]} live tests" if counted else "")


SDK_CALLS = {
    name
    for kind in (mint.ServiceClient, mint.TrainingClient, mint.SamplingClient, mint.ModelInput)
    for name in vars(kind)
    if not name.startswith("_") and name not in ("append", "close")  # of lists and connections, too
} | {"ServiceClient", "Datum", "SamplingParams", "AdamParams", "encode", "decode", "apply_chat_template", "result"}


def calls_of(source: str) -> set[str]:
    """The calls of the SDK and of its tokenizer in a script, as `name(keyword, …)`."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SDK_CALLS:
            keywords = ", ".join(sorted(keyword.arg or "**" for keyword in node.keywords))
            found.add(f"{node.func.attr}({keywords})")
    return found


def test_the_script_that_stands_for_them_has_every_call_of_theirs(tmp_path: Path) -> None:
    repository = copied(QUICKSTART, tmp_path)
    files = [*SCRIPTS, "demos/rl/rl_core.py"]
    theirs = set().union(*(calls_of((repository / file).read_text()) for file in files)) - {"sample()"}  # random.sample
    assert theirs <= calls_of((HERE / "mint_quickstart.py").read_text())


def test_the_page_shows_which_files_were_run() -> None:
    """Last of this file: writes the table if every file has run."""
    if len(RESULTS) != len(SCRIPTS) + len(SMOKES) + len(EXPERIMENTS):
        pytest.skip("not every file has run")
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    commits = ", ".join(f"{row.name} at {row.commit[:7]}" for row in (QUICKSTART, COOKBOOK))
    lines = [f"Run on {date}: {commits}.", "", f"| file | {' | '.join(SDKS)} |", "|---|---|---|"]
    for name, cells in RESULTS.items():
        lines.append(f"| `{name}` | {' | '.join(cells.get(sdk, '–') for sdk in SDKS)} |")
    replace_part(PAGE, "mint-files", "\n".join(lines))
