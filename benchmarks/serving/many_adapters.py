"""A server with 100,000 saved LoRAs beside one with 100: start, lists, and sampling by path.

    python -m benchmarks.serving.many_adapters [--many 100000] [--few 100] [--requests 1000] [--folder DIR] [--json]

Makes two data directories in `--folder` (default: the folder for temporary files): each LoRA is a checkpoint of its own
training run, of rank 1 on the attention of `mint/tiny`, with weights of its own, in the format in which mint saves it.
100,000 of them take 300,000 inodes and 4 GB; they are removed in the end. Then one `mint serve` runs on each, both at
once, and requests take turns between them, so that other load on the machine meets both:

* start: from the command to the line that says it serves; CPU seconds of the process until then
* list: the first page of 100 checkpoints, and the last one
* cold: the first sample from a LoRA that was not used before, by its path: a new sampler and 8 tokens
* warm: the same request from a LoRA that was used just before
* Zipf: paths drawn by Zipf's law (exponent 1) over all LoRAs, what the memory of the server grew by, and how many LoRAs
  it holds in memory

Every request must succeed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import numpy as np

import mint
from mint.engine.protocol import LoraSpec, ModelState
from mint.engine.torch_engine import TorchEngine
from mint.models.registry import resolve
from mint.server.private_files import open_data_dir
from mint.server.store.checkpoint_folders import Manifest, folder_size, write_checkpoint
from mint.server.store.checkpoints import SAMPLER
from mint.server.store.database import insert
from mint.server.store.journal import JOURNAL_FILE, Journal
from mint.server.store.rows import LOCAL_OWNER, CheckpointRow, SessionRow, TrainingRunRow
from mint.types import ModelInput, SamplingParams
from mint.types.checkpoint_path import CheckpointPath

BASE = "mint/tiny"
SPEC = LoraSpec(1, 0, train_attn=True, train_mlp=False, train_unembed=False)
NEW_TOKENS = 8
PROMPT = list(range(5, 29))
ROWS_AT_ONCE = 5000
EXPONENT = 1.0


def path_of(number: int) -> str:
    """The path of a LoRA."""
    return CheckpointPath(f"{session_of(number)}:train:0", SAMPLER, "final").uri


def session_of(number: int) -> str:
    return f"sess-{uuid.uuid5(uuid.NAMESPACE_OID, str(number)).hex}"


def make_adapters(data_dir: Path, count: int, *, say: Callable[[str], None] = lambda line: None) -> None:
    """Makes a data directory with so many saved LoRAs, each with weights of its own.

    The files are not fsynced one by one: this is a copy that can be made again.
    """
    open_data_dir(data_dir)
    engine = TorchEngine(threads=1)
    engine.load_base("base", str(resolve(BASE, {})))
    engine.create_model("model", "base", SPEC)
    shapes = {name: array.shape for name, array in engine.read_state("model").weights.items()}
    journal = Journal(data_dir / JOURNAL_FILE)
    now = time.time() - count
    rows: list[tuple[SessionRow, TrainingRunRow, CheckpointRow]] = []
    with closing(journal), patch("os.fsync"):
        for number in range(count):
            rows.append(_make(data_dir, number, now + number, shapes))
            if len(rows) == ROWS_AT_ONCE or number + 1 == count:
                _add(journal, rows)
                rows.clear()
                say(f"{number + 1} LoRAs made")


def _make(
    data_dir: Path, number: int, created_at: float, shapes: dict[str, tuple[int, ...]]
) -> tuple[SessionRow, TrainingRunRow, CheckpointRow]:
    rng = np.random.default_rng(number)
    state = ModelState({name: rng.normal(0, 0.02, shape).astype(np.float32) for name, shape in shapes.items()})
    path = CheckpointPath.parse(path_of(number))
    folder = f"checkpoints/{uuid.uuid5(uuid.NAMESPACE_URL, path.uri)}"
    manifest = Manifest(path.uri, BASE, vars(replace(SPEC, seed=number)), True, 1, created_at)
    (data_dir / folder).mkdir(parents=True)
    write_checkpoint(data_dir / folder, state, manifest, optimizer=False)
    session_id = session_of(number)
    return (
        SessionRow(session_id, "", None, created_at, created_at, LOCAL_OWNER, None, created_at),
        TrainingRunRow(
            path.model_id, session_id, LOCAL_OWNER, created_at, created_at, BASE, manifest.lora, ended_at=created_at
        ),
        CheckpointRow(path.model_id, SAMPLER, path.name, folder, created_at, size_bytes=folder_size(data_dir / folder)),
    )


def _add(journal: Journal, rows: list[tuple[SessionRow, TrainingRunRow, CheckpointRow]]) -> None:
    with journal.database.transaction() as transaction:
        for session, run, checkpoint in rows:
            transaction.execute(insert(SessionRow, "sessions"), **vars(session))
            transaction.execute(insert(TrainingRunRow, "runs"), **vars(run))
            transaction.execute(insert(CheckpointRow, "checkpoints"), **vars(checkpoint))


@dataclass
class Server:
    """A running `mint serve`."""

    url: str
    process_id: int
    started_s: float
    started_cpu_s: float
    adapters: int
    client: mint.ServiceClient
    http: httpx.Client

    def cpu_s(self) -> float:
        """The CPU seconds that the process has used."""
        fields = Path(f"/proc/{self.process_id}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory_mib(self) -> float:
        """The memory that the process holds now."""
        status = Path(f"/proc/{self.process_id}/status").read_text()
        return int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) / 1024

    def gauge(self, name: str) -> float:
        """A value of `/metrics`; NaN if there is none of that name."""
        found = re.findall(rf"^{re.escape(name)} (\S+)$", self.http.get("/metrics").text, re.MULTILINE)
        return float(found[0]) if found else float("nan")

    def page_s(self, offset: int) -> float:
        """The seconds of a page of 100 checkpoints."""
        started_at = time.perf_counter()
        response = self.http.get("/api/v1/checkpoints", params={"limit": 100, "offset": offset})
        assert response.status_code == 200, response.text
        assert response.json()["cursor"]["total_count"] >= self.adapters
        return time.perf_counter() - started_at

    def sample_s(self, number: int) -> float:
        """The seconds from a LoRA's path to its tokens."""
        started_at = time.perf_counter()
        sampler = self.client.create_sampling_client(model_path=path_of(number))
        params = SamplingParams(max_tokens=NEW_TOKENS, temperature=1.0, seed=number)
        answer = sampler.sample(ModelInput.from_ints(PROMPT), num_samples=1, sampling_params=params).result()
        assert answer.sequences[0].tokens
        return time.perf_counter() - started_at


