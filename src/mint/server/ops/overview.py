"""An overview of the service for its operator: owners, queues, memory, throughput. Changes nothing.

Unlike `metrics`, it names owners. Throughput is measured between the calls of the last seconds.
"""

from __future__ import annotations

import os
import resource
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mint.engine.memory.machine_memory import memory_bytes
from mint.server.ops.metrics import Metrics
from mint.server.service.service import Service
from mint.version import VERSION

RATE_OVER_S = 10.0
"""The window over which throughput is measured."""

LEAST_RATE_S = 0.5


class Overview:
    """The state of one service now. Any thread may call."""

    def __init__(self, service: Service, metrics: Metrics, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives monotonic seconds."""
        self._service = service
        self._metrics = metrics
        self._clock = clock
        self._began_at = time.time()
        self._lock = threading.Lock()
        self._seen: deque[tuple[float, Mapping[str, float]]] = deque()

    def __call__(self) -> dict[str, Any]:
        """The numbers; bytes, seconds, and unix seconds where a name ends in `_at`."""
        service = self._service
        work = self._metrics.totals()
        waiting = service.pending
        return {
            "available": True,
            "version": VERSION,
            "began_at": self._began_at,
            "now_at": time.time(),
            "is_working": service.is_working,
            "storage_problem": None if service.storage_problem is None else str(service.storage_problem),
            "base_models": list(service.base_models.names),
            "implementations": service.base_models.implementations,
            "tenants": self._tenants(),
            "queue": {
                "training": len(waiting.training),
                "samples": len(waiting.samples),
                "sampled_rows": service.sampled_sequences,
            },
            "futures": {"open": service.futures.open_count, "waited_for": service.futures.waiter_count},
            "memory": {"resident_bytes": resident_bytes(), "machine_bytes": memory_bytes()},
            "limits": self._limits(),
            "journal_bytes": self._metrics.journal_bytes(),
            "worst_pause_s": self._metrics.loop_pauses.worst_s(),
            "tokens": work["tokens"],
            "tokens_per_s": self._rates(work["tokens"]),
            "busy_s": work["busy_s"],
            "sampling": work["sampling"],
            "kv_pages": work["kv_pages"],
            "cluster": dict(service.cluster_state),
            "requests": self._metrics.requests(),
        }

    def _limits(self) -> dict[str, dict[str, int | None]]:
        """What is used of each limit of the server; a limit of None is not known yet."""
        service, limits = self._service, self._service.limits
        memory, disk = service.memory, service.disk
        return {
            "model_memory_bytes": {"used": memory.used_bytes, "limit": memory.limit_bytes},
            "models": {"used": service.model_count, "limit": limits.max_models},
            "sessions": {"used": len(service.session_owners), "limit": limits.max_sessions},
            "disk_bytes": {"free": disk.free_bytes, "reserve": disk.reserve_bytes},
        }

    def _tenants(self) -> list[dict[str, Any]]:
        """The sessions, models and waiting requests of each owner; the most waiting first."""
        service = self._service
        waiting = self._service.pending
        owners = service.session_owners
        sessions = Counter(owners.values())
        models = service.models_by_owner
        training = Counter(item.owner for item in waiting.training)
        samples = Counter(item.owner for item in waiting.samples)
        rows = [
            {
                "owner": owner,
                "sessions": sessions[owner],
                "models": models[owner],
                "checkpoint_bytes": service.checkpoints.used_bytes(owner),
                "waiting_training": training[owner],
                "waiting_samples": samples[owner],
            }
            for owner in {*sessions, *training, *samples}
        ]
        return sorted(rows, key=lambda row: (-row["waiting_training"] - row["waiting_samples"], row["owner"]))

    def _rates(self, tokens: Mapping[str, float]) -> dict[str, float | None]:
        """Tokens per second by kind; None at the first call."""
        now = self._clock()
        with self._lock:
            while len(self._seen) > 1 and now - self._seen[1][0] >= RATE_OVER_S:
                self._seen.popleft()
            since = self._seen[0] if self._seen else None
            if since is None or now - self._seen[-1][0] >= LEAST_RATE_S:
                self._seen.append((now, dict(tokens)))
        if since is None or now - since[0] < LEAST_RATE_S:
            return dict.fromkeys(tokens)
        return {kind: (count - since[1].get(kind, 0.0)) / (now - since[0]) for kind, count in tokens.items()}


def resident_bytes() -> int:
    """The resident memory of this process; if the kernel does not tell it, the peak."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
