"""Every version of the public tinker SDK runs the whole matrix against `mint serve`, unmodified.

The environments come from the package registry, once (`sdk_environments`). Every cell of docs/compatibility.md is
written from these runs: `pytest -m slow tests/compat`.
"""

from __future__ import annotations

import datetime
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.compat.page import PAGE, matrix
from tests.compat.sdk_environments import VERSIONS, sdk_python
from tests.compat.served import Served, link_tiny, mint_serve
from tests.generated_page import replace_part

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

HERE = Path(__file__).parent
DRIVER = HERE / "drive_sdk.py"

KNOWN_FAILURES: dict[tuple[str, str], str] = {}
"""(version, case) that fail, and why it is not the server's to mend; shown as failing in the page all the same."""

REFUSED = {
    "get_audit_log",
    "export_session_trace",
    "whoami",
    "get_billing_usage",
    "get_current_checkpoint_storage_usage",
    "optim_step with another optimizer (dimuon)",
    "inflight sampler weights",
}
"""What this server does not offer, and says so in a sentence; whatever else is refused has broken."""

RESULTS: dict[str, list[dict[str, Any]]] = {}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with mint_serve(tmp_path_factory.mktemp("served")) as running:
        yield running


def drive(served: Served, version: str, work_dir: Path, driver: Path = DRIVER) -> tuple[list[dict[str, Any]], str]:
    """The cells of one version, and what the SDK wrote on stderr."""
    link_tiny(work_dir)
    done = served.run(
        sdk_python(version), driver, str(work_dir), "mint/tiny", owner=version, cwd=work_dir, timeout_s=3000
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")], done.stderr


@pytest.mark.parametrize("version", VERSIONS)
def test_an_sdk_runs_unmodified(served: Served, version: str, tmp_path: Path) -> None:
    rows, complaints = drive(served, version, tmp_path)
    RESULTS[version] = rows
    failed = {row["name"]: row["detail"] for row in rows if row["outcome"] == "failed"}
    known = {name for known_version, name in KNOWN_FAILURES if known_version == version}
    assert failed.keys() == known, failed
    assert {row["name"] for row in rows if row["outcome"] == "refused"} <= REFUSED
    assert Counter(row["outcome"] for row in rows)["ok"] > 45
    assert "Dropping telemetry" not in complaints


def test_a_newer_sdk_runs_and_is_told_that_it_is_unknown(served: Served, tmp_path: Path) -> None:
    rows, complaints = drive(served, "0.38.0", tmp_path, HERE / "drive_newer_sdk.py")
    assert {row["name"]: row["detail"] for row in rows if row["outcome"] not in ("ok", "refused")} == {}
    assert "0.99.0" in complaints and "0.38" in complaints, complaints[-2000:]


def test_the_page_shows_what_was_run() -> None:
    """Last of this file: writes the page if every version has run, and holds it to what they gave."""
    if RESULTS.keys() != set(VERSIONS):
        pytest.skip("not every version has run")
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    cells = Counter(row["outcome"] for rows in RESULTS.values() for row in rows)
    counted = ", ".join(f"{count} {outcome}" for outcome, count in cells.most_common())
    replace_part(PAGE, "matrix", f"Run on {date}: {sum(cells.values())} cells ({counted}).\n\n{matrix(RESULTS)}")