@contextmanager
def serving(data_dir: Path, adapters: int) -> Generator[Server]:
    """`mint serve` on a data directory."""
    command = [sys.executable, "-c", "from mint.cli.main import app; app()", "serve", "--port", "0"]
    started_at = time.perf_counter()
    process = subprocess.Popen(
        [*command, "--data-dir", str(data_dir), "--model", BASE],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = ""
        while "mint serves" not in line:
            line = process.stdout.readline()
            if not line:
                raise SystemExit("the server did not start")
        started_s = time.perf_counter() - started_at
        url = next(word for word in line.split() if word.startswith("http"))
        with httpx.Client(base_url=url, timeout=60) as http:
            client = mint.ServiceClient(base_url=url)
            try:
                server = Server(url, process.pid, started_s, 0.0, adapters, client, http)
                server.started_cpu_s = server.cpu_s()
                yield server
            finally:
                client.close()
    finally:
        process.terminate()
        process.wait()


def percentile(seconds: list[float], share: int) -> float:
    """A percentile in milliseconds."""
    return float(np.percentile(seconds, share)) * 1000


def measure(servers: list[Server], requests: int) -> list[dict[str, Any]]:
    """A row of figures for each server; they take turns."""
    rows: list[dict[str, Any]] = [
        {"adapters": each.adapters, "start_s": each.started_s, "start_cpu_s": each.started_cpu_s} for each in servers
    ]
    rng = np.random.default_rng(0)
    orders = [rng.permutation(each.adapters) for each in servers]
    pages: list[list[list[float]]] = [[[], []] for _ in servers]
    for _ in range(20):
        for place, server in enumerate(servers):
            for which, offset in enumerate((0, server.adapters - 100)):
                pages[place][which].append(server.page_s(offset))
    for server in servers:
        server.sample_s(int(orders[0][-1]) % server.adapters)  # loads the base model
    cold: list[list[float]] = [[] for _ in servers]
    warm: list[list[float]] = [[] for _ in servers]
    for turn in range(min(requests, min(each.adapters for each in servers) - 1)):
        for place, server in enumerate(servers):
            number = int(orders[place][turn])
            cold[place].append(server.sample_s(number))
            warm[place] += [server.sample_s(number) for _ in range(4)]
    before = [each.memory_mib() for each in servers]
    drawn: list[list[float]] = [[] for _ in servers]
    law = [1 / np.arange(1, each.adapters + 1) ** EXPONENT for each in servers]
    used: list[set[int]] = [set() for _ in servers]
    for _ in range(requests):
        for place, server in enumerate(servers):
            rank = int(rng.choice(server.adapters, p=law[place] / law[place].sum()))
            number = int(orders[place][rank])
            used[place].add(number)
            drawn[place].append(server.sample_s(number))
    for place, server in enumerate(servers):
        rows[place] |= {
            "first_page_ms": percentile(pages[place][0], 50),
            "last_page_ms": percentile(pages[place][1], 50),
            "cold_p50_ms": percentile(cold[place], 50),
            "cold_p99_ms": percentile(cold[place], 99),
            "warm_p50_ms": percentile(warm[place], 50),
            "warm_p99_ms": percentile(warm[place], 99),
            "zipf_p50_ms": percentile(drawn[place], 50),
            "zipf_p99_ms": percentile(drawn[place], 99),
            "zipf_loras_used": len(used[place]),
            "memory_mib": server.memory_mib(),
            "memory_grown_mib": server.memory_mib() - before[place],
            "loras_in_memory": server.gauge("mint_cached_loras"),
            "lora_memory_mib": server.gauge('mint_lora_cache_bytes{of="used"}') / (1 << 20),
        }
    return rows


def main() -> None:
    """Makes the data, measures, prints, and removes the data."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--many", type=int, default=100_000)
    parser.add_argument("--few", type=int, default=100)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--keep", action="store_true", help="leave the data, and use what is there")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    folder = options.folder / "mint-many-adapters"
    say = (lambda line: None) if options.json else print
    try:
        with ExitStack() as opened:
            servers = []
            for count in (options.many, options.few):
                data_dir = folder / str(count)
                if not (data_dir / JOURNAL_FILE).exists():
                    make_adapters(data_dir, count, say=say)
                servers.append(opened.enter_context(serving(data_dir, count)))
            rows = measure(servers, options.requests)
    finally:
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
    if options.json:
        print(json.dumps(rows))
        return
    for name in rows[0]:
        values = [row[name] for row in rows]
        ratio = f"{values[0] / values[1]:8.2f}x" if values[1] else ""
        print(f"{name:20}", *(f"{value:12.1f}" for value in values), ratio)


if __name__ == "__main__":
    main()
