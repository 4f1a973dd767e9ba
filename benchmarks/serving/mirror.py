"""What a mirror of a data directory costs: processor time and bytes for the first state, and for one after a step.

    python -m benchmarks.serving.mirror [--mib 16 256]

The journal is filled with requests of random bytes up to each size; the object storage is a folder. Times are CPU times
of this process, which does nothing else meanwhile. Beside them stands how often a state of this size would be taken.
"""

from __future__ import annotations

import os
import tempfile
import time
from argparse import ArgumentParser
from contextlib import closing
from pathlib import Path

from mint.server.mirror.mirror import Mirror
from mint.server.mirror.objects import open_objects
from mint.server.private_files import open_data_dir
from mint.server.store.journal import JOURNAL_FILE, Journal
from mint.server.store.rows import JobRow

PAYLOAD_BYTES = 78_000
"""A step with 64 sequences of 80 tokens."""


def add_requests(journal: Journal, count: int, first: int) -> None:
    """Adds requests as large as a training step, as a server accepts them."""
    for seq_id in range(first, first + count):
        journal.add_job(JobRow("m", seq_id, "forward_backward", os.urandom(PAYLOAD_BYTES), "0" * 64), now=time.time())


def measure(size_mib: int) -> None:
    """Prints a row for a journal of this size."""
    with tempfile.TemporaryDirectory() as folder:
        data_dir = Path(folder) / "data"
        open_data_dir(data_dir)
        with closing(Journal(data_dir / JOURNAL_FILE)) as journal:
            count = (size_mib << 20) // PAYLOAD_BYTES
            add_requests(journal, count, 1)
            objects = open_objects(f"file://{folder}/objects", field="--mirror")
            mirror = Mirror(data_dir, objects, address=folder)
            row = []
            sent = 0
            for _ in range(2):
                cpu_s, began = time.process_time(), time.monotonic()
                pause_s = mirror.update()
                assert mirror.state.problem is None, mirror.state.problem
                row += [time.process_time() - cpu_s, time.monotonic() - began, (mirror.state.sent_bytes - sent) / 2**20]
                row.append(pause_s)
                sent = mirror.state.sent_bytes
                add_requests(journal, 1, count + 1)
        first = "first state: {:.2f} s of CPU, {:.2f} s, {:.1f} MiB sent, the next after {:.1f} s".format(*row[:4])
        after = "after a step: {:.2f} s of CPU, {:.2f} s, {:.2f} MiB sent, the next after {:.1f} s".format(*row[4:])
        print(f"{size_mib} MiB · {first} · {after}", flush=True)


def main() -> None:
    """Measures each size."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, nargs="+", default=[16, 256])
    for size_mib in parser.parse_args().mib:
        measure(size_mib)


if __name__ == "__main__":
    main()
