"""`mint serve` as users start it: a process of its own with a data directory and one key for each owner.

Also: running a script of another environment against it, with nothing set but its address and a key.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from mint.models.registry import BUNDLED

MINT = [sys.executable, "-c", "from mint.cli.main import app; app()"]
START_PATIENCE_S = 300.0
KEPT_VARIABLES = ("PATH", "HOME", "TMPDIR", "LANG", "SSL_CERT_FILE", "SSL_CERT_DIR")


@dataclass(frozen=True)
class Served:
    """A server that runs."""

    url: str
    data_dir: Path
    log: Path

    def key(self, owner: str) -> str:
        """A new key for an owner."""
        made = subprocess.run(
            [*MINT, "keys", "create", "--owner", owner, "--data-dir", str(self.data_dir)],
            capture_output=True,
            text=True,
            check=True,
        )
        return made.stdout.strip()

    def run(
        self,
        python: Path,
        script: Path | str,
        *arguments: str,
        owner: str,
        cwd: Path,
        timeout_s: float,
        variables: str = "TINKER",
        path: str = "",
        typed: str = "",
        more_variables: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a script there. Its environment names the server, up to `path`, and a key, in variables that begin so,
        and `more_variables`, and nothing else of ours. Its standard input is `typed`."""
        kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
        environment = {
            **kept,
            f"{variables}_BASE_URL": f"{self.url}{path}",
            f"{variables}_API_KEY": self.key(owner),
            "HF_HUB_OFFLINE": "1",  # a machine without a network fails at once instead of after a minute
            "OMP_NUM_THREADS": "1",
            **(more_variables or {}),
        }
        return subprocess.run(
            [str(python), str(script), *arguments],
            input=typed,
            capture_output=True,
            text=True,
            cwd=cwd,
            env=environment,
            timeout=timeout_s,
        )


@contextmanager
def mint_serve(data_dir: Path, *options: str) -> Iterator[Served]:
    """Starts `mint serve` on a free port, with keys asked for and further options; stops it at the end."""
    data_dir.mkdir(parents=True, exist_ok=True)
    log = data_dir / "serve.log"
    subprocess.run(
        [*MINT, "keys", "create", "--owner", "first", "--data-dir", str(data_dir)], capture_output=True, check=True
    )
    with log.open("w") as output:
        process = subprocess.Popen(
            [*MINT, "serve", "--port", "0", "--data-dir", str(data_dir), "--log-level", "warning", *options],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "MINT_HOME": str(data_dir), "MINT_THREADS": "1"},
        )
    try:
        url = _address(process, log)
        yield Served(url, data_dir, log)
    finally:
        process.terminate()
        process.wait(timeout=60)


def link_tiny(work_dir: Path) -> None:
    """Makes `mint/tiny`, seen from `work_dir`, the bundled model's folder: what loads a tokenizer by name finds it."""
    link = work_dir / "mint" / "tiny"
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.exists():
        link.symlink_to(BUNDLED["mint/tiny"])


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline_s = time.monotonic() + START_PATIENCE_S
    while time.monotonic() < deadline_s:
        assert process.poll() is None, log.read_text()
        found = re.search(r"http://[\d.]+:[1-9]\d*", log.read_text())
        if found:
            try:
                if httpx.get(f"{found[0]}/healthz", timeout=5).status_code == 200:
                    return found[0]
            except httpx.HTTPError:
                pass
        time.sleep(0.1)
    raise AssertionError(f"no server after {START_PATIENCE_S:g} s: {log.read_text()}")
